"""Adaptive Replacement Cache: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache",
FAST 2003, adapted to batches and to blocks that cannot be evicted for a while."""

from __future__ import annotations

from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, Eviction, IntegrityError, Keys, OffloadKey, Slots
from kvoffload.cache.policies.base import ListPolicy, admit_head
from kvoffload.native.structures import KeyQueue


class ARCPolicy(ListPolicy):
    """Lists t1, of blocks used once, and t2, of blocks used again. Ghost lists b1 and b2: keys of blocks that recently
    left t1 and t2, oldest first.

    ``target_t1_size`` is the desired length of t1. It grows when a key of b1 is asked for, and shrinks when a key of b2
    is; the block enters t2. A block leaves t1 while t1 is longer than its target, or as long if the key asked for was
    in b2. t1 and b1 together are at most as long as the cache, all four lists twice as long.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_lists=2)
        self.t1, self.t2 = self.lists
        self.b1 = KeyQueue(capacity)
        self.b2 = KeyQueue(capacity)
        self._asked = KeyQueue(capacity)
        """Keys that were asked for while they were in b1 or b2: their blocks may be stored at any moment."""
        self.target_t1_size = 0.0
        self.last_was_in_b2 = False

    def insert(self, slots: Slots, keys: Keys) -> None:
        returning = self._asked.holds(keys)
        for ghosts in (self._asked, self.b1, self.b2):
            ghosts.discard(keys)
        self.t1.append(slots[~returning])
        self.t2.append(slots[returning])
        self._cut_ghosts()

    def access(self, access: Access) -> None:
        self._ask(access.absent)
        slots = access.slots
        in_t1 = self.t1.holds(slots)
        again = in_t1 & access.ready
        self.t1.append(slots[in_t1 & ~access.ready])
        self.t1.discard(slots[again])
        self.t2.append(slots[again | ~in_t1])

    def _ask(self, keys: Keys) -> None:
        """Records a use of absent keys, each given once."""
        if len(keys):
            self.last_was_in_b2 = keys[-1] in self.b2
        asked, _ = self._adapt(keys, leave=True)
        self.b1.discard(asked)
        self.b2.discard(asked)
        self._asked.add(asked)

    def _adapt(self, keys: Keys, leave: bool) -> tuple[list[OffloadKey], list[bool]]:
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
        """Returns how many blocks leave t1 before one leaves t2."""
        at_target_too = self.last_was_in_b2 and self.target_t1_size.is_integer()
        return len(self.t1) - int(self.target_t1_size) + at_target_too

    def admit(self, keys: Keys, shortage: int) -> npt.NDArray[np.bool_] | None:
        returning = self._asked.holds(keys)
        t2_size = min(len(self.t2) + int(np.count_nonzero(returning)), self.capacity - int(self.target_t1_size) - 1)
        return admit_head(returning, self.capacity - t2_size)

    def refuse(self, keys: Keys) -> None:
        self.b2.discard(keys)
        self.b1.add(keys)
        self._cut_ghosts()

    def _cut_ghosts(self) -> None:
        self.b1.cut(self.capacity - len(self.t1))
        self.b2.cut(2 * self.capacity - len(self.t1) - len(self.t2) - len(self.b1))

    def clear(self) -> None:
        super().clear()
        for ghosts in (self._asked, self.b1, self.b2):
            ghosts.clear()
        self.target_t1_size = 0.0
        self.last_was_in_b2 = False

    def check_integrity(self, slots: Slots) -> None:
        super().check_integrity(slots)
        if not 0 <= self.target_t1_size <= self.capacity:
            raise IntegrityError("target_t1_size is out of its range")
        self._check_ghosts()

    def _check_ghosts(self) -> None:
        if len(self.b1) + len(self.t1) > self.capacity:
            raise IntegrityError("t1 and b1 together are longer than the capacity")
