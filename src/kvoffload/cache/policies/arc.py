"""Adaptive Replacement Cache: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
FAST 2003, adapted to batches and to blocks that cannot be evicted for a while.

``TextbookARCPolicy`` is the algorithm of the paper, and the policy that the name "arc" means. ``ARCPolicy`` is a
variant found in engines, used by ``ARCOffloadingManager``: a block whose key is in a ghost list still counts as new.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, Eviction, IntegrityError, OffloadKey, Slots
from kvoffload.cache.policies.base import ListPolicy
from kvoffload.cache.policies.queues import Ghosts, KeyQueue, admit_head, cut


class ARCPolicy(ListPolicy):
    """Lists t1, of blocks used once, and t2, of blocks used again. Ghost lists b1 and b2: keys of blocks that recently
    left t1 and t2, oldest first.

    ``target_t1_size`` is the desired length of t1. It grows when a key of b1 is asked for, and shrinks when a key of b2
    is. New blocks always enter t1. Each ghost list is at most as long as the cache.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_lists=2)
        self.t1, self.t2 = self.lists
        self.b1 = KeyQueue(capacity)
        self.b2 = KeyQueue(capacity)
        self.target_t1_size = 0.0

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self.b1.discard(keys)
        self.b2.discard(keys)
        self.t1.append(slots)

    def access(self, access: Access) -> None:
        self._ask(access.absent)
        slots = access.slots
        in_t1 = self.t1.holds(slots)
        again = in_t1 & access.ready
        self.t1.append(slots[in_t1 & ~access.ready])
        self.t1.discard(slots[again])
        self.t2.append(slots[again | ~in_t1])

    def _ask(self, keys: Sequence[OffloadKey]) -> None:
        """Records a use of absent keys, each given once."""
        asked, in_b1 = self._adapt(keys, leave=False)
        self.b1.add(list(compress(asked, in_b1)))
        self.b2.add(list(compress(asked, (not each for each in in_b1))))

    def _adapt(self, keys: Sequence[OffloadKey], leave: bool) -> tuple[list[OffloadKey], list[bool]]:
        """Moves the target towards the ghost list of each key that is in one. Returns these keys, and which of them are
        in b1.

        ``leave`` says that each of them leaves its list before the next one is asked for.
        """
        in_b1 = self.b1.holds(keys)
        in_one = in_b1 | self.b2.holds(keys)
        num_b1, num_b2 = len(self.b1), len(self.b2)
        which: list[bool] = in_b1[in_one].tolist()
        for is_in_b1 in which:
            if is_in_b1:
                self.target_t1_size = min(self.target_t1_size + max(1.0, num_b2 / num_b1), float(self.capacity))
                num_b1 -= leave
            else:
                self.target_t1_size = max(self.target_t1_size - max(1.0, num_b1 / num_b2), 0.0)
                num_b2 -= leave
        return list(compress(keys, in_one.tolist())) if which else [], which

    def evict(self, eviction: Eviction) -> Slots:
        # Between two evictions of a batch only len(t1) changes, so the rule "from t1 while it is too long, else
        # from t2, else from t1 after all" makes three runs.
        n, busy, key_of = eviction.n, eviction.busy, eviction.key_of
        first = self.t1.pop_oldest(min(n, max(0, self._t1_surplus())), busy)
        second = self.t2.pop_oldest(n - len(first), busy)
        third = self.t1.pop_oldest(n - len(first) - len(second), busy)
        from_t1 = np.concatenate((first, third))
        self.b1.add(key_of[from_t1].tolist())
        self.b2.add(key_of[second].tolist())
        return np.concatenate((first, second, third))

    def _t1_surplus(self) -> int:
        """Returns how many blocks leave t1 before one leaves t2: until t1 is shorter than its target."""
        return len(self.t1) - int(self.target_t1_size) + 1

    def clear(self) -> None:
        super().clear()
        self.b1.clear()
        self.b2.clear()
        self.target_t1_size = 0.0

    def check_integrity(self, slots: Slots) -> None:
        super().check_integrity(slots)
        if not 0 <= self.target_t1_size <= self.capacity:
            raise IntegrityError("target_t1_size is out of its range")


class TextbookARCPolicy(ARCPolicy):
    """ARC as in the paper. A block whose key was in b1 or b2 when it was asked for enters t2. A block leaves t1 while
    t1 is longer than its target, or as long if the key asked for was in b2. t1 and b1 together are at most as long as
    the cache, all four lists twice as long.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts = Ghosts(capacity)
        """Records only the keys asked for; the others are in b1 and b2."""
        self.last_was_in_b2 = False

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        returning = self._ghosts.take(keys)
        super().insert(slots[~returning], keys)
        self.t2.append(slots[returning])
        self._cut_ghosts()

    def _ask(self, keys: Sequence[OffloadKey]) -> None:
        if len(keys):
            self.last_was_in_b2 = keys[-1] in self.b2
        asked, _ = self._adapt(keys, leave=True)
        self.b1.discard(asked)
        self.b2.discard(asked)
        self._ghosts.asked.update(dict.fromkeys(asked, 0))
        cut(self._ghosts.asked, self.capacity)

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        returning = self._ghosts.returning(keys)
        t2_size = min(len(self.t2) + int(np.count_nonzero(returning)), self.capacity - int(self.target_t1_size) - 1)
        return admit_head(returning, self.capacity - t2_size)

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self.b2.discard(keys)
        self.b1.add(keys)
        self._cut_ghosts()

    def clear(self) -> None:
        super().clear()
        self._ghosts.clear()
        self.last_was_in_b2 = False

    def _t1_surplus(self) -> int:
        at_target_too = self.last_was_in_b2 and self.target_t1_size.is_integer()
        return len(self.t1) - int(self.target_t1_size) + at_target_too

    def _cut_ghosts(self) -> None:
        self.b1.cut(self.capacity - len(self.t1))
        self.b2.cut(2 * self.capacity - len(self.t1) - len(self.t2) - len(self.b1))

    def check_integrity(self, slots: Slots) -> None:
        super().check_integrity(slots)
        self._ghosts.check_integrity()
        if len(self.b1) + len(self.t1) > self.capacity:
            raise IntegrityError("t1 and b1 together are longer than the capacity")
