"""vLLM's own offloading with two tiers below its host memory, side by side: what each answers after bytes on disk have
changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from demo.act import EngineProcess, Progress
from demo.engine import connector
from demo.model import kv_bytes_per_token
from demo.protocol import ActConfig, EngineInfo, RequestResult, Source, classify
from demo.stores import flip
from kvoffload.supported import release_of

FIRST_VERSION = (0, 31)
"""The first vLLM to which kvoffload gives a secondary tier."""
DISK_BYTES = 512 << 20
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
    """What a new server answered with one tier: from what another had stored, and after the bytes of that had
    changed."""

    tier: str
    is_ours: bool
    before: list[RequestResult]
    after: list[RequestResult]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "before": [asdict(request) for request in self.before],
            "after": [asdict(request) for request in self.after],
        }


def is_possible(info: EngineInfo) -> bool:
    """Whether this vLLM lets others provide a tier in the way that kvoffload does."""
    release = release_of(info.vllm_version)
    return release is not None and release >= FIRST_VERSION


class Server(EngineProcess):
    """vLLM's own offloading with ``tiers`` below host memory, each in a folder of its own in ``disk``."""

    def __init__(self, config: ActConfig, tiers: Sequence[TierOnTrial], disk: Path, log: Path) -> None:
        block_bytes = config.block_size * (kv_bytes_per_token(Path(config.model)) or 0)
        options = {
            "spec_name": "TieringOffloadingSpec",
            # Little more than one prompt.
            "cpu_bytes_to_use": config.max_model_len // config.block_size * block_bytes,
            "secondary_tiers": [tier.entry(_folder(disk, tier)) for tier in tiers],
        }
        own = connector(options, "OffloadingConnector", None)
        super().__init__(replace(config, connector=own, visits=[], answers=[]), log)

    def ask_all(self, documents: Sequence[int], title: str, progress: Progress) -> list[RequestResult]:
        """Asks about each document, and waits until what is to be stored is stored."""
        progress.begin(title, len(documents))
        progress.ready(self.wait_ready())
        results = []
        for document in documents:
            results.append(_as_disk(self.ask(document, document)))
            progress.request(results[-1])
            self.call("settle")
        return results


def run_trials(
    config: ActConfig, out: Path, disk: Path, number: int, progress: Progress, documents: int
) -> Iterator[Trial]:
    """Runs the acts, the first of which has this ``number``: one server stores prompts in all tiers, and then one per
    tier is asked for them. Yields what came of each tier.

    Each is asked about so many ``documents`` before bytes on disk change, and about others after that: a server that
    has loaded a prompt might have it in memory.
    """
    early, late = range(documents), range(documents, 2 * documents)
    with ExitStack() as opened:

        def start(tiers: Sequence[TierOnTrial], number: int) -> Server:
            return opened.enter_context(Server(config, tiers, disk, out / f"act-{number}.log"))

        server = start(TIERS, number)
        server.ask_all([*early, *late], f"act {number}  vLLM's own offloading", progress)
        # This releases folders and memory. The process, which has nothing left to do, ends later.
        server.call("end")
        asked = []
        for act, tier in enumerate(TIERS, number + 1):
            # Two engines that compute at once on the same cores take many times as long.
            server = start([tier], act)
            asked.append((tier, act, server, server.ask_all(early, f"act {act}  {tier.name}", progress)))
        change_bytes(disk)
        for tier, act, server, found in asked:
            yield Trial(tier.name, tier.is_ours, found, server.ask_all(late, f"act {act}    bytes changed", progress))
            server.call("end")


def change_bytes(disk: Path) -> int:
    """Changes bytes of all that the tiers have stored. Returns the number of files."""
    files = (path for path in disk.rglob("*") if path.is_file())
    return flip(path for path in files if path.stat().st_size >= SMALLEST_FLIPPED_BYTES)


def _folder(disk: Path, tier: TierOnTrial) -> Path:
    folder = disk / ("ours" if tier.is_ours else "theirs")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _as_disk(result: RequestResult) -> RequestResult:
    """vLLM says how many tokens it found, not where. No device or host memory has had the prompt before."""
    found = result.device_tokens
    source = classify(result.prompt_tokens, 0, 0, found)
    return replace(result, device_tokens=0, disk_tokens=found, source=source)


def from_disk(requests: Sequence[RequestResult]) -> int:
    """Returns how many requests had most of their prompt from the tier."""
    return sum(request.source is Source.DISK for request in requests)
