"""MissMemory: a bounded memory of why blocks are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from kvoffload.abc import Miss, MissReason, OffloadKey
from kvoffload.cache.keys import hash_keys

_REASONS = tuple(MissReason)
MISS_MEMORY_ENTRIES = 1 << 16


class MissMemory:
    """Remembers why and since when keys are missing, in a table of ``entries`` places, a power of two.

    The table is direct-mapped by the key's hash: a newer key may replace an older one, which is then reported as never
    stored. No object is kept per key.
    """

    def __init__(self, entries: int = MISS_MEMORY_ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        self._mask = entries - 1
        if entries < 1 or entries & self._mask:
            raise ValueError(f"entries={entries}: must be a power of two")
        self._hash = np.zeros(entries, dtype=np.int64)
        self._time = np.zeros(entries, dtype=np.float64)
        self._reason = np.zeros(entries, dtype=np.uint8)
        self._clock = clock

    def record(self, keys: Iterable[OffloadKey], reason: MissReason) -> None:
        hashes = hash_keys(keys)
        if not len(hashes):
            return
        at = hashes & self._mask
        self._hash[at] = hashes
        self._time[at] = self._clock()
        self._reason[at] = _REASONS.index(reason)

    def explain(self, key: OffloadKey) -> Miss:
        h = hash(key)
        at = h & self._mask
        if self._hash[at] == h:
            return Miss(_REASONS[self._reason[at]], self._clock() - float(self._time[at]))
        return Miss(MissReason.NEVER_STORED)
