"""What a request is offered, whether it waits, and how long the answer is remembered."""

from __future__ import annotations

import pytest

from kvoffload.abc import KVGroup
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from tests.connector.rig import REMOTE_DECODE, FakeRequest, Rig, device_ids, make_half, offered, only, prompt, rig_with


@pytest.mark.parametrize(("asked", "offered"), [(3, 0), (4, 0), (5, 4), (8, 7), (9, 8), (11, 8), (12, 8), (30, 8)])
def test_whole_blocks_are_offered_and_one_token_is_left_to_compute(asked: int, offered: int) -> None:
    rig = Rig()
    rig.store(prompt(10))  # two whole blocks
    assert rig.look_up(FakeRequest("r", prompt(asked))) == (offered, offered > 0)


def test_a_prompt_of_one_token_is_computed_although_its_block_is_stored() -> None:
    manager = LRUOffloadingManager(HostBackend(1, 4))
    half = make_half(manager, groups=[KVGroup(1)])
    request = FakeRequest("r", [7], hash_tokens=1)
    half.get_num_new_matched_tokens(request, 0)
    manager.prepare_store([make_offload_key(request.block_hashes[0], 0)])
    manager.complete_store([make_offload_key(request.block_hashes[0], 0)])
    assert half.get_num_new_matched_tokens(FakeRequest("s", [7], hash_tokens=1), 0) == (0, False)
    assert half.get_num_new_matched_tokens(FakeRequest("t", [7, 8], hash_tokens=1), 0) == (1, True)


@pytest.mark.parametrize(("computed", "offered"), [(0, 32), (4, 28), (12, 20), (16, 16), (20, 0), (28, 0), (32, 0)])
def test_a_device_hit_may_end_inside_a_block_but_less_than_a_block_is_not_offered(computed: int, offered: int) -> None:
    rig = rig_with(prompt(32), factor=4)
    assert rig.look_up(FakeRequest("r", prompt(50)), computed) == (offered, offered > 0)
    assert rig.manager.lookups[-1] == rig.keys(prompt(50))[computed // 16 :], "looked up whole"


@pytest.mark.parametrize(("asked", "computed", "offered"), [(12, 8, 0), (13, 8, 4), (12, 4, 7)])
def test_less_than_a_device_block_is_computed_at_once(asked: int, computed: int, offered: int) -> None:
    """A load takes a step of its own, and a whole prompt's last token is always computed."""
    rig = rig_with(prompt(12))
    rig.manager.unknown = offered == 0
    request = FakeRequest("r", prompt(asked))
    assert rig.look_up(request, computed) == (offered, offered > 0), "no tier is waited for either"
    rig.allocate(request, rig.new_blocks(3), offered)
    assert len(rig.step().loads) == (offered > 0)
    assert rig.half.records[-1].reason is None, "it has missed nothing"


def test_a_request_does_not_wait_for_the_load_of_what_it_computes_in_a_step() -> None:
    rig = rig_with(prompt(8))
    rig.load(FakeRequest("first", prompt(9)))
    assert rig.look_up(FakeRequest("second", prompt(8)), computed=4) == (0, False)
    assert rig.look_up(FakeRequest("third", prompt(9)), computed=4) == (None, False)


def test_an_unknown_answer_waits_at_most_for_the_deadline() -> None:
    rig = rig_with(prompt(8))
    rig.manager.unknown = True
    request = FakeRequest("r", prompt(9))
    for now in (100.0, 100.5, 100.999):
        rig.clock.now = now
        assert rig.look_up(request) == (None, False)
    rig.clock.now = 101.0
    assert rig.look_up(request) == (0, False)
    rig.clock.now = 105.0
    assert rig.look_up(request) == (0, False), "it does not wait twice"


def test_a_request_waits_for_blocks_that_another_loads_and_shares_them() -> None:
    rig = rig_with(prompt(8))
    first, second = FakeRequest("first", prompt(9)), FakeRequest("second", prompt(12))
    job, _ = only(rig.load(first).loads)
    assert rig.look_up(second) == (None, False)
    rig.report(job)
    assert rig.look_up(second, computed=8) == (0, False), "it finds them on the device"


def test_after_the_deadline_a_request_loads_its_own_copy() -> None:
    rig = rig_with(prompt(8))
    job, _ = only(rig.load(FakeRequest("first", prompt(9))).loads)
    second = FakeRequest("second", prompt(9))
    assert rig.look_up(second) == (None, False)
    rig.clock.now += 0.999
    assert rig.look_up(second) == (None, False)
    rig.clock.now += 0.002
    other_job, spec = only(rig.load(second, ids=[70, 71]).loads)
    assert device_ids(spec) == [70, 71]
    assert rig.status(prompt(8)) == [2, 2]
    rig.report(job)
    third = FakeRequest("third", prompt(9))
    assert rig.look_up(third) == (None, False), "the second copy is still being loaded"
    rig.report(other_job)
    assert rig.look_up(third) == (8, True)


def test_without_shared_loads_no_request_waits_for_the_load_of_another() -> None:
    rig = rig_with(prompt(8), options={"share_loads": False})
    rig.load(FakeRequest("first", prompt(9)))
    assert rig.look_up(FakeRequest("second", prompt(9))) == (8, True)


def test_a_request_is_one_use_of_its_blocks_however_often_it_is_looked_up() -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(12))
    for computed in (0, 4, 0):
        rig.look_up(request, computed)
    assert len(rig.manager.lookups) == 3
    rig.allocate(request, [1, 2, 3])
    rig.step({request: 8}, new={"r": [1, 2, 3]})
    rig.step(preempted=["r"])
    request.num_computed_tokens = 0
    rig.start(request, [4, 5, 6], num_tokens=12)
    rig.step({request: 0})
    rig.end(request)
    assert rig.manager.touches == [rig.keys(prompt(12))]


