"""State groups over a lower tier: a request waits for the state and the blocks before it, and for nothing else."""

from __future__ import annotations

from kvoffload.abc import ScheduledStep
from tests.clock import Clock
from tests.connector.group_rig import HYBRID, OTHER, STATE, GroupRig
from tests.connector.rig import FakeRequest
from tests.connector.test_tiered_scheduler import SpyManager


class TieredRig(GroupRig):
    def __init__(self, num_host_blocks: int = 100) -> None:
        self.clock = Clock()
        manager = SpyManager(num_host_blocks, self.clock, HYBRID)
        super().__init__(manager=manager, options={"clock": self.clock, "load_deadline_ms": 1000})

    def settle(self) -> None:
        for _ in range(3):
            self.half.build_connector_meta(ScheduledStep({}))
            self.manager.executor.drain()
        self.half.build_connector_meta(ScheduledStep({}))

    def put_below(self, request: FakeRequest, *ends: int) -> None:
        """The blocks of the request and its states at ``ends`` are in the tier, and not in the host."""
        self.compute(request, *ends)
        self.finish(request)
        self.settle()
        self.manager.host.reset()
        self.half.jobs.changes.contents += 1

    def held_below(self, request: FakeRequest, g: int) -> list[int]:
        ends = range(4, request.num_tokens + 1, 4)
        return [end for end in ends if self.manager.tier.contains([self.key(request, g, end)])[0] == 1]

    def answer(self, request: FakeRequest) -> int | None:
        """What the request is offered when it has waited, and as many blocks have come as it asked for."""
        for _ in range(8):
            hit = self.hit(request)
            if hit is not None:
                return hit
            self.settle()
        return None


def test_a_request_waits_for_its_state_and_the_blocks_before_it() -> None:
    rig = TieredRig()
    writer = rig.request(42)
    rig.put_below(writer, 40)
    assert rig.held_below(writer, STATE) == rig.held_below(writer, OTHER) == [40]
    request = rig.request(60)
    assert rig.hit(request) is None
    assert rig.answer(request) == 40
    tables = rig.tables(60, skip_at=40)
    rig.allocate(request, tables, 40)
    (spec,) = rig.half.build_connector_meta(ScheduledStep({})).loads.values()
    assert spec.device.group_sizes == (10, 1, 1)
    assert rig.half.records[-1].tier_tokens == {"memory": 40}


def test_blocks_below_without_a_state_are_not_read() -> None:
    rig = TieredRig()
    writer = rig.request(42)
    rig.put_below(writer, 40)
    for g in (STATE, OTHER):
        rig.manager.tier.delete([rig.key(writer, g, 40)])
    request = rig.request(60)
    assert rig.hit(request) == 0
    assert rig.manager.num_used_blocks == 0
    rig.allocate(request, rig.tables(60))
    assert rig.half.records[-1].reason == "no_state"


def test_a_tier_that_is_late_costs_the_hit() -> None:
    rig = TieredRig()
    rig.put_below(rig.request(42), 40)
    request = rig.request(60)
    assert rig.hit(request) is None
    rig.clock.now += 2
    rig.half.build_connector_meta(ScheduledStep({}))
    assert rig.hit(request) == 0
    rig.allocate(request, rig.tables(60))
    assert rig.half.records[-1].reason == "not_in_time"


def test_a_superseded_state_is_not_written() -> None:
    rig = TieredRig()
    request = rig.request(42)
    rig.compute(request, 40)
    for end in (44, 48):
        request.tokens += range(len(request.tokens), end)
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
        rig.settle()
    rig.finish(request)
    rig.settle()
    assert rig.held_below(request, STATE) == rig.held_below(request, OTHER) == [40, 48]
    rig.manager.check_integrity()


def test_a_superseded_state_stays_in_the_tier_where_it_was_before() -> None:
    """An earlier request has left it there, as the end of its turn."""
    rig = TieredRig()
    first = rig.request(48)
    rig.put_below(first, 44)
    request = rig.request(42)
    rig.compute(request, 40)
    for end in (44, 48):
        request.tokens += range(len(request.tokens), end)
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
    assert rig.manager.host.lookup([rig.key(first, STATE, 44)]) == 0
    assert rig.held_below(first, STATE) == rig.held_below(first, OTHER) == [44]
