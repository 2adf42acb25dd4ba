"""Requests in the engine's queue: what a lower tier holds of them is read before they are looked up."""

from __future__ import annotations

import pytest

from kvoffload.connector import request as queue
from kvoffload.connector.adapters import Adapter
from kvoffload.tiering.prefetch import QUEUED_S
from tests.connector.rig import FakeRequest, Rig, prompt
from tests.connector.test_tiered_scheduler import TieredRig


def tiered(num_prompts: int = 1) -> TieredRig:
    rig = TieredRig(64)
    for i in range(num_prompts):
        rig.put_below(prompt(9, start=1000 * i))
    return rig


def steps(rig: TieredRig, n: int = 4) -> None:
    for _ in range(n):
        rig.clock.now += 0.01
        rig.arrive()


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
    assert (
        len(rig.half.queued.requests) == len(rig.manager.prefetcher.expected) == len(rig.manager.prefetcher.held) == 0
    )


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
    assert len(rig.half.queued.requests) == len(rig.half.requests) == len(rig.manager.prefetcher.expected) == 0
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
    assert len(rig.half.queued.requests) == 10
    rig.step()
    assert len(rig.manager.prefetcher.expected) == queue.NEW_PER_STEP
    rig.half.switch_off("a test")
    assert len(rig.half.queued.requests) == 0


def test_without_tiers_and_with_adapters_nothing_is_noted() -> None:
    rig = Rig()
    rig.half.on_new_request(FakeRequest("r", prompt(9)))
    assert len(rig.half.queued.requests) == 0
    adapter = Adapter(1, b"1")
    with_adapter = TieredRig(adapter_of=lambda request: adapter)
    with_adapter.half.on_new_request(FakeRequest("r", prompt(9)))
    with_adapter.step()
    assert not with_adapter.manager.prefetcher.expected
