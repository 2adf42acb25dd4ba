"""Adaptive Replacement Cache: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
FAST 2003, adapted to batches and to blocks that cannot be evicted for a while."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffload.base import CachePolicy, IntegrityError, OffloadKey, Slots
from kvoffload.policies.base import RecencyList


class ARCPolicy(CachePolicy):
    """t1: seen once, t2: seen again; b1 and b2: keys lately evicted from each, oldest first.

    ``target_t1_size`` is how long t1 should be: it grows when a key of b1 is asked for, shrinks for b2.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1 = RecencyList(capacity)
        self._t2 = RecencyList(capacity)
        self.b1: dict[OffloadKey, None] = {}
        self.b2: dict[OffloadKey, None] = {}
        self.target_t1_size = 0.0

    @property
    def len_t1(self) -> int:
        return len(self._t1)

    @property
    def len_t2(self) -> int:
        return len(self._t2)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        for ghosts in (self.b1, self.b2):
            if ghosts and not ghosts.keys().isdisjoint(keys):
                for key in keys:
                    ghosts.pop(key, None)
        self._t1.append(slots)

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        in_t1 = self._t1.holds(slots)
        again = in_t1 & ready
        self._t1.append(slots[in_t1 & ~ready])
        self._t1.discard(slots[again])
        self._t2.join_parked(slots[again & pinned])
        self._t2.append(slots[(again | ~in_t1) & ~pinned])

    def touch_absent(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            if key in self.b1:
                step = max(1.0, len(self.b2) / len(self.b1))
                self.target_t1_size = min(self.target_t1_size + step, float(self.capacity))
                del self.b1[key]
                self.b1[key] = None
            elif key in self.b2:
                step = max(1.0, len(self.b1) / len(self.b2))
                self.target_t1_size = max(self.target_t1_size - step, 0.0)
                del self.b2[key]
                self.b2[key] = None

    def settle(self, slots: Slots) -> None:
        in_t1 = self._t1.holds(slots)
        self._t1.settle(slots[in_t1])
        self._t2.settle(slots[~in_t1])

    def pin(self, slots: Slots) -> None:
        in_t1 = self._t1.holds(slots)
        self._t1.park(slots[in_t1])
        self._t2.park(slots[~in_t1])

    def unpin(self, slots: Slots) -> None:
        in_t1 = self._t1.holds(slots)
        self._t1.append(slots[in_t1])
        self._t2.append(slots[~in_t1])

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        # Between two evictions of a batch only len(t1) changes, so the rule "from t1 while it is at its
        # target or above, else from t2, else from t1 after all" is three runs.
        above_target = max(0, len(self._t1) - int(self.target_t1_size) + 1)
        first = self._t1.pop_oldest(min(n, above_target), busy)
        second = self._t2.pop_oldest(n - len(first), busy)
        third = self._t1.pop_oldest(n - len(first) - len(second), busy)
        from_t1 = np.concatenate((first, third))
        self.b1.update(dict.fromkeys(key_of[from_t1].tolist()))
        self.b2.update(dict.fromkeys(key_of[second].tolist()))
        for ghosts in (self.b1, self.b2):
            for key in list(islice(ghosts, max(0, len(ghosts) - self.capacity))):
                del ghosts[key]
        return np.concatenate((first, second, third))

    def remove(self, slots: Slots) -> None:
        in_t1 = self._t1.holds(slots)
        self._t1.discard(slots[in_t1])
        self._t2.discard(slots[~in_t1])

    def clear(self) -> None:
        self._t1.clear()
        self._t2.clear()
        self.b1.clear()
        self.b2.clear()
        self.target_t1_size = 0.0

    def check_integrity(self, slots: Slots) -> None:
        in_t1 = self._t1.holds(slots)
        self._t1.check_integrity(slots[in_t1].tolist())
        self._t2.check_integrity(slots[~in_t1].tolist())
        if max(len(self.b1), len(self.b2)) > self.capacity:
            raise IntegrityError("a ghost list is longer than the capacity")
        if not 0 <= self.target_t1_size <= self.capacity:
            raise IntegrityError("target_t1_size is out of its range")
