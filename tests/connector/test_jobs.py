"""Jobs in progress: fences, reports of several workers, and requests that are held until their stores have ended."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.abc import ScheduledStep
from tests.connector.rig import REMOTE_DECODE, FakeRequest, Rig, held, in_flight, only, prompt


def test_a_report_of_another_schedulers_job_is_ignored() -> None:
    """Two of one process, as when an engine makes a second one: a report of the first one's job says nothing of the
    second one's blocks."""
    first, second = Rig(), Rig()
    (job_id,) = first.start(FakeRequest("a", prompt(4))).stores
    assert job_id not in second.start(FakeRequest("b", prompt(4))).stores
    second.report(job_id)
    assert second.status(prompt(4)) == [-1]
    assert not second.half.off


def test_a_fence_names_the_blocks_that_were_handed_out_and_no_others() -> None:
    rig, job, _ = in_flight()
    new = FakeRequest("n", prompt(8, start=90))
    meta = rig.start(new, [2, 30], num_tokens=8)
    assert (meta.fences, meta.fenced_blocks) == ([job], frozenset({2})), (
        "30 is read by no store, and 1 was not handed out"
    )


def test_a_load_waits_for_the_store_that_reads_its_block_and_the_step_does_not() -> None:
    rig, job, _ = in_flight()
    meta = rig.load(FakeRequest("l", prompt(9, start=50)), ids=[1, 20])
    (load,) = meta.loads
    assert (meta.fences, meta.load_after) == ([], {load: [job]})


def test_a_preempted_request_stores_nothing_from_blocks_that_it_lost() -> None:
    rig = Rig()
    request = FakeRequest("w", prompt(3))
    rig.start(request, [1])
    rig.step({request: 1})
    request.tokens.append(99)
    assert not rig.step(preempted=["w"]).stores
    rig.half.request_finished(request)
    assert not rig.step().stores


def test_a_store_is_fenced_only_if_its_blocks_are_handed_out_again() -> None:
    rig, job, request = in_flight()
    other = FakeRequest("o", prompt(8, start=90))
    rig.look_up(other)
    rig.allocate(other, [20])
    request.tokens += [1, 2]
    assert rig.step({request: 2, other: 4}, new={"o": [20]}, more={"w": [3]}).fences == []
    rig.half.request_finished(request)
    assert rig.step({other: 1}, more={"o": [21]}).fences == [], "freed, but not handed out again"
    rig.report(job)
    assert rig.step({other: 3}, more={"o": [1, 2]}).fences == [], "the store has ended"


def test_a_block_shared_through_the_device_prefix_cache_was_not_handed_out_again() -> None:
    rig, _, _ = in_flight()
    sharer = FakeRequest("s", prompt(12), num_computed_tokens=8)
    assert rig.start(sharer, [1, 2, 20], computed=8, num_tokens=4).fences == []


def test_a_finished_request_may_be_freed_at_once() -> None:
    rig, job, request = in_flight()
    assert rig.half.request_finished(request) == (False, None)
    assert rig.half.request_finished(request) == (False, None), "nor does it matter twice"
    assert rig.half.has_pending_work(), "its store is in progress"
    rig.report(job)
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_remote_decode_keeps_the_blocks_until_they_are_stored_and_releases_once() -> None:
    rig, job = held()
    assert rig.step().releases == []
    rig.report(job)
    assert rig.step().releases == []
    assert rig.half.has_pending_work()
    rig.report(job)
    assert rig.half.has_pending_work(), "the release must still be reported"
    assert rig.step().releases == ["p"]
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_remote_decode_releases_once_when_its_deadline_is_over() -> None:
    rig, job = held()
    rig.clock.now += 0.999
    assert rig.step().releases == []
    assert rig.half.has_pending_work()
    rig.clock.now += 0.002
    assert rig.step().releases == ["p"]
    rig.report(job, times=2)
    rig.clock.now += 10
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_remote_decode_stores_the_last_block_before_it_releases() -> None:
    rig = Rig()
    request = FakeRequest("p", prompt(3), REMOTE_DECODE)
    rig.start(request, [1])
    rig.step({request: 1})
    request.tokens.append(99)
    assert rig.half.request_finished(request)[0] is True
    meta = rig.step()
    assert meta.releases == []
    rig.report(only(meta.stores)[0])
    assert rig.step().releases == ["p"]


def test_a_worker_that_reports_too_often_switches_offloading_off() -> None:
    rig = Rig(num_workers=2)
    job, _ = only(rig.start(FakeRequest("w", prompt(4))).stores)
    rig.report(job, times=3)
    assert rig.half.off
    assert rig.half.metrics.snapshot()["off"] == 1


@pytest.mark.parametrize("when", ["overwritten", "written"])
def test_a_block_that_is_overwritten_before_a_fence_can_hold_is_not_stored(when: str) -> None:
    """The engine zeroes a block for its next owner before it tells the workers of the step: their copies may hold
    zeros, and they cannot know. If it zeroes the block after that, the fence holds."""
    rig = Rig()
    running, finished = FakeRequest("r", prompt(8)), FakeRequest("f", prompt(8, start=100))
    for request, blocks in ((running, [1, 2]), (finished, [3, 4])):
        rig.look_up(request)
        rig.allocate(request, blocks)
    meta = rig.step({running: 8, finished: 4}, new={"r": [1, 2], "f": [3, 4]})
    rig.half.request_finished(finished)
    blocks_of: dict[str, Any] = {when: {2, 4}}
    step = ScheduledStep({}, {"other": ([4],)}, frozenset({"other"}), **blocks_of)
    last = rig.half.build_connector_meta(step)
    assert last.fenced_blocks == frozenset({2} if when == "written" else ())
    for job in [*meta.stores, *last.stores]:
        rig.report(job)
    is_stored = when == "written"
    assert rig.look_up(FakeRequest("again", prompt(9)))[0] == (8 if is_stored else 0), "the job that read block 2"
    assert rig.look_up(FakeRequest("f again", prompt(9, start=100)))[0] == 4
    assert not rig.half.off
