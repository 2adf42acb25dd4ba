"""The snapshot of the scheduler half."""

from __future__ import annotations

from kvoffload.connector.request import Phase, Storing
from tests.connector.rig import (
    FakeRequest,
    Rig,
    held,
    only,
    prompt,
)


def test_a_snapshot_shows_requests_and_jobs_and_does_not_change() -> None:
    rig = Rig(num_workers=2)
    rig.store(prompt(8), "writer")
    loader, waiting = FakeRequest("loader", prompt(9)), FakeRequest("waiting", prompt(4, start=50))
    load, _ = only(rig.load(loader, ids=[30, 31]).loads)
    rig.look_up(waiting)
    writer = FakeRequest("second writer", prompt(8, start=90))
    store, _ = only(rig.start(writer, [40, 41]).stores)
    rig.report(store)
    seen = rig.half.snapshot()
    assert {req_id: request.phase for req_id, request in seen.requests.items()} == {
        "loader": Phase.LOADING,
        "waiting": Phase.WAITING,
        "second writer": Phase.RUNNING,
    }
    assert seen.requests["second writer"].block_ids == ((40, 41),)
    assert seen.requests["second writer"].next_store == (2,)
    assert seen.requests["second writer"].num_jobs == 1
    assert seen.requests["second writer"].storing is Storing.ALLOWED
    assert set(seen.jobs) == {load, store}
    assert (seen.jobs[load].is_store, seen.jobs[load].num_pending, seen.jobs[load].num_blocks) == (False, 2, 2)
    assert (seen.jobs[store].is_store, seen.jobs[store].num_pending) == (True, 1)
    assert seen.jobs[store].device_blocks == {40, 41}
    assert seen.jobs[store].req_ids == ("second writer",)
    assert seen.keys_loading == dict.fromkeys(rig.keys(prompt(8)), 1)
    assert (seen.held, seen.num_resets, seen.off) == ((), 0, False)
    rig.half.reset()
    rig.report(load, times=2)
    rig.half.request_finished(writer)
    assert set(seen.jobs) == {load, store}, "it does not change any more"
    after = rig.half.snapshot()
    assert set(after.jobs) == {store}
    assert (after.keys_loading, after.num_resets) == ({}, 1)
    assert after.requests["loader"].storing is Storing.STALE


def test_a_snapshot_shows_requests_that_are_held() -> None:
    assert held()[0].half.snapshot().held == ("p",)
