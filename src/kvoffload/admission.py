"""Which block may enter: the reuse filter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvoffload.base import (
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvoffload.explain import MissMemory

MAX_SEEN_KEYS = 1 << 18
"""Keys remembered as counted for their request, over all requests. A request that is forgotten counts again when
it comes back."""


class FilterReusedOffloadingManager(OffloadingManager):
    """Stores only keys that ``store_threshold`` requests have asked for.

    A key counts once a request, when it first appears in a lookup or a touch, so what the device holds
    counts too; without a context every call counts; ``prepare_store`` never counts. Counts live in a
    least-recently-used table of at most ``max_tracker_size`` keys. All else goes to ``backing``.
    Raises ValueError for a threshold below 2 or a tracker below 1.
    """

    def __init__(self, backing: OffloadingManager, store_threshold: int = 2, max_tracker_size: int = 64_000) -> None:
        if store_threshold < 2:
            raise ValueError(f"store_threshold={store_threshold}: must be at least 2; leave it out to store all")
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size={max_tracker_size}: must be at least 1")
        self.backing = backing
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self._counts: dict[OffloadKey, int] = {}
        """Least recently counted first."""
        self._refused = MissMemory()
        self._seen: dict[str, set[OffloadKey]] = {}
        """Keys already counted, per request, the request that asked least recently first."""
        self._num_seen = 0

    def _count(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        fresh: Iterable[OffloadKey] = dict.fromkeys(keys)
        if req_context is not None:
            seen = self._seen.pop(req_context.req_id, set())
            self._seen[req_context.req_id] = seen
            fresh = [key for key in fresh if key not in seen]
            seen.update(fresh)
            self._num_seen += len(fresh)
            while len(self._seen) > 1 and self._num_seen > MAX_SEEN_KEYS:
                self._num_seen -= len(self._seen.pop(next(iter(self._seen))))
        counts = self._counts
        for key in fresh:
            counts[key] = counts.pop(key, 0) + 1
            if len(counts) > self.max_tracker_size:
                del counts[next(iter(counts))]

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        self._count(keys, req_context)
        return self.backing.lookup(keys, req_context)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        self._count(keys, req_context)
        return self.backing.lookup_each(keys, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self._count(keys, req_context)
        self.backing.touch(keys, req_context)

    def refresh(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
    ) -> None:
        self.backing.refresh(keys, stored, req_context)

    def offer_chain(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.backing.offer_chain(keys, req_context)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        counts, threshold = self._counts, self.store_threshold
        doubtful = [key for key in keys if counts.get(key, 0) < threshold]
        if not doubtful:
            return self.backing.prepare_store(keys, req_context)
        # What is there already goes along, or the store could evict it: it may have left the tracker since.
        states = self.backing.lookup_each(doubtful)
        refused = {key for key, state in zip(doubtful, states, strict=True) if state is LookupState.MISS}
        self._refused.record(refused, MissReason.NOT_ADMITTED)
        output = self.backing.prepare_store([key for key in keys if key not in refused], req_context)
        return output if output is None else replace(output, refused_keys=[*output.refused_keys, *refused])

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        worthy = [key for key in keys if self._counts.get(key, 0) >= self.store_threshold]
        self._refused.record(set(keys).difference(worthy), MissReason.NOT_ADMITTED)
        self.backing.refuse(worthy, req_context)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        return self.backing.prepare_load(keys, req_context)

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.backing.complete_load(keys, req_context)

    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        self.backing.complete_store(keys, req_context, success)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.backing.take_events()

    def reset(self) -> None:
        self.backing.reset()

    def shutdown(self) -> None:
        self.backing.shutdown()

    def explain_miss(self, key: OffloadKey) -> Miss:
        miss = self.backing.explain_miss(key)
        return self._refused.explain(key) if miss.reason is MissReason.NEVER_STORED else miss

    def poll(self) -> bool:
        return self.backing.poll()

    def let_go(self, req_context: ReqContext) -> None:
        self.backing.let_go(req_context)

    @property
    def has_pending_writes(self) -> bool:
        return self.backing.has_pending_writes

    def num_promoted(self, req_context: ReqContext) -> int:
        return self.backing.num_promoted(req_context)

    def wait(self, timeout_s: float) -> None:
        self.backing.wait(timeout_s)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self.backing.observe_prefill(num_tokens, seconds)

    def policy_state(self) -> Mapping[str, Any]:
        return self.backing.policy_state()

    def take_counts(self) -> Mapping[str, float]:
        return self.backing.take_counts()

    @property
    def num_blocks(self) -> int:
        return self.backing.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.backing.num_used_blocks

    def check_integrity(self) -> None:
        if len(self._counts) > self.max_tracker_size or self._num_seen != sum(map(len, self._seen.values())):
            raise IntegrityError("the reuse filter's tables have outgrown their bounds")
        self.backing.check_integrity()
