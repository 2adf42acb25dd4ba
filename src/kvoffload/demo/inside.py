"""vLLM's own offloading with two tiers below its host memory, side by side: what each answers after bytes on disk have
changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvoffload.demo.act import EngineProcess
from kvoffload.demo.flips import flip
from kvoffload.demo.protocol import ActConfig, EngineInfo, RequestResult, Source, classify
from kvoffload.supported import release_of

FIRST_VERSION = (0, 31)
"""The first vLLM to which kvoffload gives a secondary tier."""
PROMPTS = 4
HOST_BLOCKS = 20
"""Little more than one prompt has, so that each comes from the tier when it is asked again."""
DISK_BYTES = 1 << 30
SMALLEST_FLIPPED_BYTES = 64 << 10
"""Smaller files describe others. It is the bytes of blocks that are to be wrong."""


@dataclass(frozen=True, slots=True)
class TierOnTrial:
    """A tier below vLLM's host memory: ``entry`` makes its entry of ``secondary_tiers`` from a directory."""

    name: str
    is_ours: bool
    entry: Callable[[Path], dict[str, Any]]


TIERS = (
    TierOnTrial("vLLM's fs tier", False, lambda directory: {"type": "fs", "root_dir": str(directory)}),
    TierOnTrial(
        "kvoffload's disk tier",
        True,
        lambda directory: {
            "type": "KVOffloadTier",
            "module_path": "kvoffload.vllm.secondary_tier",
            "tier": {"kind": "disk", "dir": str(directory), "bytes": DISK_BYTES},
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """What vLLM answered with one tier: from what it had stored, and after the bytes of that had changed."""

    tier: str
    is_ours: bool
    stored: list[RequestResult]
    flipped: list[RequestResult]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "stored": [asdict(request) for request in self.stored],
            "flipped": [asdict(request) for request in self.flipped],
        }


def is_possible(info: EngineInfo) -> bool:
    """Whether this vLLM lets others provide a tier in the way that kvoffload does."""
    release = release_of(info.vllm_version)
    return release is not None and release >= FIRST_VERSION


def connector(tier: Mapping[str, Any], host_bytes: int) -> dict[str, Any]:
    """Returns the arguments of vLLM's KVTransferConfig for its own offloading, with this entry for a tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [dict(tier)],
        },
    }


@contextlib.contextmanager
def started(config: ActConfig, disk: Path, logs: Sequence[Path], block_bytes: int) -> Iterator[list[EngineProcess]]:
    """Yields an engine per tier. They start at the same time, each with a folder of its own in ``disk``."""
    with contextlib.ExitStack() as opened:
        engines = []
        for tier, log in zip(TIERS, logs, strict=True):
            entry = tier.entry(_folder(disk, tier))
            own = replace(config, connector=connector(entry, HOST_BLOCKS * block_bytes), visits=[], answers=[])
            engines.append(opened.enter_context(EngineProcess(own, log)))
        yield engines


def run_trial(
    tier: TierOnTrial, engine: EngineProcess, disk: Path, on_request: Callable[[RequestResult], None]
) -> Trial:
    """Asks PROMPTS prompts three times: to store their KV, to load it, and after its bytes have changed."""

    def ask() -> list[RequestResult]:
        results = []
        for document in range(PROMPTS):
            result = _as_disk(engine.ask(document, document))
            on_request(result)
            results.append(result)
            engine.call("settle")
        # The device would have the last of them.
        engine.call("forget")
        return results

    ask()
    stored = ask()
    flip(path for path in _folder(disk, tier).rglob("*") if path.is_file() and is_data(path))
    flipped = ask()
    engine.end()
    return Trial(tier.name, tier.is_ours, stored, flipped)


def is_data(path: Path) -> bool:
    return path.stat().st_size >= SMALLEST_FLIPPED_BYTES


def _folder(disk: Path, tier: TierOnTrial) -> Path:
    folder = disk / ("ours" if tier.is_ours else "theirs")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _as_disk(result: RequestResult) -> RequestResult:
    """vLLM says how many tokens it found, not where. The device has forgotten all, and host memory holds one prompt."""
    found = result.device_tokens
    source = classify(result.prompt_tokens, 0, 0, found)
    return replace(result, device_tokens=0, disk_tokens=found, source=source)


def from_disk(requests: Sequence[RequestResult]) -> int:
    """Returns how many requests had most of their prompt from the tier."""
    return sum(request.source is Source.DISK for request in requests)
