"""A map from digests of keys to places, in numpy arrays, for batches.

**Threads.** One thread changes a table, and any thread looks up at the same time, without a lock. A lookup that meets a
change may miss a digest, or return the place of another digest; so a place must be confirmed before it is used.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # "unique" imports it when it is first called, which would hold up other threads.
import numpy.typing as npt

from kvoffload.tiers.disk.journal import UInt64s

Places = npt.NDArray[np.int64]
"""One place per digest, -1 where there is none."""

WAYS = 8
"""Digests per bucket: 64 bytes, a cache line."""
BLOCKS_PER_BUCKET = 2
"""At most, on average: then about one digest in ten thousand finds its bucket full, and goes to a dict."""
_SHARE = 4096
"""Digests that are inserted or removed together: a bucket gets few of them, and each takes a round; and the thread that
looks up waits for no single long call."""


class ForeignTable:
    """At most one place per digest, for about ``capacity`` digests. A digest is not 0, a place not negative."""

    def __init__(self, capacity: int) -> None:
        num_buckets = 1 << max(0, (-(-max(capacity, 2) // BLOCKS_PER_BUCKET) - 1).bit_length())
        self.capacity = num_buckets * BLOCKS_PER_BUCKET
        self._mask = np.uint64(num_buckets - 1)
        self._digests = np.zeros((num_buckets, WAYS), dtype=np.uint64)
        self._places = np.zeros(num_buckets * WAYS, dtype=np.int64)
        self._spill: dict[int, int] = {}
        self._spilled = np.zeros(num_buckets, dtype=np.bool_)
        """Buckets that have had digests in the dict."""
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def find(self, digests: UInt64s) -> Places:
        """Returns the place of each digest."""
        entries = self._entries_of(digests)
        places = np.where(entries >= 0, self._places.take(entries, mode="clip"), -1)
        if self._spill:
            missing = np.flatnonzero((entries < 0) & self._spilled.take(self._buckets(digests)))
            for i in missing.tolist():
                places[i] = self._spill.get(int(digests[i]), -1)
        return places

    def insert(self, digests: UInt64s, places: Places) -> None:
        """Inserts digests with distinct places. A digest that has a place keeps it."""
        for start in range(0, len(digests), _SHARE):
            share, first = np.unique(digests[start : start + _SHARE], return_index=True)
            targets = places[start + first]
            absent = np.flatnonzero(self.find(share) < 0)
            self._len += len(absent)
            self._insert_absent(share[absent], targets[absent])

    def _insert_absent(self, digests: UInt64s, places: Places) -> None:
        while len(digests):
            buckets = self._buckets(digests)
            empty = self._digests.take(buckets, axis=0) == 0
            has_room = empty.any(axis=1)
            for i in np.flatnonzero(~has_room).tolist():
                self._spilled[buckets[i]] = True
                self._spill[int(digests[i])] = int(places[i])
            entries = buckets * WAYS + empty.argmax(axis=1)
            # If several digests take the same entry, the last one wins, and the others come in the next round.
            self._places[entries[has_room]] = places[has_room]
            won = has_room & (self._places.take(entries) == places)
            self._digests.ravel()[entries[won]] = digests[won]
            later = has_room & ~won
            digests, places = digests[later], places[later]

    def remove(self, digests: UInt64s, places: Places) -> None:
        """Removes digests that have these places; others are left alone."""
        for start in range(0, len(digests), _SHARE):
            self._remove(digests[start : start + _SHARE], places[start : start + _SHARE])

    def _remove(self, digests: UInt64s, places: Places) -> None:
        entries = self._entries_of(digests)
        held = np.flatnonzero((entries >= 0) & (self._places.take(entries, mode="clip") == places))
        self._digests.ravel()[entries[held]] = 0
        self._len -= len(held)
        if self._spill:
            for i in np.flatnonzero(entries < 0).tolist():
                if self._spill.get(int(digests[i])) == int(places[i]):
                    del self._spill[int(digests[i])]
                    self._len -= 1

    def _buckets(self, digests: UInt64s) -> npt.NDArray[np.int64]:
        return (digests & self._mask).view(np.int64)

    def _entries_of(self, digests: UInt64s) -> npt.NDArray[np.int64]:
        """Returns the number of each digest's entry, -1 where there is none."""
        buckets = self._buckets(digests)
        matches = self._digests.take(buckets, axis=0) == digests[:, None]
        found = np.flatnonzero(matches.view("<u8").ravel())
        entries = np.full(len(digests), -1, dtype=np.int64)
        entries[found] = buckets[found] * WAYS + matches[found].argmax(axis=1)
        return entries
