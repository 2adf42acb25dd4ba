"""Loads: what is pinned and copied, and what becomes of promises that cannot be kept."""

from __future__ import annotations

import pytest

from tests.connector.rig import REMOTE_DECODE, FakeRequest, Rig, device_ids, only, prompt


def test_the_engine_may_take_less_than_it_was_offered() -> None:
    rig = Rig(factor=2)
    rig.store(prompt(32))
    request = FakeRequest("r", prompt(40))
    assert rig.look_up(request) == (32, True)
    rig.allocate(request, [50, 51, 52, 53, 54], 20)
    _, spec = only(rig.step().loads)
    assert device_ids(spec) == [50, 51, 52, 53, 54]
    assert len(spec.host.slots) == 3
    assert rig.status(prompt(32)) == [1, 1, 1, 0]


def test_zero_external_tokens_decline_the_offer() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.allocate(request, [50, 51, 52], 0)
    meta = rig.step({request: 9}, new={"r": [50, 51, 52]})
    assert not meta.loads
    assert not meta.broken_loads
    assert rig.status(prompt(8)) == [0, 0]
    assert not rig.half.has_pending_work()


@pytest.mark.parametrize("is_pause", [False, True])
def test_a_load_that_no_step_has_sent_before_a_reset_fails(is_pause: bool) -> None:
    rig = Rig(num_workers=2)
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.allocate(request, [50, 51], 8)
    rig.half.reset(is_pause=is_pause)
    assert rig.status(prompt(8)) == ([0, 0] if is_pause else [None, None]), "nothing is pinned"
    assert rig.half.has_pending_work()
    meta = rig.step()
    assert not meta.loads, "workers would take it for a load that began after the reset"
    assert meta.broken_loads == {"r": [50, 51]}
    assert not rig.half.jobs.jobs
    assert rig.half.metrics.snapshot()["load_failures"] == 1


def test_nothing_is_stored_for_a_request_while_it_is_loading() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(16))
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    assert not rig.step({request: 0}, new={"r": [50, 51]}).stores
    rig.report(job)
    _, spec = only(rig.step({request: 8}, new={"r": [50, 51, 52, 53]}).stores)
    assert device_ids(spec) == [52, 53]


def test_a_loaded_prefix_is_not_stored_again() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(12))
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    rig.report(job)
    rig.manager.asked_stores.clear()
    rig.step({request: 4}, new={"r": [50, 51, 52]})
    assert rig.manager.asked_stores == [rig.keys(prompt(12))[2:]]


def test_a_loaded_prefix_is_stored_again_for_remote_decode() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(12), REMOTE_DECODE)
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    rig.report(job)
    rig.manager.asked_stores.clear()
    _, spec = only(rig.step({request: 4}, new={"r": [50, 51, 52]}).stores)
    assert rig.manager.asked_stores == [rig.keys(prompt(12))]
    assert device_ids(spec) == [52], "what is still there is not copied"


def test_a_failed_load_is_counted_and_its_request_never_loads_again() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    job, _ = only(rig.load(request).loads)
    rig.report(job, failed=True)
    request.num_computed_tokens = 0
    assert rig.look_up(request) == (0, False)
    assert rig.half.metrics.snapshot()["load_failures"] == 1
    assert "load_blocks" not in rig.half.metrics.snapshot()
    assert rig.status(prompt(8)) == [0, 0]
    assert rig.look_up(FakeRequest("other", prompt(9))) == (8, True)


def test_a_promise_that_cannot_be_kept_is_reported_as_broken() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.manager.reset()  # behind the connector's back
    rig.allocate(request, [50, 51], 8)
    assert rig.half.has_pending_work()
    meta = rig.step()
    assert not meta.loads
    assert meta.broken_loads == {"r": [50, 51]}
    assert not rig.half.off
    assert rig.look_up(request) == (0, False), "and it never loads again"
    assert rig.step().broken_loads == {}, "reported once"


def test_a_load_of_more_than_was_offered_is_reported_as_broken() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(13))
    assert rig.look_up(request) == (8, True)
    rig.allocate(request, [50, 51, 52], 12)
    meta = rig.step()
    assert not meta.loads
    assert set(meta.broken_loads) == {"r"}
