"""Reference models: the contracts in the plainest Python there is, slow and obviously right.

Nothing here is shared with the real managers but the value types of ``base``. Keys are handled one at a
time, lists are Python lists with the oldest first, and an eviction walks past whatever must stay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvoffload.abc import (
    BlockNotPinnedError,
    BlockNotReadyError,
    BlockStatus,
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)

BEING_WRITTEN = -1
MEDIUM = "reference"


def unique(keys: Iterable[OffloadKey]) -> list[OffloadKey]:
    """Each key once, where it came first."""
    return list(dict.fromkeys(keys))


class ReferenceManager(OffloadingManager):
    """Everything of a manager but the eviction order, which a subclass keeps in plain lists.

    ``blocks`` holds every key that is there. ``leaving`` holds the blocks that a reset caught in transfer:
    their keys are gone, their slots come back when the transfer ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self.capacity = num_blocks
        self.free_slots = list(range(num_blocks))
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self.leaving: dict[OffloadKey, BlockStatus] = {}
        self.events: list[OffloadingEvent] = []

    # The order, which is the subclass's: each call is for one key.

    @abstractmethod
    def order_insert(self, key: OffloadKey) -> None:
        """A new block."""

    def order_insert_all(self, keys: list[OffloadKey]) -> None:
        """The new blocks of one call."""
        for key in keys:
            self.order_insert(key)

    def order_admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Which of ``keys``, absent and in the order of their chain, may be stored when room must be made for them."""
        return keys

    @abstractmethod
    def order_touch(self, key: OffloadKey) -> None:
        """``key`` was used, whether it is there or not."""

    def order_refresh(self, key: OffloadKey, new: bool) -> None:
        """The request that used ``key``, or stored it if ``new``, has all of its chain."""
        self.order_unpin(key)

    @abstractmethod
    def order_unpin(self, key: OffloadKey) -> None:
        """Its last reader let go of ``key``."""

    @abstractmethod
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        """Chooses one of ``evictable``, which is not empty, and forgets it."""

    @abstractmethod
    def order_remove(self, key: OffloadKey) -> None:
        """``key`` vanished for another reason than eviction."""

    @abstractmethod
    def order_clear(self) -> None:
        """Everything vanished."""

    def order_pin(self, key: OffloadKey) -> None:
        """``key`` got its first reader."""

    def order_refuse(self, key: OffloadKey) -> None:
        """``order_admit`` does not let ``key`` in; it is remembered as one that left."""

    def admit_head(self, keys: list[OffloadKey], returning: list[OffloadKey], room: int) -> list[OffloadKey]:
        """All that return, and the first ``room`` of the others: the rest would leave again for the sake of them."""
        others = [key for key in keys if key not in returning]
        refused = others[room:]
        for key in reversed(refused):
            self.order_refuse(key)
        return [key for key in keys if key not in refused]

    # The contract.

    def state(self, key: OffloadKey) -> LookupState:
        if key not in self.blocks:
            return LookupState.MISS
        return LookupState.HIT if self.blocks[key].is_ready else LookupState.PENDING

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        for n, key in enumerate(keys):
            if self.state(key) is not LookupState.HIT:
                return n
        return len(keys)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        return [self.state(key) for key in keys]

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        keys = unique(keys)
        for key in keys:
            if self.state(key) is not LookupState.HIT:
                raise BlockNotReadyError(key.hex())
        for key in keys:
            self.blocks[key].ref_cnt += 1
        return self.spec([self.blocks[key].slot for key in keys])

    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        keys = unique(self.named(blocks))
        for key in keys:
            block = self.held(key)
            if block is None or block.ref_cnt < 1:
                raise BlockNotPinnedError(key.hex())
        for key in reversed(keys):
            block = self.held(key)
            assert block is not None
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and key in self.leaving:
                self.free_slots.append(self.leaving.pop(key).slot)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        for key in reversed(unique(keys)):
            self.order_touch(key)

    def reorder_chain(
        self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        for key in reversed(unique(keys)):
            if key in self.blocks:
                self.order_refresh(key, key in stored)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        to_store = [key for key in unique(keys) if self.held(key) is None]
        if len(to_store) > len(self.free_slots):
            to_store = self.order_admit(to_store)
        evictable = self.evictable(keys)
        num_to_evict = max(0, len(to_store) - len(self.free_slots))
        if num_to_evict > len(evictable):
            return None
        evicted = []
        for _ in range(num_to_evict):
            key = self.order_evict(evictable)
            evictable.remove(key)
            self.free_slots.append(self.blocks.pop(key).slot)
            evicted.append(key)
        for key in to_store:
            self.blocks[key] = BlockStatus(self.free_slots.pop(0), BEING_WRITTEN)
        self.order_insert_all(to_store)
        self.announce(evicted, removed=True)
        return PrepareStoreOutput(to_store, self.spec([self.blocks[key].slot for key in to_store]), evicted)

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        became_ready = []
        for key in unique(self.named(blocks)):
            block = self.held(key)
            if block is None or block.ref_cnt != BEING_WRITTEN:
                continue
            if key in self.leaving:
                self.free_slots.append(self.leaving.pop(key).slot)
            elif success:
                block.ref_cnt = 0
                became_ready.append(key)
            else:
                self.free_slots.append(self.blocks.pop(key).slot)
                self.order_remove(key)
        self.announce(became_ready, removed=False)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self.events = self.events, []
        return events

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        gone = {key: self.blocks.pop(key) for key in unique(keys) if key in self.blocks}
        self.announce([key for key, block in gone.items() if block.is_ready], removed=True)
        for key, block in gone.items():
            self.order_remove(key)
            if block.ref_cnt == 0:
                self.free_slots.append(block.slot)
            else:
                self.leaving[key] = block

    def reset(self) -> None:
        self.announce([key for key, block in self.blocks.items() if block.is_ready], removed=True)
        for key, block in self.blocks.items():
            if block.ref_cnt == 0:
                self.free_slots.append(block.slot)
            else:
                self.leaving[key] = block
        self.blocks.clear()
        self.order_clear()

    def shutdown(self) -> None:
        self.reset()
        self.leaving.clear()
        self.free_slots = list(range(self.capacity))

    @property
    def num_blocks(self) -> int:
        return self.capacity

    @property
    def num_used_blocks(self) -> int:
        return self.capacity - len(self.free_slots)

    def check_integrity(self) -> None:
        used = [block.slot for block in [*self.blocks.values(), *self.leaving.values()]]
        if sorted(used + self.free_slots) != list(range(self.capacity)):
            raise IntegrityError(f"slots used {used}, free {self.free_slots}, of {self.capacity}")
        if self.blocks.keys() & self.leaving.keys():
            raise IntegrityError("a key has two blocks")

    def block_status(self, key: OffloadKey) -> BlockStatus | None:
        block = self.blocks.get(key)
        return None if block is None else BlockStatus(block.slot, block.ref_cnt)

    # Helpers.

    def named(self, blocks: LoadStoreSpec | Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """The keys of a lease."""
        if not isinstance(blocks, LoadStoreSpec):
            return blocks
        key_of = {block.slot: key for key, block in [*self.blocks.items(), *self.leaving.items()]}
        return [key_of[slot] for slot in blocks.slots.tolist() if slot in key_of]

    def held(self, key: OffloadKey) -> BlockStatus | None:
        """The block whose slot is taken for ``key``, be it there or leaving."""
        return self.blocks.get(key) or self.leaving.get(key)

    def evictable(self, protected: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Blocks that may be evicted: ready, without a reader, and none of ``protected``."""
        return {key for key, block in self.blocks.items() if block.ref_cnt == 0 and key not in protected}

    def spec(self, slots: list[int]) -> LoadStoreSpec:
        return LoadStoreSpec(MEDIUM, np.array(slots, dtype=np.int64))

    def announce(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys:
            self.events.append(OffloadingEvent(keys, MEDIUM, removed))


class ReferenceLRUManager(ReferenceManager):
    """Evicts the least recently used. ``order`` has the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.order: list[OffloadKey] = []

    def order_insert(self, key: OffloadKey) -> None:
        self.order.append(key)

    def order_touch(self, key: OffloadKey) -> None:
        if key in self.order:
            self.order.remove(key)
            self.order.append(key)

    def order_unpin(self, key: OffloadKey) -> None:
        self.order_touch(key)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        victim = next(key for key in self.order if key in evictable)
        self.order.remove(victim)
        return victim

    def order_remove(self, key: OffloadKey) -> None:
        self.order.remove(key)

    def order_clear(self) -> None:
        self.order.clear()


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

    def order_unpin(self, key: OffloadKey) -> None:
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
    """ARC as in the paper. ``asked``: keys found in b1 or b2, due for t2 when they are stored."""

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
        for key in keys:
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


class ReferenceFIFOManager(ReferenceManager):
    """Evicts what was stored first. ``order`` has the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.order: list[OffloadKey] = []

    def order_insert(self, key: OffloadKey) -> None:
        self.order.append(key)

    def order_touch(self, key: OffloadKey) -> None:
        pass

    def order_refresh(self, key: OffloadKey, new: bool) -> None:
        if new:
            self.order.remove(key)
            self.order.append(key)

    def order_unpin(self, key: OffloadKey) -> None:
        pass

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        victim = next(key for key in self.order if key in evictable)
        self.order.remove(victim)
        return victim

    def order_remove(self, key: OffloadKey) -> None:
        self.order.remove(key)

    def order_clear(self) -> None:
        self.order.clear()


class ReferenceSIEVEManager(ReferenceManager):
    """SIEVE (Zhang et al., NSDI 2024). The queue, oldest first, is ``behind`` the hand and then ``ahead`` of it. A
    block that may not go is passed over, and its turn comes when it may."""

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

    def order_refresh(self, key: OffloadKey, new: bool) -> None:
        if new:
            part = self.ahead if key in self.ahead else self.behind
            part.remove(key)
            part.append(key)

    def order_unpin(self, key: OffloadKey) -> None:
        pass

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
    """S3-FIFO (Yang et al., SOSP 2023). Every list has the oldest first. ``asked``: keys found in ghost, due for main.

    While nothing has been evicted, main takes what small has no room for.
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
        """Returning ones into main, the others into small; before the first eviction, as many of their tail as it
        takes."""
        new = [key for key in keys if key not in self.asked]
        room = len(new) if self.has_evicted else max(0, self.max_small - len(self.small))
        into_small = new[len(new) - room :] if room < len(new) else new
        for key in keys:
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

    def reorder_chain(
        self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        """Before the first eviction, what of the chain is in small is its tail."""
        mine = [key for key in reversed(unique(keys)) if key in self.blocks and key in stored]
        into_small = [key for key in mine if key in self.small]
        if not self.has_evicted:
            into_small = mine[: len(into_small)]
        for key in mine:
            self.order_remove(key)
            (self.small if key in into_small else self.main).append(key)

    def order_unpin(self, key: OffloadKey) -> None:
        pass

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

    ``asked``: keys found in a1out, due for am.
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

    def order_refresh(self, key: OffloadKey, new: bool) -> None:
        if key in self.am:
            self.order_touch(key)
        elif new:
            self.a1in.remove(key)
            self.a1in.append(key)

    def order_unpin(self, key: OffloadKey) -> None:
        if key in self.am:
            self.order_touch(key)

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

    ``stack``: LIR blocks but those being read, HIR blocks, and keys of HIR blocks that left. ``left``: keys that left
    from the stack, at most twice as many as there are blocks. ``asked``: those of them asked for, due to be LIR.
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
        if key not in self.lir or self.blocks[key].ref_cnt <= 0:
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
        for key in keys:
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

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """A chain is used at once: what was in the stack before counts."""
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

    def order_pin(self, key: OffloadKey) -> None:
        if key in self.lir:
            self.stack.remove(key)

    def order_refresh(self, key: OffloadKey, new: bool) -> None:
        if self.blocks[key].ref_cnt <= 0:
            self.order_unpin(key)

    def order_unpin(self, key: OffloadKey) -> None:
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


class ReferenceFilter(OffloadingManager):
    """Lets a key into ``backing`` once enough requests have looked it up or touched it.

    Remembers for ever which request showed it which key, which a real filter must not.
    """

    def __init__(self, backing: OffloadingManager, store_threshold: int = 2, max_tracker_size: int = 64_000) -> None:
        if store_threshold < 2:
            raise ValueError(f"store_threshold={store_threshold}: must be at least 2")
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size={max_tracker_size}: must be at least 1")
        self.backing = backing
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self.counts: OrderedDict[OffloadKey, int] = OrderedDict()
        self.seen: set[tuple[str, OffloadKey]] = set()

    def count(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        for key in unique(keys):
            if req_context is not None:
                if (req_context.req_id, key) in self.seen:
                    continue
                self.seen.add((req_context.req_id, key))
            self.counts[key] = self.counts.get(key, 0) + 1
            self.counts.move_to_end(key)
            if len(self.counts) > self.max_tracker_size:
                self.counts.popitem(last=False)

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        self.count(keys, req_context)
        return self.backing.lookup(keys, req_context)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        self.count(keys, req_context)
        return self.backing.lookup_each(keys, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.count(keys, req_context)
        self.backing.touch(keys, req_context)

    def reorder_chain(
        self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        self.backing.reorder_chain(keys, stored, req_context)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        admitted = []
        for key in keys:
            present = self.backing.lookup_each([key]) != [LookupState.MISS]
            if present or self.counts.get(key, 0) >= self.store_threshold:
                admitted.append(key)
        return self.backing.prepare_store(admitted, req_context)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        return self.backing.prepare_load(keys, req_context)

    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        self.backing.complete_load(blocks, req_context)

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        self.backing.complete_store(blocks, req_context, success)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        self.backing.drop(keys)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.backing.take_events()

    def reset(self) -> None:
        self.backing.reset()

    def shutdown(self) -> None:
        self.backing.shutdown()

    @property
    def num_blocks(self) -> int:
        return self.backing.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.backing.num_used_blocks

    def check_integrity(self) -> None:
        self.backing.check_integrity()
        if len(self.counts) > self.max_tracker_size:
            raise IntegrityError(f"{len(self.counts)} keys tracked of {self.max_tracker_size}")
