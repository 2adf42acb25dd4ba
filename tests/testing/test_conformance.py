"""The suites are tested too: each planted bug must be caught, and nothing that is right may be.

Every class below but the plain ones is a manager, a policy or a backend with one thing wrong with it. Many
of the bugs were found in real offloading code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.abc import (
    Access,
    Backend,
    BlockStatus,
    CachePolicy,
    Eviction,
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    Need,
    Offer,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Slots,
    States,
)
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import PolicyConformance
from tests.cache.reference_filter import ReferenceFilter
from tests.cache.reference_policies import ReferenceARCManager
from tests.suites.conformance import BackendConformance, ManagerConformance
from tests.suites.reference import (
    ReferenceLRUManager,
    ReferenceManager,
    unique,
)
from tests.suites.stateful import manager_machine, walk

Keys = Sequence[OffloadKey]
Context = ReqContext | None
Blocks = LoadStoreSpec | Sequence[OffloadKey]

# Managers


class EvictsPinned(ReferenceLRUManager):
    def evictable(self, protected: Keys) -> set[OffloadKey]:
        return {key for key, block in self.blocks.items() if block.is_ready and key not in protected}


class EvictsBeingWritten(ReferenceLRUManager):
    def evictable(self, protected: Keys) -> set[OffloadKey]:
        return {key for key, block in self.blocks.items() if block.ref_cnt <= 0 and key not in protected}


class EvictsItsOwnPrefix(ReferenceLRUManager):
    def evictable(self, protected: Keys) -> set[OffloadKey]:
        return super().evictable([])


class EvictsThenGivesUp(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            for victim in [key for key in self.order if key in self.evictable(keys)]:
                self.order.remove(victim)
                self.free_slots.append(self.blocks.pop(victim).slot)
                self.announce([victim], removed=True)
        return output


class MovesBeforeItGivesUp(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None and self.order:
            self.order.append(self.order.pop(0))
        return output


class EvictsOneMore(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is not None and output.evicted_keys and self.evictable(keys):
            victim = self.order_evict(self.evictable(keys))
            self.free_slots.append(self.blocks.pop(victim).slot)
            self.announce([victim], removed=True)
            output.evicted_keys.append(victim)
        return output


class EvictsWithoutSaying(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        return output and PrepareStoreOutput(output.keys_to_store, output.store_spec, [])


class EvictsNewest(ReferenceLRUManager):
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        self.order.reverse()
        victim = super().order_evict(evictable)
        self.order.reverse()
        return victim


class RefusesAnEmptyStore(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        return output if output and output.keys_to_store else None


class ReadyTooEarly(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is not None:
            self.complete_store(output.keys_to_store)
        return output


class NeverReady(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        if not success:
            super().complete_store(keys, success=False)


class ReportsWritingAsHit(ReferenceLRUManager):
    def state(self, key: OffloadKey) -> LookupState:
        return LookupState.HIT if key in self.blocks else LookupState.MISS


class ReportsWritingAsMiss(ReferenceLRUManager):
    def lookup_each(self, keys: Keys, req_context: Context = None, need: Need = Need.ALL) -> States:
        states = super().lookup_each(keys)
        states[states == LookupState.PENDING] = LookupState.MISS
        return states


class FailureLeaksTheSlot(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        free_before = list(self.free_slots)
        super().complete_store(keys, success=success)
        if not success:
            self.free_slots = free_before

    def check_integrity(self) -> None:
        pass


class FailureFreesTwice(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        free_before = list(self.free_slots)
        super().complete_store(keys, success=success)
        if not success:
            self.free_slots += [slot for slot in self.free_slots if slot not in free_before]

    def check_integrity(self) -> None:
        pass


class FailureDropsReadyBlocks(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store(keys, success=success)
        for key in unique(keys):
            if not success and key in self.blocks and self.blocks[key].ref_cnt == 0:
                self.free_slots.append(self.blocks.pop(key).slot)
                self.order_remove(key)


class FailureIsSuccess(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store(keys)


class CompletionUnpins(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store(keys, success=success)
        for key in keys:
            if success and key in self.blocks:
                self.blocks[key].ref_cnt = 0


class UnknownCompletionRaises(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        for key in keys:
            if self.held(key) is None:
                raise KeyError(key)
        super().complete_store(keys, success=success)


class BecomingReadyMoves(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        written = [key for key in unique(keys) if self.state(key) is LookupState.PENDING]
        super().complete_store(keys, success=success)
        for key in written:
            self.order_touch(key)


class DuplicateLeaksASlot(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        new = set() if output is None else set(output.keys_to_store)
        for _ in range(sum(key in new for key in keys) - len(new)):
            del self.free_slots[:1]
        return output

    def check_integrity(self) -> None:
        pass


class SlotsInAnotherOrder(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            return None
        spec = self.spec(output.store_spec.slots.tolist()[::-1])
        return PrepareStoreOutput(output.keys_to_store, spec, output.evicted_keys)


class KeysInAnotherOrder(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        return super().prepare_store(sorted(keys))


class StoresAgainWhatIsInFlight(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            return None
        again = [key for key in unique(keys) if self.state(key) is LookupState.PENDING]
        return PrepareStoreOutput(again, self.spec([self.blocks[key].slot for key in again]), output.evicted_keys)


class SpecChangesLater(ReferenceLRUManager):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.scratch = np.zeros(num_blocks, dtype=np.int64)

    def spec(self, slots: list[int]) -> LoadStoreSpec:
        view = self.scratch[: len(slots)]
        view[:] = slots
        return LoadStoreSpec("reference", view)


class LookupSkipsGaps(ReferenceLRUManager):
    def lookup(self, keys: Keys, req_context: Context = None) -> int | None:
        return sum(self.state(key) is LookupState.HIT for key in keys)


class LookupTouches(ReferenceLRUManager):
    def lookup(self, keys: Keys, req_context: Context = None) -> int | None:
        self.touch(keys)
        return super().lookup(keys)


class LookupEachStopsAtAMiss(ReferenceLRUManager):
    def lookup_each(self, keys: Keys, req_context: Context = None, need: Need = Need.ALL) -> States:
        states = super().lookup_each(keys)
        states[super().lookup(keys) :] = LookupState.MISS
        return states


class LookupOfTheLastFindsTheFirst(ReferenceLRUManager):
    def lookup_each(self, keys: Keys, req_context: Context = None, need: Need = Need.ALL) -> States:
        states = super().lookup_each(keys)
        if need is Need.LAST:
            states[int((states == LookupState.HIT).argmax()) + 1 :] = LookupState.MISS
        return states


class LookupOfTheLastStopsAtAMiss(ReferenceLRUManager):
    def lookup_each(self, keys: Keys, req_context: Context = None, need: Need = Need.ALL) -> States:
        states = super().lookup_each(keys)
        if need is Need.LAST:
            states[super().lookup(keys) :] = LookupState.MISS
        return states


class LookupOfTheLastFindsBlocksBeingWritten(ReferenceLRUManager):
    def lookup_each(self, keys: Keys, req_context: Context = None, need: Need = Need.ALL) -> States:
        states = super().lookup_each(keys)
        if need is Need.LAST:
            states[states == LookupState.PENDING] = LookupState.HIT
        return states


class LookupOfTheLastTouches(ReferenceLRUManager):
    def lookup_each(self, keys: Keys, req_context: Context = None, need: Need = Need.ALL) -> States:
        states = super().lookup_each(keys)
        if need is Need.LAST:
            self.touch([key for key, state in zip(keys, states, strict=True) if state == LookupState.HIT][-1:])
        return states


class PinsBeforeItChecks(ReferenceLRUManager):
    def prepare_load(self, keys: Keys, req_context: Context = None) -> LoadStoreSpec:
        specs = [super(PinsBeforeItChecks, self).prepare_load([key]) for key in unique(keys)]
        return self.spec([int(spec.slots[0]) for spec in specs])


class DuplicatePinsTwice(ReferenceLRUManager):
    def prepare_load(self, keys: Keys, req_context: Context = None) -> LoadStoreSpec:
        spec = super().prepare_load(keys)
        for key in set(keys):
            self.blocks[key].ref_cnt += list(keys).count(key) - 1
        return spec


class PinsOnce(ReferenceLRUManager):
    def prepare_load(self, keys: Keys, req_context: Context = None) -> LoadStoreSpec:
        spec = super().prepare_load(keys)
        for key in keys:
            self.blocks[key].ref_cnt = 1
        return spec


class UnpinForgives(ReferenceLRUManager):
    def complete_load(self, blocks: Blocks, req_context: Context = None) -> None:
        keys = self.named(blocks)
        super().complete_load([key for key in keys if (block := self.held(key)) and block.ref_cnt > 0])


class UnpinsBeforeItChecks(ReferenceLRUManager):
    def complete_load(self, blocks: Blocks, req_context: Context = None) -> None:
        keys = self.named(blocks)
        for key in unique(keys):
            super().complete_load([key])


class UnpinMoves(ReferenceLRUManager):
    def complete_load(self, blocks: Blocks, req_context: Context = None) -> None:
        super().complete_load(blocks)
        for key in reversed(unique(self.named(blocks))):
            self.order_touch(key)


class PinMoves(ReferenceLRUManager):
    def prepare_load(self, keys: Keys, req_context: Context = None) -> LoadStoreSpec:
        spec = super().prepare_load(keys)
        self.touch(keys)
        return spec


class StoresTheHeadFirst(ReferenceLRUManager):
    def order_insert_all(self, keys: list[OffloadKey]) -> None:
        super().order_insert_all(keys[::-1])


class TouchesFirstKeyFirst(ReferenceLRUManager):
    def touch(self, keys: Keys, req_context: Context = None, chain: Keys | None = None) -> None:
        super().touch(unique(keys)[::-1])


class TouchesDuplicatesAgain(ReferenceLRUManager):
    def touch(self, keys: Keys, req_context: Context = None, chain: Keys | None = None) -> None:
        super().touch(unique(keys[::-1])[::-1])


class TouchDoesNothing(ReferenceLRUManager):
    def touch(self, keys: Keys, req_context: Context = None, chain: Keys | None = None) -> None:
        pass


class TouchRaisesForAMiss(ReferenceLRUManager):
    def order_touch(self, key: OffloadKey) -> None:
        self.order.remove(key)
        self.order.append(key)


class TouchSkipsBlocksBeingWritten(ReferenceLRUManager):
    def order_touch(self, key: OffloadKey) -> None:
        if self.state(key) is LookupState.HIT:
            super().order_touch(key)


class PassedOverLoseTheirPlace(ReferenceLRUManager):
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        while self.order[0] not in evictable:
            self.order.append(self.order.pop(0))
        return self.order.pop(0)


class SaysItTwice(ReferenceLRUManager):
    def take_events(self) -> list[OffloadingEvent]:
        return list(self.events)


class SaysReadyTooEarly(ReferenceLRUManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is not None:
            self.announce(output.keys_to_store, removed=False)
        return output

    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        waiting = list(self.events)
        super().complete_store(keys, success=success)
        self.events = waiting


class SaysRemovedOnFailure(ReferenceLRUManager):
    def order_remove(self, key: OffloadKey) -> None:
        super().order_remove(key)
        self.announce([key], removed=True)


class EvictsInSilence(ReferenceLRUManager):
    def announce(self, keys: list[OffloadKey], removed: bool) -> None:
        if not removed:
            super().announce(keys, removed)


class WrongMedium(ReferenceLRUManager):
    def announce(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys:
            self.events.append(OffloadingEvent(keys, "elsewhere", removed))


class ResetInSilence(ReferenceLRUManager):
    def reset(self, keep_shared: bool = False) -> bool:
        waiting = list(self.events)
        super().reset()
        self.events = waiting
        return False


class ResetAnnouncesWhatNeverWas(ReferenceLRUManager):
    def reset(self, keep_shared: bool = False) -> bool:
        self.announce([key for key, block in self.blocks.items() if not block.is_ready], removed=True)
        return super().reset()


class ResetFreesSlotsInTransfer(ReferenceLRUManager):
    def reset(self, keep_shared: bool = False) -> bool:
        super().reset()
        self.free_slots += [block.slot for block in self.leaving.values()]
        self.leaving.clear()
        return False


class ResetLeaksSlotsInTransfer(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store([key for key in keys if key not in self.leaving], success=success)


class ResetSparesPinnedBlocks(ReferenceLRUManager):
    def reset(self, keep_shared: bool = False) -> bool:
        pinned = {key: block for key, block in self.blocks.items() if block.ref_cnt > 0}
        super().reset()
        for key in pinned:
            self.blocks[key] = self.leaving.pop(key)
            self.order_insert(key)
        return False


class LateCompletionRevives(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        for key in unique(keys):
            if success and key in self.leaving and self.leaving[key].ref_cnt < 0:
                self.blocks[key] = self.leaving.pop(key)
                self.order_insert(key)
        super().complete_store(keys, success=success)


class ForgetsOldTransfersOfAKey(ReferenceLRUManager):
    """Stores a key again while its old transfer runs: the old completion is taken for the new one's."""

    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        old = {key: self.leaving.pop(key) for key in keys if key in self.leaving}
        output = super().prepare_store(keys)
        if output is None:
            self.leaving.update(old)
        return output

    def check_integrity(self) -> None:
        pass


