"""The suites are tested too: each planted bug is caught by the test that is for it, and nothing that is right is.

Every class below but the plain ones is a manager, a policy or a backend with one thing wrong with it, named after it.
Many of the bugs were found in real offloading code.
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
    Backend,
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
from tests.cache.reference_filter import ReferenceFilter
from tests.cache.reference_policies import ReferenceARCManager
from tests.suites.conformance import BackendConformance, ManagerConformance
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


@caught_by("pinned_block_is_not_evicted_until_its_last_reader_is_done")
class EvictsPinned(ReferenceLRUManager):
    def evictable(self, protected: Keys) -> set[OffloadKey]:
        return {key for key, block in self.blocks.items() if block.is_ready and key not in protected}


@caught_by("new_blocks_are_not_ready_and_cannot_be_evicted")
class EvictsBeingWritten(ReferenceLRUManager):
    def evictable(self, protected: Keys) -> set[OffloadKey]:
        return {key for key, block in self.blocks.items() if block.ref_cnt <= 0 and key not in protected}


@caught_by("store_never_evicts_one_of_its_own_keys")
class EvictsItsOwnPrefix(ReferenceLRUManager):
    def evictable(self, protected: Keys) -> set[OffloadKey]:
        return super().evictable([])


@caught_by("store_without_room_is_refused_and_nothing_changed")
class EvictsThenGivesUp(ReferenceLRUManager):
    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            for victim in [key for key in self.order if key in self.evictable(keys)]:
                self.order.remove(victim)
                self.free_slots.append(self.blocks.pop(victim).slot)
                self.announce([victim], removed=True)
        return output


@caught_by("lookup_each_returns_the_state_of_every_key")
class ReportsWritingAsHit(ReferenceLRUManager):
    def state(self, key: OffloadKey) -> LookupState:
        return LookupState.HIT if key in self.blocks else LookupState.MISS


@caught_by("used_blocks_are_counted")
class FailureLeaksTheSlot(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Any = None, success: bool = True) -> None:
        keys = self.named(blocks)
        free_before = list(self.free_slots)
        super().complete_store(keys, success=success)
        if not success:
            self.free_slots = free_before

    def check_integrity(self) -> None:
        pass


@caught_by("a_store_may_be_completed_in_parts_with_different_ends")
class FailureIsSuccess(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Any = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store(keys)


@caught_by("completing_unknown_or_ready_keys_is_ignored")
class CompletionUnpins(ReferenceLRUManager):
    def complete_store(self, blocks: Blocks, req_context: Any = None, success: bool = True) -> None:
        keys = self.named(blocks)
        super().complete_store(keys, success=success)
        for key in keys:
            if success and key in self.blocks:
                self.blocks[key].ref_cnt = 0


@caught_by("load_reads_where_the_store_wrote")
class SlotsInAnotherOrder(ReferenceLRUManager):
    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            return None
        spec = self.spec(output.store_spec.slots.tolist()[::-1])
        return PrepareStoreOutput(output.keys_to_store, spec, output.evicted_keys)


@caught_by("store_drops_what_is_present_or_in_flight_and_keeps_order")
class StoresAgainWhatIsInFlight(ReferenceLRUManager):
    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys)
        if output is None:
            return None
        again = [key for key in unique(keys) if self.state(key) is LookupState.PENDING]
        return PrepareStoreOutput(again, self.spec([self.blocks[key].slot for key in again]), output.evicted_keys)


@caught_by("load_reads_where_the_store_wrote")
class SpecChangesLater(ReferenceLRUManager):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.scratch = np.zeros(num_blocks, dtype=np.int64)

    def spec(self, slots: list[int]) -> LoadStoreSpec:
        view = self.scratch[: len(slots)]
        view[:] = slots
        return LoadStoreSpec("reference", view)


@caught_by("lookup_is_the_leading_run_of_ready_blocks")
class LookupSkipsGaps(ReferenceLRUManager):
    def lookup(self, keys: Keys, req_context: ReqContext | None = None) -> int | None:
        return sum(self.state(key) is LookupState.HIT for key in keys)


@caught_by("load_of_a_block_that_is_not_ready_is_an_error_and_pins_nothing")
class PinsBeforeItChecks(ReferenceLRUManager):
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        specs = [super(PinsBeforeItChecks, self).prepare_load([key]) for key in unique(keys)]
        return self.spec([int(spec.slots[0]) for spec in specs])


@caught_by("unpinning_a_block_without_a_pin_is_an_error_and_unpins_nothing")
class UnpinsBeforeItChecks(ReferenceLRUManager):
    def complete_load(self, blocks: Blocks, req_context: ReqContext | None = None) -> None:
        keys = self.named(blocks)
        for key in unique(keys):
            super().complete_load([key])


@caught_by("a_duplicate_in_one_touch_counts_where_it_came_first")
class TouchesFirstKeyFirst(ReferenceLRUManager):
    def touch(self, keys: Keys, req_context: ReqContext | None = None, chain: Keys | None = None) -> None:
        super().touch(unique(keys)[::-1])


@caught_by("a_pinned_block_that_was_passed_over_is_evicted_from_its_old_place")
class PassedOverLoseTheirPlace(ReferenceLRUManager):
    def order_evict(self, evictable: set[OffloadKey]) -> OffloadKey:
        while self.order[0] not in evictable:
            self.order.append(self.order.pop(0))
        return self.order.pop(0)


@caught_by("there_are_events_when_blocks_become_ready_and_when_they_are_evicted")
class EvictsInSilence(ReferenceLRUManager):
    def announce(self, keys: list[OffloadKey], removed: bool) -> None:
        if not removed:
            super().announce(keys, removed)


@caught_by("after_a_reset_a_slot_being_written_returns_when_its_transfer_ends")
class ResetFreesSlotsInTransfer(ReferenceLRUManager):
    def reset(self, keep_shared: bool = False) -> bool:
        super().reset()
        self.free_slots += [block.slot for block in self.leaving.values()]
        self.leaving.clear()
        return False


@caught_by("after_a_reset_a_key_in_transfer_counts_as_in_flight")
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


@caught_by("after_a_reset_a_completion_of_the_other_kind_ends_no_transfer")
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


class CountsEveryLookup(ReferenceFilter):
    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
        super().count(keys, None)


class LetsInOneTooEarly(ReferenceFilter):
    def prepare_store(self, keys: Keys, *more: Any, **named: Any) -> PrepareStoreOutput | None:
        return self.backing.prepare_store([key for key in keys if self.counts.get(key, 0) > 1])


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


@caught_by("freed_slots_can_be_had_again_and_others_cannot")
class LosesFreedSlots(PlainBackend):
    def free(self, slots: Slots) -> None:
        super().free(slots[1:])


@caught_by("freeing_twice_is_found")
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


@caught_by("handed_out_slots_do_not_change_afterwards")
class HandsOutViews(PlainBackend):
    def allocate_blocks(self, keys: Keys) -> Slots:
        slots = super().allocate_blocks(keys)
        self.scratch = getattr(self, "scratch", np.zeros(self.size, dtype=np.int64))
        self.scratch[: len(slots)] = slots
        return self.scratch[: len(slots)]


@caught_by("a_spec_says_where_keys_lie_in_order")
class SpecLosesTheOrder(PlainBackend):
    def get_load_store_spec(self, keys: Keys, slots: Slots) -> LoadStoreSpec:
        return LoadStoreSpec(self.medium, np.sort(slots))


# The proof


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


def through_a_manager(policy: type[PlainPolicy]) -> Callable[[int], PolicyOffloadingManager]:
    return lambda n: PolicyOffloadingManager(HostBackend(16, n), policy(n), enable_events=True)


def filtered(kind: type[ReferenceFilter]) -> Callable[[int], ReferenceFilter]:
    return lambda n: kind(ReferenceLRUManager(n), store_threshold=3)


SUITES: list[tuple[type, type, str]] = [
    (ReferenceLRUManager, ManagerConformance, "make_manager"),
    (PlainPolicy, PolicyConformance, "make_policy"),
    (PlainBackend, BackendConformance, "make_backend"),
]
"""What is right, its suite, and the method of the suite that makes it."""


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    for right, suite, make in [*SUITES, (ReferenceARCManager, ManagerConformance, "make_manager")]:
        assert failures(suite, make, staticmethod(right)) == []
    assert not walk_finds(through_a_manager(PlainPolicy), ReferenceLRUManager)
    assert not walk_finds(ReferenceARCManager, ReferenceARCManager, compare_arc_lists)
    assert not walk_finds(filtered(ReferenceFilter), filtered(ReferenceFilter))


@pytest.mark.parametrize("bug", CAUGHT_BY)
def test_a_planted_bug_is_caught_by_the_test_that_is_for_it(bug: type) -> None:
    suite, make = next((suite, make) for right, suite, make in SUITES if issubclass(bug, right))
    assert failures(suite, make, staticmethod(bug), CAUGHT_BY[bug])


def test_the_machine_catches_a_wrong_manager_policy_or_filter() -> None:
    for manager in (EvictsPinned, FailureLeaksTheSlot, UnpinsBeforeItChecks, OldCompletionEndsALoad):
        assert walk_finds(manager, ReferenceLRUManager), manager
    for arc in (ARCIgnoresItsTarget, ARCGhostsWithoutBound):
        assert walk_finds(arc, ReferenceARCManager, compare_arc_lists), arc
    for kind in (CountsEveryLookup, LetsInOneTooEarly):
        assert walk_finds(filtered(kind), filtered(ReferenceFilter)), kind
    for policy in (EvictsBusy, PassesOverForGoodTheSecondTime):
        assert walk_finds(through_a_manager(policy), ReferenceLRUManager), policy


def test_hypothesis_catches_a_wrong_manager() -> None:
    assert hypothesis_finds(ResetFreesSlotsInTransfer, ReferenceLRUManager)
