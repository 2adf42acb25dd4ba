"""Copies between the blocks of a CUDA device and the host pool, planned and issued by threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvoffload.abc import ByteArray, Transfer, TransferResult, TransferSpec
from kvoffload.transfer.cuda.device import Device
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS, Limits
from kvoffload.transfer.cuda.native_loop import NativeLoop
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.slots import ReadySlots
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

_ABANDONED: list[object] = []
"""Memory that copies may still use after a ``close`` that has reached its deadline."""


class CudaTransfer(Transfer):
    """Gathers blocks of several jobs and groups into chunks, and copies each chunk over the bus with one call.

    ``tables`` say where the pages of each group are; ``device`` was made for the same groups. ``submit``,
    ``before_forward`` and ``poll`` only pass jobs and results on, threads plan and issue the copies. ``wait`` issues
    the rows that a fence needs itself. With ``with_threads`` False the caller calls ``advance`` instead of the threads.
    ``poll`` raises the error of a device that has failed. ``close`` closes the device too, and releases the
    registration."""

    def __init__(
        self,
        tables: Sequence[PageTable],
        pool_data: ByteArray,
        device: Device,
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
        self._loop = NativeLoop(device, tables, pool_data, registration, limits)
        self._is_closed = False
        if self._loop.staging_bytes:
            logger.info(
                "kvoffload: blocks are gathered and scattered in %s of device memory, taken now",
                format_bytes(self._loop.staging_bytes),
            )
        self._threads = [
            threading.Thread(target=self._loop.run, args=(number,), name=f"kvoffload-copies-{number}", daemon=True)
            for number in range(self._loop.num_threads if with_threads else 0)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self._loop.submit(job_id, spec, is_store)

    def before_forward(self) -> None:
        self._loop.record_point()

    def poll(self, busy: bool) -> list[TransferResult]:
        return self._loop.poll()

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self._loop.record_point()
        jobs = np.fromiter(job_ids, dtype=np.int64)
        blocks = None if device_blocks is None else np.fromiter(device_blocks, dtype=np.int64)
        self._loop.fence(jobs, blocks)
        # Loads that are submitted from now on come after what the engine's stream waits for.
        self._loop.record_point()

    def wait_any(self, timeout_s: float) -> None:
        if not self._threads:
            deadline, timeout_s = time.monotonic() + timeout_s, 0.0
            while time.monotonic() < deadline and self.advance():
                pass
        self._loop.wait_any(timeout_s)

    def advance(self) -> bool:
        """Makes one step of the copies that wait, as a thread does. Returns whether there was anything to do."""
        return not self._is_closed and self._loop.advance()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.stop()
        deadline = time.monotonic() + self._limits.close_deadline_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # After an error, too, copies that were issued before it must end: their loads are reported as failed, and the
        # blocks that they fill belong to others then.
        is_running = any(thread.is_alive() for thread in self._threads)
        if not is_running and self._ends(deadline) and not self._loop.has_failed:
            self._registration.release()
            self._device.close()
        else:
            logger.warning(
                "kvoffload: copies did not end within %g s, or the device failed; their memory is not freed",
                self._limits.close_deadline_s,
            )
            _ABANDONED.append((self._device, self._loop, self._pool_data))

    def _ends(self, deadline: float) -> bool:
        try:
            return self._loop.wait_until_idle(deadline)
        except Exception:
            logger.exception("kvoffload: the device failed")
            return False
