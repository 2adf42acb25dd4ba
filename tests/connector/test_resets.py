"""Resets, new weights and sleeps: which blocks are forgotten, and which can be found again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.connector.messages import StepMeta, WorkerReport
from tests.connector.rig import TOKENS, FakeRequest, Rig, device_ids, only, prompt, rig_with


def test_a_worker_that_finds_changed_weights_has_all_blocks_forgotten_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_with(prompt(4), num_workers=2)
    store, _ = only(rig.start(FakeRequest("s", prompt(4, 50))).stores)
    assert rig.step().epoch == 0
    # The worker that noticed has carried this store out before; the other one has failed it.
    rig.half.update_connector_output(WorkerReport({store: 2}, {store}, changed_at=0))
    assert rig.status(prompt(4)) == rig.status(prompt(4, 50)) == [None]
    assert rig.half.metrics.snapshot()["weight_changes"] == 1
    assert "THE WEIGHTS HAVE CHANGED" in caplog.text
    assert "reset_prefix_cache(reset_connector=True)" in caplog.text
    assert "a store failed" not in caplog.text
    assert rig.step().epoch == 1
    rig.store(prompt(4))
    rig.half.update_connector_output(WorkerReport(changed_at=0))
    assert rig.status(prompt(4)) == [0], "the other worker noticed later what is known already"
    rig.half.update_connector_output(WorkerReport(changed_at=1))
    assert rig.status(prompt(4)) == [None]
    assert rig.step().epoch == 2
    rig.manager.check_integrity()


def go_on(rig: Rig, name: str, tokens: list[int], found: list[int], new: list[int]) -> StepMeta:
    """A request that finds blocks in the engine's own cache and computes the rest."""
    return rig.start(FakeRequest(name, tokens), [*found, *new], computed=len(found) * TOKENS)


def test_after_a_reset_nothing_is_stored_that_follows_old_blocks_of_the_engines_cache() -> None:
    """The engine's own cache may still hold KV of weights that are gone."""
    rig = Rig()
    rig.start(FakeRequest("before", prompt(4)), [1])
    rig.half.reset()
    assert not go_on(rig, "old", prompt(12), [1], [2, 3]).stores
    assert not go_on(rig, "older", prompt(16), [1, 2, 3], [4]).stores, "on blocks that follow old ones"
    new = FakeRequest("new", prompt(12, 50))
    assert device_ids(only(rig.start(new, [5, 6, 7]).stores)[1]) == [5, 6, 7]
    assert device_ids(only(go_on(rig, "newer", prompt(16, 50), [5, 6, 7], [8]).stores)[1]) == [8]
    # Blocks are handed out again.
    assert device_ids(only(rig.start(FakeRequest("reused", prompt(4, 70)), [2]).stores)[1]) == [2]
    assert device_ids(only(go_on(rig, "sound", prompt(8, 70), [2], [9]).stores)[1]) == [9]
    assert not go_on(rig, "spoiled", prompt(8), [1], [9]).stores
    assert not go_on(rig, "on spoiled", prompt(12), [9], [10, 11]).stores


def paused(**options: Any) -> Rig:
    """An engine that has stored two blocks and paused."""
    rig = rig_with(prompt(8), **options)
    rig.half.reset(is_pause=True)
    return rig


def asks_for_a_check(rig: Rig) -> tuple[FakeRequest, int]:
    """A request that waits, and the check that it waits for."""
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (None, False)
    check = rig.step().check_weights
    assert check is not None
    assert rig.step().check_weights is None
    assert rig.look_up(request) == (None, False)
    return request, check


def test_after_a_pause_with_the_same_weights_blocks_are_found_again() -> None:
    rig = paused(num_workers=2)
    assert rig.step().check_weights is None, "perhaps its weights have no memory"
    request, check = asks_for_a_check(rig)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(request) == (None, False)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(request) == (8, True)
    assert rig.load(request).loads
    rig.manager.check_integrity()


NOT_PAUSED: dict[str, Callable[[Rig], object]] = {
    "a reset": lambda rig: rig.half.reset(),
    "changed weights": lambda rig: rig.half.update_connector_output(WorkerReport(changed_at=1)),
    "the end": lambda rig: rig.half.shutdown(),
}


@pytest.mark.parametrize("event", NOT_PAUSED)
def test_what_a_pause_has_kept_may_be_dropped(event: str) -> None:
    rig = paused()
    rig.step()
    assert rig.manager.num_used_blocks == 2
    NOT_PAUSED[event](rig)
    assert rig.manager.num_used_blocks == 0
    assert rig.look_up(FakeRequest("r", prompt(9))) == (0, False)
    assert rig.step().check_weights is None
    assert not rig.half.off


@pytest.mark.parametrize("is_pause", [True, False])
def test_a_reset_during_a_check(is_pause: bool) -> None:
    """A worker that has other weights accepts them with its first tokens, so the next check would succeed."""
    rig = paused()
    _, check = asks_for_a_check(rig)
    rig.half.reset(is_pause)
    rig.half.update_connector_output(WorkerReport({check: 1}, {check}))
    assert rig.look_up(FakeRequest("s", prompt(9))) == (0, False)
    assert rig.manager.num_used_blocks == 0


def test_a_check_from_before_a_pause_proves_nothing() -> None:
    rig = paused()
    request, check = asks_for_a_check(rig)
    rig.half.reset(is_pause=True)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    again = asks_for_a_check(rig)[1]
    assert again != check
    rig.half.update_connector_output(WorkerReport({again: 1}))
    assert rig.look_up(request) == (8, True)


def test_a_step_that_computes_after_a_pause_checks_first() -> None:
    """Its tokens are the first that workers accept new weights for."""
    assert paused().step({FakeRequest("n", prompt(9)): 1}).check_weights is not None


def test_a_request_that_may_not_load_waits_for_no_check() -> None:
    rig = paused()
    request = FakeRequest("n", prompt(9), {"kvoffload": {"load": False}})
    assert rig.look_up(request) == (0, False)
    assert rig.step().check_weights is None
    assert rig.manager.num_used_blocks == 2


def test_a_request_that_waits_for_a_check_computes_at_the_deadline() -> None:
    """A check that comes late is of use to the next one."""
    rig = paused()
    request, check = asks_for_a_check(rig)
    rig.clock.now += 1
    assert rig.look_up(request) == (0, False)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(FakeRequest("s", prompt(9))) == (8, True)


def test_a_pause_is_no_wait_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with(prompt(8))
    load, _ = only(rig.load(FakeRequest("l", prompt(9))).loads)
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (None, False), "its blocks are being loaded for another"
    released: list[str] = []
    monkeypatch.setattr(rig.manager, "release_request", lambda context: released.append(context.req_id))
    rig.half.reset(is_pause=True)
    assert "r" in released, "it may wait for lower tiers as long as a new request"
    rig.report(load, failed=True)
    rig.clock.now += 60
    assert rig.look_up(request) == (None, False)
    check = rig.step().check_weights
    assert check is not None
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(request) == (8, True)


def test_stores_and_loads_under_way_fail_when_the_engine_pauses() -> None:
    rig = rig_with(prompt(8))
    request = FakeRequest("l", prompt(9))
    load, _ = only(rig.load(request).loads)
    store, _ = only(rig.start(FakeRequest("s", prompt(8, 50)), [10, 11]).stores)
    rig.half.reset(is_pause=True)
    rig.report(store)
    rig.report(load, failed=True)
    new, check = asks_for_a_check(rig)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(new) == (8, True)
    assert rig.look_up(FakeRequest("t", prompt(9, 50))) == (0, False)
    rig.manager.check_integrity()
