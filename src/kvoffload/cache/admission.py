"""ReuseFilter: stores only blocks that several requests have asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
    Admission,
    ConfigError,
    IntegrityError,
    Keys,
    Miss,
    MissReason,
    OffloadingManager,
    OffloadKey,
    ReqContext,
)
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.tenants import Shares

MAX_SEEN_KEYS = 1 << 18
"""Keys remembered as counted, over all requests. A request that is forgotten is counted again when it comes back."""
MAX_SEEN_REQUESTS = 1 << 14
MIN_TRACKER_SIZE = 64_000
MAX_TRACKER_SIZE = 1 << 20
"""A key takes about 300 bytes."""
TRACKED_PER_BLOCK = 4
"""Tracked keys per block of capacity; measured in docs/policies.md."""
_MAX_FORGOTTEN = 255


def tracker_size(num_blocks: int) -> int:
    """Returns how many keys a filter tracks for tiers that hold ``num_blocks`` blocks together: enough to recognize a
    key that would still be held if it had been stored."""
    return min(max(MIN_TRACKER_SIZE, TRACKED_PER_BLOCK * num_blocks), MAX_TRACKER_SIZE)


class ReuseFilter(Admission):
    """Accepts only keys that ``store_threshold`` requests have asked for.

    A key counts once per request, when it first appears in a lookup or a touch, so blocks that the device holds
    count too. Without a context every call counts. Counts are in a least-recently-used table of at most
    ``max_tracker_size`` keys. ``request_of`` maps a request's id to the id of the request that it is part of, so that
    parts count as one. Raises ValueError for a threshold below 2 or a tracker below 1.
    """

    def __init__(
        self, store_threshold: int = 2, max_tracker_size: int = 64_000, request_of: Callable[[str], str] = str
    ) -> None:
        if store_threshold < 2:
            raise ValueError(f"store_threshold={store_threshold}: must be at least 2; leave it out to store all")
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size={max_tracker_size}: must be at least 1")
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self._request_of = request_of
        # Keys are tracked by their hashes, which take less memory; two keys with the same hash are counted as one.
        self._counts: OrderedDict[int, int] = OrderedDict()
        """Least recently counted first."""
        entries = 1 << max(16, (max_tracker_size - 1).bit_length())
        self._refused = MissMemory(entries)
        self._forgotten = np.zeros(entries, dtype=np.int64)
        """Hashes that have left the tracker, each in the place that it maps to."""
        self._forgotten_counts = np.zeros(entries, dtype=np.uint8)
        self._seen: OrderedDict[str, set[int]] = OrderedDict()
        """Keys already counted, per request, the request that asked least recently first."""
        self._num_seen = 0

    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
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
        """Returns the ``keys`` not yet counted for the request, and counts them from now on."""
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
        """Remembers how often keys that left the tracker were counted. ``left`` has rows of key and count."""
        keys, counts = left.T
        at = keys & (len(self._forgotten) - 1)
        counts = counts + np.where(self._forgotten[at] == keys, self._forgotten_counts[at], 0)
        self._forgotten[at] = keys
        self._forgotten_counts[at] = np.minimum(counts, _MAX_FORGOTTEN)

    def accepts(self, keys: Keys) -> list[bool]:
        counts, threshold = self._counts, self.store_threshold
        return [counts.get(hash(key), 0) >= threshold for key in keys]

    def refuse(self, keys: Collection[OffloadKey]) -> None:
        """Remembers why ``keys`` are not stored: FORGOTTEN if the tracker would still accept them had it kept them."""
        hashes = np.fromiter(map(hash, keys), dtype=np.int64, count=len(keys))
        at = hashes & (len(self._forgotten) - 1)
        before = np.where(self._forgotten[at] == hashes, self._forgotten_counts[at], 0).tolist()
        forgotten = [
            n > 0 and n + self._counts.get(key, 0) >= self.store_threshold
            for key, n in zip(hashes.tolist(), before, strict=True)
        ]
        self._refused.record(compress(keys, forgotten), MissReason.FORGOTTEN)
        self._refused.record(compress(keys, (not each for each in forgotten)), MissReason.NOT_ADMITTED)

    @property
    def num_requests(self) -> int:
        """Requests whose counted keys are remembered."""
        return len(self._seen)

    def explain(self, key: OffloadKey) -> Miss:
        return self._refused.explain(key)

    def check_integrity(self) -> None:
        num_seen = sum(map(len, self._seen.values()))
        is_bounded = len(self._counts) <= self.max_tracker_size and len(self._seen) <= MAX_SEEN_REQUESTS
        if not is_bounded or self._num_seen != num_seen:
            raise IntegrityError("the reuse filter's tables have outgrown their bounds")


class TenantAdmission(Admission):
    """An admission of its own for each tenant of ``shares``, so that no tenant's requests make it forget another's."""

    def __init__(self, shares: Shares, make: Callable[[], Admission]) -> None:
        self._shares = shares
        self._admissions = [make() for _ in shares.names]

    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
        for t, own, _ in self._shares.split(keys):
            self._admissions[t].count(own, req_context)

    def accepts(self, keys: Keys) -> list[bool]:
        accepted = np.zeros(len(keys), dtype=np.bool_)
        for t, own, chosen in self._shares.split(keys):
            accepted[slice(None) if chosen is None else chosen] = self._admissions[t].accepts(own)
        answers: list[bool] = accepted.tolist()
        return answers

    def refuse(self, keys: Collection[OffloadKey]) -> None:
        for t, own, _ in self._shares.split(list(keys)):
            self._admissions[t].refuse(own)

    def explain(self, key: OffloadKey) -> Miss:
        return self._admissions[self._shares.tenant(key)].explain(key)

    def check_integrity(self) -> None:
        for admission in self._admissions:
            admission.check_integrity()


def FilterReusedOffloadingManager(
    backing: OffloadingManager,
    store_threshold: int = 2,
    max_tracker_size: int = 64_000,
    request_of: Callable[[str], str] = str,
) -> OffloadingManager:
    """Returns ``backing``, which from now on stores only keys that a ReuseFilter with these arguments accepts.

    Raises ValueError for a wrong argument, ConfigError if ``backing`` takes no admission.
    """
    admission = ReuseFilter(store_threshold, max_tracker_size, request_of)
    host = getattr(backing, "host", backing)
    if not isinstance(host, PolicyOffloadingManager):
        raise ConfigError(
            fault=f"{type(backing).__name__} takes no admission", fix="put a PolicyOffloadingManager in its place"
        )
    host.admission = admission
    return backing
