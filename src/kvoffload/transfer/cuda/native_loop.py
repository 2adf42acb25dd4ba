"""The loop of copies in native code, with what it needs of a device."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import astuple
from types import ModuleType

import numpy as np

from kvoffload.abc import ByteArray, ConfigError, TransferResult, TransferSpec
from kvoffload.native import ENVIRONMENT_VARIABLE, describe, load
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Device
from kvoffload.transfer.cuda.driver import DriverError
from kvoffload.transfer.cuda.limits import ROW_ALIGNMENT, Limits, aligned, device_bytes
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.slots import ReadySlots

logger = logging.getLogger(__name__)

LOADS, STORES = DIRECTIONS = range(2)
ORDINARY, FENCES = range(2)
"""The lanes of a direction."""
EVENTS_PER_CHUNK = 3
NUM_POINTS = 4
NOT_READY = 600
PAUSE_S = 100e-6
WAITS_FOR_DRIVER = (
    "kvoffload: copies have waited for %.0f s for a call of the driver that issues others: a debugger, a profiler, "
    "swapping or a full launch queue delays it; they go on after it"
)


def native_module() -> ModuleType:
    """Returns the compiled module. Raises ConfigError if there is none: no other code copies on a GPU."""
    module = load("_transfer")
    if module is None:
        raise ConfigError(
            fault=f"a CUDA device is served with native code only, and kvoffload runs on {describe()}",
            fix=f"reinstall kvoffload from a wheel or where there is a C compiler, and unset {ENVIRONMENT_VARIABLE}",
        )
    return module


class NativeLoop:
    """Copies jobs on the streams of ``device`` without Python's lock, with one thread per direction that calls ``run``.

    All other methods are called on the engine's thread. After the first error of the device no copy is issued: ``poll``
    and ``fence`` raise RuntimeError, and ``run`` returns.
    """

    num_threads = len(DIRECTIONS)

    def __init__(
        self,
        device: Device,
        tables: Sequence[PageTable],
        pool_data: ByteArray,
        registration: ReadySlots,
        limits: Limits,
    ) -> None:
        calls = device.native_calls()
        self._device = device
        self._registration = registration
        self._limits = limits
        self._said_batches_are_off = False
        self._thread_error: Exception | None = None
        is_staged = [
            kernel is not None and table.needs_gather for kernel, table in zip(calls.kernels, tables, strict=True)
        ]
        largest = max((table.device_block_bytes for table in tables), default=0)
        stages = [
            aligned(max(size, largest) + ROW_ALIGNMENT * (len(tables) - 1))
            for size in (limits.stage_bytes, limits.fence_bytes)
        ]
        bounce_bytes = max(limits.bounce_bytes, largest)
        self._loop = native_module().Loop(
            astuple(calls)[:-1],
            [
                (
                    table.num_blocks if table.runs else 0,
                    table.factor,
                    table.row_bytes,
                    table.runs,
                    kernel if staged else None,
                )
                for table, kernel, staged in zip(tables, calls.kernels, is_staged, strict=True)
            ],
            pool_data,
            registration.boundary_slots,
            (
                max(limits.chunk_bytes, largest),
                limits.chunk_rows,
                max(limits.stage_bytes, largest),
                max(limits.fence_bytes, largest),
                bounce_bytes,
            ),
        )
        # One piece, because the driver takes whole pages for each.
        nbytes = len(DIRECTIONS) * (stages[FENCES] + limits.in_flight * stages[ORDINARY]) if any(is_staged) else 0
        self.staging_bytes = device_bytes(nbytes)
        """Device memory that was allocated."""
        at = device.allocate(nbytes) if nbytes else 0
        for direction in DIRECTIONS:
            for lane in (ORDINARY, FENCES):
                shared = at if lane == FENCES else 0
                streams = [device.new_stream() for _ in range(2)]
                self._loop.set_streams(direction, lane, *streams, self._new_events(2), shared)
            at += stages[FENCES] if nbytes else 0
            for _ in range(limits.in_flight):
                self._loop.add_chunk(direction, ORDINARY, self._new_events(EVENTS_PER_CHUNK), at)
                at += stages[ORDINARY] if nbytes else 0
            self._loop.add_chunk(direction, FENCES, self._new_events(EVENTS_PER_CHUNK))
            for _ in range(limits.num_bounce_buffers if registration.num_ready_slots < len(pool_data) else 0):
                self._loop.add_bounce(direction, int(device.allocate_host(bounce_bytes).ctypes.data))
        for event in self._new_events(NUM_POINTS):
            self._loop.add_point(event)
        self.record_point()

    @property
    def has_failed(self) -> bool:
        """Whether there was an error of the device."""
        return self._loop.error is not None

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        """Queues a job. A store waits for the next ``record_point``, a load is copied after the last one."""
        self._loop.submit(job_id, spec, is_store)

    def record_point(self) -> None:
        """Records a point of the engine's stream: stores submitted before it, and loads submitted after it, wait for
        it."""
        self._loop.set_ready(self._registration.num_ready_slots)
        while not self._loop.renew_point():
            self._loop.add_point(self._device.new_event())
        if not self._loop.record_point(self._device.engine_stream()):
            self._raise()

    def poll(self) -> list[TransferResult]:
        """Returns the jobs that have ended. Stores that still wait for a point get one."""
        if self._loop.has_new_stores:
            self.record_point()
        if self._loop.error is not None:
            self._raise()
        if self._loop.batches_are_off and not self._said_batches_are_off:
            self._said_batches_are_off = True
            logger.warning(
                "kvoffload: the driver refused a batch of copies, so copies are issued one by one, which takes the "
                "copying threads longer: another version of the driver may have no such fault"
            )
        results: list[TransferResult] = self._loop.take()
        return results

    def fence(self, jobs: Numbers, blocks: Numbers | None) -> None:
        """Makes the engine's stream wait until ``jobs`` have read, or filled, ``blocks`` (None: all of their device
        blocks). Their rows are issued first. Jobs with rows for which there is no bounce buffer fail."""
        jobs = np.sort(jobs)
        blocks = None if blocks is None else np.sort(blocks)
        stream = self._device.engine_stream()
        for direction in DIRECTIONS:
            self._hold(direction)
            try:
                while not self._loop.fence(direction, jobs, blocks, stream):
                    self._loop.add_chunk(direction, FENCES, self._new_events(EVENTS_PER_CHUNK))
            finally:
                self._loop.let_go(direction)
        if self._loop.error is not None:
            self._raise()

    def wait_any(self, timeout_s: float) -> None:
        """Waits until there are results or an error, or ``stop`` was called, at most ``timeout_s``. Returns at once if
        no job is open."""
        if self._loop.has_new_stores:
            self.record_point()
        if self._loop.num_open:
            self._loop.wait_any(timeout_s)

    def advance(self) -> bool:
        """Makes one step of the copies that wait, where no thread does. Returns whether there was anything to do."""
        return any(self._loop.advance(direction) for direction in DIRECTIONS)

    def run(self, thread: int) -> None:
        """Copies until ``stop`` or an error, in one of ``num_threads`` threads."""
        try:
            self._device.enter_thread()
        except Exception as error:
            self._thread_error = error
            self._loop.fail()
        self._loop.run(thread)

    def stop(self) -> None:
        """Makes ``run`` return."""
        self._loop.close()

    def wait_until_idle(self, deadline: float) -> bool:
        """Makes the engine's later work wait for all that was issued, waits for it until ``deadline`` (of
        time.monotonic), and returns whether it has ended. Called after ``stop``, when no thread is in ``run``; works
        after an error, too. Raises the error of a device that cannot say it."""
        self._check(self._loop.mark_end(self._device.engine_stream()))
        while (code := self._loop.query_end()) == NOT_READY:
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        self._check(code)
        return True

    def _hold(self, direction: int) -> None:
        begin = time.monotonic()
        while not self._loop.hold(direction, self._limits.lock_warning_s):
            logger.warning(WAITS_FOR_DRIVER, time.monotonic() - begin)

    def _new_events(self, number: int) -> list[int]:
        return [self._device.new_event() for _ in range(number)]

    def _raise(self) -> None:
        what, code, count, copy = self._loop.error
        if count:
            what += f" of {count} copies" + (f" at copy {copy}" if copy < count else "")
        cause = self._thread_error or DriverError(what, "CUDA error", code)
        raise RuntimeError("the device failed while blocks were copied") from cause

    def _check(self, code: int) -> None:
        if code:
            raise DriverError("the end of copies", "CUDA error", code)
