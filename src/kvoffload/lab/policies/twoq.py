"""2Q, the full version: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement
Algorithm", VLDB 1994."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, Eviction, OffloadKey, Slots
from kvoffload.cache.policies.base import ListPolicy, admit_head
from kvoffload.lab.policies.queues import Ghosts


class TwoQPolicy(ListPolicy):
    """A1in: a queue of recently stored blocks, a quarter of the cache. A1out: the keys of blocks that recently left
    A1in, half as many as the cache has blocks. Am: blocks that returned from A1out, least recently used first.

    Uses of a block in A1in are not counted: all of them are taken for one use.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_lists=2)
        self.a1in, self.am = self.lists
        self._a1in_limit = max(1, capacity // 4)
        self.a1out = Ghosts(max(1, capacity // 2))

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        returning = self.a1out.take(keys)
        self.am.append(slots[returning])
        self.a1in.append(slots[~returning])

    def access(self, access: Access) -> None:
        self.a1out.ask(access.absent)
        self.am.move_to_end(access.slots)

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        self.am.move_to_end(slots)
        self.a1in.move_to_end(slots[new])

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        returning = self.a1out.returning(keys)
        am_size = min(len(self.am) + int(np.count_nonzero(returning)), self.capacity - self._a1in_limit)
        return admit_head(returning, self.capacity - am_size)

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self.a1out.add(keys)

    def evict(self, eviction: Eviction) -> Slots:
        n, busy = eviction.n, eviction.busy
        surplus = max(0, len(self.a1in) - self._a1in_limit)
        first = self.a1in.pop_oldest(min(n, surplus), busy)
        second = self.am.pop_oldest(n - len(first), busy)
        third = self.a1in.pop_oldest(n - len(first) - len(second), busy)
        self.a1out.add(eviction.key_of[np.concatenate((first, third))].tolist())
        return np.concatenate((first, second, third))

    def clear(self) -> None:
        super().clear()
        self.a1out.clear()

    def check_integrity(self, slots: Slots) -> None:
        super().check_integrity(slots)
        self.a1out.check_integrity()
