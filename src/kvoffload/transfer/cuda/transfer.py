"""Copies between the blocks of a CUDA device and the host pool, planned and issued by threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvoffload.abc import ByteArray, Transfer, TransferResult, TransferSpec
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.driver import NOT_READY, DriverError
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS, Limits
from kvoffload.transfer.cuda.native_loop import DIRECTIONS, FENCES, error_of, make_loop, new_events
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.slots import ReadySlots
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

PAUSE_S = 100e-6
WAITS_FOR_DRIVER = (
    "kvoffload: copies have waited for %.0f s for a call of the driver that issues others: a debugger, a profiler, "
    "swapping or a full launch queue delays it; they go on after it"
)
_ABANDONED: list[object] = []
"""Memory that copies may still use after a ``close`` that has reached its deadline."""


class CudaTransfer(Transfer):
    """Gathers blocks of several jobs and groups into chunks, and copies each chunk over the bus with one call.

    ``tables`` say where the pages of each group are; ``device`` was made for the same groups. ``submit``,
    ``before_forward`` and ``poll`` only pass jobs and results on; the native loop plans and issues the copies, in a
    thread per direction, without Python's lock. ``wait`` issues the rows that a fence needs itself. With
    ``with_threads`` False the caller calls ``advance`` instead of the threads. After the first error of the device no
    copy is issued: ``poll`` and ``wait`` raise it, as RuntimeError. ``close`` closes the device too, and releases the
    registration."""

    def __init__(
        self,
        tables: Sequence[PageTable],
        pool_data: ByteArray,
        device: CudaDevice,
        registration: ReadySlots,
        *,
        limits: Limits = DEFAULT_LIMITS,
        with_threads: bool = True,
    ) -> None:
        for table in tables:
            if table.factor * table.row_bytes > pool_data.shape[1]:
                raise ValueError(
                    f"{table.factor} rows of {table.row_bytes} bytes exceed a slot of {pool_data.shape[1]}"
                )
        self._device = device
        self._pool_data = pool_data
        self._registration = registration
        self._limits = limits
        self._loop, staging_bytes = make_loop(device, device.native_calls(), tables, pool_data, registration, limits)
        self._said_batches_are_off = False
        self._thread_error: Exception | None = None
        self._is_closed = False
        self._record_point()
        if staging_bytes:
            logger.info(
                "kvoffload: blocks are gathered and scattered in %s of device memory, taken now",
                format_bytes(staging_bytes),
            )
        self._threads = [
            threading.Thread(target=self._run, args=(direction,), name=f"kvoffload-copies-{direction}", daemon=True)
            for direction in (DIRECTIONS if with_threads else ())
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self._loop.submit(job_id, spec, is_store)

    def before_forward(self) -> None:
        self._record_point()

    def _record_point(self) -> None:
        """Records a point of the engine's stream: stores submitted before it, and loads submitted after it, wait for
        it."""
        self._loop.set_ready(self._registration.num_ready_slots)
        while not self._loop.renew_point():
            self._loop.add_point(self._device.new_event())
        if not self._loop.record_point(self._device.engine_stream()):
            self._raise()

    def poll(self, busy: bool) -> list[TransferResult]:
        if self._loop.has_new_stores:
            self._record_point()
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

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        """Issues the rows of these blocks before all others. Jobs with rows for which there is no bounce buffer
        fail."""
        self._record_point()
        jobs = np.sort(np.fromiter(job_ids, dtype=np.int64))
        blocks = None if device_blocks is None else np.sort(np.fromiter(device_blocks, dtype=np.int64))
        stream = self._device.engine_stream()
        for direction in DIRECTIONS:
            self._fence(direction, jobs, blocks, stream)
        if self._loop.error is not None:
            self._raise()
        # Loads that are submitted from now on come after what the engine's stream waits for.
        self._record_point()

    def _fence(self, direction: int, jobs: Numbers, blocks: Numbers | None, stream: int) -> None:
        begin = time.monotonic()
        while not self._loop.hold(direction, self._limits.lock_warning_s):
            logger.warning(WAITS_FOR_DRIVER, time.monotonic() - begin)
        try:
            while not self._loop.fence(direction, jobs, blocks, stream):
                self._loop.add_chunk(direction, FENCES, new_events(self._device))
        finally:
            self._loop.let_go(direction)

    def wait_any(self, timeout_s: float) -> None:
        if not self._threads:
            deadline, timeout_s = time.monotonic() + timeout_s, 0.0
            while time.monotonic() < deadline and self.advance():
                pass
        if self._loop.has_new_stores:
            self._record_point()
        if self._loop.num_open:
            self._loop.wait_any(timeout_s)

    def advance(self) -> bool:
        """Makes one step of the copies that wait, as a thread does. Returns whether there was anything to do."""
        return not self._is_closed and any(self._loop.advance(direction) for direction in DIRECTIONS)

    def _run(self, direction: int) -> None:
        try:
            self._device.enter_thread()
        except Exception as error:
            self._thread_error = error
            self._loop.fail()
        self._loop.run(direction)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.close()
        deadline = time.monotonic() + self._limits.close_deadline_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # After an error, too, copies that were issued before it must end: their loads are reported as failed, and the
        # blocks that they fill belong to others then.
        is_running = any(thread.is_alive() for thread in self._threads)
        if not is_running and self._ends(deadline) and self._loop.error is None:
            self._registration.release()
            self._device.close()
        else:
            logger.warning(
                "kvoffload: copies did not end within %g s, or the device failed; their memory is not freed",
                self._limits.close_deadline_s,
            )
            _ABANDONED.append((self._device, self._loop, self._pool_data))

    def _ends(self, deadline: float) -> bool:
        """Makes the engine's later work wait for all that was issued, and waits for it too. Returns whether it has
        ended by then. No thread runs the loop any more."""
        try:
            code = self._loop.mark_end(self._device.engine_stream())
            while not code and (code := self._loop.query_end()) == NOT_READY:
                if time.monotonic() > deadline:
                    return False
                time.sleep(PAUSE_S)
                code = 0
            if code:
                raise DriverError("the end of copies", "CUDA error", code)
        except Exception:
            logger.exception("kvoffload: the device failed")
            return False
        return True

    def _raise(self) -> None:
        raise RuntimeError("the device failed while blocks were copied") from self._thread_error or error_of(self._loop)
