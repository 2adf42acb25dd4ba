"""The scheduler half as a whole: nothing raises into the engine, whatever fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvoffload.connector.messages import StepMeta
from tests.connector.rig import FakeRequest, Rig, device_ids, held, only, prompt, rig_with


def look_up_and_allocate(rig: Rig, request: FakeRequest, device_blocks: list[int], external: int) -> None:
    rig.look_up(request)
    rig.allocate(request, device_blocks, external)


def broken(*args: object) -> None:
    raise ZeroDivisionError("a bug")


BREAKABLE: dict[str, Callable[[Rig, FakeRequest], object]] = {
    "lookup": lambda rig, request: rig.look_up(request),
    "touch": lambda rig, request: rig.look_up(request),
    "prepare_load": lambda rig, request: look_up_and_allocate(rig, request, [50, 51], 8),
    "explain_miss": lambda rig, request: rig.load(FakeRequest("r", prompt(13))),
    "prepare_store": lambda rig, request: (rig.look_up(request), rig.start(FakeRequest("s", prompt(4, 70)))),
    "complete_store": lambda rig, request: rig.store(prompt(4, 70), "s"),
    "complete_load": lambda rig, request: rig.report(*rig.load(request).loads),
    "take_events": lambda rig, request: list(rig.half.take_events()),
    "reset": lambda rig, request: rig.half.reset(),
}


@pytest.mark.parametrize("method", BREAKABLE)
def test_an_error_in_the_manager_switches_offloading_off_loudly(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_with(prompt(8))
    assert rig.half.metrics.snapshot()["off"] == 0

    monkeypatch.setattr(rig.manager, method, broken)
    BREAKABLE[method](rig, FakeRequest("r", prompt(10)))
    assert rig.half.off
    assert rig.half.metrics.snapshot()["off"] == 1
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(loud) == 1
    assert "OFFLOADING IS OFF" in loud[0].getMessage()
    assert loud[0].exc_info
    # From here on every call answers, and nothing is offered or stored, whatever the manager does.
    request = FakeRequest("after", prompt(10))
    assert rig.look_up(request) == (0, False)
    rig.allocate(request, [60, 61, 62], 0)
    meta = rig.step({request: 10}, new={"after": [60, 61, 62]})
    assert (meta.loads, meta.stores, meta.fences) == ({}, {}, [])
    rig.report(0, 1, 2)
    assert rig.half.request_finished(request) == (False, None)
    rig.half.reset()
    assert list(rig.half.take_events()) == []
    rig.step()
    assert not rig.half.has_pending_work()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


class Unreadable:
    """Raises whatever is read of it."""

    def __getattr__(self, name: str) -> object:
        raise ZeroDivisionError("a bug")


def test_what_answers_instead_does_not_raise_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A promised load is reported as failed although neither the manager nor the engine can be asked any more."""
    rig = rig_with(prompt(8))
    request, unknown = FakeRequest("r", prompt(10)), FakeRequest("unknown", prompt(10))
    assert rig.look_up(request) == (8, True)

    for method in ("prepare_load", "release_request", "poll"):
        monkeypatch.setattr(rig.manager, method, broken)
    rig.half.queued.engine = replace(rig.half.queued.engine, engine_options=broken)  # type: ignore[arg-type]
    rig.allocate(request, [50, 51], 8)
    rig.half.update_state_after_alloc(unknown, Unreadable(), 8)  # type: ignore[arg-type]
    assert rig.half.off
    assert rig.look_up(request) == (0, False)
    assert rig.half.has_pending_work()
    meta = rig.half.build_connector_meta(Unreadable())  # type: ignore[arg-type]
    assert meta.broken_loads == {"r": [50, 51], "unknown": []}
    assert not meta.has_tokens, "weights must not be read in a step that may have none"
    assert not rig.half.has_pending_work()


POINTS: dict[str, Callable[[Rig, FakeRequest], StepMeta | None]] = {
    "is looked up": lambda rig, request: rig.look_up(request) and None,
    "is offered blocks and gets none": lambda rig, request: look_up_and_allocate(rig, request, [50], 0),
    "loads": lambda rig, request: rig.load(request),
    "has loaded": lambda rig, request: rig.report(*rig.load(request).loads),
    "has failed to load": lambda rig, request: rig.report(*rig.load(request).loads, failed=True),
    "is stored": lambda rig, request: rig.start(request),
    "is preempted": lambda rig, request: (rig.start(request), rig.step(preempted=["r"]))[0],
    "has computed": lambda rig, request: rig.report(*rig.start(request).stores),
}


@pytest.mark.parametrize("point", POINTS)
def test_an_id_may_be_used_again_when_its_request_has_ended(point: str) -> None:
    """Whatever is under way for the first request, and reported while the second one runs."""
    rig = rig_with(prompt(8), num_host_blocks=32)
    rig.store(prompt(8, 100))
    first, second = FakeRequest("r", prompt(13)), FakeRequest("r", prompt(13, 100))
    meta = POINTS[point](rig, first)
    rig.half.request_finished(first)
    rest = rig.step()
    assert rig.look_up(second) == (8, True)
    rig.allocate(second, [70, 71, 72, 73], 8)
    second.num_computed_tokens = 8
    load, spec = only(rig.step().loads)
    assert device_ids(spec) == [70, 71]
    for late in (meta, rest):
        rig.report(*([] if late is None else [*late.loads, *late.stores]))
    rig.report(load)
    rig.allocate(second, [70, 71, 72, 73])
    store, spec = only(rig.step({second: 5}, new={"r": [70, 71, 72, 73]}).stores)
    assert device_ids(spec) == [72], "what was loaded is not stored again"
    rig.report(store)
    rig.report(*rig.end(second).stores)
    assert rig.status(prompt(12, 100)) == [0, 0, 0]
    assert rig.status(prompt(8)) == [0, 0]
    assert not rig.half.off
    assert not rig.half.requests
    assert not rig.half.has_pending_work()
    rig.manager.check_integrity()


@pytest.mark.parametrize("method", ["lookup", "complete_load"])
def test_switching_off_breaks_the_promises_that_were_made(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the loads behind one that a reset could not end."""
    rig, requests = Rig(), {name: FakeRequest(name, prompt(9, 50 * i)) for i, name in enumerate("abc")}
    for i, name in enumerate(requests):
        rig.store(prompt(8, 50 * i), f"store {name}")
    assert [rig.look_up(request) for request in requests.values()] == [(8, True)] * 3
    rig.allocate(requests["a"], [20, 21], 8)
    rig.allocate(requests["b"], [22, 23], 8)
    monkeypatch.setattr(rig.manager, method, None)
    if method == "complete_load":
        rig.half.reset()
    assert rig.look_up(FakeRequest("r", prompt(5, 200))) == (0, False)
    rig.allocate(requests["c"], [30, 31], 8)
    meta = rig.step()
    assert (meta.loads, meta.broken_loads) == ({}, {"a": [20, 21], "b": [22, 23], "c": [30, 31]})


def test_switching_off_releases_held_requests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, job = held()
    monkeypatch.setattr(rig.manager, "lookup", None)
    rig.look_up(FakeRequest("r", prompt(5)))
    assert rig.half.has_pending_work()
    assert rig.step().releases == ["p"]
    rig.report(job, times=2)
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_an_error_at_shutdown_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    monkeypatch.setattr(rig.manager, "shutdown", broken)
    rig.half.shutdown()
