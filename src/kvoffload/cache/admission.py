"""Which block may enter: the reuse filter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
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
from kvoffload.cache.misses import MissMemory

MAX_SEEN_KEYS = 1 << 18
"""Keys remembered as counted for their request, over all requests. A request that is forgotten counts again when
it comes back."""
MAX_SEEN_REQUESTS = 1 << 14
MIN_TRACKER_SIZE = 64_000
MAX_TRACKER_SIZE = 1 << 20
"""Each key takes about 300 bytes."""
TRACKED_PER_BLOCK = 4
"""Keys in the tracker for each block that there is room for: docs/policies.md has the measurement."""
_MAX_FORGOTTEN = 255


def tracker_size(num_blocks: int) -> int:
    """How many keys a filter tracks in front of tiers that hold ``num_blocks`` blocks together: enough to meet a key
    again that would still be held if it had been stored."""
    return min(max(MIN_TRACKER_SIZE, TRACKED_PER_BLOCK * num_blocks), MAX_TRACKER_SIZE)


class FilterReusedOffloadingManager(OffloadingManager):
    """Stores only keys that ``store_threshold`` requests have asked for.

    A key counts once a request, when it first appears in a lookup or a touch, so what the device holds
    counts too; without a context every call counts; ``prepare_store`` never counts. Counts live in a
    least-recently-used table of at most ``max_tracker_size`` keys. ``request_of`` maps a request's id to that of the
    request it is part of, so that parts count as one. All else goes to ``backing``.
    Raises ValueError for a threshold below 2 or a tracker below 1.
    """

    def __init__(
        self,
        backing: OffloadingManager,
        store_threshold: int = 2,
        max_tracker_size: int = 64_000,
        request_of: Callable[[str], str] = str,
    ) -> None:
        if store_threshold < 2:
            raise ValueError(f"store_threshold={store_threshold}: must be at least 2; leave it out to store all")
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size={max_tracker_size}: must be at least 1")
        self.backing = backing
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self._request_of = request_of
        # Keys are tracked by their hashes, which take less memory; two keys with the same one are counted as one.
        self._counts: OrderedDict[int, int] = OrderedDict()
        """Least recently counted first."""
        entries = 1 << max(16, (max_tracker_size - 1).bit_length())
        self._refused = MissMemory(entries)
        self._forgotten = np.zeros(entries, dtype=np.int64)
        """What has left the tracker, in the place that its hash gives it."""
        self._forgotten_counts = np.zeros(entries, dtype=np.uint8)
        self._seen: OrderedDict[str, set[int]] = OrderedDict()
        """Keys already counted, per request, the request that asked least recently first."""
        self._num_seen = 0

    def _count(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        if not keys:
            return
        fresh: Iterable[int] = dict.fromkeys(map(hash, keys))
        if req_context is not None:
            fresh = self._not_counted(fresh, self._request_of(req_context.req_id))
        counts, forgotten = self._counts, []
        for key in fresh:
            counts[key] = counts.pop(key, 0) + 1
            if len(counts) > self.max_tracker_size:
                forgotten.append(counts.popitem(last=False))
        if forgotten:
            self._forget(np.array(forgotten, dtype=np.int64))

    def _not_counted(self, keys: Iterable[int], request: str) -> list[int]:
        """Those of ``keys`` that were not yet counted for the request, which are from now on."""
        seen = self._seen.setdefault(request, set())
        self._seen.move_to_end(request)
        fresh = [key for key in keys if key not in seen]
        seen.update(fresh)
        self._num_seen += len(fresh)
        while len(self._seen) > 1 and (self._num_seen > MAX_SEEN_KEYS or len(self._seen) > MAX_SEEN_REQUESTS):
            _, dropped = self._seen.popitem(last=False)
            self._num_seen -= len(dropped)
        return fresh

    def _forget(self, left: npt.NDArray[np.int64]) -> None:
        """Notes of keys that left the tracker how often they were counted. ``left``: (key, count) in rows."""
        keys, counts = left.T
        at = keys & (len(self._forgotten) - 1)
        counts = counts + np.where(self._forgotten[at] == keys, self._forgotten_counts[at], 0)
        self._forgotten[at] = keys
        self._forgotten_counts[at] = np.minimum(counts, _MAX_FORGOTTEN)

    def _note_refused(self, keys: Collection[OffloadKey]) -> None:
        """Remembers why ``keys`` are not stored: some would be, if the tracker still knew of them."""
        hashes = np.fromiter(map(hash, keys), dtype=np.int64, count=len(keys))
        at = hashes & (len(self._forgotten) - 1)
        before = np.where(self._forgotten[at] == hashes, self._forgotten_counts[at], 0).tolist()
        forgotten = [
            n > 0 and n + self._counts.get(key, 0) >= self.store_threshold
            for key, n in zip(hashes.tolist(), before, strict=True)
        ]
        self._refused.record(compress(keys, forgotten), MissReason.FORGOTTEN)
        self._refused.record(compress(keys, (not each for each in forgotten)), MissReason.NOT_ADMITTED)

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
        doubtful = [key for key in keys if counts.get(hash(key), 0) < threshold]
        if not doubtful:
            return self.backing.prepare_store(keys, req_context)
        # What is there already goes along, or the store could evict it: it may have left the tracker since.
        states = self.backing.lookup_each(doubtful)
        refused = {key for key, state in zip(doubtful, states, strict=True) if state is LookupState.MISS}
        self._note_refused(refused)
        output = self.backing.prepare_store([key for key in keys if key not in refused], req_context)
        return output if output is None else replace(output, refused_keys=[*output.refused_keys, *refused])

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        worthy = [key for key in keys if self._counts.get(hash(key), 0) >= self.store_threshold]
        self._note_refused(set(keys).difference(worthy))
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
        num_seen = sum(map(len, self._seen.values()))
        is_bounded = len(self._counts) <= self.max_tracker_size and len(self._seen) <= MAX_SEEN_REQUESTS
        if not is_bounded or self._num_seen != num_seen:
            raise IntegrityError("the reuse filter's tables have outgrown their bounds")
        self.backing.check_integrity()
