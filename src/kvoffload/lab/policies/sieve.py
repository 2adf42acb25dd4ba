"""SIEVE: Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
Algorithm for Web Caches", NSDI 2024."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, Eviction, OffloadKey, Slots
from kvoffload.cache.policies.base import ListPolicy
from kvoffload.lab.policies.queues import sweep


class SIEVEPolicy(ListPolicy):
    """A hand moves over the blocks from the oldest to the newest, and starts again. A block that was used since the
    hand last passed it loses its mark and stays; another block leaves.

    The queue consists of two lists: ``ahead`` of the hand, where new blocks join, and ``behind`` it. A busy block
    that the hand has passed over is judged as soon as it is evictable.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_lists=2)
        self.ahead, self.behind = self.lists
        self._used = np.zeros(capacity, dtype=np.bool_)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self._used[slots] = False
        self.ahead.append(slots)

    def access(self, access: Access) -> None:
        self._used[access.slots[access.ready]] = True

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        self.move_to_end(slots[new])

    def evict(self, eviction: Eviction) -> Slots:
        n, parts = eviction.n, []
        # The rest of this round; the next round, which may find marks; and one more, which finds none.
        for _ in range(3):
            victims, spared = sweep(self.ahead, n, eviction.busy, self._used)
            self._used[spared] = False
            self.behind.append(spared)
            parts.append(victims)
            n -= len(victims)
            if n > 0 or not len(self.ahead):
                self.ahead, self.behind = self.behind, self.ahead
            if n == 0:
                break
        return np.concatenate(parts)
