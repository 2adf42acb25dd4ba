"""IOThreads runs jobs by priority, bounds its queues, and closes within a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvoffload.tiers import threads
from kvoffload.tiers.threads import IOThreads

LONG_S = 30.0


class Gate:
    """A job that signals when it has begun, and ends when it is allowed to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        self.may_end.wait(LONG_S)


@pytest.fixture
def gates() -> Iterator[Callable[[], Gate]]:
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate())
        return made[-1]

    yield make
    for gate in made:
        gate.may_end.set()


def test_maintenance_runs_before_reads_and_reads_before_writes_each_kind_in_order(gates: Callable[[], Gate]) -> None:
    executor, gate = IOThreads(1), gates()
    done: list[object] = []
    executor.submit_read(gate)
    assert gate.begun.wait(LONG_S)
    for i in range(3):
        executor.submit_write(partial(done.append, f"write {i}"))
        executor.submit_read(partial(done.append, f"read {i}"))
    executor.submit_maintenance(lambda: done.append("maintenance"))
    gate.may_end.set()
    assert executor.close(LONG_S)
    assert done == ["maintenance", "read 0", "read 1", "read 2", "write 0", "write 1", "write 2"]


def test_writes_that_hang_leave_threads_for_reads(gates: Callable[[], Gate]) -> None:
    executor = IOThreads(4)
    writes = [gates() for _ in range(4)]
    for gate in writes:
        executor.submit_write(gate)
    assert writes[0].begun.wait(LONG_S)
    assert writes[1].begun.wait(LONG_S)
    read = gates()
    executor.submit_read(read)
    assert read.begun.wait(LONG_S)
    assert not writes[2].begun.is_set()
    writes[0].may_end.set()
    assert writes[2].begun.wait(LONG_S)


def test_queues_are_bounded(gates: Callable[[], Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_QUEUED", 2)
    executor, gate = IOThreads(1), gates()
    executor.submit_read(gate)
    assert gate.begun.wait(LONG_S)
    assert [executor.submit_read(gate) for _ in range(4)] == [True, True, False, False]
    assert [executor.submit_write(gate) for _ in range(4)] == [True, True, False, False]
    assert [executor.submit_maintenance(gate) for _ in range(2)] == [True, False]


def test_close_ends_in_time_if_a_job_hangs(gates: Callable[[], Gate]) -> None:
    executor, gate = IOThreads(1), gates()
    done: list[object] = []
    executor.submit_read(gate)
    executor.submit_read(lambda: done.append("late"))
    assert gate.begun.wait(LONG_S)
    assert not executor.close(0.01)
    gate.may_end.set()
    assert executor.close(LONG_S)
    assert done == []


def test_a_job_that_raises_does_not_affect_others() -> None:
    executor = IOThreads(1)
    done: list[object] = []
    executor.submit_read(lambda: print(1 // 0))
    executor.submit_read(lambda: done.append(1))
    assert executor.close(LONG_S)
    assert done == [1]


def test_wait_returns_when_a_job_has_ended(gates: Callable[[], Gate]) -> None:
    executor, gate = IOThreads(1), gates()
    waited = threading.Event()
    executor.submit_read(gate)
    assert gate.begun.wait(LONG_S)
    executor.wait(0.0)

    def wait() -> None:
        executor.wait(LONG_S)
        waited.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    assert not waited.is_set()
    gate.may_end.set()
    assert waited.wait(LONG_S / 2)
