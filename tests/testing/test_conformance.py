"""The suite of policies and the state machine are tested too: they catch each planted bug, and nothing that is right.

Every class below but the plain one is a manager or a policy with one thing wrong with it, named after it. Many of the
bugs were found in real offloading code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvoffload.abc import (
    Access,
    BlockStatus,
    CachePolicy,
    Eviction,
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Slots,
)
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import PolicyConformance
from tests.cache.reference_filter import FilteredLRUManager
from tests.cache.reference_policies import ReferenceARCManager
from tests.suites.reference import ReferenceLRUManager, unique
from tests.suites.stateful import manager_machine, walk
from tests.testing.suites import failures

Keys = Sequence[OffloadKey]
Blocks = LoadStoreSpec | Sequence[OffloadKey]
Bug = TypeVar("Bug", bound=type)

CAUGHT_BY: dict[type, str] = {}
"""The test that must catch each bug."""


def caught_by(test: str) -> Callable[[Bug], Bug]:
    def note(bug: Bug) -> Bug:
        CAUGHT_BY[bug] = f"test_{test}"
        return bug

    return note


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
    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            for victim in [key for key in self.order if key in self.evictable(keys)]:
                self.order.remove(victim)
                self.free_slots.append(self.blocks.pop(victim).slot)
                self.announce([victim], removed=True)
        return output


class ReportsWritingAsHit(ReferenceLRUManager):
    def state(self, key: OffloadKey) -> LookupState:
        return LookupState.HIT if key in self.blocks else LookupState.MISS


class FailureLeaksTheSlot(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Any = None, success: bool = True) -> None:
        keys = self.named(blocks)
        free_before = list(self.free_slots)
        super().complete_store(keys, success=success)
        if not success:
            self.free_slots = free_before

    def check_integrity(self) -> None:
        pass


class FailureIsSuccess(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Any = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store(keys)


class CompletionUnpins(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Any = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store(keys, success=success)
        for key in keys:
            if success and key in self.blocks:
                self.blocks[key].ref_cnt = 0


class SlotsInAnotherOrder(ReferenceLRUManager):
    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            return None
        spec = self.spec(output.store_spec.slots.tolist()[::-1])
        return PrepareStoreOutput(output.keys_to_store, spec, output.evicted_keys)


class StoresAgainWhatIsInFlight(ReferenceLRUManager):
    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            return None
        again = [key for key in unique(keys) if self.state(key) is LookupState.PENDING]
        return PrepareStoreOutput(again, self.spec([self.blocks[key].slot for key in again]), output.evicted_keys)


class LookupSkipsGaps(ReferenceLRUManager):
    def lookup(self, keys: Keys, req_context: ReqContext | None = None) -> int | None:
        return sum(self.state(key) is LookupState.HIT for key in keys)


class PinsBeforeItChecks(ReferenceLRUManager):
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        specs = [super(PinsBeforeItChecks, self).prepare_load([key]) for key in unique(keys)]
        return self.spec([int(spec.slots[0]) for spec in specs])


class UnpinsBeforeItChecks(ReferenceLRUManager):
    def complete_load(self, blocks: Blocks, req_context: ReqContext | None = None) -> None:
        keys = self.named(blocks)
        for key in unique(keys):
            super().complete_load([key])


class TouchesFirstKeyFirst(ReferenceLRUManager):
    def touch(self, keys: Keys, req_context: ReqContext | None = None, chain: Keys | None = None) -> None:
        super().touch(unique(keys)[::-1])


class PassedOverLoseTheirPlace(ReferenceLRUManager):
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        while self.order[0] not in evictable:
            self.order.append(self.order.pop(0))
        return self.order.pop(0)


class EvictsInSilence(ReferenceLRUManager):
    def announce(self, keys: list[OffloadKey], removed: bool) -> None:
        if not removed:
            super().announce(keys, removed)


class ResetFreesSlotsInTransfer(ReferenceLRUManager):
    def reset(self, keep_shared: bool = False) -> bool:
        super().reset()
        self.free_slots += [block.slot for block in self.leaving.values()]
        self.leaving.clear()
        return False


class ForgetsOldTransfersOfAKey(ReferenceLRUManager):
    """Stores a key again while its old transfer runs: the old completion is taken for the new one's."""

    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        old = {key: self.leaving.pop(key) for key in keys if key in self.leaving}
        output = super().prepare_store(keys)
        if output is None:
            self.leaving.update(old)
        return output

    def check_integrity(self) -> None:
        pass


class OldCompletionEndsALoad(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Any = None, success: bool = True) -> None:
        keys = self.named(blocks)
        for key in unique(keys):
            if key in self.leaving and self.leaving[key].ref_cnt > 0:
                self.leaving[key] = BlockStatus(self.leaving[key].slot, -1)
        super().complete_store(keys, success=success)


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


class CountsEveryLookup(FilteredLRUManager):
    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
        super().count(keys, None)


class CountsDuplicates(FilteredLRUManager):
    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
        super().count(keys, req_context)
        for key in {key for key in keys if list(keys).count(key) > 1}:
            self.counts[key] += 1


class CountsUpToTheFirstMiss(FilteredLRUManager):
    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
        super().count(keys[: (ReferenceLRUManager.lookup(self, keys) or 0) + 1], req_context)


