"""Reference models of the policies behind a manager, in the plainest Python there is: slow and obviously right."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvoffload.abc import OffloadKey, ReqContext
from tests.suites.reference import ReferenceLRUManager, ReferenceManager, unique


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


class ReferenceFIFOManager(ReferenceLRUManager):
    """Evicts the block that was stored first. ``order`` has the oldest first."""

    def order_touch(self, key: OffloadKey) -> None:
        pass

    def order_move(self, key: OffloadKey, new: bool) -> None:
        if new:
            self.order.remove(key)
            self.order.append(key)


class ReferenceSIEVEManager(ReferenceManager):
    """SIEVE (Zhang et al., NSDI 2024). The queue, oldest first, consists of ``behind`` the hand and ``ahead`` of it. A
    block that must stay is passed over, and judged once it is evictable."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.behind: list[OffloadKey] = []
        self.ahead: list[OffloadKey] = []
        self.used: set[OffloadKey] = set()

    def order_insert(self, key: OffloadKey) -> None:
        self.ahead.append(key)

    def order_touch(self, key: OffloadKey) -> None:
        if key in self.blocks and self.blocks[key].is_ready:
            self.used.add(key)

    def order_move(self, key: OffloadKey, new: bool) -> None:
        if new:
            part = self.ahead if key in self.ahead else self.behind
            part.remove(key)
            part.append(key)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        while True:
            candidates = [key for key in self.ahead if key in evictable]
            if not candidates:
                self.ahead, self.behind = self.behind, self.ahead
                continue
            key = candidates[0]
            self.ahead.remove(key)
            if key in self.used:
                self.used.remove(key)
                self.behind.append(key)
                continue
            if not self.ahead:
                self.ahead, self.behind = self.behind, self.ahead
            return key

    def order_remove(self, key: OffloadKey) -> None:
        (self.ahead if key in self.ahead else self.behind).remove(key)
        self.used.discard(key)

    def order_clear(self) -> None:
        self.behind.clear()
        self.ahead.clear()
        self.used.clear()