def test_a_lookup_is_remembered_until_something_changes() -> None:
    rig = rig_with(prompt(8))
    request = FakeRequest("r", prompt(13))
    rig.manager.lookups.clear()
    assert [rig.look_up(request) for _ in range(5)] == [(8, True)] * 5
    assert len(rig.manager.lookups) == 1
    assert rig.look_up(request, computed=4) == (4, True), "the device holds more now"
    assert len(rig.manager.lookups) == 2
    rig.store(prompt(13), "writer of one more block")
    assert rig.look_up(request, computed=4) == (8, True)


def test_a_request_that_waits_is_looked_up_again_only_when_a_load_ends() -> None:
    rig = rig_with(prompt(8))
    job, _ = only(rig.load(FakeRequest("first", prompt(12))).loads)
    waiting = FakeRequest("waiting", prompt(12))
    assert rig.look_up(waiting) == (None, False)
    rig.report(*rig.start(FakeRequest("other", prompt(8, start=90))).stores)
    lookups = len(rig.manager.lookups)
    assert rig.look_up(waiting) == (None, False)
    assert len(rig.manager.lookups) == lookups
    rig.report(job)
    assert rig.look_up(waiting) == (8, True)


# Loads: what is pinned and copied, and what becomes of promises that cannot be kept.


def test_the_engine_may_take_less_than_it_was_offered() -> None:
    rig = rig_with(prompt(32), factor=2)
    request = FakeRequest("r", prompt(40))
    assert rig.look_up(request) == (32, True)
    rig.allocate(request, [50, 51, 52, 53, 54], 20)
    _, spec = only(rig.step().loads)
    assert device_ids(spec) == [50, 51, 52, 53, 54]
    assert len(spec.host.slots) == 3
    assert rig.status(prompt(32)) == [1, 1, 1, 0]


def test_zero_external_tokens_decline_the_offer() -> None:
    rig, request = offered(9)
    rig.allocate(request, [50, 51, 52], 0)
    meta = rig.step({request: 9}, new={"r": [50, 51, 52]})
    assert not meta.loads
    assert not meta.broken_loads
    assert rig.status(prompt(8)) == [0, 0]
    assert not rig.half.has_pending_work()


@pytest.mark.parametrize("is_pause", [False, True])
def test_a_load_that_no_step_has_sent_before_a_reset_fails(is_pause: bool) -> None:
    rig, request = offered(9, num_workers=2)
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
    rig = rig_with(prompt(8))
    request = FakeRequest("r", prompt(16))
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    assert not rig.step({request: 0}, new={"r": [50, 51]}).stores
    rig.report(job)
    _, spec = only(rig.step({request: 8}, new={"r": [50, 51, 52, 53]}).stores)
    assert device_ids(spec) == [52, 53]


def test_a_loaded_prefix_is_not_stored_again() -> None:
    rig = rig_with(prompt(8))
    request = FakeRequest("r", prompt(12))
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    rig.report(job)
    rig.manager.asked_stores.clear()
    rig.step({request: 4}, new={"r": [50, 51, 52]})
    assert rig.manager.asked_stores == [rig.keys(prompt(12))[2:]]


def test_a_loaded_prefix_is_stored_again_for_remote_decode() -> None:
    rig = rig_with(prompt(8))
    request = FakeRequest("r", prompt(12), REMOTE_DECODE)
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    rig.report(job)
    rig.manager.asked_stores.clear()
    _, spec = only(rig.step({request: 4}, new={"r": [50, 51, 52]}).stores)
    assert rig.manager.asked_stores == [rig.keys(prompt(12))]
    assert device_ids(spec) == [52], "what is still there is not copied"


def test_a_failed_load_is_counted_and_its_request_never_loads_again() -> None:
    rig = rig_with(prompt(8))
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
    rig, request = offered(9)
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
    rig, request = offered(13)
    rig.allocate(request, [50, 51, 52], 12)
    meta = rig.step()
    assert not meta.loads
    assert set(meta.broken_loads) == {"r"}
