"""The scheduler half over a manager with a lower tier: requests that wait for it, and their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kvoffload.abc import KVGroup, LookupState, OffloadingEvent, ReqContext, ScheduledStep
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.connector import request as queue
from kvoffload.connector.adapters import Adapter
from kvoffload.connector.lookups import MAX_WAITS_PER_REQUEST
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiering.health import MAX_FAILURES, PAUSE_S
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiering.prefetch import QUEUED_S
from tests.clock import Clock
from tests.connector.rig import TOKENS, FakeRequest, Rig, make_half, prompt
from tests.counting import lines_of
from tests.sim.executor import SteppedExecutor
from tests.tiering.rig import SLOT_BYTES, SpyTier, arrived


class SpyManager(TieredOffloadingManager):
    """Remembers its waits, and the measurements of the engine's speed."""

    def __init__(
        self,
        num_blocks: int,
        clock: Callable[[], float],
        groups: Sequence[KVGroup] = (KVGroup(TOKENS),),
        enable_events: bool = False,
    ) -> None:
        self.executor = SteppedExecutor(clock=clock)
        self.tier = SpyTier(make_pools(num_blocks, SLOT_BYTES), 64, self.executor, clock)
        host = PolicyOffloadingManager(
            HostBackend(TOKENS, num_blocks), make_policy("lru", num_blocks), enable_events, clock=clock
        )
        super().__init__(host, [self.tier], TieringSettings(groups, load_deadline_ms=1000), clock=clock)
        self.waits: list[float] = []
        self.prefills: list[tuple[int, float]] = []

    def poll(self, timeout_s: float = 0.0) -> bool:
        if timeout_s:
            self.waits.append(timeout_s)
        return super().poll(timeout_s)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self.prefills.append((num_tokens, seconds))
        super().observe_prefill(num_tokens, seconds)


class TieredRig(Rig):
    def __init__(self, num_host_blocks: int = 16, enable_events: bool = False, **options: Any) -> None:
        clock = Clock()
        manager = SpyManager(num_host_blocks, clock, enable_events=enable_events)
        options["enable_events"] = enable_events
        super().__init__(num_host_blocks, manager=manager, clock=clock, options=options)

    def put_below(self, tokens: list[int]) -> None:
        """The blocks of ``tokens`` are in the tier, and not in the host."""
        for end in range(TOKENS, len(tokens) + 1, TOKENS):
            self.store(tokens[:end], f"writer{end}")
            self.manager.executor.drain()
            self.step()
        self.manager.host.reset()

    def arrive(self) -> None:
        """Delivers the blocks that requests wait for."""
        self.step()
        self.manager.executor.drain()
        self.step()


def with_blocks_below(**options: Any) -> tuple[TieredRig, FakeRequest]:
    """The tier has the blocks of ``prompt(8)``, which a request of one token more can use."""
    rig = TieredRig(**options)
    rig.put_below(prompt(8))
    return rig, FakeRequest("r", prompt(9))


def test_a_request_waits_for_its_blocks_and_loads_them() -> None:
    rig, request = with_blocks_below()
    assert rig.look_up(request) == (None, False)
    rig.arrive()
    assert len(rig.load(request).loads) == 1
    record = rig.half.records[-1]
    assert (record.host_tokens, record.disk_tokens, record.missed_key) == (0, 8, None)
    assert record.tier_tokens == {"memory": 8}
    assert rig.half.metrics.snapshot()["tier_hit_tokens:memory"] == 8
    assert rig.half.metrics.snapshot()["promoted_blocks"] == 2


def test_events_of_promoted_blocks_describe_them() -> None:
    """By the request that waits for them. The same blocks are announced for host memory and for the tier."""
    rig = TieredRig(enable_events=True)
    rig.put_below(prompt(8))
    list(rig.half.take_events())
    request = FakeRequest("r", prompt(9))
    rig.look_up(request)
    rig.arrive()
    events = list(rig.half.take_events())
    assert [(event.medium, event.tier) for event in events] == [("CPU", None), ("STORAGE", "memory")]
    for event in events:
        assert event.blocks is not None
        described = {(block.start, block.end) for block in event.blocks if block is not None}
        assert described == {(0, 4), (4, 8)}
        assert all(block is not None and block.request is request for block in event.blocks)
    rig.end(request)
    assert list(rig.half.take_events()) == []


def take_events(rig: TieredRig) -> list[OffloadingEvent]:
    return list(rig.half.take_events())


def waiting_for_events(num_others: int) -> TieredRig:
    """Two blocks are announced for which no request waits, while others do."""
    rig = TieredRig(enable_events=True)
    rig.put_below(prompt(8))
    list(rig.half.take_events())
    for i in range(num_others):
        rig.look_up(FakeRequest(f"r{i}", [*prompt(8), i]))
    return rig


