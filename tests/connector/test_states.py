"""State groups in the scheduler half: what is stored, where a hit may end, which device block a state goes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvoffload.abc import BoundaryState, KVGroup, ScheduledStep
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from tests.connector.rig import FakeRequest

SIZE = 4
"""Tokens per block of all groups."""
FULL, STATE, OTHER = 0, 1, 2
HYBRID = (KVGroup(SIZE), KVGroup(SIZE, state=True), KVGroup(SIZE, state=True))


@dataclass
class Tables:
    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(map(list, self.ids))


@dataclass
class Rig:
    """A scheduler half with state groups, and an engine whose block tables do not say where the states are."""

    groups: Sequence[KVGroup] = HYBRID
    num_host_blocks: int = 1000
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.manager = LRUOffloadingManager(HostBackend(1, self.num_host_blocks), enable_events=True)
        self.half = OffloadingConnectorScheduler(self.manager, groups=self.groups, hash_block_size=1, **self.options)
        self.states = [g for g, group in enumerate(self.groups) if group.state]
        self.next_block = 1
        self.names = 0

    def request(self, num_tokens: int, first: int = 0, **params: Any) -> FakeRequest:
        self.names += 1
        tokens = list(range(first, first + num_tokens))
        return FakeRequest(f"r{self.names}", tokens, {"kvoffload": params} if params else None, hash_tokens=1)

    def new_blocks(self, n: int) -> list[int]:
        self.next_block += n
        return list(range(self.next_block - n, self.next_block))

    def tables(self, end: int, skip_at: int = 0) -> tuple[list[int], ...]:
        tables = []
        for group in self.groups:
            ids = self.new_blocks(-(-end // group.device_block_size))
            null = group.skipped_tokens(skip_at) // group.device_block_size
            tables.append([0] * null + ids[null:])
        return tuple(tables)

    def admit(self, request: FakeRequest, computed: int = 0) -> None:
        """The request gets blocks for all of its tokens and computes nothing yet."""
        self.half.get_num_new_matched_tokens(request, computed)
        tables = self.tables(request.num_tokens)
        self.half.update_state_after_alloc(request, Tables(tables), 0)
        request.num_computed_tokens = computed
        self.half.build_connector_meta(ScheduledStep({}, {request.request_id: tables}, frozenset({request.request_id})))

    def offer(self, *ends: int, groups: Iterable[int] | None = None) -> list[BoundaryState]:
        """States of all state groups at these positions, each in a device block that no block table has."""
        states = self.states if groups is None else list(groups)
        return [BoundaryState(g, self.new_blocks(1)[0], end) for end in ends for g in states]

    def step(self, request: FakeRequest, tokens: int, offered: Sequence[BoundaryState] = (), **more: Any) -> StepMeta:
        req_id = request.request_id
        step = ScheduledStep({req_id: tokens}, boundary_states={req_id: offered} if offered else {}, **more)
        meta = self.half.build_connector_meta(step)
        request.num_computed_tokens += tokens
        return meta

    def done(self, meta: StepMeta, failed: bool = False) -> None:
        jobs = [*meta.loads, *meta.stores]
        self.half.update_connector_output(
            WorkerReport(done=dict.fromkeys(jobs, 1), failed=set(jobs) if failed else set())
        )

    def compute(self, request: FakeRequest, *ends: int) -> list[BoundaryState]:
        """Computes the request in one step that offers its states at ``ends``; the copies are done."""
        self.admit(request)
        offered = self.offer(*ends)
        self.done(self.step(request, request.num_tokens, offered))
        return offered

    def finish(self, request: FakeRequest) -> None:
        self.half.request_finished(request)
        self.done(self.half.build_connector_meta(ScheduledStep({})))

    def key(self, request: FakeRequest, g: int, end: int) -> bytes:
        return make_offload_key(request.block_hashes[end - 1], g)

    def held(self, request: FakeRequest, g: int) -> list[int]:
        """Where the blocks of group ``g`` end that can be loaded."""
        ends = range(SIZE, request.num_tokens + 1, SIZE)
        return [end for end in ends if self.manager.lookup([self.key(request, g, end)])]

    def hit(self, request: FakeRequest, computed: int = 0) -> int | None:
        return self.half.get_num_new_matched_tokens(request, computed)[0]


def test_a_hit_ends_exactly_where_the_states_are() -> None:
    rig = Rig()
    rig.compute(rig.request(42), 40)
    assert rig.hit(rig.request(60)) == 40
    assert rig.hit(rig.request(41)) == 40
    assert rig.hit(rig.request(40)) == 0, "a state cannot go back by one token"
    assert rig.hit(rig.request(39)) == 0


@pytest.mark.parametrize("g", [STATE, OTHER])
def test_there_is_no_hit_without_each_state_at_its_end(g: int) -> None:
    rig = Rig()
    request = rig.request(42)
    rig.compute(request, 40)
    rig.manager.drop([rig.key(request, g, 40)])
    assert rig.hit(rig.request(60)) == 0


def test_there_is_no_hit_without_the_blocks_before_the_state() -> None:
    rig = Rig()
    request = rig.request(42)
    rig.compute(request, 40)
    rig.manager.drop([rig.key(request, FULL, 24)])
    assert rig.hit(rig.request(60)) == 0
    assert rig.hit(rig.request(60), computed=24) == 16, "the device holds the missing block"


def test_a_state_is_stored_from_the_block_that_the_engine_names() -> None:
    """The block tables have other blocks at the same positions."""
    rig = Rig()
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
    rig = Rig()
    request = rig.request(42)
    rig.compute(request)
    rig.finish(request)
    assert rig.held(request, FULL) == list(range(4, 44, 4))
    assert rig.held(request, STATE) == rig.held(request, OTHER) == []
    assert rig.hit(rig.request(60)) == 0


def test_a_load_takes_one_device_block_per_state() -> None:
    rig = Rig()
    request = rig.request(42)
    rig.compute(request, 40)
    again = rig.request(50)
    assert rig.hit(again, computed=16) == 24
    tables = rig.tables(44, skip_at=40)
    # The engine may keep a block of its own before it.
    tables[STATE][8] = rig.new_blocks(1)[0]
    rig.half.update_state_after_alloc(again, Tables(tables), 24)
    (spec,) = rig.half.build_connector_meta(ScheduledStep({})).loads.values()
    assert spec.device.group_sizes == (6, 1, 1)
    assert spec.device.block_indices == (4, 9, 9)
    assert spec.device.block_ids.tolist() == [*tables[FULL][4:10], tables[STATE][9], tables[OTHER][9]]
    keys = [rig.key(request, g, 40) for g in (STATE, OTHER)]
    slots = [status.slot for key in keys if (status := rig.manager.block_status(key))]
    assert spec.host.slots.tolist()[-2:] == slots


def test_a_load_without_a_device_block_for_the_state_is_reported_as_failed() -> None:
    rig = Rig()
    rig.compute(rig.request(42), 40)
    again = rig.request(50)
    assert rig.hit(again) == 40
    tables = rig.tables(44, skip_at=40)
    tables[OTHER][9] = 0
    rig.half.update_state_after_alloc(again, Tables(tables), 40)
    meta = rig.half.build_connector_meta(ScheduledStep({}))
    assert not meta.loads
    assert set(meta.broken_loads) == {again.request_id}
    assert not rig.half.off


def test_only_the_whole_offer_may_be_loaded() -> None:
    rig = Rig()
    rig.compute(rig.request(42), 40)
    again = rig.request(50)
    assert rig.hit(again) == 40
    rig.half.update_state_after_alloc(again, Tables(rig.tables(36, skip_at=36)), 36)
    assert set(rig.half.build_connector_meta(ScheduledStep({})).broken_loads) == {again.request_id}