class OldCompletionEndsALoad(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Context = None, success: bool = True) -> None:
        keys = self.named(blocks)
        for key in unique(keys):
            if key in self.leaving and self.leaving[key].ref_cnt > 0:
                self.leaving[key] = BlockStatus(self.leaving[key].slot, -1)
        super().complete_store(keys, success=success)


class FirstOldReaderFreesTheSlot(ReferenceLRUManager):
    def complete_load(self, blocks: Blocks, req_context: Context = None) -> None:
        keys = self.named(blocks)
        for key in keys:
            if key in self.leaving and self.leaving[key].ref_cnt > 1:
                self.leaving[key].ref_cnt = 1
        super().complete_load(keys)


class ShutdownOnce(ReferenceLRUManager):
    down = False

    def shutdown(self) -> None:
        if self.down:
            raise RuntimeError("already down")
        self.down = True


class ShutdownKeepsBlocks(ReferenceLRUManager):
    def shutdown(self) -> None:
        pass


class GivesOutTheSameSlotTwice(ReferenceLRUManager):
    def complete_load(self, blocks: Blocks, req_context: Context = None) -> None:
        keys = self.named(blocks)
        super().complete_load(keys)
        for key in unique(keys):
            if self.state(key) is LookupState.HIT and self.blocks[key].ref_cnt == 0:
                self.free_slots.append(self.blocks[key].slot)
                break

    def check_integrity(self) -> None:
        pass


