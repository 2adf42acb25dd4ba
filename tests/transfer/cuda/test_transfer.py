"""CudaTransfer on a device without streams: bytes, chunks, results, errors. Streams are checked elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, ConfigError, PageGroup, Placement, TransferResult
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.native import load
from kvoffload.transfer.cuda import native_loop
from kvoffload.transfer.cuda.calls import MAX_BLOCKS
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS, Limits
from kvoffload.transfer.cuda.pages import LayerRun, PageTable, page_table
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.transfer.cuda.plain_device import ENGINE, PlainDevice, PlainEvent
from tests.transfer.specs import spec_of

pytestmark = pytest.mark.skipif(load("_transfer") is None, reason="needs native code")

BLOCKS = SLOTS = 64
ROW = 128
"""Bytes of a device block in all layouts."""


@dataclass
class Ready:
    """A registration of which the first slots are ready."""

    num_ready_slots: int = SLOTS
    boundary_slots: int = 8
    released: int = 0

    def release(self) -> None:
        self.released += 1


def noise(*shape: int) -> ByteArray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def apart() -> list[ByteArray]:
    """Returns layers that were allocated one by one."""
    return [noise(BLOCKS, size) for size in (64, 24, 40)]


def packed() -> list[ByteArray]:
    """Returns layers whose pages of one device block follow one another."""
    whole = noise(BLOCKS, 4, 32)
    return [whole[:, layer] for layer in range(4)]


class Rig:
    def __init__(
        self,
        *groups: PageGroup,
        registration: Any = None,
        limits: Limits = DEFAULT_LIMITS,
        with_threads: bool = False,
        num_slots: int = SLOTS,
        pool: ByteArray | None = None,
    ) -> None:
        self.groups = groups
        block_bytes = max(group.block_bytes for group in groups)
        self.pool = np.zeros((num_slots, block_bytes), np.uint8) if pool is None else pool
        self.registration = registration or Ready(num_slots)
        tables = [page_table(group) for group in groups]
        self.device = PlainDevice(tables)
        self.transfer = CudaTransfer(
            tables, self.pool, self.device, self.registration, limits=limits, with_threads=with_threads
        )

    def advance(self) -> None:
        """Makes all steps that are possible."""
        while self.transfer.advance():
            pass

    def run(self) -> list[TransferResult]:
        self.advance()
        return self.transfer.poll(busy=False)

    def store(self, job_id: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self.transfer.submit(job_id, spec_of(slots, (blocks, 0)), is_store=True)

    def load(self, job_id: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self.transfer.submit(job_id, spec_of(slots, (blocks, 0)), is_store=False)

    def block(self, block: int, group: int = 0) -> bytes:
        return b"".join(view[block].tobytes() for view in self.groups[group].views)

    def slot(self, slot: int) -> bytes:
        """Returns the block of the first group that is in a slot."""
        return self.pool[slot, : self.groups[0].device_block_bytes].tobytes()

    @property
    def copies_per_block(self) -> int:
        """Copies over the bus of one block of the first group."""
        table = page_table(self.groups[0])
        return 1 if table.is_compact else len(table.runs)

    def calls(self, name: str) -> list[int]:
        """Returns how large the calls of an operation of the device were, and forgets all calls."""
        sizes = [size for called, size in self.device.calls if called == name]
        self.device.calls.clear()
        return sizes


def ended(results: Sequence[TransferResult]) -> list[int]:
    assert all(result.ok for result in results)
    return [result.job_id for result in results]


@pytest.fixture(params=[apart, packed])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(PageGroup(request.param()))
    yield rig
    rig.transfer.close()


SMALL_CHUNKS = Limits(chunk_bytes=4 * ROW, stage_bytes=4 * ROW, fence_bytes=4 * ROW)
"""Chunks of four rows, if there is one group."""


# Bytes.


def test_a_slot_that_is_too_small_for_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of 256 bytes exceed a slot of 511"):
        Rig(PageGroup(apart(), 2, Placement((130, 0, 200), 2 * ROW)), pool=np.zeros((SLOTS, 511), np.uint8))


def test_without_native_code_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_loop, "load", lambda name: None)
    monkeypatch.setattr(native_loop, "describe", lambda: "plain Python: it was not compiled")
    with pytest.raises(ConfigError, match=r"native code only.*plain Python: it was not compiled; reinstall kvoffload"):
        Rig(PageGroup(apart()))


# Chunks.


def test_many_small_stores_are_one_chunk() -> None:
    rig = Rig(PageGroup(apart()))
    for job_id in range(40):
        rig.store(job_id, [job_id], [63 - job_id])
    rig.transfer.before_forward()
    assert ended(rig.run()) == list(range(40))
    assert [size for name, size in rig.device.calls if name == "gather"] == [40]
    assert rig.calls("copy") == [5], "one per eight slots, which is where registrations may end"


def test_blocks_in_one_piece_are_copied_without_staging() -> None:
    rig = Rig(PageGroup(packed()))
    rig.store(1, [8, 9, 11], [20, 21, 30])
    rig.transfer.before_forward()
    assert ended(rig.run()) == [1]
    assert [rig.slot(slot) for slot in (8, 9, 11)] == [rig.block(block) for block in (20, 21, 30)]
    assert rig.device.calls.count(("gather", 3)) == 0
    assert rig.calls("copy") == [2], "blocks 20 and 21 follow one another on both sides"


@pytest.mark.parametrize("make", [apart, packed])
def test_at_most_four_chunks_of_a_direction_are_in_flight(make: Callable[[], list[ByteArray]]) -> None:
    rig = Rig(PageGroup(make()), limits=SMALL_CHUNKS)
    rig.device.held = True
    rig.store(1, range(0, 64, 2), range(0, 64, 2))
    rig.load(2, range(1, 65, 2), range(1, 65, 2))
    rig.transfer.before_forward()
    assert rig.run() == []
    assert rig.calls("copy") == [4] * 2 * DEFAULT_LIMITS.in_flight
    rig.device.release()
    assert ended(rig.run()) == [2, 1]


def test_loads_are_issued_before_stores_and_jobs_of_a_direction_in_order() -> None:
    rig = Rig(PageGroup(apart()), limits=SMALL_CHUNKS)
    for job_id in range(4):
        rig.store(job_id, range(4 * job_id, 4 * job_id + 4), range(4 * job_id, 4 * job_id + 4))
    rig.transfer.before_forward()
    for job_id in range(4, 8):
        rig.load(job_id, range(4 * job_id, 4 * job_id + 4), range(4 * job_id, 4 * job_id + 4))
    results = ended(rig.run())
    assert [job_id for job_id in results if job_id < 4] == [0, 1, 2, 3]
    assert [job_id for job_id in results if job_id >= 4] == [4, 5, 6, 7]
    names = [name for name, _ in rig.device.calls if name in ("gather", "scatter")]
    assert names == ["scatter"] * 4 + ["gather"] * 4


def test_a_job_of_many_chunks_ends_once_with_all_its_bytes_and_seconds() -> None:
    rig = Rig(PageGroup(apart()), limits=SMALL_CHUNKS)
    rig.store(1, range(50), range(50))
    rig.store(2, [50, 51], [50, 51])
    rig.transfer.before_forward()
    first, second = rig.run()
    assert (first.job_id, first.ok, first.nbytes) == (1, True, 50 * ROW)
    assert (second.job_id, second.ok, second.nbytes) == (2, True, 2 * ROW)
    # On this device each copy takes one second. The last one is shared by both jobs.
    assert first.seconds == 12.5
    assert second.seconds == 0.5


def test_serving_allocates_nothing(rig: Rig) -> None:
    for round_number in range(50):
        rig.store(round_number, [1, 2], [3, 4])
        rig.transfer.before_forward()
        rig.load(100 + round_number, [5], [6])
        assert len(rig.run()) == 2
        if round_number == 0:
            before = len(rig.device.memory), len(rig.device.events)
    assert (len(rig.device.memory), len(rig.device.events)) == before


# Fences.


def test_a_fence_issues_the_rows_of_its_blocks_and_no_others() -> None:
    rig = Rig(PageGroup(apart()), limits=SMALL_CHUNKS)
    rig.store(1, range(20), range(20))
    rig.store(2, range(20, 40), range(20, 40))
    rig.transfer.wait([1], {3, 17, 25})
    assert [size for name, size in rig.device.calls if name == "gather"] == [2], "25 is read by another store"
    assert (rig.slot(3), rig.slot(17)) == (rig.block(3), rig.block(17))
    assert ended(rig.run()) == [1, 2]
    assert all(rig.slot(i) == rig.block(i) for i in range(40))


def engine_waits(rig: Rig) -> int:
    n = sum(stream == ENGINE for stream, _ in rig.device.waits)
    rig.device.waits.clear()
    return int(n)


def test_the_engine_waits_only_for_what_a_fence_names(rig: Rig) -> None:
    rig.device.held = True
    rig.store(1, range(4), range(4))
    rig.transfer.before_forward()
    rig.run()
    rig.transfer.wait([1], {9})
    rig.transfer.wait([7])
    rig.transfer.wait([1], set())
    assert engine_waits(rig) == 0
    rig.transfer.wait([1], {2})
    assert engine_waits(rig) == 1
    rig.device.release()
    assert ended(rig.run()) == [1]
    rig.transfer.wait([1], {2})
    assert engine_waits(rig) == 0, "the store has ended"


def engine_events(rig: Rig) -> list[PlainEvent]:
    return [event for event in rig.device.events if event.stream == ENGINE]


def test_a_fence_that_waits_long_for_another_thread_says_so_and_waits_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(PageGroup(apart()), limits=Limits(lock_warning_s=0.01))
    is_copying, may_go_on = threading.Event(), threading.Event()
    copy = rig.device.copy

    def slow(*arguments: Any) -> int:
        is_copying.set()
        may_go_on.wait(60)
        return copy(*arguments)

    monkeypatch.setattr(rig.device, "copy", slow)
    rig.store(1, [0], [0])
    rig.transfer.before_forward()
    thread = threading.Thread(target=rig.advance)
    thread.start()
    assert is_copying.wait(60)
    rig.store(2, [1], [1])
    fence = threading.Thread(target=lambda: rig.transfer.wait([2]))
    fence.start()
    deadline = time.monotonic() + 60
    while "have waited" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    may_go_on.set()
    thread.join()
    fence.join()
    assert "a call of the driver" in caplog.text
    assert rig.slot(1) == rig.block(1)
    assert sorted(ended(rig.run())) == [1, 2]


# Jobs that copy nothing, jobs that cannot be copied.


def test_a_bad_job_fails_alone_and_says_why(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.store(1, [0], [0])
    rig.store(2, [0], [BLOCKS])
    rig.store(3, [SLOTS], [0])
    rig.store(4, [1, 2], [0])
    rig.transfer.submit(5, spec_of([1], ([1], 0), ([], 0)), is_store=True)
    rig.store(6, [6], [6])
    rig.transfer.before_forward()
    with caplog.at_level(logging.ERROR):
        results = rig.run()
    assert {result.job_id: result.ok for result in results} == {
        1: True,
        2: False,
        3: False,
        4: False,
        5: False,
        6: True,
    }
    assert [str(job_id) in message for job_id, message in zip((2, 3, 4, 5), caplog.messages, strict=False)].count(
        True
    ) > 1
    assert "device block of group 0 is not in [0, 64)" in caplog.text


def test_a_job_without_rows_ends() -> None:
    rig = Rig(PageGroup([]), PageGroup(apart()))
    rig.transfer.submit(1, spec_of([5], ([3], 0), ([], 0)), is_store=True)
    rig.transfer.submit(2, spec_of([], ([], 0), ([], 0)), is_store=False)
    rig.transfer.before_forward()
    results = rig.run()
    assert sorted(ended(results)) == [1, 2]
    assert not any(result.nbytes for result in results)


# The engine's side.


@pytest.mark.parametrize("operation", ["copy", "query", "gather", "scatter"])
@pytest.mark.parametrize("with_threads", [False, True])
def test_an_error_of_the_device_reaches_the_worker_which_gives_up(operation: str, with_threads: bool) -> None:
    rig = Rig(PageGroup(apart()), with_threads=with_threads)
    worker = OffloadingConnectorWorker(rig.transfer)
    spec = spec_of([0], ([0], 0))
    rig.device.raise_in = operation
    total = WorkerReport()
    metas = iter([StepMeta(stores={1: spec}), StepMeta(loads={2: spec})])
    deadline = time.monotonic() + 60
    while not (total.broken and len(total.done) == 2) and time.monotonic() < deadline:
        if not with_threads:
            rig.advance()
        with worker.step(next(metas, StepMeta(has_tokens=False)), lambda report: print(total.add(report))):
            pass
    assert total.broken
    assert total.done == {1: 1, 2: 1}
    assert total.failed
    assert worker.take_report() is None
    worker.shutdown()
    assert (rig.device.closed, rig.registration.released) == (0, 0), "copies may still use the memory"


def test_a_worker_that_gives_up_for_another_reason_frees_the_device_once(rig: Rig) -> None:
    worker = OffloadingConnectorWorker(rig.transfer)
    reports: list[WorkerReport] = []
    with worker.step(StepMeta(stores={1: spec_of([0], ([0], 0))}), reports.append):
        rig.advance()
    worker.weights.watch = SimpleNamespace(begin=lambda: 1 // 0)
    with worker.step(StepMeta(), reports.append):
        pass
    assert reports[-1].broken
    worker.shutdown()
    assert (rig.device.closed, rig.registration.released) == (1, 1)


def test_an_error_in_a_fence_is_raised_to_its_caller(rig: Rig) -> None:
    rig.store(1, [0], [0])
    rig.device.raise_in = "copy"
    with pytest.raises(RuntimeError, match="failed"):
        rig.transfer.wait([1])
    with pytest.raises(RuntimeError, match="the device failed"):
        rig.transfer.poll(busy=True)
    assert not rig.transfer.advance()


def test_no_step_is_made_by_a_thread_that_waited_while_another_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, may_fail = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        is_copying.set()
        may_fail.wait(60)
        raise RuntimeError("the driver failed")

    rig.store(1, [0], [0])
    rig.transfer.before_forward()
    monkeypatch.setattr(rig.device, "copy", fail)
    threads = [threading.Thread(target=rig.advance) for _ in range(2)]
    threads[0].start()
    assert is_copying.wait(60)
    threads[1].start()
    # Long enough, mostly, for the second thread to wait for the first.
    threads[1].join(0.05)
    may_fail.set()
    for thread in threads:
        thread.join()
    assert not [name for name, _ in rig.device.calls if name == "query"], "the chunk is issued halfway"


def test_close_frees_the_device_once_and_drops_what_was_not_issued(rig: Rig) -> None:
    rig.store(1, [0], [0])
    rig.transfer.before_forward()
    rig.transfer.close()
    rig.transfer.close()
    assert (rig.device.closed, rig.registration.released) == (1, 1)
    assert not rig.transfer.advance()
    assert not rig.pool.any()


@pytest.mark.parametrize("make", [apart, packed])
def test_close_does_not_free_memory_that_copies_use(make: Callable[[], list[ByteArray]]) -> None:
    rig = Rig(PageGroup(make()), limits=Limits(close_deadline_s=0.01))
    rig.device.held = True
    rig.store(1, [0], [0])
    rig.transfer.before_forward()
    rig.run()
    rig.transfer.close()
    assert (rig.device.closed, rig.registration.released) == (0, 0)


# The thread.


def test_a_waiting_thread_is_woken_by_the_end_of_a_job() -> None:
    rig = Rig(PageGroup(apart()), with_threads=True)
    rig.transfer.wait_any(60)
    rig.store(1, [0], [0])
    rig.transfer.wait_any(60)
    assert ended(rig.transfer.poll(busy=False)) == [1]
    assert rig.device.threads >= 1
    rig.transfer.close()


def test_waiting_ends_at_its_timeout() -> None:
    rig = Rig(PageGroup(apart()), with_threads=True)
    rig.device.held = True
    rig.store(1, [0], [0])
    rig.transfer.wait_any(0.01)
    assert rig.transfer.poll(busy=False) == []
    rig.device.release()
    rig.transfer.wait_any(60)
    assert ended(rig.transfer.poll(busy=False)) == [1]
    rig.transfer.close()


# Batches, kernels and staging memory.


def test_a_refused_batch_is_copied_one_by_one_and_there_are_no_batches_any_more(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.device.refuses_batches = True
    rig.store(1, [0, 20, 30], [1, 2, 3])
    rig.transfer.before_forward()
    assert ended(rig.run()) == [1]
    assert [rig.slot(slot) for slot in (0, 20, 30)] == [rig.block(block) for block in (1, 2, 3)]
    assert rig.calls("copy") == [1] * 3 * rig.copies_per_block
    rig.device.refuses_batches = False
    rig.load(2, [0, 20], [5, 6])
    assert ended(rig.run()) == [2]
    assert rig.device.num_batches == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refused a batch" in caplog.text


def test_an_error_of_one_copy_is_no_refusal(rig: Rig) -> None:
    rig.device.raise_in = "copy"
    rig.store(1, [0], [1])
    rig.transfer.before_forward()
    rig.advance()
    with pytest.raises(RuntimeError) as error:
        rig.transfer.poll(busy=False)
    assert str(error.value.__cause__) == f"cuMemcpyBatchAsync of {rig.copies_per_block} copies failed: CUDA error (719)"


def test_more_rows_than_the_numbers_of_one_launch() -> None:
    num = 2 * MAX_BLOCKS + 5
    views = [noise(num, 16), noise(num, 24)]
    rig = Rig(PageGroup(views), num_slots=num)
    rig.store(1, range(num), range(num - 1, -1, -1))
    rig.transfer.before_forward()
    assert ended(rig.run()) == [1]
    assert rig.calls("gather") == [MAX_BLOCKS, MAX_BLOCKS, 5]
    assert np.array_equal(rig.pool, np.concatenate(views, axis=1)[::-1])


def test_a_fence_beside_full_traffic_has_streams_and_staging_memory_of_its_own() -> None:
    """So nothing is in front of its gather. Where rows are in flight, they are gathered already."""
    rig = Rig(PageGroup(apart()), limits=SMALL_CHUNKS)
    rig.device.held = True
    rig.store(1, range(64), range(64))
    rig.transfer.before_forward()
    rig.run()
    ordinary = {event.stream for event in rig.device.events if event.recorded}
    rig.device.waits.clear()
    rig.transfer.wait([1], {63})
    (at, fenced), *copied = [(stream, event) for stream, event in rig.device.waits if stream not in ordinary]
    assert at not in ordinary
    assert fenced in engine_events(rig), "the gather waits for the engine's point and for nothing else"
    assert len(copied) == 1, "its copy waits for the gather"
    assert engine_waits(rig) == 1
    rig.transfer.wait([1], {0})
    assert [stream for stream, _ in rig.device.waits] == [ENGINE]
    rig.device.release()
    assert ended(rig.run()) == [1]


# Runs of addresses computed from views.

LAYERS, FEW_BLOCKS, PAGE = 3, 4, 32


def test_blocks_outermost_are_one_run() -> None:
    whole = np.zeros((FEW_BLOCKS, LAYERS, PAGE), np.uint8)
    table = page_table(PageGroup([whole[:, layer] for layer in range(LAYERS)]))
    assert table.runs == (LayerRun(whole.ctypes.data, LAYERS * PAGE, LAYERS * PAGE, 0),)
    assert table.is_compact
    assert not table.needs_gather


@pytest.mark.parametrize(
    "offsets", [(-1, 40, 80), (0, PAGE - 1, 80), (80, 40, 40), (0, 40, 97), (0, 40), (0, 40, 64, 96)]
)
def test_pages_without_places_of_their_own_are_refused(offsets: tuple[int, ...]) -> None:
    views = [np.zeros((FEW_BLOCKS, PAGE), np.uint8) for _ in range(LAYERS)]
    assert page_table(PageGroup(views, 1, Placement((0, 96, 40), 128))).row_bytes == 128
    with pytest.raises(ValueError, match=r"places are given|into a row of 128 bytes"):
        page_table(PageGroup(views, 1, Placement(offsets, 128)))


def test_a_rank_without_layers_of_a_group_has_no_runs() -> None:
    assert page_table(PageGroup([], 2)) == PageTable((), 0, 0, 2)


def test_views_with_different_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="same number"):
        page_table(PageGroup([np.zeros((4, 8), np.uint8), np.zeros((5, 8), np.uint8)]))
