"""State groups in the scheduler half: what is stored, where a hit may end, which device block a state goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.abc import KVGroup, Need, ReqContext, ScheduledStep, States
from kvoffload.cache.admission import ReuseFilter
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from tests.connector.group_rig import FULL, OTHER, SIZE, STATE, GroupRig
from tests.connector.rig import FakeRequest


def test_a_load_without_a_device_block_for_the_state_is_reported_as_failed() -> None:
    rig = GroupRig()
    rig.compute(rig.request(42), 40)
    again = rig.request(50)
    assert rig.hit(again) == 40
    tables = rig.tables(44, skip_at=40)
    tables[OTHER][9] = 0
    rig.allocate(again, tables, 40)
    meta = rig.half.build_connector_meta(ScheduledStep({}))
    assert not meta.loads
    assert set(meta.broken_loads) == {again.request_id}
    assert not rig.half.off


def test_only_the_whole_offer_may_be_loaded() -> None:
    rig = GroupRig()
    rig.compute(rig.request(42), 40)
    again = rig.request(50)
    assert rig.hit(again) == 40
    rig.allocate(again, rig.tables(36, skip_at=36), 36)
    assert set(rig.half.build_connector_meta(ScheduledStep({})).broken_loads) == {again.request_id}


def test_a_state_counts_only_where_all_groups_end() -> None:
    rig = GroupRig([KVGroup(8), KVGroup(SIZE, state=True), KVGroup(SIZE, state=True)])
    request = rig.request(42)
    rig.compute(request, 36)
    assert rig.held(request, STATE) == []
    rig = GroupRig()
    rig.admit(request)
    rig.done(rig.step(request, 42, rig.offer(40, groups=[STATE])))
    assert rig.held(request, STATE) == [], "without the state of the other group it is of no use"


# What is stored.


@pytest.mark.parametrize("options", [{"store": False}, {"max_tokens": 15}])
def test_a_request_may_forbid_that_its_states_are_stored(options: dict[str, Any]) -> None:
    rig = GroupRig()
    request = rig.request(42, **options)
    rig.compute(request, 16, 40)
    assert rig.held(request, STATE) == []


def test_states_of_requests_that_are_gone_are_not_stored() -> None:
    rig = GroupRig()
    gone, preempted, stale = rig.request(42), rig.request(42, 1000), rig.request(42, 2000)
    rig.admit(gone)
    rig.half.request_finished(gone)
    assert not rig.step(gone, 0, rig.offer(40)).stores
    rig.admit(preempted)
    assert not rig.step(preempted, 0, rig.offer(40), preempted=iter([preempted.request_id])).stores
    rig.admit(stale)
    rig.half.reset()
    assert not rig.step(stale, 42, rig.offer(40)).stores


def test_states_of_a_request_that_was_preempted_and_computes_again_are_stored() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.admit(request)
    rig.half.get_num_new_matched_tokens(request, 0)
    tables, name = rig.tables(54), request.request_id
    rig.allocate(request, tables)
    step = {"preempted": [name], "replaced": frozenset({name}), "block_ids": {name: tables}}
    rig.done(rig.step(request, 42, rig.offer(40), **step))
    assert rig.hit(rig.request(60)) == 40


def test_a_state_without_room_is_dropped_and_not_offered_again() -> None:
    rig = GroupRig(num_host_blocks=9)
    busy, request = rig.request(34, 1000), rig.request(26)
    rig.admit(busy)
    blocking = rig.step(busy, 28)
    rig.admit(request)
    assert len(rig.step(request, 3, rig.offer(24)).stores) == 1, "two slots are free"
    assert not rig.step(busy, 0, rig.offer(28)).stores
    rig.done(blocking)
    assert not rig.step(busy, 0).stores
    assert rig.half.metrics.snapshot()["refused_stores"] == 1
    assert not rig.half.off


def test_a_chain_longer_than_the_pool_has_a_state_at_the_end_of_what_is_stored() -> None:
    rig = GroupRig(num_host_blocks=10)
    request = rig.request(82)
    rig.admit(request)
    for end in (24, 48, 80):
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
    assert rig.held(request, FULL) == list(range(4, 36, 4))
    assert rig.hit(rig.request(82)) == 24


def test_a_state_that_is_refused_keeps_nothing_else_from_being_stored() -> None:
    """The reuse filter has not seen the text that follows the prompt."""
    rig = GroupRig()
    rig.manager.admission = ReuseFilter(2)
    for _ in range(2):
        request = rig.request(22)
        rig.admit(request)
        rig.half.request_finished(request)
    request = rig.request(22)
    rig.admit(request)
    request.tokens += range(22, 33)
    rig.done(rig.step(request, 12, rig.offer(24)))
    assert rig.held(request, STATE) == []
    rig.done(rig.step(request, 10, rig.offer(20)))
    assert rig.held(request, FULL) == [4, 8, 12, 16, 20]
    assert rig.held(request, STATE) == [20]


# Which states are kept.


def test_of_a_prompt_its_last_state_is_kept() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.admit(request)
    for end in (16, 32, 40):
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
    rig.finish(request)
    assert rig.held(request, STATE) == rig.held(request, OTHER) == [40]


def test_a_prompt_that_ends_at_a_boundary_can_come_again() -> None:
    rig = GroupRig()
    request = rig.request(40)
    rig.compute(request, 36, 40)
    assert rig.held(request, STATE) == [36, 40]
    assert rig.hit(rig.request(40)) == 36
    assert rig.hit(rig.request(44)) == 40


def test_an_output_that_ends_just_behind_a_state_continues_from_the_state_before() -> None:
    """Blocks of a draft model have no name at 48 yet: its layers look three tokens ahead, and one is known."""
    groups = (KVGroup(SIZE), KVGroup(SIZE, lookahead=3), KVGroup(SIZE, state=True))
    rig = GroupRig(
        groups, options={"following": lambda request, position, n: repr(request.tokens[position:][:n]).encode()}
    )
    request = rig.request(43)
    rig.compute(request, 40)
    for end in (44, 48):
        request.tokens += range(len(request.tokens), end + 1)
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
    rig.finish(request)
    assert rig.hit(rig.request(60)) == 44
    assert rig.held(request, 2) == [40, 44, 48]


def test_a_state_that_others_use_is_not_dropped() -> None:
    rig = GroupRig()
    request, other = rig.request(48), rig.request(60)
    request.tokens = request.tokens[:42]
    rig.compute(request, 40)
    request.tokens += [42, 43]
    rig.done(rig.step(request, 2, rig.offer(44)))
    assert rig.hit(other) == 44
    rig.allocate(other, rig.tables(60, skip_at=44), 44)
    rig.done(rig.half.build_connector_meta(ScheduledStep({})))
    request.tokens += [44, 45, 46, 47]
    rig.done(rig.step(request, 4, rig.offer(48)))
    assert rig.held(request, STATE) == [40, 44, 48]


def test_a_state_that_another_has_computed_too_is_not_dropped() -> None:
    rig = GroupRig()
    first, second = rig.request(42), rig.request(42)
    for request in (first, second):
        rig.compute(request, 40)
        request.tokens += [42, 43]
    for request in (first, second):
        rig.done(rig.step(request, 2, rig.offer(44)))
    first.tokens += [44, 45, 46, 47]
    rig.done(rig.step(first, 4, rig.offer(48)))
    assert rig.held(first, STATE) == [40, 44, 48]


def test_a_superseded_state_that_is_still_being_written_is_dropped() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    request.tokens += [42, 43]
    slow = rig.step(request, 2, rig.offer(44))
    request.tokens += [44, 45, 46, 47]
    rig.done(rig.step(request, 4, rig.offer(48)))
    rig.done(slow)
    assert rig.held(request, STATE) == [40, 48]
    rig.manager.check_integrity()


def test_an_offer_that_was_remembered_ends_with_its_state() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    request.tokens += [42, 43]
    rig.done(rig.step(request, 2, rig.offer(44)))
    other = rig.request(60)
    assert rig.hit(other) == 44
    request.tokens += [44, 45, 46, 47]
    rig.step(request, 4, rig.offer(48))
    assert rig.hit(other) == 40, "the state at 44 is gone, the one at 48 is being written"


def test_the_state_where_prompts_part_is_kept() -> None:
    """The second request sees how far the first one's text goes, and leaves a state for the third."""
    rig = GroupRig()
    first = rig.request(82)
    rig.compute(first, 80)

    def another(n: int) -> FakeRequest:
        request = rig.request(82)
        request.tokens[46:] = range(n, n + 36)
        return request

    second = another(1000)
    rig.admit(second)
    for end in (16, 32, 48, 64, 80):
        rig.done(rig.step(second, end - second.num_computed_tokens, rig.offer(end)))
    assert rig.held(second, STATE) == [32, 80]
    assert rig.hit(another(2000)) == 32