class NeedsAList(ReferenceLRUManager):
    def lookup(self, keys: Keys, req_context: Context = None) -> int | None:
        return super().lookup(keys + [])  # type: ignore[operator]


class ChangesTheCallersKeys(ReferenceLRUManager):
    def touch(self, keys: Keys, req_context: Context = None, chain: Keys | None = None) -> None:
        if isinstance(keys, list):
            keys.reverse()
        super().touch(keys[::-1])


class IgnoresTheGroup(ReferenceLRUManager):
    def state(self, key: OffloadKey) -> LookupState:
        return super().state(next((held for held in self.blocks if held[:-4] == key[:-4]), key))


class DoesNotCountUse(ReferenceLRUManager):
    @property
    def num_used_blocks(self) -> int:
        return sum(block.is_ready for block in self.blocks.values())


class CountsOnlyResets(ReferenceLRUManager):
    @property
    def num_removed(self) -> int:
        return 0 if self.blocks else self.removed


MANAGER_BUGS = [bug for bug in ReferenceLRUManager.__subclasses__() if bug.__module__ == __name__]


class ARCPromotesBlocksBeingWritten(ReferenceARCManager):
    def order_touch(self, key: OffloadKey) -> None:
        if key in self.t1:
            self.t1.remove(key)
            self.t2.append(key)
        else:
            super().order_touch(key)


