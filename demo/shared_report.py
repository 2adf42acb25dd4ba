"""What the servers of each store have shown: comparisons, numbers, and the list of failed checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from demo.protocol import EngineInfo, RequestResult, Source
from demo.report import Comparison, compare, finite

LOAD_DEADLINE_S = 1.0
"""How long a request waits for blocks: ``load_deadline_ms`` of the servers."""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What two servers on one store have answered, in the order of the requests.

    ``first`` saw the prompts first, ``shared`` are the same prompts at the second server, and ``computed`` each of them
    once more, right after it and without loading. ``back`` are prompts that the second server saw first, at the first.
    ``control``: loads were corrupted after they were verified. ``corrupted``: the stored values were changed.
    ``bad_blocks``: how many of those were found by their checksums.
    """

    name: str
    title: str
    first: list[RequestResult]
    shared: list[RequestResult]
    computed: list[RequestResult]
    back: list[RequestResult]
    control: list[RequestResult]
    corrupted: list[RequestResult]
    bad_blocks: int


@dataclass(frozen=True, slots=True)
class SkippedStore:
    """A store that cannot run here."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class SharedReport:
    """The result of the demo. ``baseline`` has the answer to each document without kvoffload."""

    model: str
    seed: int
    made_at: str
    load_average: float
    info: EngineInfo
    baseline: Mapping[int, RequestResult]
    stores: list[StoreResult | SkippedStore]
    errors: list[str] = field(default_factory=list)
    """Why the run of a store has ended early."""

    @property
    def results(self) -> list[StoreResult]:
        return [store for store in self.stores if isinstance(store, StoreResult)]

    @property
    def skipped(self) -> list[SkippedStore]:
        return [store for store in self.stores if isinstance(store, SkippedStore)]

    def compare(self, requests: Sequence[RequestResult]) -> Comparison:
        """Compares the outputs of requests with those without kvoffload."""
        return compare([self.baseline[request.document] for request in requests], requests)

    def identical(self, store: StoreResult) -> bool:
        served = (store.first, store.shared, store.computed, store.back, store.corrupted)
        return not any(self.compare(requests).different for requests in served)

    def control_detected(self, store: StoreResult) -> bool:
        return bool(hit_tokens(store.control)) and bool(self.compare(store.control).different)

    def ttft_ms(self, store: StoreResult) -> dict[str, float | None]:
        """The median time to the first token at the second server: where it took most of a prompt from the store, and
        where it computed the same prompts, in turn."""
        pairs = zip(store.shared, store.computed, strict=True)
        measured = [(loaded, computed) for loaded, computed in pairs if loaded.source is Source.DISK]
        return {
            "recompute": _median([computed for _, computed in measured]),
            "shared": _median([loaded for loaded, _ in measured]),
        }

    @property
    def failures(self) -> list[str]:
        """One sentence per failed check; empty if all passed."""
        sentences = list(self.errors)
        for store in self.results:
            for who, requests in (
                ("the first server", store.first),
                ("the second server", store.shared),
                ("the second server, without loading,", store.computed),
                ("the first server, for prompts of the second,", store.back),
                ("the first server, after the stored values were changed,", store.corrupted),
            ):
                different = self.compare(requests).different
                if different:
                    sentences.append(
                        f"{store.name}: the outputs of {who} differ from those without kvoffload in {len(different)} "
                        f"of {len(requests)} requests."
                    )
            for who, requests in (("second", store.shared), ("first", store.back)):
                if not hit_tokens(requests):
                    sentences.append(f"{store.name}: the {who} server found nothing of what the other had computed.")
            if not self.control_detected(store):
                sentences.append(
                    f"{store.name}: the control was not detected: corrupted loads changed no output, so identical "
                    "outputs prove nothing."
                )
            if not store.bad_blocks:
                sentences.append(f"{store.name}: no checksum has found the changed values.")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``shared.json``. Its keys are stable; new ones may be added."""
        stores: dict[str, Any] = {store.name: {"skipped": store.reason} for store in self.skipped}
        for store in self.results:
            stores[store.name] = {
                "identical": self.identical(store),
                "hit_tokens": hit_tokens(store.shared),
                "ttft_ms": self.ttft_ms(store),
                "control_detected": self.control_detected(store),
                "tokens_asked": tokens_asked(store.shared),
                "hit_tokens_back": hit_tokens(store.back),
                "max_logprob_diff": finite(self.compare(store.shared).max_logprob_diff),
                "control_outputs_changed": len(self.compare(store.control).different),
                "corrupted": {"bad_blocks": store.bad_blocks, "hit_tokens": hit_tokens(store.corrupted)},
                "requests": {
                    name: [asdict(request) for request in getattr(store, name)]
                    for name in ("first", "shared", "computed", "back", "control", "corrupted")
                },
            }
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "stores": {store.name: stores[store.name] for store in self.stores},
            "model": self.model,
            "seed": self.seed,
            "vllm_version": self.info.vllm_version,
            "device": self.info.device,
            "made_at": self.made_at,
            "load_average": self.load_average,
            "baseline": [asdict(request) for request in self.baseline.values()],
        }


def hit_tokens(requests: Iterable[RequestResult]) -> int:
    """Returns the tokens that were read from the store."""
    return sum(request.disk_tokens for request in requests)


def tokens_asked(requests: Iterable[RequestResult]) -> int:
    return sum(request.prompt_tokens for request in requests)


def speedup_of(ttft_ms: Mapping[str, float | None]) -> float | None:
    """Returns how many times faster the first token came from the store, None if nothing did."""
    recompute, shared = ttft_ms["recompute"], ttft_ms["shared"]
    return None if recompute is None or shared is None else recompute / shared


def _median(requests: Sequence[RequestResult]) -> float | None:
    return float(np.median([request.ttft_ms for request in requests])) if requests else None