def test_after_a_reset_nothing_of_before_is_dropped() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    request.tokens += [42, 43]
    rig.done(rig.step(request, 2, rig.offer(44)))
    rig.half.reset()
    again = rig.request(46)
    rig.compute(again, 44)
    request.tokens += [44, 45, 46, 47]
    assert not rig.step(request, 4, rig.offer(48)).stores
    later = rig.request(50)
    rig.half.get_num_new_matched_tokens(later, 0)
    assert rig.held(again, STATE) == [44]


def test_a_state_of_tokens_that_were_taken_back_is_dropped() -> None:
    rig = GroupRig()
    request, before = rig.request(42), rig.request(44)
    rig.compute(request, 40)
    request.tokens += [42, 43]
    rig.done(rig.step(request, 2, rig.offer(44)))
    assert rig.held(before, STATE) == [40, 44]
    request.tokens[43] = 7
    rig.done(rig.step(request, 0, rig.offer(44)))
    assert rig.held(request, STATE) == [40, 44]
    assert rig.held(before, STATE) == [40]


# Why a request misses.


def test_a_missing_state_is_the_reason() -> None:
    rig = GroupRig()
    first = rig.request(82)
    rig.compute(first, 80)
    for num_tokens, parted, reason in [(60, 60, "no_state"), (60, 3, "never_stored"), (82, 82, None)]:
        request = rig.request(num_tokens)
        request.tokens[parted:] = range(5000, 5000 + num_tokens - parted)
        rig.admit(request)
        assert rig.half.records[-1].reason == reason
    assert rig.half.metrics.snapshot()["misses:no_state"] == 1