class ARCTouchOfABlockBeingWrittenRaises(ReferenceARCManager):
    def order_touch(self, key: OffloadKey) -> None:
        super().order_touch(key)
        if self.state(key) is LookupState.PENDING:
            raise KeyError(key)


class ARCGivesUpBelowTarget(ReferenceARCManager):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        below = len(self.t1) < int(self.target_t1_size)
        if below and not set(self.t2) & self.evictable(keys) and not self.free_slots:
            return None if any(self.held(key) is None for key in keys) else super().prepare_store(keys)
        return super().prepare_store(keys)


class ARCIgnoresItsTarget(ReferenceARCManager):
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        target, self.target_t1_size = self.target_t1_size, 0.0
        victim = super().order_evict(evictable)
        self.target_t1_size = target
        return victim


class ARCGhostsWithoutBound(ReferenceARCManager):
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        before = list(self.b1)
        victim = super().order_evict(evictable)
        self.b1 = before + self.b1[-1:] if victim in self.b1 else before
        return victim


class ARCCountsOnlyEvictable(ReferenceARCManager):
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        busy = [key for key in self.t1 if key not in evictable]
        self.t1 = [key for key in self.t1 if key in evictable]
        victim = super().order_evict(evictable)
        self.t1 += busy
        return victim


class ARCKeepsGhostsOfStoredKeys(ReferenceARCManager):
    def order_insert(self, key: OffloadKey) -> None:
        self.t1.append(key)