def test_events_are_described_by_any_request_that_waits() -> None:
    rig = waiting_for_events(3)
    for i in range(2):
        rig.half.request_finished(FakeRequest(f"r{i}", []))
    rig.arrive()
    assert all(event.blocks and all(event.blocks) for event in take_events(rig))
    rig.half.request_finished(FakeRequest("r2", []))
    rig.manager.drop(rig.keys(prompt(8)), only_host=True)
    list(rig.half.take_events())
    assert not vars(rig.half.observer.descriptions)["_coming"]


def test_an_event_costs_the_same_however_many_requests_wait() -> None:
    few, many = waiting_for_events(2), waiting_for_events(50)
    for rig in (few, many):
        rig.arrive()
        # Of these, no request can say what they are.
        output = rig.manager.prepare_store(unknown := rig.keys(prompt(8, start=90)))
        assert output is not None
        rig.manager.complete_store(unknown)
    cost, same = (lines_of(partial(take_events, rig)) for rig in (few, many))
    assert cost == same


def test_a_request_that_waits_is_not_looked_up_while_nothing_changes() -> None:
    rig, request = with_blocks_below()
    rig.look_up(request)
    rig.half.build_connector_meta(busy_step())
    asked: list[object] = []
    lookup = rig.manager.lookup

    def note(keys: Any, context: Any = None) -> Any:
        asked.append(keys)
        return lookup(keys, context)

    rig.manager.lookup = note
    rig.look_up(request)
    assert len(asked) == 1, "its blocks were begun"
    for _ in range(5):
        assert rig.look_up(request) == (None, False)
        rig.half.build_connector_meta(busy_step())
    assert len(asked) == 1
    rig.arrive()
    assert rig.look_up(request) == (8, True)


def test_an_offer_is_looked_up_again_when_room_was_made_for_a_test_read_that_was_refused() -> None:
    rig = TieredRig(4)
    rig.put_below(prompt(4, start=50))
    rig.store(prompt(16))
    while rig.half.has_pending_work() or rig.manager.has_transfers:
        rig.arrive()
    rig.manager.tier.num_failed_lookups = MAX_FAILURES
    rig.step()
    rig.clock.now += 2 * PAUSE_S
    rig.step()
    waiting = FakeRequest("waits for device blocks", prompt(17))
    assert rig.look_up(waiting) == (16, True)
    rig.manager.tier.refuses = True
    assert rig.look_up(FakeRequest("finds a block to read as a test", prompt(5, start=50))) == (0, False)
    rig.step()
    assert rig.look_up(waiting) == (12, True)
    meta = rig.load(waiting)
    assert (len(meta.loads), meta.broken_loads) == (1, {})


def busy_step() -> ScheduledStep:
    return ScheduledStep({"another": 1})


def test_only_a_step_without_tokens_waits_and_only_for_waiting_requests() -> None:
    rig = TieredRig()
    rig.put_below(prompt(8))
    rig.manager.waits.clear()
    rig.half.build_connector_meta(busy_step())
    assert rig.manager.waits == []
    rig.step()
    assert rig.manager.waits == [pytest.approx(0.002)]


@pytest.mark.parametrize("deadline_s", [0.0, 1.0])
def test_at_its_deadline_a_request_still_gets_what_the_host_has(deadline_s: float) -> None:
    rig = TieredRig()
    rig.put_below(prompt(16))
    rig.store(prompt(8))
    rig.step()
    rig.half.lookups.deadline_s = deadline_s
    request = FakeRequest("r", prompt(17))
    with rig.manager.executor.hold():
        for _ in range(3):
            found = rig.look_up(request)
            rig.half.build_connector_meta(busy_step())
            rig.clock.now += 0.9 * deadline_s
    assert found == (8, True)


