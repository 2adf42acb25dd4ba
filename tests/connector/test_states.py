"""State groups in the scheduler half: what is stored, where a hit may end, which device block a state goes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import (
    BoundaryState,
    KVGroup,
    LookupState,
    Need,
    ReqContext,
    ScheduledStep,
    States,
)
from kvoffload.cache.admission import ReuseFilter
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.layout import Block
from kvoffload.connector.messages import StepMeta
from kvoffload.connector.states import StateKeeper
from tests.connector.group_rig import FULL, HYBRID, OTHER, SIZE, STATE, GroupRig
from tests.connector.rig import FakeRequest


def test_a_hit_ends_exactly_where_the_states_are() -> None:
    rig = GroupRig()
    rig.compute(rig.request(42), 40)
    assert rig.hit(rig.request(60)) == 40
    assert rig.hit(rig.request(41)) == 40
    assert rig.hit(rig.request(40)) == 0, "a state cannot go back by one token"
    assert rig.hit(rig.request(39)) == 0


@pytest.mark.parametrize("g", [STATE, OTHER])
def test_there_is_no_hit_without_each_state_at_its_end(g: int) -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    rig.manager.drop([rig.key(request, g, 40)])
    assert rig.hit(rig.request(60)) == 0


def test_there_is_no_hit_without_the_blocks_before_the_state() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    rig.manager.drop([rig.key(request, FULL, 24)])
    assert rig.hit(rig.request(60)) == 0
    assert rig.hit(rig.request(60), computed=24) == 16, "the device holds the missing block"


def test_a_state_is_stored_from_the_block_that_the_engine_names() -> None:
    """The block tables have other blocks at the same positions."""
    rig = GroupRig()
    request = rig.request(42)
    rig.admit(request)
    offered = rig.offer(40)
    meta = rig.step(request, 42, offered)
    read: dict[int, list[int]] = {g: [] for g in range(3)}
    for spec in meta.stores.values():
        ids = iter(spec.device.block_ids.tolist())
        for g, size in enumerate(spec.device.group_sizes):
            read[g] += [next(ids) for _ in range(size)]
    assert len(read[FULL]) == 10
    assert {g: read[g] for g in (STATE, OTHER)} == {each.group: [each.device_block] for each in offered}


def test_nothing_of_a_state_group_is_stored_by_position() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request)
    rig.finish(request)
    assert rig.held(request, FULL) == list(range(4, 44, 4))
    assert rig.held(request, STATE) == rig.held(request, OTHER) == []
    assert rig.hit(rig.request(60)) == 0


def test_a_load_takes_one_device_block_per_state() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    again = rig.request(50)
    assert rig.hit(again, computed=16) == 24
    tables = rig.tables(44, skip_at=40)
    # The engine may keep a block of its own before it.
    tables[STATE][8] = rig.new_blocks(1)[0]
    rig.allocate(again, tables, 24)
    (spec,) = rig.half.build_connector_meta(ScheduledStep({})).loads.values()
    assert spec.device.group_sizes == (6, 1, 1)
    assert spec.device.block_indices == (4, 9, 9)
    assert spec.device.block_ids.tolist() == [*tables[FULL][4:10], tables[STATE][9], tables[OTHER][9]]
    keys = [rig.key(request, g, 40) for g in (STATE, OTHER)]
    slots = [status.slot for key in keys if (status := rig.manager.block_status(key))]
    assert spec.host.slots.tolist()[-2:] == slots


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


# Bytes.


class Memory:
    """Device blocks and host slots with labels instead of bytes."""

    def __init__(self, rig: GroupRig) -> None:
        self.rig = rig
        self.device: dict[int, object] = {}
        self.host: dict[int, object] = {}

    def computed(self, request: FakeRequest, tables: Sequence[Sequence[int]], offered: Sequence[BoundaryState]) -> None:
        """What a forward pass leaves: KV by position, running states in the tables, and the states at boundaries."""
        for g, table in enumerate(tables):
            for i, block in enumerate(table[: request.num_tokens // SIZE]):
                self.device[block] = self.wanted(request, g, (i + 1) * SIZE) if g == FULL else "a running state"
        for g, block, end in offered:
            self.device[block] = self.wanted(request, g, end)

    def wanted(self, request: FakeRequest, g: int, end: int) -> object:
        return g, request.block_hashes[end - 1]

    def copy(self, meta: StepMeta) -> None:
        for spec in meta.stores.values():
            for block, slot in zip(spec.device.block_ids.tolist(), spec.host.slots.tolist(), strict=True):
                self.host[slot] = self.device[block]
        for spec in meta.loads.values():
            for block, slot in zip(spec.device.block_ids.tolist(), spec.host.slots.tolist(), strict=True):
                self.device[block] = self.host[slot]


class Forgetful(LRUOffloadingManager):
    """Finds states that it does not have."""

    def lookup_each(
        self, keys: Sequence[bytes], req_context: ReqContext | None = None, need: Need = Need.ALL
    ) -> States:
        return np.full(len(keys), LookupState.HIT, dtype=np.uint8)


@pytest.mark.parametrize("bug", [None, "by position", "another boundary", "no state"])
def test_a_request_continues_from_the_right_bytes(bug: str | None) -> None:
    """With a bug planted in the engine or the manager, the same check fails."""
    rig = GroupRig(manager=Forgetful(HostBackend(1, 1000)) if bug == "no state" else None)
    memory, writer = Memory(rig), rig.request(42)
    tables = rig.admit(writer)
    # The engine has taken the states away from where they were computed.
    offered = rig.offer(40)
    memory.computed(writer, tables, offered)
    if bug == "by position":
        offered = [BoundaryState(each.group, tables[each.group][9], 40) for each in offered]
    if bug == "another boundary":
        for each in offered:
            memory.device[each.device_block] = memory.wanted(writer, each.group, 36)
    if bug == "no state":
        offered = []
    meta = rig.step(writer, 42, offered)
    memory.copy(meta)
    rig.done(meta)
    reader = rig.request(50)
    assert rig.hit(reader) == 40
    tables = rig.tables(50, skip_at=40)
    rig.allocate(reader, tables, 40)
    meta = rig.half.build_connector_meta(ScheduledStep({}))
    memory.copy(meta)
    found = [memory.device.get(tables[FULL][i]) == memory.wanted(reader, FULL, 4 * i + 4) for i in range(10)]
    found += [memory.device.get(tables[g][9]) == memory.wanted(reader, g, 40) for g in (STATE, OTHER)]
    assert (all(found) and not meta.broken_loads) is (bug is None)


# What is stored.


def test_a_state_counts_only_where_all_groups_end() -> None:
    rig = GroupRig([KVGroup(8), KVGroup(SIZE, state=True), KVGroup(SIZE, state=True)])
    request = rig.request(42)
    rig.compute(request, 36)
    assert rig.held(request, STATE) == []
    rig = GroupRig()
    rig.admit(request)
    rig.done(rig.step(request, 42, rig.offer(40, groups=[STATE])))
    assert rig.held(request, STATE) == [], "without the state of the other group it is of no use"


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


def test_behind_a_refused_block_no_state_is_stored() -> None:
    rig = GroupRig()
    rig.manager.admission = ReuseFilter(2)
    request = rig.request(42)
    rig.admit(request)
    assert not rig.step(request, 42, rig.offer(40)).stores
    again = rig.request(42)
    rig.admit(again)
    rig.done(rig.step(again, 42))
    # Only now is the chain known; the first request goes on.
    rig.manager.lookup([rig.key(request, STATE, 40), rig.key(request, OTHER, 40)], ReqContext("third"))
    assert not rig.step(request, 0, rig.offer(40)).stores
    assert rig.held(request, STATE) == []


def test_device_blocks_of_states_are_fenced() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.admit(request)
    offered = rig.offer(40)
    stores = rig.step(request, 42, offered).stores
    (job,) = [job for job, spec in stores.items() if offered[0].device_block in spec.device.block_ids]
    meta = rig.half.build_connector_meta(ScheduledStep({}, {"other": ([], [offered[0].device_block], [])}))
    assert meta.fences == [job]
    assert meta.fenced_blocks == frozenset({offered[0].device_block})


def test_a_state_that_was_loaded_costs_nothing_when_it_is_offered() -> None:
    rig = GroupRig()
    rig.compute(rig.request(42), 40)
    again = rig.request(50)
    assert rig.hit(again) == 40
    tables = rig.tables(50, skip_at=40)
    rig.allocate(again, tables, 40)
    meta = rig.half.build_connector_meta(ScheduledStep({}, {again.request_id: tables}, frozenset({again.request_id})))
    rig.done(meta)
    again.num_computed_tokens = 40
    meta = rig.step(again, 8, [BoundaryState(g, tables[g][9], 40) for g in (STATE, OTHER)])
    assert [spec.device.group_sizes for spec in meta.stores.values()] == [(2, 0, 0)]


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


def test_of_an_output_the_latest_state_is_kept() -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    for end in (44, 48, 52):
        request.tokens += range(len(request.tokens), end)
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
        assert rig.held(request, STATE) == rig.held(request, OTHER) == [40, end]
    rig.finish(request)
    assert rig.hit(rig.request(60)) == 52
    rig.manager.check_integrity()


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


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_state_that_was_not_stored_takes_the_place_of_no_other(is_stored: bool) -> None:
    rig = GroupRig()
    request = rig.request(42)
    rig.compute(request, 40)
    state, keeper = rig.half.requests[request.request_id], StateKeeper(rig.half.layout)
    for end, is_there in ((44, True), (48, is_stored)):
        assert keeper.choose(state, [end]) == [end]
        keys = [rig.key(rig.request(60), g, end) for g in rig.states]
        blocks = [Block(g, end // SIZE - 1, key, 0, [1]) for g, key in zip(rig.states, keys, strict=True)]
        keeper.stored(state, blocks if is_there else [], keys)
    assert keeper.end(request.request_id) == {48 if is_stored else 44}


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


def test_a_state_that_was_evicted_and_stored_again_belongs_to_another() -> None:
    rig = GroupRig()
    first, second = rig.request(42), rig.request(42)
    for request in (first, second):
        rig.compute(request, 40)
        request.tokens += [42, 43]
    rig.done(rig.step(first, 2, rig.offer(44)))
    rig.manager.drop([rig.key(first, g, 44) for g in (STATE, OTHER)])
    rig.done(rig.step(second, 2, rig.offer(44)))
    first.tokens += [44, 45, 46, 47]
    rig.done(rig.step(first, 4, rig.offer(48)))
    assert rig.held(first, STATE) == [40, 44, 48]


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


def expected_hit(rig: GroupRig, request: FakeRequest, computed: int) -> int:
    """The longest hit by trying every position."""
    align = rig.half.layout.align
    for end in range((request.num_tokens - 1) // align * align, computed, -align):
        needed = []
        for g, group in enumerate(rig.groups):
            size = group.block_tokens
            first = end - size if group.state else max(group.skipped_tokens(end), computed) // size * size
            needed += [rig.key(request, g, at + size) for at in range(first, end, size)]
        if rig.manager.lookup(needed) == len(needed):
            return end - computed
    return 0


@pytest.mark.parametrize(
    "groups",
    [
        HYBRID,
        (KVGroup(SIZE), KVGroup(SIZE, sliding_window=9), KVGroup(SIZE, state=True)),
        (KVGroup(SIZE, state=True), KVGroup(2, sliding_window=7), KVGroup(2, 4), KVGroup(2)),
        (KVGroup(SIZE, state=True), KVGroup(2, state=True)),
    ],
    ids=["attention", "window", "sizes", "states only"],
)
def test_the_longest_hit_is_found(groups: Sequence[KVGroup]) -> None:
    """Blocks and states are missing at random; the hit is the one that a search of all positions finds."""
    rng, found = random.Random(0), 0
    for _ in range(150):
        rig = GroupRig(groups)
        request = rig.request(rng.randrange(1, 90))
        keys = [rig.key(request, g, at) for g, group in enumerate(groups) for at in ends_of(group, request)]
        chance = rng.choice([0.5, 0.9, 0.98, 1])
        output = rig.manager.prepare_store([key for key in keys if rng.random() < chance])
        assert output is not None
        rig.manager.complete_store(output.store_spec)
        computed = rng.choice([0, 0, *range(0, request.num_tokens, rig.half.layout.align)])
        expected = expected_hit(rig, request, computed)
        assert rig.hit(request, computed) == expected
        found += expected > 0
    assert found > 20


def ends_of(group: KVGroup, request: FakeRequest) -> range:
    return range(group.block_tokens, request.num_tokens + 1, group.block_tokens)


def test_few_calls_look_up_a_long_chain() -> None:
    """One call finds the state to touch, one the last state, one asks for those of the other groups, one for the blocks
    before it; where the hit ends early, two more find out why."""

    class Counting(LRUOffloadingManager):
        calls = 0

        def lookup(self, keys: Sequence[bytes], req_context: ReqContext | None = None) -> int | None:
            self.calls += 1
            return super().lookup(keys, req_context)

        def lookup_each(
            self, keys: Sequence[bytes], req_context: ReqContext | None = None, need: Need = Need.ALL
        ) -> States:
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
