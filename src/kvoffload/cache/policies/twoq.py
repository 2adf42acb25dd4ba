"""2Q, the full version: Johnson and Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement
Algorithm", VLDB 1994."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, OffloadKey, Slots
from kvoffload.cache.policies.base import RecencyList
from kvoffload.cache.policies.queues import Ghosts, admit_head


class TwoQPolicy(CachePolicy):
    """A1in: a queue of blocks that came lately, a quarter of the cache. A1out: keys of half as many blocks as the cache
    has, lately gone from A1in. Am: what came back from A1out, least recently used first.

    Uses while in A1in count for nothing: they are taken for one.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._a1in = RecencyList(capacity)
        self._am = RecencyList(capacity)
        self._a1in_limit = max(1, capacity // 4)
        self._a1out = Ghosts(max(1, capacity // 2))

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        returning = self._a1out.take(keys)
        self._am.append(slots[returning])
        self._a1in.append(slots[~returning])

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        self._am.append(slots[self._am.holds(slots) & ~pinned])

    def touch_absent(self, keys: Sequence[OffloadKey]) -> None:
        self._a1out.ask(keys)

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        in_am = self._am.holds(slots)
        self._am.append(slots[in_am & ~pinned])
        self._a1in.append(slots[~in_am & new])

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        if not self.may_refuse:
            return None
        returning = self._a1out.returning(keys)
        of_am = min(len(self._am) + int(np.count_nonzero(returning)), self.capacity - self._a1in_limit)
        admitted = admit_head(returning, self.capacity - of_am)
        self.refuse(list(compress(keys, ~admitted)))
        return admitted

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self._a1out.add(reversed(keys))

    def settle(self, slots: Slots) -> None:
        in_am = self._am.holds(slots)
        self._am.settle(slots[in_am])
        self._a1in.settle(slots[~in_am])

    def pin(self, slots: Slots) -> None:
        self._am.park(slots[self._am.holds(slots)])

    def unpin(self, slots: Slots) -> None:
        in_am = self._am.holds(slots)
        self._am.append(slots[in_am])
        self._a1in.settle(slots[~in_am])

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        surplus = max(0, len(self._a1in) - self._a1in_limit)
        first = self._a1in.pop_oldest(min(n, surplus), busy)
        second = self._am.pop_oldest(n - len(first), busy)
        third = self._a1in.pop_oldest(n - len(first) - len(second), busy)
        self._a1out.add(key_of[np.concatenate((first, third))].tolist())
        return np.concatenate((first, second, third))

    def remove(self, slots: Slots) -> None:
        in_am = self._am.holds(slots)
        self._am.discard(slots[in_am])
        self._a1in.discard(slots[~in_am])

    def clear(self) -> None:
        self._am.clear()
        self._a1in.clear()
        self._a1out.clear()

    def check_integrity(self, slots: Slots) -> None:
        in_am = self._am.holds(slots)
        self._am.check_integrity(slots[in_am].tolist())
        self._a1in.check_integrity(slots[~in_am].tolist())
        self._a1out.check_integrity()
