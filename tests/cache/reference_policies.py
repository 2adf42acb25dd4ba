"""Reference models of the policies behind a manager, in the plainest Python there is: slow and obviously right."""

from __future__ import annotations

from kvoffload.abc import OffloadKey
from tests.suites.reference import ReferenceManager


class ReferenceARCManager(ReferenceManager):
    """Adaptive Replacement Cache (Megiddo and Modha, FAST 2003). Every list has the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.t1: list[OffloadKey] = []
        self.t2: list[OffloadKey] = []
        self.b1: list[OffloadKey] = []
        self.b2: list[OffloadKey] = []
        self.target_t1_size = 0.0

    def order_insert(self, key: OffloadKey) -> None:
        self.t1.append(key)
        for ghosts in (self.b1, self.b2):
            if key in ghosts:
                ghosts.remove(key)

    def order_touch(self, key: OffloadKey) -> None:
        if key in self.t1:
            self.t1.remove(key)
            (self.t2 if self.blocks[key].is_ready else self.t1).append(key)
        elif key in self.t2:
            self.t2.remove(key)
            self.t2.append(key)
        elif key in self.b1:
            step = max(1.0, len(self.b2) / len(self.b1))
            self.target_t1_size = min(float(self.capacity), self.target_t1_size + step)
            self.b1.remove(key)
            self.b1.append(key)
        elif key in self.b2:
            step = max(1.0, len(self.b1) / len(self.b2))
            self.target_t1_size = max(0.0, self.target_t1_size - step)
            self.b2.remove(key)
            self.b2.append(key)

    def order_move(self, key: OffloadKey, new: bool) -> None:
        owner = self.t1 if key in self.t1 else self.t2
        owner.remove(key)
        owner.append(key)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        from_t1 = [key for key in self.t1 if key in evictable]
        from_t2 = [key for key in self.t2 if key in evictable]
        if from_t1 and (self.t1_is_long() or not from_t2):
            victim = from_t1[0]
            self.t1.remove(victim)
            self.b1.append(victim)
        else:
            victim = from_t2[0]
            self.t2.remove(victim)
            self.b2.append(victim)
        del self.b1[: -self.capacity]
        del self.b2[: -self.capacity]
        return victim

    def t1_is_long(self) -> bool:
        return len(self.t1) >= int(self.target_t1_size)

    def order_remove(self, key: OffloadKey) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def order_clear(self) -> None:
        for keys in (self.t1, self.t2, self.b1, self.b2):
            keys.clear()
        self.target_t1_size = 0.0


class ReferenceTextbookARCManager(ReferenceARCManager):
    """ARC as in the paper. ``asked``: keys found in b1 or b2, which enter t2 when they are stored."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.asked: list[OffloadKey] = []
        self.last_was_in_b2 = False

    def order_touch(self, key: OffloadKey) -> None:
        if key not in self.blocks:
            self.last_was_in_b2 = key in self.b2
        super().order_touch(key)
        for ghosts in (self.b1, self.b2):
            if key in ghosts:
                ghosts.remove(key)
                self.asked.append(key)
        del self.asked[: -self.capacity]

    def order_admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        returning = [key for key in keys if key in self.asked]
        t2_in_the_end = min(len(self.t2) + len(returning), self.capacity - int(self.target_t1_size) - 1)
        return self.admit_head(keys, returning, self.capacity - t2_in_the_end)

    def order_refuse(self, key: OffloadKey) -> None:
        for ghosts in (self.b1, self.b2):
            if key in ghosts:
                ghosts.remove(key)
        self.b1.append(key)
        self.cut_ghosts()

    def order_insert_all(self, keys: list[OffloadKey]) -> None:
        for key in reversed(keys):
            super().order_insert(key)
            if key in self.asked:
                self.asked.remove(key)
                self.t1.remove(key)
                self.t2.append(key)
        self.cut_ghosts()

    def cut_ghosts(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.capacity:
            del self.b1[0]
        while self.b2 and len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.capacity:
            del self.b2[0]

    def t1_is_long(self) -> bool:
        at_target = len(self.t1) == self.target_t1_size
        return len(self.t1) > self.target_t1_size or (at_target and self.last_was_in_b2)

    def order_clear(self) -> None:
        super().order_clear()
        self.asked.clear()
        self.last_was_in_b2 = False