class ARCFailureLeavesAGhost(ReferenceARCManager):
    def order_remove(self, key: OffloadKey) -> None:
        super().order_remove(key)
        self.b1.append(key)


class ARCResetKeepsTheTarget(ReferenceARCManager):
    def order_clear(self) -> None:
        target = self.target_t1_size
        super().order_clear()
        self.target_t1_size = target


class ARCReorderPromotes(ReferenceARCManager):
    def order_move(self, key: OffloadKey, new: bool) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)


ARC_BUGS = [bug for bug in ReferenceARCManager.__subclasses__() if bug.__module__ == __name__]


class CountsEveryLookup(ReferenceFilter):
    def count(self, keys: Keys, req_context: Context) -> None:
        super().count(keys, None)


class CountsUpToTheFirstMiss(ReferenceFilter):
    def lookup(self, keys: Keys, req_context: Context = None) -> int | None:
        n = self.backing.lookup(keys) or 0
        self.count(keys[: n + 1], req_context)
        return n


class CountsStores(ReferenceFilter):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        self.count(keys, req_context)
        return super().prepare_store(keys)


class CountsDuplicates(ReferenceFilter):
    def count(self, keys: Keys, req_context: Context) -> None:
        for key in keys if req_context is None else unique(keys):
            super().count([key], req_context)