def test_a_full_engine_does_not_use_up_the_deadline_of_the_disk() -> None:
    rig = TieredRig(num_host_blocks=96)
    rig.put_below(prompt(160))
    request = FakeRequest("r", prompt(161))
    rig.look_up(request)
    rig.clock.now += 0.002
    rig.arrive()
    for second in range(3):
        rig.store(prompt(96 * TOKENS // 2, start=10_000 * (second + 1)), f"other{second}")
        rig.clock.now += 1.0
        rig.step()
        assert rig.look_up(request) == (160, True), "and no room on the device"
    assert len(rig.load(request).loads) == 1
    assert rig.half.records[-1].disk_tokens == 160


def test_a_request_waits_a_limited_number_of_times() -> None:
    rig, request = with_blocks_below()
    answers = []
    with rig.manager.executor.hold():
        for _ in range(20):
            answers.append(rig.look_up(request)[0])
            rig.half.jobs.changes.contents += 1
            rig.clock.now += 0.5
            rig.step()
    assert answers.count(None) <= 3 * MAX_WAITS_PER_REQUEST
    assert answers[-8:] == [0] * 8
    rig.start(request)
    assert rig.manager.num_promotions == 0


def test_an_idle_engine_steps_until_a_long_prompt_is_on_disk() -> None:
    rig = TieredRig(num_host_blocks=64)
    rig.store(prompt(40 * TOKENS))
    steps = 0
    while rig.half.has_pending_work() or rig.manager.has_transfers:
        rig.step()
        rig.manager.executor.drain()
        steps += 1
        assert steps < 20
    rig.step()
    assert (rig.manager.tier.contains(rig.keys(prompt(40 * TOKENS))) == LookupState.HIT).all()


def test_decoded_blocks_are_written_when_their_request_ends() -> None:
    rig = TieredRig(num_host_blocks=64)
    rig.store(prompt(20))
    request = FakeRequest("r", prompt(18))
    ids = rig.new_blocks(7)
    rig.start(request, ids, num_tokens=18)
    for token in range(900, 908):
        request.tokens.append(token)
        rig.report(*rig.step({request: 1}).stores)
    keys = rig.keys(request.tokens[:24])
    rig.half.request_finished(request)
    for _ in range(3):
        rig.report(*rig.step().stores)
        rig.manager.executor.drain()
    assert (rig.manager.tier.contains(keys) == LookupState.HIT).all()


@pytest.mark.parametrize("ending", ["finished", "declined", "loaded"])
def test_nothing_is_kept_for_a_request_that_does_not_wait_any_more(ending: str) -> None:
    rig, request = with_blocks_below()
    rig.look_up(request)
    rig.arrive()
    assert arrived(rig.manager, ReqContext("r")) == {"memory": 2}
    if ending == "finished":
        rig.half.request_finished(request)
    elif ending == "declined":
        rig.start(request)
    else:
        rig.report(*rig.load(request).loads)
    assert arrived(rig.manager, ReqContext("r")) == {}
    assert rig.manager.host.num_available_blocks == rig.manager.most_blocks()


def test_windows_are_promoted_after_the_blocks_before_them() -> None:
    clock = Clock()
    groups = [KVGroup(TOKENS), KVGroup(TOKENS, sliding_window=TOKENS + 1)]
    manager = SpyManager(32, clock, groups)
    rig = Rig(manager=manager, clock=clock)
    half = make_half(manager, groups=groups, clock=clock)
    keys = [key[:-1] + bytes([g]) for key in rig.keys(prompt(12)) for g in range(2)]
    manager.prepare_store(keys)
    manager.complete_store(keys)
    manager.end_chain(keys, [])
    for _ in range(2):
        manager.executor.drain()
        manager.poll()
    manager.host.reset()
    request = FakeRequest("r", prompt(13))
    for _ in range(3):
        answer = half.get_num_new_matched_tokens(request, 0)
        half.build_connector_meta(busy_step())
        manager.executor.drain()
        half.build_connector_meta(busy_step())
    assert answer == (12, True)
    promoted = half.metrics.snapshot()["promoted_blocks"]
    assert promoted == 4, "three blocks of the one group, and of the other what the next token looks at"


def test_the_manager_learns_how_fast_the_engine_computes() -> None:
    rig = TieredRig(num_host_blocks=64)
    request = FakeRequest("r", prompt(100))
    ids = rig.new_blocks(26)
    rig.start(request, ids, num_tokens=60)
    rig.clock.now += 1.0
    rig.step({request: 40})
    rig.clock.now += 0.5
    request.tokens.append(0)
    rig.step({request: 1})
    rig.step({request: 1})
    assert rig.manager.prefills == [(100, pytest.approx(1.5))]


def test_loaded_and_short_prompts_are_not_measured() -> None:
    rig = TieredRig(num_host_blocks=64)
    rig.store(prompt(80))
    rig.manager.prefills.clear()
    request = FakeRequest("r", prompt(81))
    rig.report(*rig.load(request).loads)
    short = FakeRequest("short", prompt(20, start=500))
    rig.start(short)
    for _ in range(3):
        for each in (request, short):
            each.tokens.append(0)
        rig.step({request: 1, short: 1})
    assert rig.manager.prefills == []


def test_has_pending_work_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieredRig()
    monkeypatch.setattr(type(rig.manager), "has_pending_writes", property(lambda manager: 1 // 0))
    assert not rig.half.has_pending_work()
    assert rig.half.off


def test_shutting_down_closes_the_tiers_even_when_offloading_is_off() -> None:
    rig = TieredRig()
    rig.half.switch_off("a test")
    rig.half.shutdown()
    assert rig.manager.tier.stats().used_bytes == 0
    rig.half.shutdown()


# Requests in the engine's queue: what a lower tier holds of them is read before they are looked up.


def tiered(num_prompts: int = 1) -> TieredRig:
    rig = TieredRig(64)
    for i in range(num_prompts):
        rig.put_below(prompt(9, start=1000 * i))
    return rig


def steps(rig: TieredRig, n: int = 4) -> None:
    for _ in range(n):
        rig.clock.now += 0.01
        rig.arrive()


def queued(rig: Rig) -> int:
    """How many requests of the engine's queue are noted."""
    return len(rig.half.queued.new) + len(rig.half.queued.expected)


def test_what_a_queued_request_needs_is_in_the_host_when_it_is_looked_up() -> None:
    rig = tiered()
    request = FakeRequest("r", prompt(9))
    rig.half.on_new_request(request)
    steps(rig)
    assert rig.look_up(request) == (8, True), "at once"
    rig.load(request)
    record, counts = rig.half.records[-1], rig.half.metrics.snapshot()
    assert (record.host_tokens, record.disk_tokens) == (8, 0)
    assert (counts["prefetched_blocks"], counts["prefetched_used_blocks"]) == (2, 2)
    assert queued(rig) == len(rig.manager.prefetcher.expected) == len(rig.manager.prefetcher.held) == 0


def test_a_request_that_is_looked_up_at_once_is_not_read_ahead() -> None:
    rig = tiered()
    request = FakeRequest("r", prompt(9))
    rig.half.on_new_request(request)
    assert rig.look_up(request) == (None, False)
    steps(rig)
    assert rig.look_up(request) == (8, True)
    rig.load(request)
    assert rig.half.records[-1].disk_tokens == 8
    assert "prefetched_blocks" not in rig.half.metrics.snapshot()


@pytest.mark.parametrize("params", [{"load": False}, {"max_tokens": 3}])
def test_what_a_request_may_not_load_is_not_read(params: dict[str, object]) -> None:
    rig = tiered()
    rig.half.on_new_request(FakeRequest("r", prompt(9), {"kvoffload": params}))
    steps(rig)
    assert "prefetched_blocks" not in rig.half.metrics.snapshot()


def test_a_request_that_ends_in_the_queue_leaves_nothing() -> None:
    rig = tiered(2)
    ended, aborted = FakeRequest("r0", prompt(9)), FakeRequest("r1", prompt(9, start=1000))
    rig.half.on_new_request(ended)
    rig.half.request_finished(ended)
    rig.half.on_new_request(aborted)
    steps(rig)
    rig.half.request_finished(aborted)
    assert queued(rig) == len(rig.half.requests) == len(rig.manager.prefetcher.expected) == 0
    rig.clock.now += QUEUED_S + 1
    steps(rig, 1)
    assert not rig.manager.prefetcher.held
    rig.manager.check_integrity()


def test_a_name_that_is_used_again_stands_for_the_new_request() -> None:
    rig = tiered()
    for i in range(queue.NEW_PER_STEP - 1):
        rig.half.on_new_request(FakeRequest(f"o{i}", prompt(9, start=1000 * i + 2000)))
    ended, new = FakeRequest("r", prompt(9)), FakeRequest("r", prompt(9, start=500))
    rig.half.on_new_request(ended)
    rig.half.request_finished(ended)
    rig.half.on_new_request(new)
    steps(rig)
    assert rig.look_up(new) == (0, False)
    assert rig.half.requests["r"].request is new


def test_the_queue_and_the_work_per_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_QUEUED", 10)
    rig = tiered(10)
    for i in range(100):
        rig.half.on_new_request(FakeRequest(f"r{i}", prompt(9, start=1000 * i)))
    assert queued(rig) == 10
    rig.step()
    assert len(rig.manager.prefetcher.expected) == queue.NEW_PER_STEP
    rig.half.switch_off("a test")
    assert queued(rig) == 0


def test_without_tiers_and_with_adapters_nothing_is_noted() -> None:
    rig = Rig()
    rig.half.on_new_request(FakeRequest("r", prompt(9)))
    assert queued(rig) == 0
    adapter = Adapter(1, b"1")
    with_adapter = TieredRig(adapter_of=lambda request: adapter)
    with_adapter.half.on_new_request(FakeRequest("r", prompt(9)))
    with_adapter.step()
    assert not with_adapter.manager.prefetcher.expected
