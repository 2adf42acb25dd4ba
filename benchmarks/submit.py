"""The CUDA transfer over a driver that does nothing but take time: what it copies beside a busy engine, and CPU time.

No GPU is needed. ``timed_driver.c`` has the driver's functions and the speeds of a GPU on PCIe 5: 55 GB/s per direction
of the bus, 2 TB/s of its memory, 1 to 2 us per call. The engine's thread makes steps of 10 ms, in which it runs Python
for a share of the time and waits for the device for the rest, and submits more jobs than the bus can copy. So the
figures are how much of the bus the loop of copies keeps in use. "Fence": one block of a store in full traffic; the
engine's thread issues its rows, then the engine's stream waits for them.

Where that is allowed, all threads run with real-time priority, so that other processes of the machine change nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, TransferSpec
from kvoffload.transfer.cuda.calls import DriverCalls, Kernel
from kvoffload.transfer.cuda.device import Device
from kvoffload.transfer.cuda.pages import PageTable, Run
from kvoffload.transfer.cuda.transfer import CudaTransfer

SOURCE = Path(__file__).with_name("timed_driver.c")
DEVICE = 1 << 50
"""Addresses from here on are on the device. Nothing is behind them: no byte is copied."""
LAYERS = 32
NUM_BLOCKS = 1 << 15
ROUNDS = 15
LIMIT_MS = 1.0
"""How long the engine's thread may be busy with 512 jobs or blocks."""
GOAL_GBPS = 44.0
"""What rows of 64 KiB must reach, however busy the engine's thread is."""
STEP_S = 10e-3
JOB_BYTES = 64 << 20
OPEN_BYTES = 1600 << 20
"""Jobs that are open in each direction: more than the bus copies in two steps."""
SECONDS = 0.6
CHUNK_BYTES = 8 << 20
CASES = (
    ("512 blocks, one job", 512, 1),
    ("512 blocks, a job per block", 512, 512),
    ("6,250 blocks, one job", 6250, 1),
    ("6,250 blocks, a job per block", 6250, 6250),
)
SHARES = (0.0, 0.3, 0.7, 0.95)
"""How much of a step the engine's thread runs Python."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one size: device blocks that are gathered, or in one piece."""

    kib: int
    is_direct: bool

    @property
    def what(self) -> str:
        return f"{self.kib} KiB {'direct' if self.is_direct else 'staged'}"

    @property
    def table(self) -> PageTable:
        nbytes = self.kib << 10
        if self.is_direct:
            return PageTable((Run(2 * DEVICE, nbytes, nbytes, 0),), nbytes, NUM_BLOCKS)
        page = nbytes // LAYERS
        runs = [Run(2 * DEVICE + i * NUM_BLOCKS * page, page, page, i * page) for i in range(LAYERS)]
        return PageTable(tuple(runs), nbytes, NUM_BLOCKS)


KINDS = (Rows(64, False), Rows(256, False), Rows(2048, True))


