"""Reference models: the contracts in the plainest Python there is, slow and obviously right.

They share nothing with the real managers but the value types of ``kvoffload.abc``. They handle one key at a time,
keep Python lists with the oldest key first, and walk past the blocks that must stay.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from kvoffload.abc import (
    BlockNotPinnedError,
    BlockNotReadyError,
    BlockStatus,
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    Need,
    Offer,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    States,
)

BEING_WRITTEN = -1
MEDIUM = "reference"


def unique(keys: Iterable[OffloadKey]) -> list[OffloadKey]:
    """Returns each key once, where it came first."""
    return list(dict.fromkeys(keys))


class ReferenceManager(OffloadingManager):
    """Everything of a manager but the eviction order, which a subclass keeps in plain lists.

    ``blocks`` holds every key that can be found. ``leaving`` holds the blocks that were dropped while in transfer:
    their keys are gone, and their slots come back when the transfer ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self.capacity = num_blocks
        self.free_slots = list(range(num_blocks))
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self.leaving: dict[OffloadKey, BlockStatus] = {}
        self.events: list[OffloadingEvent] = []
        self.removed = 0
        """Ready blocks that have left."""

    # The order, which the subclass keeps. Each call is about one key, and chains are given tail first.

    @abstractmethod
    def order_insert(self, key: OffloadKey) -> None:
        """Adds a new block."""

    def order_insert_all(self, keys: list[OffloadKey]) -> None:
        """Adds the new blocks of one call. ``keys`` are in the order of their chain."""
        for key in reversed(keys):
            self.order_insert(key)

    def order_admit(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Returns which of ``keys``, absent and in the order of their chain, may be stored when room must be made."""
        return keys

    def order_refuse(self, key: OffloadKey) -> None:
        """Records that ``order_admit`` did not let ``key`` in."""

    @abstractmethod
    def order_touch(self, key: OffloadKey) -> None:
        """Records a use of ``key``, cached or not."""

    def order_move(self, key: OffloadKey, new: bool) -> None:
        """Moves the block of a request that ends, and has used it or, if ``new``, stored it. This is no further use."""
        self.order_touch(key)

    @abstractmethod
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        """Removes one of ``evictable``, which is not empty, and returns it."""

    def order_evict_all(self, n: int, evictable: set[OffloadKey], entering: list[OffloadKey]) -> list[OffloadKey]:
        """Removes ``n`` of ``evictable`` to make room for ``entering``, and returns them in order."""
        evicted = []
        for _ in range(n):
            evicted.append(self.order_evict(evictable))
            evictable.remove(evicted[-1])
        return evicted

    @abstractmethod
    def order_remove(self, key: OffloadKey) -> None:
        """Removes a block that vanished for another reason than eviction."""

    @abstractmethod
    def order_clear(self) -> None:
        """Removes all blocks."""

    def admit_head(self, keys: list[OffloadKey], returning: list[OffloadKey], room: int) -> list[OffloadKey]:
        """Returns all that return, and the first ``room`` others: the rest would be evicted again for these."""
        others = [key for key in keys if key not in returning]
        return [key for key in keys if key not in others[room:]]

    # The contract.

    def state(self, key: OffloadKey) -> LookupState:
        if key not in self.blocks:
            return LookupState.MISS
        return LookupState.HIT if self.blocks[key].is_ready else LookupState.PENDING

    def lookup_each(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, need: Need = Need.ALL
    ) -> States:
        return np.array([self.state(key) for key in keys], dtype=np.uint8)

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        for n, key in enumerate(keys):
            if self.state(key) is not LookupState.HIT:
                return n
        return len(keys)

    def explain_miss(self, key: OffloadKey) -> Miss:
        return Miss(MissReason.BEING_WRITTEN if key in self.blocks else MissReason.NEVER_STORED)

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

    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        for key in reversed(unique(keys)):
            self.order_touch(key)

    def end_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        for key in reversed(unique(keys)):
            if key in self.blocks:
                self.order_move(key, key in stored)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        to_store = [key for key in unique(keys) if self.held(key) is None]
        refused: list[OffloadKey] = []
        if offer is Offer.BEHIND_REFUSED:
            for key in reversed(to_store):
                self.order_refuse(key)
            return PrepareStoreOutput([], self.spec([]), [], to_store)
        if len(to_store) > len(self.free_slots):
            admitted = self.order_admit(to_store)
            refused = [key for key in to_store if key not in admitted]
            to_store = admitted
        evictable = self.evictable(keys)
        num_to_evict = max(0, len(to_store) - len(self.free_slots))
        if num_to_evict > len(evictable):
            return None
        for key in reversed(refused):
            self.order_refuse(key)
        evicted = self.order_evict_all(num_to_evict, evictable, to_store)
        for key in evicted:
            self.free_slots.append(self.blocks.pop(key).slot)
        for key in to_store:
            self.blocks[key] = BlockStatus(self.free_slots.pop(0), BEING_WRITTEN)
        self.order_insert_all(to_store)
        self.announce(evicted, removed=True)
        return PrepareStoreOutput(to_store, self.spec([self.blocks[key].slot for key in to_store]), evicted, refused)

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

    def drop(self, keys: Sequence[OffloadKey], only_host: bool = False) -> None:
        gone = {key: self.blocks.pop(key) for key in unique(keys) if key in self.blocks}
        self.announce([key for key, block in gone.items() if block.is_ready], removed=True)
        for key, block in gone.items():
            self.order_remove(key)
            if block.ref_cnt == 0:
                self.free_slots.append(block.slot)
            else:
                self.leaving[key] = block

    def reset(self, keep_shared: bool = False) -> bool:
        self.announce([key for key, block in self.blocks.items() if block.is_ready], removed=True)
        for key, block in self.blocks.items():
            if block.ref_cnt == 0:
                self.free_slots.append(block.slot)
            else:
                self.leaving[key] = block
        self.blocks.clear()
        self.order_clear()
        return False

    def take_counts(self) -> Mapping[str, float]:
        return {"pool_used_blocks": self.num_used_blocks}

    def shutdown(self) -> None:
        self.reset()
        self.leaving.clear()
        self.free_slots = list(range(self.capacity))

    def most_blocks(self, key: OffloadKey | None = None) -> int:
        return self.capacity

    @property
    def num_used_blocks(self) -> int:
        return self.capacity - len(self.free_slots)

    @property
    def num_removed(self) -> int:
        return self.removed

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
        """Returns the keys of a lease, or the given keys."""
        if not isinstance(blocks, LoadStoreSpec):
            return blocks
        key_of = {block.slot: key for key, block in [*self.blocks.items(), *self.leaving.items()]}
        return [key_of[slot] for slot in blocks.slots.tolist() if slot in key_of]

    def held(self, key: OffloadKey) -> BlockStatus | None:
        """Returns the block that has a slot for ``key``, even if it was dropped."""
        return self.blocks.get(key) or self.leaving.get(key)

    def evictable(self, protected: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Returns the blocks that may be evicted: ready, without a pin, and none of ``protected``."""
        return {key for key, block in self.blocks.items() if block.ref_cnt == 0 and key not in protected}

    def spec(self, slots: list[int]) -> LoadStoreSpec:
        return LoadStoreSpec(MEDIUM, np.array(slots, dtype=np.int64))

    def announce(self, keys: list[OffloadKey], removed: bool) -> None:
        self.removed += len(keys) if removed else 0
        if keys:
            self.events.append(OffloadingEvent(keys, MEDIUM, removed))


class ReferenceLRUManager(ReferenceManager):
    """Evicts the least recently used block. ``order`` has the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.order: list[OffloadKey] = []

    def order_insert(self, key: OffloadKey) -> None:
        self.order.append(key)

    def order_touch(self, key: OffloadKey) -> None:
        if key in self.order:
            self.order.remove(key)
            self.order.append(key)

    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        victim = next(key for key in self.order if key in evictable)
        self.order.remove(victim)
        return victim

    def order_remove(self, key: OffloadKey) -> None:
        self.order.remove(key)

    def order_clear(self) -> None:
        self.order.clear()
