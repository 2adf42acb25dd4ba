"""The worker half of the connector with real copies: the device and the pool are numpy arrays."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, PageGroup, Transfer, TransferResult, TransferSpec
from kvoffload.connector.adapters import CHECK_DEADLINE_S, DROPPED, UNREADABLE, Adapter, AdapterNeed
from kvoffload.connector.messages import IDLE_WAIT_S, StepMeta, WorkerReport
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.transfer.inline import InlineTransfer
from tests.connector.rig import LoadedAdapters
from tests.sim.faults import SlowTransfer, WrappedTransfer

LAYERS, BLOCKS, PAGE = 2, 8, 16
NOTHING = StepMeta()
IDLE = StepMeta(has_tokens=False)


def job(slots: list[int], device_blocks: list[int], req_id: str = "r") -> TransferSpec:
    device = DeviceSpec(np.array(device_blocks, dtype=np.int64), (len(device_blocks),), (0,))
    return TransferSpec(req_id, LoadStoreSpec("CPU", np.array(slots, dtype=np.int64)), device)


@dataclass
class Device:
    """A device, a host pool, and a transfer between them that tests may wrap."""

    data: ByteArray = field(default_factory=lambda: np.zeros((LAYERS, BLOCKS, PAGE), np.uint8))
    pool: ByteArray = field(default_factory=lambda: np.zeros((4, padded_slot_bytes(LAYERS * PAGE)), np.uint8))

    def __post_init__(self) -> None:
        self.transfer: Transfer = InlineTransfer([PageGroup(list(self.data))], self.pool)
        self.data[:] = np.random.default_rng(0).integers(0, 256, self.data.shape)

    def slot(self, slot: int) -> bytes:
        return self.pool[slot, : LAYERS * PAGE].tobytes()

    def block(self, block: int) -> bytes:
        return self.data[:, block].tobytes()


class Faulty(WrappedTransfer):
    """Fails the first ``failures`` tries of every job. Records the calls."""

    def __init__(self, inner: Transfer, failures: int = 0) -> None:
        super().__init__(inner)
        self.failures = failures
        self.tries: dict[int, int] = {}
        self.waited_for: list[list[int]] = []
        self.waited_blocks: list[Collection[int] | None] = []
        self.idle_waits: list[float] = []
        self.closed = 0
        self._failed: list[TransferResult] = []

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self.tries[job_id] = self.tries.get(job_id, 0) + 1
        if self.tries[job_id] <= self.failures:
            self._failed.append(TransferResult(job_id, ok=False))
        else:
            super().submit(job_id, spec, is_store)

    def poll(self, busy: bool) -> list[TransferResult]:
        failed, self._failed = self._failed, []
        return [*failed, *super().poll(busy)]

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self.waited_for.append(list(job_ids))
        self.waited_blocks.append(device_blocks)
        super().wait(job_ids, device_blocks)

    def wait_any(self, timeout_s: float) -> None:
        self.idle_waits.append(timeout_s)
        super().wait_any(timeout_s)

    def close(self) -> None:
        self.closed += 1
        super().close()


class Sleeping(Faulty):
    """Copies only while it is waited for, like a device that needs time."""

    def poll(self, busy: bool) -> list[TransferResult]:
        return self.inner.poll(busy=False) if self.idle_waits else []


def step(worker: OffloadingConnectorWorker, meta: StepMeta = NOTHING) -> tuple[set[str], set[int], set[str]]:
    """Runs one engine step. Returns the loaded requests, the failed blocks and the released requests."""
    worker.begin_step(meta)
    worker.start_loads(meta)
    worker.end_step(meta)
    finished = worker.get_finished(meta)
    failed = {block for blocks in finished.failed.values() for block in blocks}
    return finished.loaded, failed, finished.released


def report(worker: OffloadingConnectorWorker) -> tuple[dict[int, int], set[int]]:
    taken = worker.take_report() or WorkerReport()
    return taken.done, taken.failed


def broken(*args: object) -> None:
    raise RuntimeError("the device is gone")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def worker(device: Device) -> OffloadingConnectorWorker:
    return OffloadingConnectorWorker(device.transfer)


# Without failures.


def test_loads_that_wait_end_when_the_device_loses_its_memory_or_the_transfer_breaks(device: Device) -> None:
    for breaks in (False, True):
        transfer = Sleeping(device.transfer)
        worker = OffloadingConnectorWorker(transfer)
        step(worker, StepMeta(loads={2: job([3], [5], "l")}, stores={1: job([2], [5])}, load_after={2: [1]}))
        if breaks:
            worker._give_up()
        else:
            worker.suspend()
        finished = worker.get_finished(IDLE)
        assert finished.failed == {"l": [5]}
        assert report(worker)[1] >= {2}


def test_a_load_waits_for_all_stores_that_read_its_device_blocks(device: Device) -> None:
    transfer = Faulty(device.transfer, failures=1)
    transfer.tries = {1: 1, 2: 1}
    worker = OffloadingConnectorWorker(transfer)
    stores = {1: job([2], [5]), 4: job([1], [6])}
    step(worker, StepMeta(loads={2: job([3, 0], [5, 6], "l")}, stores=stores, load_after={2: [1, 4]}))
    assert transfer.tries == {1: 2, 2: 1, 4: 2}, "4 is tried again"
    assert {"l"} in [step(worker, IDLE)[0] for _ in range(3)]
    assert report(worker) == ({1: 1, 2: 1, 4: 1}, set())


def test_a_transfer_that_takes_no_load_fails_all_that_wait_for_one_store(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Sleeping(device.transfer)
    worker = OffloadingConnectorWorker(transfer)
    loads = {2: job([3], [5], "l"), 3: job([4], [6], "m")}
    step(worker, StepMeta(loads=loads, stores={1: job([2, 1], [5, 6])}, load_after={2: [1], 3: [1]}))

    monkeypatch.setattr(transfer, "submit", broken)
    loaded: set[str] = set()
    for _ in range(4):
        loaded |= step(worker, IDLE)[0]
    assert loaded == {"l", "m"}
    assert report(worker)[1] == {2, 3}


def test_the_transfer_learns_which_device_blocks_a_fence_is_about(device: Device) -> None:
    transfer = Faulty(device.transfer)
    worker = OffloadingConnectorWorker(transfer)
    step(worker, StepMeta(stores={1: job([0, 1], [1, 2])}))
    step(worker, StepMeta(fences=[1], fenced_blocks=frozenset({2})))
    assert (transfer.waited_for, transfer.waited_blocks) == ([[1]], [{2}])


def test_broken_loads_are_reported_as_failed_once(worker: OffloadingConnectorWorker) -> None:
    assert step(worker, StepMeta(broken_loads={"b": [3, 4]})) == ({"b"}, {3, 4}, set())
    assert step(worker) == (set(), set(), set())
    assert worker.take_report() is None, "there was no job"


def test_the_last_piece_fails_for_all(device: Device) -> None:
    worker = OffloadingConnectorWorker(Faulty(device.transfer, failures=9))
    assert step(worker, StepMeta(loads={1: job([0], [1])}, pieces={1: []})) == (set(), set(), set())
    step(worker)
    assert report(worker) == ({1: 1}, {1})
    step(worker, StepMeta(loads={2: job([1], [2])}, pieces={2: [1, 2]}))
    assert step(worker) == ({"r"}, {1, 2}, set())


def test_a_load_is_not_reported_as_failed_while_a_piece_of_it_is_copied(device: Device) -> None:
    slow = SlowTransfer(device.transfer, 0, 0.0)
    worker = OffloadingConnectorWorker(slow)
    step(worker, StepMeta(loads={1: job([0], [1])}, pieces={1: []}))
    assert step(worker, StepMeta(broken_loads={"r": [1, 2]})) == (set(), set(), set())
    slow.wait([1])
    assert step(worker) == ({"r"}, {1, 2}, set())


# One call per step.


def test_one_call_runs_a_step_and_delivers_its_report(device: Device, worker: OffloadingConnectorWorker) -> None:
    reports: list[WorkerReport] = []
    with worker.step(StepMeta(stores={1: job([2], [5])}), reports.append) as finished:
        device.data[:, 5] = 7  # the forward pass
    assert (finished.loaded, finished.failed, finished.released) == (set(), {}, set())
    assert reports == [], "the store is not through"
    device.pool[3] = 9
    with worker.step(StepMeta(loads={2: job([3], [4])}, releases=["a"]), reports.append) as finished:
        assert finished.loaded == set(), "it is filled when the step has ended"
    assert (finished.loaded, finished.failed, finished.released) == ({"r"}, {}, {"a"})
    assert device.slot(2) == device.block(5) == bytes([7]) * LAYERS * PAGE
    assert device.block(4) == device.slot(3)
    assert [each.done for each in reports] == [{1: 1, 2: 1}]
    with worker.step(NOTHING, reports.append):
        pass
    assert len(reports) == 1, "there was nothing to report"
    assert worker.take_report() is None


def test_what_a_failed_forward_pass_was_to_compute_is_not_stored(
    device: Device, worker: OffloadingConnectorWorker
) -> None:
    """Stores of the step count as failed, unless they were read before it. The engine sees its own exception."""
    reports: list[WorkerReport] = []
    want = device.block(1)
    meta = StepMeta(stores={1: job([0], [1]), 2: job([1], [2])}, fences=[1], loads={3: job([3], [4])})

    def run_step() -> None:
        with worker.step(meta, reports.append):
            device.data[:] = 0
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        run_step()
    with worker.step(NOTHING, reports.append):
        pass
    total = WorkerReport()
    for each in reports:
        total.add(each)
    assert (total.done, total.failed) == ({1: 1, 2: 1, 3: 1}, {2})
    assert device.slot(0) == want
    assert device.slot(1) == bytes(LAYERS * PAGE)


# Copies that fail.


@pytest.mark.parametrize(("failures", "ok"), [(0, True), (1, True), (2, False)])
def test_a_store_is_tried_twice(device: Device, failures: int, ok: bool) -> None:
    faulty = Faulty(device.transfer, failures)
    worker = OffloadingConnectorWorker(faulty)
    step(worker, StepMeta(stores={1: job([0], [1])}))
    for _ in range(4):
        step(worker)
    assert faulty.tries == {1: min(failures + 1, 2)}
    assert report(worker) == ({1: 1}, set() if ok else {1})
    assert (device.slot(0) == device.block(1)) is ok


@pytest.mark.parametrize(("failures", "ok"), [(1, True), (2, False)])
def test_a_load_is_tried_twice_and_then_names_its_blocks(device: Device, failures: int, ok: bool) -> None:
    worker = OffloadingConnectorWorker(Faulty(device.transfer, failures))
    reported = [step(worker, meta) for meta in (StepMeta(loads={1: job([0, 1], [4, 5])}), *[NOTHING] * 3)]
    loaded = [entry for entry in reported if entry != (set(), set(), set())]
    assert loaded == [({"r"}, set() if ok else {4, 5}, set())], "reported once, when it is decided"
    assert report(worker) == ({1: 1}, set() if ok else {1})


# Idle steps.


@pytest.mark.parametrize(
    ("meta", "waits"),
    [
        (StepMeta(loads={1: job([0], [1])}, has_tokens=False), [IDLE_WAIT_S]),
        (StepMeta(loads={1: job([0], [1])}, has_tokens=True), []),
        (StepMeta(has_tokens=False), []),
        (StepMeta(stores={1: job([0], [1])}, has_tokens=False), []),
        (StepMeta(loads={1: job([0], [1])}, broken_loads={"b": [3]}, has_tokens=False), []),
    ],
    ids=["loads pending", "has tokens", "nothing pending", "only stores pending", "something to tell"],
)
def test_only_a_step_without_tokens_waits_for_loads(device: Device, meta: StepMeta, waits: list[float]) -> None:
    sleeping = Sleeping(device.transfer)
    worker = OffloadingConnectorWorker(sleeping)
    step(worker, meta)
    assert sleeping.idle_waits == waits


# A transfer that raises.


@pytest.mark.parametrize("method", ["submit", "poll", "wait", "wait_any"])
def test_a_broken_transfer_fails_every_job_and_raises_nothing(
    device: Device, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = Sleeping(device.transfer)
    worker = OffloadingConnectorWorker(transfer)
    step(worker, StepMeta(stores={1: job([0], [1])}))
    step(worker, StepMeta(loads={2: job([1], [2], "early")}))

    monkeypatch.setattr(transfer, method, broken)
    reported: list[tuple[set[str], set[int], set[str]]] = []
    reported.append(step(worker, StepMeta(loads={3: job([2], [3], "late")}, has_tokens=False)))
    reported.append(step(worker, StepMeta(stores={4: job([3], [4])}, fences=[1])))
    reported.append(step(worker, IDLE))
    assert set().union(*(loaded for loaded, _, _ in reported)) == {"early", "late"}
    assert sum(len(loaded) for loaded, _, _ in reported) == 2, "each is reported once"
    # A transfer that breaks only in the second of these steps may have completed the loads before.
    done, failed = report(worker)
    assert done == dict.fromkeys((1, 2, 3, 4), 1)
    assert failed == (done.keys() if method != "wait" else {4})
    assert transfer.closed == 1
    assert sum("OFFLOADING IS OFF" in record.message for record in caplog.records) == 1


def test_after_a_transfer_broke_all_jobs_fail_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OffloadingConnectorWorker(device.transfer)
    monkeypatch.setattr(device.transfer, "poll", None)
    step(worker)
    assert step(worker, StepMeta(loads={1: job([0], [1])})) == ({"r"}, {1}, set())
    step(worker, StepMeta(stores={2: job([0], [1])}))
    assert step(worker, StepMeta(releases=["x"])) == (set(), set(), {"x"})
    assert report(worker) == ({1: 1, 2: 1}, {1, 2})


def test_a_transfer_that_was_given_up_is_left_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = Faulty(device.transfer)
    worker = OffloadingConnectorWorker(transfer)
    monkeypatch.setattr(device.transfer, "poll", None)
    step(worker, StepMeta(stores={1: job([0], [1])}))
    caplog.clear()
    step(worker, StepMeta(fences=[1], fenced_blocks=frozenset({1})))
    assert (transfer.waited_for, transfer.closed, caplog.messages) == ([], 1, [])


def test_a_transfer_that_cannot_be_closed_raises_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OffloadingConnectorWorker(device.transfer)
    monkeypatch.setattr(device.transfer, "submit", None)
    monkeypatch.setattr(device.transfer, "close", None)
    assert step(worker, StepMeta(loads={1: job([0], [1])})) == ({"r"}, {1}, set())


# Device blocks that lose their memory.


class Late(Faulty):
    """Ends its jobs only after three waits."""

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self.waited_for.append(list(job_ids))

    def poll(self, busy: bool) -> list[TransferResult]:
        return super().poll(busy) if len(self.idle_waits) >= 3 else []


@pytest.mark.parametrize("kind", [Faulty, Late])
def test_no_copy_is_in_progress_when_blocks_lose_their_memory(device: Device, kind: type[Faulty]) -> None:
    """Stores in progress are completed. Loads fail, as do stores that were not submitted."""
    transfer = kind(device.transfer)
    worker = OffloadingConnectorWorker(transfer)
    transfer.idle_waits += [0.0] * 3
    step(worker, StepMeta(stores={1: job([0], [1])}))
    step(worker, StepMeta(stores={2: job([1], [2])}))
    transfer.idle_waits.clear()
    worker.begin_step(NOTHING)
    worker.start_loads(StepMeta(loads={3: job([0], [4], "loading")}))
    worker.end_step(StepMeta(stores={4: job([3], [3])}))
    stored = device.block(2)
    worker.suspend()
    device.data[:] = 0
    worker.suspend()
    assert set(transfer.tries) == {1, 2, 3}
    reported = step(worker, StepMeta(loads={5: job([0], [5], "asleep")}))
    assert reported == ({"loading", "asleep"}, {4, 5}, set())
    assert report(worker) == ({1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, {3, 4, 5})
    assert device.slot(1) == stored
    assert not device.data.any(), "nothing is written into them afterwards"
    worker.resume()
    worker.resume()
    assert step(worker, StepMeta(loads={6: job([1], [6], "awake")}))[:2] == ({"awake"}, set())
    assert device.block(6) == stored


def test_a_copy_that_does_not_end_closes_the_transfer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.connector.worker.SUSPEND_DEADLINE_S", 0.0)
    transfer = Late(device.transfer)
    worker = OffloadingConnectorWorker(transfer)
    worker.start_loads(StepMeta(loads={1: job([0], [1])}))
    worker.suspend()
    assert transfer.closed == 1
    assert report(worker) == ({1: 1}, {1})


@pytest.mark.parametrize("fences", [[], [2]])
def test_a_store_that_comes_while_suspended_copies_nothing_after_it(device: Device, fences: list[int]) -> None:
    """Its device blocks have lost their content, even if they have memory again before the next step."""
    worker, before = OffloadingConnectorWorker(device.transfer), device.slot(2)
    worker.suspend()
    step(worker, StepMeta(stores=STORE, fences=fences, has_tokens=False))
    device.data[:] = 7
    worker.resume()
    step(worker)
    assert report(worker) == ({2: 1}, {2})
    assert device.slot(2) == before


def test_shutdown_closes_the_transfer(device: Device) -> None:
    faulty = Faulty(device.transfer)
    OffloadingConnectorWorker(faulty).shutdown()
    assert faulty.closed == 1


# Reports.


def test_reports_of_workers_add_up() -> None:
    total = WorkerReport()
    one = WorkerReport({1: 1, 2: 1}, {2}, store_bytes=10, load_bytes=1, store_seconds=0.5, load_seconds=2.0)
    two = WorkerReport({2: 1, 3: 1}, {3}, store_bytes=5, load_bytes=2, store_seconds=0.25, load_seconds=1.0)
    assert total.add(one).add(two) is total
    assert total == WorkerReport({1: 1, 2: 2, 3: 1}, {2, 3}, 15, 3, 0.75, 3.0)
    assert one.done == {1: 1, 2: 1}, "what is added stays as it was"
    total = WorkerReport(answers={1: [b"a"]}, adapters={3: {b"a"}}, changed_at=2)
    total.add(WorkerReport(answers={1: [b"b"], 2: [b"c"]}, adapters={3: {b"b"}, 4: {b"c"}}, changed_at=1))
    assert (total.answers, total.adapters) == ({1: [b"a", b"b"], 2: [b"c"]}, {3: {b"a", b"b"}, 4: {b"c"}})
    assert total.changed_at == 2


@pytest.fixture(autouse=True)
def no_logs_on_the_screen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield


# Weights that change.


class Weights:
    """A watch over one number. With ``answers`` False, comparisons do not end."""

    def __init__(self) -> None:
        self.now = self.accepted = self._compared = 0
        self.answers = True
        self.num_comparisons = 0

    def accept(self) -> None:
        self.accepted = self._compared = self.now

    def begin(self) -> None:
        self._compared = self.now
        self.num_comparisons += 1

    def poll(self) -> bool | None:
        return self._compared != self.accepted if self.answers else None

    def are_same(self) -> bool:
        return self.now == self.accepted


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def watched(device: Device, weights: Weights) -> OffloadingConnectorWorker:
    return OffloadingConnectorWorker(device.transfer, weights)


LOAD = {1: job([3], [4])}
STORE = {2: job([2], [5])}


def test_weights_are_compared_in_steps_that_compute_load_or_store(
    watched: OffloadingConnectorWorker, weights: Weights
) -> None:
    for meta, comparisons in [
        (IDLE, 0),
        (StepMeta(fences=[7], releases=["q"], has_tokens=False), 0),
        (NOTHING, 1),
        (StepMeta(loads=LOAD, has_tokens=False), 2),
        (StepMeta(stores=STORE), 3),
        (IDLE, 3),
    ]:
        step(watched, meta)
        assert weights.num_comparisons == comparisons
    assert report(watched) == ({1: 1, 2: 1}, set())


def test_other_weights_are_seen_in_a_step_without_jobs(watched: OffloadingConnectorWorker, weights: Weights) -> None:
    """What it computes may be stored when the weights are the former ones again."""
    weights.now = 1
    step(watched, NOTHING)
    weights.now = 0
    step(watched, StepMeta(stores=STORE))
    taken = watched.take_report() or WorkerReport()
    assert (taken.changed_at, taken.done, taken.failed) == (0, {}, set())
    step(watched, NOTHING)
    assert report(watched) == ({2: 1}, {2})


def test_no_comparison_begins_after_copies_have_ended_for_a_sleep(
    watched: OffloadingConnectorWorker, weights: Weights
) -> None:
    """The weights of a sleeping engine have no memory: reading them would be an invalid access."""
    weights.answers = False
    step(watched, StepMeta(loads=LOAD))
    step(watched, StepMeta(loads={3: job([2], [6], "s")}))
    watched.suspend()
    weights.answers = True
    compared = weights.num_comparisons
    step(watched, IDLE)
    assert weights.num_comparisons == compared
    assert report(watched) == ({1: 1, 3: 1}, {1, 3})
    watched.resume()
    step(watched, StepMeta(loads={4: job([3], [4])}))
    assert weights.num_comparisons == compared + 1
    assert report(watched) == ({4: 1}, set())


def test_new_weights_are_accepted_by_the_first_step_after_a_reset_that_computes(
    watched: OffloadingConnectorWorker, weights: Weights
) -> None:
    """The weights of a sleeping engine have no memory, and it runs steps without tokens."""
    weights.accept = lambda: pytest.fail(  # type: ignore[method-assign]
        "looked at the weights of a sleeping engine"
    )
    step(watched, StepMeta(has_tokens=False, epoch=1))
    del weights.accept
    weights.now = 1
    step(watched, StepMeta(epoch=1))
    step(watched, StepMeta(loads=LOAD, epoch=1))
    assert report(watched) == ({1: 1}, set())
    weights.now = 2
    step(watched, StepMeta(loads={3: job([3], [4])}, epoch=1))
    assert report(watched) == ({3: 1}, {3})


@pytest.mark.parametrize("epoch", [0, 1])
def test_weights_are_not_read_while_device_blocks_have_no_memory(
    watched: OffloadingConnectorWorker, weights: Weights, epoch: int
) -> None:
    """The weights may have none either. A request that ends while the engine sleeps may leave blocks to be stored."""
    watched.suspend()
    weights.now = 1
    meta = StepMeta(stores=STORE, has_tokens=False, epoch=epoch)
    step(watched, meta)
    step(watched, StepMeta(has_tokens=False, epoch=epoch))
    assert weights.num_comparisons == 0
    assert weights.accepted == 0
    assert report(watched) == ({2: 1}, {2})


CHECK = StepMeta(has_tokens=False, epoch=1, check_weights=9)


def test_after_a_sleep_weights_are_compared_with_those_of_before(
    watched: OffloadingConnectorWorker, weights: Weights
) -> None:
    step(watched, StepMeta(has_tokens=False, epoch=1))
    step(watched, CHECK)
    assert report(watched) == ({9: 1}, set())
    # They are accepted once. Later differences are changes.
    weights.now = 1
    step(watched, StepMeta(epoch=1))
    step(watched, StepMeta(loads=LOAD, epoch=1))
    taken = watched.take_report() or WorkerReport()
    assert (taken.failed, taken.changed_at) == ({1}, 1)


def test_weights_may_not_be_known_to_be_the_same(device: Device, weights: Weights) -> None:
    """Without a watch, with a broken watch, while asleep, and after weights of the new epoch were accepted."""
    accepted = OffloadingConnectorWorker(device.transfer, weights)
    step(accepted, StepMeta(epoch=1))
    unreadable = Weights()
    unreadable.are_same = lambda: bool(1 / 0)  # type: ignore[method-assign]
    broken = OffloadingConnectorWorker(device.transfer, unreadable)
    asleep = OffloadingConnectorWorker(device.transfer, Weights())
    asleep.suspend()
    for worker in (accepted, asleep, broken, OffloadingConnectorWorker(device.transfer)):
        step(worker, CHECK)
        assert report(worker) == ({9: 1}, {9})


@pytest.mark.parametrize("call", ["accept", "begin", "poll"])
def test_a_check_of_weights_that_raises_switches_offloading_off(
    watched: OffloadingConnectorWorker, weights: Weights, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(weights, call, broken)
    step(watched, StepMeta(epoch=1))
    step(watched, StepMeta(loads=LOAD, stores=STORE, epoch=1))
    step(watched, StepMeta(epoch=1))
    taken = watched.take_report() or WorkerReport()
    assert taken.broken
    assert taken.failed >= {2}
    assert "OFFLOADING IS OFF" in caplog.text


# Adapters.


def test_adapters_that_a_step_has_loaded_and_answers_are_reported(device: Device) -> None:
    adapters = LoadedAdapters()
    worker = OffloadingConnectorWorker(device.transfer, adapters=adapters)
    adapters.loaded[3] = b"old"
    adapters.delay = 1
    step(worker, StepMeta(questions={7: Adapter(3, b""), 8: Adapter(4, b"file")}))
    taken = worker.take_report() or WorkerReport()
    assert (taken.adapters, taken.answers) == ({3: {b"old"}}, {})
    worker.begin_step(NOTHING)
    adapters.loaded = {3: b"new"}
    worker.end_step(NOTHING)
    worker.get_finished(NOTHING)
    taken = worker.take_report() or WorkerReport()
    assert (taken.adapters, taken.answers) == ({3: {b"new"}}, {7: [b"old"], 8: [b"file"]})
    adapters.loaded = {}
    step(worker)
    taken = worker.take_report() or WorkerReport()
    assert taken.adapters == {3: {DROPPED}}
    step(worker)
    assert worker.take_report() is None


@pytest.mark.parametrize("now", [b"right", b"other", None])
def test_a_load_for_other_bytes_of_an_adapter_fails(device: Device, now: bytes | None) -> None:
    """They may change until the load has ended."""
    adapters = LoadedAdapters()
    adapters.loaded[3] = b"right"
    worker = OffloadingConnectorWorker(Sleeping(device.transfer), adapters=adapters)
    step(worker, StepMeta(loads=LOAD, needs={1: AdapterNeed(3, frozenset([b"right"]))}))
    adapters.loaded = {} if now is None else {3: now}
    failed = {4} if now != b"right" else set()
    assert step(worker, IDLE) == ({"r"}, failed, set())


def test_a_load_does_not_wait_for_a_check_that_never_ends(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = LoadedAdapters()
    adapters.slow_checks = []
    worker = OffloadingConnectorWorker(device.transfer, adapters=adapters)
    step(worker, StepMeta(loads=LOAD, needs={1: AdapterNeed(3, frozenset([b"right"]))}))
    assert step(worker) == (set(), set(), set())
    later = time.monotonic() + CHECK_DEADLINE_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert step(worker) == ({"r"}, {4}, set())


@pytest.mark.parametrize("is_reread", [False, True])
def test_an_adapter_that_is_loaded_during_the_check_of_its_files_counts(device: Device, is_reread: bool) -> None:
    """Except for a request for which the files are read again."""
    adapters = LoadedAdapters()
    checks = adapters.slow_checks = []
    worker = OffloadingConnectorWorker(device.transfer, adapters=adapters)
    step(worker, StepMeta(loads=LOAD, needs={1: AdapterNeed(3, frozenset([b"files"]), is_reread)}))
    adapters.loaded = {3: b"other"}
    assert step(worker) == (set(), set(), set())
    checks[0].set_result(True)
    assert step(worker) == ({"r"}, set() if is_reread else {4}, set())


def test_a_step_that_has_computed_with_other_bytes_says_so(device: Device) -> None:
    adapters = LoadedAdapters()
    worker = OffloadingConnectorWorker(device.transfer, adapters=adapters)
    adapters.loaded = {3: b"loaded"}
    step(worker)
    assert worker.take_report() == WorkerReport(adapters={3: {b"loaded"}})
    one, both, other = frozenset([b"loaded"]), frozenset([b"loaded", b"of another rank"]), frozenset([b"other"])
    step(worker, StepMeta(computes_with={3: {one, both}}))
    assert worker.take_report() is None
    step(worker, StepMeta(computes_with={3: {one, other}}))
    assert worker.take_report() == WorkerReport(adapters={3: {b"loaded"}})
    step(worker, StepMeta(computes_with={4: {one}}))
    assert worker.take_report() == WorkerReport(adapters={4: {UNREADABLE}})


@pytest.mark.parametrize("call", ["changes", "ask", "answers", "check"])
def test_a_watch_over_adapters_that_raises_costs_no_step(
    device: Device, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = LoadedAdapters()
    setattr(adapters, call, lambda *_: 1 / 0)
    worker = OffloadingConnectorWorker(device.transfer, adapters=adapters)
    meta = StepMeta(loads=LOAD, needs={1: AdapterNeed(3, frozenset([b"right"]))}, questions={7: Adapter(3, b"")})
    assert step(worker, meta) == ({"r"}, {4}, set())
    assert "ZeroDivisionError" in caplog.text
    step(worker, StepMeta(questions={8: Adapter(3, b"")}))
    taken = worker.take_report() or WorkerReport()
    assert taken.answers[8]


def test_without_a_watch_no_adapter_is_known(device: Device) -> None:
    worker = OffloadingConnectorWorker(device.transfer)
    step(worker, StepMeta(questions={7: Adapter(3, b"")}))
    assert worker.take_report() == WorkerReport(answers={7: [UNREADABLE]})
