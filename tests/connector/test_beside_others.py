"""Beside other connectors that load into the same device blocks: what is stored of these, and when."""

from __future__ import annotations

import pytest

from kvoffload.connector.options import PARAM
from tests.connector.rig import REMOTE_DECODE, FakeRequest, Rig, only, prompt, rig_with

OTHERS = {"is_beside_others": True}


def store_in_flight(rig: Rig) -> tuple[int, FakeRequest]:
    """A request has computed device blocks 1 and 2 and ended; no worker has reported their store."""
    request = FakeRequest("w", prompt(8))
    job, _ = only(rig.start(request, [1, 2]).stores)
    rig.half.request_finished(request)
    return job, request


@pytest.mark.parametrize("beside_others", [True, False])
def test_a_store_reads_a_block_before_another_connector_can_write_to_it(beside_others: bool) -> None:
    """The request that waits for the other's load is in no step yet. Without the setting nothing is fenced."""
    rig = Rig(options={"is_beside_others": beside_others})
    job, _ = store_in_flight(rig)
    loading = FakeRequest("l", prompt(9, start=50))
    rig.look_up(loading)
    rig.allocate(loading, [2, 7, 8])
    meta = rig.step()
    assert (meta.fences, meta.fenced_blocks) == (([job], frozenset({2})) if beside_others else ([], frozenset()))


def test_blocks_that_the_device_held_before_are_not_fenced() -> None:
    rig = Rig(options=OTHERS)
    store_in_flight(rig)
    loading = FakeRequest("l", prompt(13))
    rig.look_up(loading, computed=8)
    rig.allocate(loading, [1, 2, 7])
    assert not rig.step().fences


def test_what_another_connector_has_loaded_is_stored_when_its_request_runs() -> None:
    """Not before: until then it may not have arrived."""
    rig = Rig(options=OTHERS)
    request = FakeRequest("l", prompt(9))
    rig.look_up(request)
    rig.allocate(request, [1, 2, 3])
    for _ in range(3):
        assert not rig.step().stores
    request.num_computed_tokens = 8
    rig.allocate(request, [1, 2, 3])
    job, spec = only(rig.step({request: 1}, new={"l": [1, 2, 3]}).stores)
    assert spec.device.block_ids.tolist() == [1, 2]
    rig.report(job)
    assert rig.status(prompt(8)) == [0, 0]


def test_after_a_reset_nothing_is_stored_of_what_another_connector_has_loaded() -> None:
    """It may be of weights that are gone, whatever was in the device blocks before."""
    rig = Rig(options=OTHERS)
    rig.half.reset()
    first = FakeRequest("first", prompt(8, start=50))
    rig.report(*rig.start(first, [1, 2]).stores)
    rig.half.request_finished(first)
    request = FakeRequest("l", prompt(9))
    rig.look_up(request)
    rig.allocate(request, [1, 2, 3])
    rig.step()
    request.num_computed_tokens = 8
    rig.allocate(request, [1, 2, 3])
    assert not rig.step({request: 1}, new={"l": [1, 2, 3]}).stores


def test_nothing_is_stored_of_a_request_that_ends_before_the_load_of_another_connector() -> None:
    rig = Rig(options=OTHERS)
    request = FakeRequest("l", prompt(9))
    rig.look_up(request)
    rig.allocate(request, [1, 2, 3])
    rig.step()
    request.num_computed_tokens = 8
    assert rig.half.request_finished(request) == (False, None)
    assert not rig.step().stores


def loaded_at_once(rig: Rig) -> tuple[int, FakeRequest]:
    """Another connector loads 8 tokens in the step that computes the next one. The job that stores these blocks."""
    request = FakeRequest("l", prompt(9))
    rig.look_up(request)
    rig.allocate(request, [1, 2, 3])
    request.num_computed_tokens = 8
    return only(rig.step({request: 1}, new={"l": [1, 2, 3]}).stores)[0], request


@pytest.mark.parametrize("failed", [{2, 3}, set()])
def test_nothing_is_kept_of_a_load_that_failed_in_the_step_that_computed_with_it(failed: set[int]) -> None:
    """With no failed block, the control, all is kept."""
    rig = Rig(options=OTHERS)
    job, request = loaded_at_once(rig)
    if failed:
        rig.half.loads_of_others_failed(failed)
        request.num_computed_tokens = 4
    rig.report(job)
    assert rig.status(prompt(8)) == ([None, None] if failed else [0, 0])
    if failed:
        assert not rig.step({request: 5}).stores, "its table may still hold wrong bytes"
        other = FakeRequest("o", prompt(13))
        assert not rig.start(other, [1, 2, 6, 7], computed=8, num_tokens=5).stores, (
            "computed with blocks that may be wrong"
        )
    rig.end(request)
    fresh = FakeRequest("f", prompt(8, start=80))
    assert rig.start(fresh, [1, 2]).stores, "blocks that are filled anew are sound"
    assert not rig.half.off


def test_a_failed_load_that_its_request_waits_for_concerns_no_other_request() -> None:
    rig = Rig(options=OTHERS)
    running = FakeRequest("r", prompt(8))
    rig.start(running, [1, 2], num_tokens=3)
    loading = FakeRequest("l", prompt(9, start=50))
    rig.look_up(loading)
    rig.allocate(loading, [4, 5, 6])
    rig.step({running: 1})
    rig.half.loads_of_others_failed({4, 5})
    assert rig.step({running: 4}).stores
    assert rig.half.sound.origins is None


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_request_whose_load_by_another_connector_failed_is_offered_no_other(has_failed: bool) -> None:
    """It has lost its device blocks, and may stand before requests that hold those which a load would need. The control
    has run, and is preempted."""
    rig = rig_with(prompt(8), options=OTHERS)
    request = FakeRequest("l", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.allocate(request, [1, 2, 3])
    if not has_failed:
        rig.step({request: 1}, new={"l": [1, 2, 3]})
        rig.step(preempted=["l"])
    assert rig.look_up(request) == ((0, False) if has_failed else (8, True))
    rig.allocate(request, [4, 5, 6])
    rig.step({request: 9}, new={"l": [4, 5, 6]})
    assert not rig.half.off


def test_a_remote_decode_is_meant_for_the_other_connector() -> None:
    """Two answers would clash in vLLM."""
    rig = Rig(options=OTHERS)
    request = FakeRequest("p", prompt(8), REMOTE_DECODE)
    rig.start(request, [1, 2])
    assert rig.half.request_finished(request) == (False, None)


def test_the_options_of_a_client_go_on_with_a_remote_decode() -> None:
    """Routers send the answer to the second server in place of what the client has sent: without its tenant the KV
    would be found by all, and without ``store`` it would be kept."""
    options = {"tenant": "a", "store": False, "max_tokens": 4, "handover": {}, "unknown": 1}
    rig = Rig(options=OTHERS)
    request = FakeRequest("p", prompt(8), {**REMOTE_DECODE, PARAM: options})
    rig.start(request, [1, 2])
    passed_on = {"tenant": "a", "store": False, "max_tokens": 4}
    assert rig.half.request_finished(request) == (False, {PARAM: passed_on})
    second = FakeRequest("d", prompt(8), {PARAM: passed_on})
    rig.start(second, [3, 4])
    (state,) = rig.half.requests.values()
    assert (state.options.tenant, state.options.store, state.options.max_tokens) == ("a", False, 4)
    assert not state.options.ignored