class ReferenceS3FIFOManager(ReferenceManager):
    """S3-FIFO (Yang et al., SOSP 2023). Every list has the oldest first. ``asked``: keys found in ghost, which enter
    main when they are stored.

    Until the first eviction, main takes what small has no room for.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.small: list[OffloadKey] = []
        self.main: list[OffloadKey] = []
        self.ghost: list[OffloadKey] = []
        self.asked: list[OffloadKey] = []
        self.uses: dict[OffloadKey, int] = {}
        self.max_small = max(1, num_blocks // 10)
        self.max_main = num_blocks - self.max_small
        self.max_ghost = max(1, num_blocks * 9 // 10)
        self.has_evicted = False

    def order_insert_all(self, keys: list[OffloadKey]) -> None:
        """Returning keys enter main, others small. Before the first eviction, small takes only as much of the tail as
        it has room for."""
        new = [key for key in keys if key not in self.asked]
        room = len(new) if self.has_evicted else max(0, self.max_small - len(self.small))
        into_small = new[len(new) - room :] if room < len(new) else new
        for key in reversed(keys):
            self.uses[key] = 0
            (self.small if key in into_small else self.main).append(key)
            for ghosts in (self.ghost, self.asked):
                if key in ghosts:
                    ghosts.remove(key)

    def order_insert(self, key: OffloadKey) -> None:
        self.order_insert_all([key])

    def order_touch(self, key: OffloadKey) -> None:
        if key in self.ghost:
            self.ghost.remove(key)
            self.asked.append(key)
            del self.asked[: -self.max_ghost]
        elif key in self.blocks and self.blocks[key].is_ready:
            self.uses[key] = min(3, self.uses[key] + 1)

    def order_admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        returning = [key for key in keys if key in self.asked]
        main_in_the_end = min(len(self.main) + len(returning), self.max_main)
        return self.admit_head(keys, returning, self.capacity - main_in_the_end)

    def order_refuse(self, key: OffloadKey) -> None:
        if key in self.ghost:
            self.ghost.remove(key)
        self.ghost.append(key)
        del self.ghost[: -self.max_ghost]

    def end_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        """Before the first eviction, the part of the chain that is in small is its tail."""
        mine = [key for key in reversed(unique(keys)) if key in self.blocks and key in stored]
        into_small = [key for key in mine if key in self.small]
        if not self.has_evicted:
            into_small = mine[: len(into_small)]
        for key in mine:
            self.order_remove(key)
            (self.small if key in into_small else self.main).append(key)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        self.has_evicted = True
        if len(self.main) > self.max_main:
            victim = self.evict_from_main(evictable) or self.evict_from_small(evictable)
        else:
            victim = self.evict_from_small(evictable) or self.evict_from_main(evictable)
        assert victim is not None
        return victim

    def evict_from_small(self, evictable: set[OffloadKey]) -> OffloadKey | None:
        for key in [key for key in self.small if key in evictable]:
            self.small.remove(key)
            if self.uses[key] < 2:
                self.order_refuse(key)
                return key
            self.uses[key] = 0
            self.main.append(key)
        return None

    def evict_from_main(self, evictable: set[OffloadKey]) -> OffloadKey | None:
        while any(key in evictable for key in self.main):
            key = next(key for key in self.main if key in evictable)
            self.main.remove(key)
            if self.uses[key] == 0:
                return key
            self.uses[key] -= 1
            self.main.append(key)
        return None

    def order_remove(self, key: OffloadKey) -> None:
        (self.small if key in self.small else self.main).remove(key)

    def order_clear(self) -> None:
        for keys in (self.small, self.main, self.ghost, self.asked):
            keys.clear()
        self.has_evicted = False


class Reference2QManager(ReferenceManager):
    """2Q, full version (Johnson and Shasha, VLDB 1994). Every list has the oldest first.

    ``asked``: keys found in a1out, which enter am when they are stored.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.a1in: list[OffloadKey] = []
        self.am: list[OffloadKey] = []
        self.a1out: list[OffloadKey] = []
        self.asked: list[OffloadKey] = []
        self.max_a1in = max(1, num_blocks // 4)
        self.max_a1out = max(1, num_blocks // 2)

    def order_insert(self, key: OffloadKey) -> None:
        (self.am if key in self.asked else self.a1in).append(key)
        for ghosts in (self.a1out, self.asked):
            if key in ghosts:
                ghosts.remove(key)

    def order_touch(self, key: OffloadKey) -> None:
        if key in self.am:
            self.am.remove(key)
            self.am.append(key)
        elif key in self.a1out:
            self.a1out.remove(key)
            self.asked.append(key)
            del self.asked[: -self.max_a1out]

    def order_admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        returning = [key for key in keys if key in self.asked]
        am_in_the_end = min(len(self.am) + len(returning), self.capacity - self.max_a1in)
        return self.admit_head(keys, returning, self.capacity - am_in_the_end)

    def order_refuse(self, key: OffloadKey) -> None:
        if key in self.a1out:
            self.a1out.remove(key)
        self.a1out.append(key)
        del self.a1out[: -self.max_a1out]

    def order_move(self, key: OffloadKey, new: bool) -> None:
        if key in self.am:
            self.order_touch(key)
        elif new:
            self.a1in.remove(key)
            self.a1in.append(key)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        from_a1in = [key for key in self.a1in if key in evictable]
        from_am = [key for key in self.am if key in evictable]
        if from_a1in and (len(self.a1in) > self.max_a1in or not from_am):
            self.a1in.remove(from_a1in[0])
            self.order_refuse(from_a1in[0])
            return from_a1in[0]
        self.am.remove(from_am[0])
        return from_am[0]

    def order_remove(self, key: OffloadKey) -> None:
        (self.am if key in self.am else self.a1in).remove(key)

    def order_clear(self) -> None:
        for keys in (self.a1in, self.am, self.a1out, self.asked):
            keys.clear()


class ReferenceLIRSManager(ReferenceManager):
    """LIRS (Jiang and Zhang, SIGMETRICS 2002), its stack a list. Every list has the oldest first.

    ``stack``: LIR blocks, HIR blocks, and keys of HIR blocks that left. ``left``: keys that left the cache while in the
    stack, at most twice as many as there are blocks. ``asked``: those of them that were asked for, and will be LIR when
    they are stored.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.lir: set[OffloadKey] = set()
        self.stack: list[OffloadKey] = []
        self.queue: list[OffloadKey] = []
        self.left: list[OffloadKey] = []
        self.asked: list[OffloadKey] = []
        self.max_lir = num_blocks - max(1, num_blocks // 100)
        self.max_ghosts = 2 * num_blocks

    def to_top(self, key: OffloadKey) -> None:
        if key in self.stack:
            self.stack.remove(key)
        self.stack.append(key)

    def to_end_of_queue(self, key: OffloadKey) -> None:
        if key in self.queue:
            self.queue.remove(key)
        self.queue.append(key)

    def lir_in_stack(self) -> list[OffloadKey]:
        return [key for key in self.stack if key in self.lir]

    def demote(self, key: OffloadKey) -> None:
        self.lir.remove(key)
        self.stack.remove(key)
        self.queue.append(key)

    def prune(self) -> None:
        while len(self.lir) > self.max_lir and self.lir_in_stack():
            self.demote(self.lir_in_stack()[0])
        while self.lir_in_stack() and self.stack[0] not in self.lir:
            del self.stack[0]

    def order_insert_all(self, keys: list[OffloadKey]) -> None:
        returning = [key for key in keys if key in self.asked]
        room = self.max_lir - len(self.lir) - len(returning)
        new = [key for key in keys if key not in returning]
        for key in reversed(keys):
            for ghosts in (self.left, self.asked):
                if key in ghosts:
                    ghosts.remove(key)
            if key in returning or key in new[: max(0, room)]:
                self.lir.add(key)
            else:
                self.queue.append(key)
            self.to_top(key)
        self.prune()

    def order_insert(self, key: OffloadKey) -> None:
        self.order_insert_all([key])

    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        """Uses the blocks of a chain at the same time: what counts is whether they were in the stack before."""
        last_first = list(reversed(unique(keys)))
        for key in last_first:
            if key not in self.blocks and key in self.left:
                self.left.remove(key)
                if key in self.stack:
                    self.stack.remove(key)
                    self.asked.append(key)
        del self.asked[: -self.max_ghosts]
        before = list(self.stack)
        for key in last_first:
            if key not in self.blocks:
                continue
            if key in self.queue:
                if key in before and self.blocks[key].is_ready:
                    self.queue.remove(key)
                    self.lir.add(key)
                else:
                    self.to_end_of_queue(key)
            self.to_top(key)
        self.prune()

    def order_touch(self, key: OffloadKey) -> None:
        raise NotImplementedError

    def order_admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        returning = [key for key in keys if key in self.asked]
        lir_in_the_end = min(len(self.lir) + len(returning), self.max_lir)
        return self.admit_head(keys, returning, self.capacity - lir_in_the_end)

    def order_refuse(self, key: OffloadKey) -> None:
        if key in self.stack:
            self.stack.remove(key)
        self.stack.append(key)
        self.leave(key)

    def leave(self, key: OffloadKey) -> None:
        if key in self.left:
            self.left.remove(key)
        self.left.append(key)
        for forgotten in self.left[: -self.max_ghosts]:
            if forgotten in self.stack:
                self.stack.remove(forgotten)
        del self.left[: -self.max_ghosts]

    def order_move(self, key: OffloadKey, new: bool) -> None:
        if key in self.queue:
            self.to_end_of_queue(key)
        self.to_top(key)
        self.prune()

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        while not any(key in evictable for key in self.queue):
            self.demote(self.lir_in_stack()[0])
        self.prune()
        victim = next(key for key in self.queue if key in evictable)
        self.queue.remove(victim)
        if victim in self.stack:
            self.leave(victim)
        return victim

    def order_remove(self, key: OffloadKey) -> None:
        for keys in (self.stack, self.queue):
            if key in keys:
                keys.remove(key)
        self.lir.discard(key)

    def order_clear(self) -> None:
        for keys in (self.stack, self.queue, self.left, self.asked):
            keys.clear()
        self.lir.clear()
