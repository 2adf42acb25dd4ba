"""What a policy remembers of blocks that are gone: a hash and a stamp, in arrays of fixed size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.abc import OffloadKey

WAYS = 16
"""Entries of a bucket. A table for up to twice as many is one bucket."""
SLACK = 2
"""Entries there are for each in use."""

Hashes = npt.NDArray[np.uint64]
Stamps = npt.NDArray[np.int64]

_HALF = np.uint64(32)
_NEVER = -1
_ODD = np.uint32(1)


def key_hashes(keys: Sequence[OffloadKey]) -> Hashes:
    """64 evenly spread bits a key, made of its own bytes: the same in every process."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), dtype=np.uint64, count=len(keys))


class GhostTable:
    """The ``capacity`` hashes that entered last, each with a stamp and a mark.

    A hash that entered before those is not found any more, exactly: so a chain that is half forgotten has lost one end
    and has no holes. There are twice as many entries as are in use, in buckets; where a bucket is full
    nevertheless, its earliest entry makes room. Two keys are taken for one if bucket and 32 bits agree.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        ways = WAYS if capacity > 2 * WAYS else capacity
        num_buckets = round(SLACK * capacity / ways) if capacity > 2 * WAYS else 1
        self._num_buckets = np.uint64(num_buckets)
        self._tags = np.zeros((num_buckets, ways), dtype=np.uint32)
        """In a bucket each at most once, but 0."""
        self._entered = np.full((num_buckets, ways), _NEVER, dtype=np.int64)
        """How many had entered before; _NEVER: free."""
        self._stamps = np.zeros((num_buckets, ways), dtype=np.int64)
        self._marks = np.zeros((num_buckets, ways), dtype=np.bool_)
        self._winner = np.zeros(num_buckets, dtype=np.int64)
        self._next = 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._entered >= max(0, self._next - self._capacity)))

    def find(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """The entry of each hash, -1 where it is not known."""
        if self._next == 0:
            return np.full(len(hashes), -1, dtype=np.int64)
        entries = self._locate(*self._homes(hashes))
        known = self._entered.ravel()[entries] >= max(0, self._next - self._capacity)
        return np.where(known & (entries >= 0), entries, -1)

    def _locate(self, buckets: npt.NDArray[np.int64], tags: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """The only entry that may hold each tag, or -1."""
        same = self._tags[buckets] == tags[:, None]
        ways = same.argmax(axis=1)
        return np.where(same[np.arange(len(buckets)), ways], buckets * self._tags.shape[1] + ways, -1)

    def stamps(self, entries: npt.NDArray[np.int64]) -> Stamps:
        """Of ``entries``, none -1."""
        stamps: Stamps = self._stamps.ravel()[entries]
        return stamps

    def is_marked(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Of ``entries``; not of -1."""
        return (entries >= 0) & self._marks.ravel()[entries]

    def mark(self, entries: npt.NDArray[np.int64], marks: npt.NDArray[np.bool_]) -> None:
        """Of ``entries``, none -1."""
        self._marks.ravel()[entries] = marks

    def take_out(self, hashes: Hashes, entries: npt.NDArray[np.int64]) -> None:
        """Hashes are forgotten, if they are still where ``find`` saw them: in ``entries``, -1 where nowhere."""
        tags = hashes.astype(np.uint32) | _ODD
        entries = entries[(entries >= 0) & (self._tags.ravel()[entries] == tags)]
        self._entered.ravel()[entries] = _NEVER
        self._tags.ravel()[entries] = 0

    def add(self, hashes: Hashes, stamps: Stamps) -> None:
        """Distinct hashes enter in this order, without a mark. Those that are known enter anew."""
        hashes, stamps = hashes[-self._capacity :], stamps[-self._capacity :]
        if not len(hashes):
            return
        order = np.arange(self._next, self._next + len(hashes))
        self._next += len(hashes)
        buckets, tags = self._homes(hashes)
        entries = self._locate(buckets, tags)
        known = entries >= 0
        self._entered.ravel()[entries[known]] = order[known]
        left = np.flatnonzero(~known)
        while len(left):
            # Of several that would take the earliest entry of one bucket, one does so at a time.
            here = buckets[left]
            self._winner[here] = left
            won = self._winner[here] == left
            chosen, at = left[won], here[won]
            ways = self._entered[at].argmin(axis=1)
            entries[chosen] = at * self._tags.shape[1] + ways
            self._tags[at, ways] = tags[chosen]
            self._entered[at, ways] = order[chosen]
            left = left[~won]
        self._stamps.ravel()[entries] = stamps
        self._marks.ravel()[entries] = False

    def _homes(self, hashes: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        buckets = ((hashes >> _HALF) * self._num_buckets) >> _HALF
        return buckets.astype(np.int64), hashes.astype(np.uint32) | _ODD

    def clear(self) -> None:
        self._entered.fill(_NEVER)
        self._tags.fill(0)
        self._next = 0
