"""GhostTable: a hash and a stamp per evicted or refused block, in arrays of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.abc import OffloadKey
from kvoffload.cache.keys import Hashes, key_block_hash, make_offload_key
from kvoffload.native import load

WAYS = 16
"""Entries per bucket. A table for up to twice as many hashes is one bucket."""
SLACK = 2
"""Entries per remembered hash."""

Stamps = npt.NDArray[np.int64]
Entries = npt.NDArray[np.int64]

_NEVER = -1
_ABSENT = -1
# Arrays, because numpy handles them faster than its scalars.
_HALF = np.array(32, dtype=np.uint64)
_ODD = np.array(1, dtype=np.uint32)
_FIRST_GROUP = make_offload_key(b"", 0)


def seem_of_several_groups(keys: Sequence[OffloadKey]) -> bool:
    """Returns whether one of the first two or the last two keys is not of the first KV cache group. Engines with one
    group have no such keys; those of several groups are in the order in which blocks end, so in a long list it is seen.
    It takes the same time for any number of keys."""
    return not all(key.endswith(_FIRST_GROUP) for key in (*keys[:2], *keys[-2:]))


def shared_names(keys: Sequence[OffloadKey]) -> list[bytes]:
    """Returns the keys that blocks of the first KV cache group have at the same places: blocks of several groups that
    end at one token have one name."""
    return [key_block_hash(key) + _FIRST_GROUP for key in keys]


def plain_same_keys(a: Sequence[bytes], b: Sequence[bytes]) -> bool:
    """Returns whether lists or tuples have equal keys."""
    return tuple(a) == tuple(b)


class PlainGhostTable:
    """The ``capacity`` hashes that were added last, each with a stamp and a mark.

    A hash that was added before those is never found: so a chain that is half forgotten has lost one end, and has no
    holes. There are twice as many entries as remembered hashes, in buckets. A new entry overwrites a free or the
    earliest one of its bucket, so that a bucket to which too many hashes belong forgets some too soon. Two keys are
    confused if their buckets and 32 bits of their hashes agree.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ways = WAYS if capacity > 2 * WAYS else capacity
        num_buckets = round(SLACK * capacity / self._ways) if capacity > 2 * WAYS else 1
        self._num_buckets = np.array(num_buckets, dtype=np.uint64)
        self._tags = np.zeros((num_buckets, self._ways), dtype=np.uint32)
        """A bucket has each tag at most once; 0: the entry is free."""
        self._added = np.full(num_buckets * self._ways, _NEVER, dtype=np.int64)
        """How many hashes had been added before; _NEVER: the entry is free."""
        self._stamps = np.zeros(num_buckets * self._ways, dtype=np.int64)
        """Twice the stamp, plus one if the entry is marked."""
        self._next_way = np.zeros(num_buckets, dtype=np.uint8 if self._ways < 256 else np.int64)
        """The earliest entry of each bucket; the others follow in the order of a ring."""
        self._is_disordered = np.zeros(num_buckets, dtype=np.bool_)
        """Buckets from which an entry was removed since they were put in order."""
        self._winner = np.zeros(num_buckets, dtype=np.int32)
        self._num_added = 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._added >= max(0, self._num_added - self._capacity)))

    def find(self, hashes: Hashes) -> Entries:
        """Returns the entry of each hash, -1 if it is not remembered."""
        if self._num_added == 0:
            return np.full(len(hashes), _ABSENT, dtype=np.int64)
        return self._without_forgotten(self._locate(*self._homes(hashes)))

    def find_again(self, hashes: Hashes, entries: Entries) -> Entries:
        """Same as ``find``, if ``entries`` are what it has returned earlier, and none of ``hashes`` was added since."""
        if not np.count_nonzero(entries >= 0):
            return entries
        found = np.flatnonzero(entries >= 0)
        entries = entries.copy()
        entries[found] = self.find(hashes[found])
        return entries

    def _without_forgotten(self, entries: Entries) -> Entries:
        """Replaces the entries of hashes that were added too long ago by -1."""
        found = np.flatnonzero(entries >= 0)
        if len(found):
            forgotten = found[self._added[entries[found]] < self._num_added - self._capacity]
            # Freed, so that a hash that is added again is in its bucket once. They are the earliest of their buckets.
            self._free(entries[forgotten])
            entries[forgotten] = _ABSENT
        return entries

    def _locate(self, buckets: npt.NDArray[np.int64], tags: npt.NDArray[np.uint32]) -> Entries:
        """Returns the only entry that can hold each tag, or -1."""
        same = self._tags.take(buckets, axis=0) == tags[:, None]
        entries = np.full(len(buckets), _ABSENT, dtype=np.int64)
        found = np.flatnonzero(same)
        rows = found // self._ways
        entries[rows] = buckets[rows] * self._ways + (found - rows * self._ways)
        return entries

    def stamps(self, entries: Entries) -> Stamps:
        """Returns the stamps of ``entries``, none of which is -1."""
        stamps: Stamps = self._stamps[entries] >> 1
        return stamps

    def is_marked(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Returns which of ``entries`` are marked. -1 is not."""
        marked = entries >= 0
        if np.count_nonzero(marked):
            marked &= (self._stamps[entries] & 1).astype(np.bool_)
        return marked

    def mark(self, entries: Entries, marks: npt.NDArray[np.bool_]) -> None:
        """Sets the marks of ``entries``, none of which is -1."""
        self._stamps[entries] = self._stamps[entries] & ~1 | marks

    def remove(self, entries: Entries) -> None:
        """Forgets the hashes in ``entries``, none of which is -1."""
        self._free(entries)
        self._is_disordered[entries // self._ways] = True

    def _free(self, entries: Entries) -> None:
        self._added[entries] = _NEVER
        self._tags.ravel()[entries] = 0

    def add(self, hashes: Hashes, stamps: Stamps, new: bool = False) -> None:
        """Adds distinct hashes in this order, without marks. Those that are remembered are added again.

        ``new`` says that all were removed, or not found, since they were last added: then this is faster.
        """
        hashes, stamps = hashes[-self._capacity :], stamps[-self._capacity :]
        n = len(hashes)
        if n == 0:
            return
        buckets, tags = self._homes(hashes)
        entries = np.full(n, _ABSENT, dtype=np.int64)
        if not new:
            known = self._locate(buckets, tags)
            self.remove(known[known >= 0])
        disordered = buckets[self._is_disordered[buckets]]
        if len(disordered):
            self._put_in_order(np.unique(disordered))
        left = np.arange(n)
        while len(left):
            # If several hashes take the earliest entry of one bucket, the first one wins, and the others try again.
            here = buckets[left]
            self._winner[here[::-1]] = left[::-1]
            won = self._winner[here] == left
            chosen, at = left[won], here[won]
            ways = self._next_way[at]
            entries[chosen] = at * self._ways + ways
            ways += 1
            ways[ways == self._ways] = 0
            self._next_way[at] = ways
            left = left[~won]
        self._tags.ravel()[entries] = tags
        self._added[entries] = np.arange(self._num_added, self._num_added + n)
        self._stamps[entries] = 2 * stamps
        self._num_added += n

    def _put_in_order(self, buckets: npt.NDArray[np.int64]) -> None:
        """Moves the entries of buckets so that the free ones come first, then the others, the earliest first."""
        order = self._added.reshape(-1, self._ways)[buckets].argsort(axis=1)
        for column in (self._tags, self._added, self._stamps):
            rows = column.reshape(-1, self._ways)
            rows[buckets] = np.take_along_axis(rows[buckets], order, axis=1)
        self._next_way[buckets] = 0
        self._is_disordered[buckets] = False

    def _homes(self, hashes: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        buckets = ((hashes >> _HALF) * self._num_buckets) >> _HALF
        return buckets.astype(np.int64), hashes.astype(np.uint32) | _ODD

    def clear(self) -> None:
        """Forgets everything."""
        self._added.fill(_NEVER)
        self._tags.fill(0)
        self._next_way.fill(0)
        self._is_disordered.fill(False)
        self._num_added = 0


if TYPE_CHECKING or (native := load("_ghosts")) is None:
    GhostTable = PlainGhostTable
    same_keys = plain_same_keys
else:
    GhostTable = native.GhostTable
    same_keys = native.same_keys
