"""SIEVE: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
Algorithm for Web Caches", NSDI 2024."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, OffloadKey, Slots
from kvoffload.cache.policies.queues import SweptQueue


class SIEVEPolicy(CachePolicy):
    """A hand goes over the blocks from the oldest to the newest and starts anew; a block that was used since it passed
    loses its mark and stays, another leaves.

    The queue lies in two pieces: ``_ahead`` of the hand, where new blocks join, and ``_behind`` it. A busy block
    that the hand has passed over is judged as soon as it has settled.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ahead = SweptQueue(capacity)
        self._behind = SweptQueue(capacity)
        self._used = np.zeros(capacity, dtype=np.uint8)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self._used[slots] = 0
        self._ahead.append(slots)

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        self._used[slots[ready]] = 1

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        mine = slots[new]
        ahead = self._ahead.holds(mine)
        self._ahead.append(mine[ahead])
        self._behind.append(mine[~ahead])

    def settle(self, slots: Slots) -> None:
        ahead = self._ahead.holds(slots)
        self._ahead.settle(slots[ahead])
        self._behind.settle(slots[~ahead])

    def pin(self, slots: Slots) -> None:
        pass

    def unpin(self, slots: Slots) -> None:
        self.settle(slots)

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        parts = []
        # What is left of this round; the next, which may find marks; and one more, which finds none.
        for _ in range(3):
            victims, spared = self._ahead.sweep(n, busy, self._used, spared_from=1)
            self._used[spared] = 0
            self._behind.append(spared)
            parts.append(victims)
            n -= len(victims)
            if n > 0 or not len(self._ahead):
                self._ahead, self._behind = self._behind, self._ahead
            if n == 0:
                break
        return np.concatenate(parts)

    def remove(self, slots: Slots) -> None:
        ahead = self._ahead.holds(slots)
        self._ahead.discard(slots[ahead])
        self._behind.discard(slots[~ahead])

    def clear(self) -> None:
        self._ahead.clear()
        self._behind.clear()

    def check_integrity(self, slots: Slots) -> None:
        ahead = self._ahead.holds(slots)
        self._ahead.check_integrity(slots[ahead].tolist())
        self._behind.check_integrity(slots[~ahead].tolist())
