"""Reference models: the contracts in the plainest Python there is, slow and obviously right.

Nothing here is shared with the real managers but the value types of ``base``. Keys are handled one at a
time, lists are Python lists with the oldest first, and an eviction walks past whatever must stay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from kvoffload.base import (
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

    @abstractmethod
    def order_touch(self, key: OffloadKey) -> None:
        """``key`` was used, whether it is there or not."""

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

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        keys = unique(keys)
        for key in keys:
            block = self.held(key)
            if block is None or block.ref_cnt < 1:
                raise BlockNotPinnedError(key.hex())
        for key in reversed(keys):
            block = self.held(key)
            assert block is not None
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if key in self.blocks:
                self.order_unpin(key)
            else:
                self.free_slots.append(self.leaving.pop(key).slot)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        for key in reversed(unique(keys)):
            self.order_touch(key)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        to_store = [key for key in unique(keys) if self.held(key) is None]
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
            self.order_insert(key)
        self.announce(evicted, removed=True)
        return PrepareStoreOutput(to_store, self.spec([self.blocks[key].slot for key in to_store]), evicted)

    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        became_ready = []
        for key in unique(keys):
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
        if from_t1 and (len(self.t1) >= int(self.target_t1_size) or not from_t2):
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

    def order_remove(self, key: OffloadKey) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def order_clear(self) -> None:
        for keys in (self.t1, self.t2, self.b1, self.b2):
            keys.clear()
        self.target_t1_size = 0.0


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

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.backing.complete_load(keys, req_context)

    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        self.backing.complete_store(keys, req_context, success)

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