class TimedDriver:
    """The functions of ``timed_driver.c``. They keep Python's lock where Python calls them."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise RuntimeError("this benchmark needs a C compiler")
        path = folder / "timed_driver.so"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-pthread", SOURCE, "-o", path], check=True)
        self.library = ctypes.PyDLL(str(path))
        self.library.timed_new.restype = c_uint64
        self.library.timed_left.restype = c_double
        self.library.timed_left.argtypes = [c_void_p]

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), c_void_p).value or 0


class TimedDevice(Device):
    """A device of one group of pages on a TimedDriver."""

    def __init__(self, driver: TimedDriver, table: PageTable) -> None:
        self._driver = driver
        self._table = table
        self._allocated = DEVICE
        driver.library.timed_reset()
        self._engine = self.new_stream()

    def native_calls(self) -> DriverCalls:
        names = ("copy_batch", "copy", "launch", "record", "wait", "query", "elapsed")
        row_bytes = self._table.device_block_bytes
        kernel = Kernel(1, 2, DEVICE, len(self._table.runs), row_bytes, 256, 16, max(1, (64 << 10) / row_bytes))
        addresses = {name: self._driver.address(f"timed_{name}") for name in names}
        return DriverCalls(**addresses, kernels=[kernel])

    def enter_thread(self) -> None: ...

    def new_stream(self) -> int:
        return int(self._driver.library.timed_new())

    def engine_stream(self) -> int:
        return self._engine

    def new_event(self) -> int:
        return int(self._driver.library.timed_new())

    def allocate(self, nbytes: int) -> int:
        self._allocated += nbytes
        return self._allocated - nbytes

    def allocate_host(self, nbytes: int) -> ByteArray:
        raise NotImplementedError("all slots are registered")

    def close(self) -> None: ...


class _Registered:
    num_ready_slots = NUM_BLOCKS
    boundary_slots = 64

    def release(self) -> None: ...


class Bench:
    """A CudaTransfer over a TimedDriver, and an engine that keeps OPEN_BYTES of jobs in each direction open."""

    def __init__(self, driver: TimedDriver, rows: Rows, with_threads: bool = True) -> None:
        block_bytes = rows.kib << 10
        pool = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (NUM_BLOCKS, block_bytes), (block_bytes, 1))
        before = set(threading.enumerate())
        self.device = TimedDevice(driver, rows.table)
        self.transfer = CudaTransfer([rows.table], pool, self.device, _Registered(), with_threads=with_threads)
        self.threads = [thread for thread in threading.enumerate() if thread not in before]
        self.driver = driver
        self.job_blocks = JOB_BYTES // block_bytes
        self.nbytes = 0
        self.jobs: list[int] = []
        """Stores, oldest first."""
        self._ids = iter(range(1 << 40))
        self._open = {True: 0, False: 0}
        self._is_store: dict[int, bool] = {}
        rng = np.random.default_rng(0)
        self._numbers = [rng.permutation(NUM_BLOCKS) for _ in range(2)]

    def spec(self, number: int) -> TransferSpec:
        place = slice(number * self.job_blocks % NUM_BLOCKS, number * self.job_blocks % NUM_BLOCKS + self.job_blocks)
        blocks, slots = (each[place] for each in self._numbers)
        return TransferSpec("r", LoadStoreSpec("CPU", slots), DeviceSpec(blocks, (len(blocks),), (0,)))

    def step(self, directions: tuple[bool, ...]) -> None:
        """What an engine does in a step: takes results, submits jobs, begins a forward pass."""
        for result in self.transfer.poll(busy=True):
            assert result.ok
            self.nbytes += result.nbytes
            self._open[self._is_store.pop(result.job_id)] -= 1
        for is_store in directions:
            while self._open[is_store] * JOB_BYTES < OPEN_BYTES:
                job_id = next(self._ids)
                self.transfer.submit(job_id, self.spec(job_id), is_store)
                self._is_store[job_id] = is_store
                self._open[is_store] += 1
        self.transfer.before_forward()

    def stores(self) -> list[int]:
        """Returns the ids of open stores, oldest first."""
        return [job_id for job_id, is_store in self._is_store.items() if is_store]

    def close(self) -> None:
        self.transfer.close()


@contextmanager
def bench(driver: TimedDriver, rows: Rows) -> Iterator[Bench]:
    made = Bench(driver, rows)
    try:
        yield made
    finally:
        made.close()


def run_python(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def cpu_seconds(threads: list[threading.Thread]) -> float:
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in threads if each.ident)


@dataclass(frozen=True, slots=True)
class Figures:
    gbps: float
    engine_us: float
    """CPU time of the engine's thread in the transfer, per 8 MiB."""
    copying_us: float


def measure(made: Bench, share: float, directions: tuple[bool, ...], seconds: float) -> Figures:
    """Runs steps of an engine that runs Python for ``share`` of each."""
    engine = nbytes = 0.0
    begin, cpu_begin = time.perf_counter(), 0.0
    is_warm = False
    while True:
        step = time.perf_counter()
        if not is_warm and step > begin + 4 * STEP_S:
            is_warm, begin, engine, nbytes = True, step, 0.0, made.nbytes
            cpu_begin = cpu_seconds(made.threads)
        if is_warm and step > begin + seconds:
            break
        at = time.thread_time()
        made.step(directions)
        engine += time.thread_time() - at
        run_python(share * STEP_S - (time.perf_counter() - step))
        time.sleep(max(0.0, STEP_S - (time.perf_counter() - step)))
    chunks = max(1.0, made.nbytes - nbytes) / CHUNK_BYTES
    copying = cpu_seconds(made.threads) - cpu_begin
    return Figures((made.nbytes - nbytes) / (step - begin) / 1e9, engine / chunks * 1e6, copying / chunks * 1e6)