def test_a_state_that_was_evicted_is_called_so() -> None:
    rig = GroupRig(num_host_blocks=13)
    first = rig.request(42)
    rig.compute(first, 40)
    rig.finish(first)
    rig.compute(rig.request(9, 1000))
    assert rig.held(first, FULL) == list(range(4, 44, 4)), "the state leaves before the blocks before it"
    rig.admit(rig.request(60))
    assert rig.half.records[-1].reason == "evicted"


# Agreement.


def test_few_calls_look_up_a_long_chain() -> None:
    """One call finds the state to touch, one the last state, one asks for those of the other groups, one for the blocks
    before it; where the hit ends early, two more find out why."""

    class Counting(LRUOffloadingManager):
        calls = 0

        def lookup(self, keys: Sequence[bytes], req_context: ReqContext | None = None) -> int | None:
            self.calls += 1
            return super().lookup(keys, req_context)

        def lookup_each(self, keys: Any, req_context: Any = None, need: Need = Need.ALL) -> States:
            self.calls += 1
            return super().lookup_each(keys, req_context, need)

    manager = Counting(HostBackend(1, 1000))
    rig = GroupRig(num_host_blocks=1000, manager=manager)
    rig.compute(rig.request(801), 800)
    manager.calls = 0
    assert rig.hit(rig.request(801)) == 800
    assert manager.calls == 4
    manager.calls = 0
    assert rig.hit(rig.request(800)) == 0
    assert manager.calls <= 4