class LetsInOneTooEarly(ReferenceFilter):
    def prepare_store(
        self, keys: Keys, req_context: Context = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        return self.backing.prepare_store([key for key in keys if self.counts.get(key, 0) > 1])


class ForgetsNothing(ReferenceFilter):
    def count(self, keys: Keys, req_context: Context) -> None:
        limit, self.max_tracker_size = self.max_tracker_size, 10**9
        super().count(keys, req_context)
        self.max_tracker_size = limit

    def check_integrity(self) -> None:
        pass


FILTER_BUGS = [bug for bug in ReferenceFilter.__subclasses__() if bug.__module__ == __name__]


# Policies


class PlainPolicy(CachePolicy):
    """The least that a policy can be: one list, oldest first. A third-party policy in a few lines."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.order: list[int] = []

    def insert(self, slots: Slots, keys: Keys) -> None:
        self.order += slots.tolist()

    def move(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.order.remove(slot)
            self.order.append(slot)

    def access(self, access: Access) -> None:
        self.move(access.slots)

    def reorder(self, slots: Slots, new: Any) -> None:
        self.move(slots)

    def evict(self, eviction: Eviction) -> Slots:
        victims = [slot for slot in self.order if not eviction.busy[slot]][: eviction.n]
        self.order = [slot for slot in self.order if slot not in victims]
        return np.array(victims, dtype=np.int64)

    def remove(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.order.remove(slot)

    def clear(self) -> None:
        self.order.clear()

    def check_integrity(self, slots: Slots) -> None:
        if sorted(self.order) != sorted(slots.tolist()):
            raise IntegrityError("other slots than expected")


class EvictsBusy(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(replace(eviction, busy=np.zeros_like(eviction.busy)))


class EvictsTooFew(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(replace(eviction, n=max(1, eviction.n - 1)))


class EvictsOneTwice(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        victims = super().evict(eviction)
        victims[1:2] = victims[0:1]
        return victims


class EvictsAndRemembers(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        before = list(self.order)
        victims = super().evict(eviction)
        self.order = before
        return victims


class ReturnsAList(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(eviction).tolist()  # type: ignore[no-any-return]


class LosesWhatItPassesOver(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        victims = super().evict(eviction)
        while eviction.n and self.order and eviction.busy[self.order[0]]:
            del self.order[0]
        return victims


class MarkingMoves(PlainPolicy):
    def mark_evictable(self, slots: Slots) -> None:
        self.move(slots)


class PassesOverForGood(PlainPolicy):
    """Skips a block for ever when it has been passed over."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.passed = np.zeros(capacity, dtype=np.bool_)

    def evict(self, eviction: Eviction) -> Slots:
        self.passed |= eviction.busy
        return super().evict(replace(eviction, busy=self.passed))


class PassesOverForGoodTheSecondTime(PlainPolicy):
    """Skips a block for ever when it has been passed over twice."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.times_passed = np.zeros(capacity, dtype=np.int64)

    def evict(self, eviction: Eviction) -> Slots:
        self.times_passed += eviction.busy
        return super().evict(replace(eviction, busy=eviction.busy | (self.times_passed > 1)))


class UseMakesEvictable(PlainPolicy):
    """Loses track of a busy block that is used."""

    def access(self, access: Access) -> None:
        for slot in access.slots[~access.ready].tolist():
            self.order.remove(slot)


class ReorderDoesNothing(PlainPolicy):
    def reorder(self, slots: Slots, new: Any) -> None:
        pass


class ReorderKeepsWhatIsNotNew(PlainPolicy):
    def reorder(self, slots: Slots, new: Any) -> None:
        self.move(slots[new])


class ReorderReversesTheChain(PlainPolicy):
    def reorder(self, slots: Slots, new: Any) -> None:
        self.move(slots[::-1])


class AdmitsSlots(PlainPolicy):
    def admit(self, keys: Keys, shortage: int) -> Any:
        return np.arange(len(keys) - shortage)


class AdmitMoves(PlainPolicy):
    def admit(self, keys: Keys, shortage: int) -> Any:
        self.order = self.order[1:] + self.order[:1]


class RemoveDoesNothing(PlainPolicy):
    def remove(self, slots: Slots) -> None:
        pass


class ClearDoesNothing(PlainPolicy):
    def clear(self) -> None:
        pass


class InsertsAtTheOldEnd(PlainPolicy):
    def insert(self, slots: Slots, keys: Keys) -> None:
        self.order = slots.tolist() + self.order


class ChecksNothing(PlainPolicy):
    def check_integrity(self, slots: Slots) -> None:
        pass


class AbsentKeysRaise(PlainPolicy):
    def access(self, access: Access) -> None:
        if access.absent:
            raise KeyError(access.absent[0])
        super().access(access)


class RefusedKeysRaise(PlainPolicy):
    def refuse(self, keys: Keys) -> None:
        raise KeyError(keys[0])


class ClearKeepsGhosts(PlainPolicy):
    """A key that was refused once puts the block that is stored for it at the old end."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.refused: set[OffloadKey] = set()

    def refuse(self, keys: Keys) -> None:
        self.refused |= set(keys)

    def access(self, access: Access) -> None:
        super().access(access)
        self.refused |= set(access.absent)

    def insert(self, slots: Slots, keys: Keys) -> None:
        super().insert(slots, keys)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            if key in self.refused:
                self.order.remove(slot)
                self.order.insert(0, slot)


POLICY_BUGS = [bug for bug in PlainPolicy.__subclasses__() if bug.__module__ == __name__]


# Backends


class PlainBackend(Backend):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(16, "plain")
        self.size = num_blocks
        self.free_slots = list(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return self.size

    def get_num_free_blocks(self) -> int:
        return len(self.free_slots)

    def allocate_blocks(self, keys: Keys) -> Slots:
        return np.array([self.free_slots.pop() for _ in keys], dtype=np.int64)

    def free(self, slots: Slots) -> None:
        self.free_slots += slots.tolist()

    def check_integrity(self) -> None:
        if len(set(self.free_slots)) != len(self.free_slots):
            raise IntegrityError("a slot is free twice")


class LosesFreedSlots(PlainBackend):
    def free(self, slots: Slots) -> None:
        super().free(slots[1:])


class KeepsFreedArrays(PlainBackend):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.returned: list[Slots] = []

    def free(self, slots: Slots) -> None:
        self.returned.append(slots)

    def get_num_free_blocks(self) -> int:
        return len(self.free_slots) + sum(map(len, self.returned))

    def allocate_blocks(self, keys: Keys) -> Slots:
        for slots in self.returned:
            self.free_slots += slots.tolist()
        self.returned.clear()
        return super().allocate_blocks(keys)


class HandsOutAgain(PlainBackend):
    def allocate_blocks(self, keys: Keys) -> Slots:
        slots = super().allocate_blocks(keys)
        if len(slots) > 1:
            slots[0] = slots[1]
        return slots


class CountsFromOne(PlainBackend):
    def allocate_blocks(self, keys: Keys) -> Slots:
        return super().allocate_blocks(keys) + 1

    def free(self, slots: Slots) -> None:
        super().free(slots - 1)


class HandsOutViews(PlainBackend):
    def allocate_blocks(self, keys: Keys) -> Slots:
        slots = super().allocate_blocks(keys)
        self.scratch = getattr(self, "scratch", np.zeros(self.size, dtype=np.int64))
        self.scratch[: len(slots)] = slots
        return self.scratch[: len(slots)]


class ForgivesDoubleFree(PlainBackend):
    def free(self, slots: Slots) -> None:
        super().free(np.array([slot for slot in set(slots.tolist()) if slot not in self.free_slots]))


class SpecLosesTheOrder(PlainBackend):
    def get_load_store_spec(self, keys: Keys, slots: Slots) -> LoadStoreSpec:
        return LoadStoreSpec(self.medium, np.sort(slots))


class SpecNamesAnotherMedium(PlainBackend):
    def get_load_store_spec(self, keys: Keys, slots: Slots) -> LoadStoreSpec:
        return LoadStoreSpec("other", slots)


class SmallIntegers(PlainBackend):
    def allocate_blocks(self, keys: Keys) -> Slots:
        return super().allocate_blocks(keys).astype(np.int32)


BACKEND_BUGS = [bug for bug in PlainBackend.__subclasses__() if bug.__module__ == __name__]


# The proof


def cases(suite: object) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test of a suite with each of its parameters, as pytest would call it."""
    for name in dir(suite):
        if not name.startswith("test_"):
            continue
        method = getattr(suite, name)
        marks = getattr(method, "pytestmark", [])
        if not marks:
            yield name, method
        for mark in marks:
            argument, values = mark.args
            for value in values:
                yield f"{name}[{value}]", partial(method, **{argument: value})


def failures(suite: type, make: str, factory: Callable[[int], object]) -> list[str]:
    """Which tests of ``suite`` fail for what ``factory`` makes."""
    subclass = type("Suite", (suite,), {make: staticmethod(factory)})
    failed = []
    for name, case in cases(subclass()):
        try:
            case()
        except (Exception, pytest.fail.Exception):
            failed.append(name)
    return failed


def walk_finds(
    make_manager: Callable[[int], Any],
    make_reference: Callable[[int], Any],
    compare_more: Callable[[Any, Any], None] = lambda manager, reference: None,
    num_walks: int = 60,
) -> bool:
    """Whether the state machine, walking at random, tells the two apart."""
    machine = manager_machine(make_manager, make_reference, compare_more)
    try:
        for seed in range(num_walks):
            walk(machine, seed, num_steps=100)
    except Exception:
        return True
    return False


def hypothesis_finds(make_manager: Callable[[int], Any], make_reference: Callable[[int], Any]) -> bool:
    """Whether the state machine, driven by Hypothesis, tells the two apart."""
    thorough = settings(
        max_examples=2000,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(manager_machine(make_manager, make_reference), settings=thorough)
    except Exception:
        return True
    return False


def compare_arc_lists(manager: ReferenceARCManager, reference: ReferenceARCManager) -> None:
    assert (len(manager.t1), len(manager.t2)) == (len(reference.t1), len(reference.t2))
    assert (manager.b1, manager.b2) == (reference.b1, reference.b2)
    assert manager.target_t1_size == reference.target_t1_size


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert failures(ManagerConformance, "make_manager", ReferenceLRUManager) == []
    assert failures(ManagerConformance, "make_manager", ReferenceARCManager) == []
    assert failures(PolicyConformance, "make_policy", PlainPolicy) == []
    assert failures(BackendConformance, "make_backend", PlainBackend) == []
    assert not walk_finds(through_a_manager(PlainPolicy), ReferenceLRUManager)
    assert not walk_finds(ReferenceARCManager, ReferenceARCManager, compare_arc_lists)


@pytest.mark.parametrize("bug", MANAGER_BUGS)
def test_the_suite_catches_a_wrong_manager(bug: type[ReferenceManager]) -> None:
    assert failures(ManagerConformance, "make_manager", bug)


NOT_FOR_THE_MACHINE = {
    WrongMedium,
    SpecChangesLater,
    NeedsAList,
    ChangesTheCallersKeys,
    IgnoresTheGroup,
    ShutdownKeepsBlocks,
}
"""It compares keys and slots at once, drives one group with lists, and ends with the shutdown."""


@pytest.mark.parametrize("bug", [bug for bug in MANAGER_BUGS if bug not in NOT_FOR_THE_MACHINE])
def test_the_machine_catches_a_wrong_manager(bug: type[ReferenceManager]) -> None:
    assert walk_finds(bug, ReferenceLRUManager)


@pytest.mark.parametrize("bug", [EvictsPinned, ReadyTooEarly, ResetFreesSlotsInTransfer])
def test_hypothesis_catches_a_wrong_manager(bug: type[ReferenceManager]) -> None:
    assert hypothesis_finds(bug, ReferenceLRUManager)


@pytest.mark.parametrize("bug", ARC_BUGS)
def test_the_machine_catches_a_wrong_arc(bug: type[ReferenceManager]) -> None:
    assert walk_finds(bug, ReferenceARCManager, compare_arc_lists)


@pytest.mark.parametrize("bug", FILTER_BUGS)
def test_the_machine_catches_a_wrong_filter(bug: type[ReferenceFilter]) -> None:
    def make(filter_class: type[ReferenceFilter]) -> Callable[[int], ReferenceFilter]:
        return lambda n: filter_class(ReferenceLRUManager(n), store_threshold=3, max_tracker_size=10)

    assert walk_finds(make(bug), make(ReferenceFilter))


@pytest.mark.parametrize("bug", POLICY_BUGS)
def test_the_suite_catches_a_wrong_policy(bug: type[PlainPolicy]) -> None:
    assert failures(PolicyConformance, "make_policy", bug)


@pytest.mark.parametrize("bug", BACKEND_BUGS)
def test_the_suite_catches_a_wrong_backend(bug: type[PlainBackend]) -> None:
    assert failures(BackendConformance, "make_backend", bug)


def through_a_manager(policy: type[PlainPolicy]) -> Callable[[int], PolicyOffloadingManager]:
    return lambda n: PolicyOffloadingManager(HostBackend(16, n), policy(n), enable_events=True)


@pytest.mark.parametrize(
    "bug", [EvictsBusy, EvictsTooFew, EvictsOneTwice, LosesWhatItPassesOver, MarkingMoves, PassesOverForGood]
)
def test_the_machine_catches_a_wrong_policy_through_its_manager(bug: type[PlainPolicy]) -> None:
    assert walk_finds(through_a_manager(bug), ReferenceLRUManager)