class ForgetsNothing(FilteredLRUManager):
    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
        self.max_tracker_size, size = 1 << 30, self.max_tracker_size
        super().count(keys, req_context)
        self.max_tracker_size = size

    def check_integrity(self) -> None:
        ReferenceLRUManager.check_integrity(self)


class LetsInOneTooEarly(FilteredLRUManager):
    def is_admitted(self, key: OffloadKey) -> bool:
        return self.counts.get(key, 0) > 1


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


@caught_by("a_block_that_is_busy_later_is_passed_over_and_keeps_its_place")
class EvictsBusy(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(replace(eviction, busy=np.zeros_like(eviction.busy)))


@caught_by("blocks_used_once_leave_in_order_of_insertion")
class EvictsTooFew(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(replace(eviction, n=max(1, eviction.n - 1)))


@caught_by("an_evicted_block_is_forgotten_and_its_slot_can_be_used_again")
class EvictsAndRemembers(PlainPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        before = list(self.order)
        victims = super().evict(eviction)
        self.order = before
        return victims


@caught_by("a_block_can_be_passed_over_twice")
class PassesOverForGoodTheSecondTime(PlainPolicy):
    """Skips a block for ever when it has been passed over twice."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.times_passed = np.zeros(capacity, dtype=np.int64)

    def evict(self, eviction: Eviction) -> Slots:
        self.times_passed += eviction.busy
        return super().evict(replace(eviction, busy=eviction.busy | (self.times_passed > 1)))


@caught_by("a_use_of_a_block_being_written_does_not_make_it_evictable")
class UseMakesEvictable(PlainPolicy):
    """Loses track of a busy block that is used."""

    def access(self, access: Access) -> None:
        for slot in access.slots[~access.ready].tolist():
            self.order.remove(slot)


@caught_by("reorder_moves_new_blocks_and_the_others_if_uses_move_blocks")
class ReorderKeepsWhatIsNotNew(PlainPolicy):
    def reorder(self, slots: Slots, new: Any) -> None:
        self.move(slots[new])


@caught_by("a_chain_stored_in_parts_loses_its_tail_before_its_head")
class ReorderReversesTheChain(PlainPolicy):
    def reorder(self, slots: Slots, new: Any) -> None:
        self.move(slots[::-1])


@caught_by("admit_changes_nothing")
class AdmitMoves(PlainPolicy):
    def admit(self, keys: Keys, shortage: int) -> Any:
        self.order = self.order[1:] + self.order[:1]


@caught_by("a_removed_block_is_forgotten")
class RemoveDoesNothing(PlainPolicy):
    def remove(self, slots: Slots) -> None:
        pass


@caught_by("integrity_check_distinguishes_known_slots_from_others")
class ChecksNothing(PlainPolicy):
    def check_integrity(self, slots: Slots) -> None:
        pass


@caught_by("clear_forgets_everything")
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


# The proof


def walk_finds(
    make_manager: Callable[[int], Any],
    make_reference: Callable[[int], Any],
    compare_more: Callable[[Any, Any], None] = lambda manager, reference: None,
) -> bool:
    """Whether the state machine, walking at random, tells the two apart."""
    machine = manager_machine(make_manager, make_reference, compare_more)
    try:
        for seed in range(60):
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


def through_a_manager(policy: type[PlainPolicy]) -> Callable[[int], PolicyOffloadingManager]:
    return lambda n: PolicyOffloadingManager(HostBackend(16, n), policy(n), enable_events=True)


def filtered(kind: type[FilteredLRUManager]) -> Callable[[int], FilteredLRUManager]:
    return lambda n: kind(n, store_threshold=3, max_tracker_size=5)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert failures(PolicyConformance, "make_policy", staticmethod(PlainPolicy)) == []
    assert not walk_finds(through_a_manager(PlainPolicy), ReferenceLRUManager)
    assert not walk_finds(ReferenceARCManager, ReferenceARCManager, compare_arc_lists)
    assert not walk_finds(filtered(FilteredLRUManager), filtered(FilteredLRUManager))


@pytest.mark.parametrize("bug", CAUGHT_BY)
def test_a_planted_bug_is_caught_by_the_test_that_is_for_it(bug: type) -> None:
    assert failures(PolicyConformance, "make_policy", staticmethod(bug), CAUGHT_BY[bug])


@pytest.mark.parametrize("bug", [each for each in ReferenceLRUManager.__subclasses__() if each.__module__ == __name__])
def test_the_machine_catches_a_wrong_manager(bug: type[ReferenceLRUManager]) -> None:
    assert walk_finds(bug, ReferenceLRUManager)


def test_the_machine_catches_a_wrong_policy_or_filter() -> None:
    for arc in (ARCIgnoresItsTarget, ARCGhostsWithoutBound):
        assert walk_finds(arc, ReferenceARCManager, compare_arc_lists), arc
    for kind in FilteredLRUManager.__subclasses__():
        assert walk_finds(filtered(kind), filtered(FilteredLRUManager)), kind
    for policy in (EvictsBusy, PassesOverForGoodTheSecondTime):
        assert walk_finds(through_a_manager(policy), ReferenceLRUManager), policy


def test_hypothesis_catches_a_wrong_manager() -> None:
    assert hypothesis_finds(ResetFreesSlotsInTransfer, ReferenceLRUManager)