def measure_fence(made: Bench, rounds: int) -> tuple[float, float]:
    """Returns medians in us: how long the call for one block that is queued takes, and how long the engine's stream
    waits after it."""
    calls, waits = [], []
    for _ in range(rounds):
        made.step((True,))
        time.sleep(STEP_S / 4)
        job = made.stores()[-1]
        block = int(made.spec(job).device.block_ids[-1])
        begin = time.perf_counter()
        made.transfer.wait([job], [block])
        calls.append((time.perf_counter() - begin) * 1e6)
        waits.append(made.driver.library.timed_left(made.device.engine_stream()) * 1e-3)
    return statistics.median(calls), statistics.median(waits)


def measure_submit(driver: TimedDriver, num_blocks: int, num_jobs: int) -> float:
    """Returns milliseconds of CPU time of the engine's thread for a store of these blocks: to submit it, and to take
    results."""
    made = Bench(driver, Rows(128, False), with_threads=False)
    blocks, slots = (np.random.default_rng(seed).permutation(NUM_BLOCKS)[:num_blocks] for seed in range(2))
    specs = [
        TransferSpec("r", LoadStoreSpec("CPU", here), DeviceSpec(there, (len(there),), (0,)))
        for here, there in zip(np.split(slots, num_jobs), np.split(blocks, num_jobs), strict=True)
    ]
    start = time.thread_time()
    for job_id, spec in enumerate(specs):
        made.transfer.submit(job_id, spec, is_store=True)
    made.transfer.before_forward()
    total, num_ended = time.thread_time() - start, 0
    while num_ended < num_jobs:
        while made.transfer.advance():
            pass
        start = time.thread_time()
        results = made.transfer.poll(busy=True)
        total += (time.thread_time() - start) if results else 0.0
        num_ended += len(results)
    made.close()
    return 1e3 * total


def main(out: Path, quick: bool) -> None:
    if not quick:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    with tempfile.TemporaryDirectory() as folder:
        publish(
            "submit",
            "Copies of a CUDA device over a driver that does nothing but take time",
            list(_rows(TimedDriver(Path(folder)), quick)),
            out,
        )


def _rows(driver: TimedDriver, quick: bool) -> Iterator[Row]:
    seconds = 0.02 if quick else SECONDS
    for rows in KINDS:
        for share in SHARES[-1:] if quick else SHARES:
            with bench(driver, rows) as made:
                figures = measure(made, share, (True,), seconds)
            what = f"{rows.what}, engine runs Python {share:.0%} of the time"
            goal: dict[str, Any] = {"versus": "goal", "ratio": figures.gbps / GOAL_GBPS} if rows.kib == 64 else {}
            yield Row(what, figures.gbps, "GB/s", **goal)
            if share in (0.0, 0.7):
                yield Row(f"{what}: CPU time per 8 MiB, engine's thread", figures.engine_us, "us")
                yield Row(f"{what}: CPU time per 8 MiB, copying threads", figures.copying_us, "us")
    for share in SHARES[-1:] if quick else (0.0, 0.7):
        with bench(driver, KINDS[0]) as made:
            figures = measure(made, share, (True, False), seconds)
        what = f"{KINDS[0].what}, both directions, engine runs Python {share:.0%} of the time"
        yield Row(what, figures.gbps, "GB/s")
    with bench(driver, KINDS[0]) as made:
        call, wait = measure_fence(made, 3 if quick else 40)
        yield Row("fence of one block of 64 KiB: engine's thread", call, "us")
        yield Row("fence of one block of 64 KiB: engine's stream after it", wait, "us")
    for what, num_blocks, num_jobs in CASES[:1] if quick else CASES:
        ms = min(measure_submit(driver, num_blocks, num_jobs) for _ in range(1 if quick else ROUNDS))
        limit: dict[str, Any] = {"versus": "limit", "ratio": LIMIT_MS / ms} if num_blocks <= 512 else {}
        yield Row(f"engine's thread: {what}", ms, "ms", **limit)
