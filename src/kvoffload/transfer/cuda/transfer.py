"""Copies between the blocks of a CUDA device and the host pool, planned and issued by a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvoffload.abc import ByteArray, Transfer, TransferResult, TransferSpec
from kvoffload.transfer.cuda.copier import Copier, Submitted
from kvoffload.transfer.cuda.device import Device
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS, Limits
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.rows import Point
from kvoffload.transfer.cuda.slots import HostSlots, Registration
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 100e-6, 1e-3
"""How long the thread sleeps between two looks at chunks in flight. The pause doubles while nothing ends."""

_ABANDONED: list[object] = []
"""Memory that copies may still use after a ``close`` that has reached its deadline."""


class CudaTransfer(Transfer):
    """Gathers blocks of several jobs and groups into chunks, and copies each chunk over the bus with one call.

    ``tables`` say where the pages of each group are; ``device`` was made for the same groups. ``submit``,
    ``before_forward`` and ``poll`` only pass jobs and results on, a thread plans and issues the copies. ``wait`` issues
    the rows that a fence needs itself. With ``with_thread`` False the caller calls ``advance`` instead of the thread.
    ``poll`` raises the error of a device that has failed. ``close`` closes the device too, and releases the
    registration."""

    def __init__(
        self,
        tables: Sequence[PageTable],
        pool_data: ByteArray,
        device: Device,
        registration: Registration,
        *,
        limits: Limits = DEFAULT_LIMITS,
        with_thread: bool = True,
    ) -> None:
        self._device = device
        self._pool_data = pool_data
        self._limits = limits
        self._registration = registration
        self._copier = Copier(device, tables, HostSlots(pool_data, registration, device), limits)
        self._point = Point(0, device.new_event())
        """What loads that are submitted now wait for."""
        self._new_stores: dict[int, TransferSpec] = {}
        """Stores that were submitted since ``_point``."""
        self._num_open = 0
        """Jobs that ``poll`` has not returned."""
        self._is_closed = False
        self._wake = threading.Event()
        """Set when the thread may have something to do."""
        self._ended = threading.Event()
        """Set when there may be results, or an error."""
        self._thread: threading.Thread | None = None
        if self._copier.staging_bytes:
            logger.info(
                "kvoffload: blocks are gathered and scattered in %s of device memory, taken now",
                format_bytes(self._copier.staging_bytes),
            )
        self._record_point()
        if with_thread:
            self._thread = threading.Thread(target=self._run, name="kvoffload-copies", daemon=True)
            self._thread.start()

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self._num_open += 1
        if is_store:
            self._new_stores[job_id] = spec
        else:
            self._send(False, {job_id: spec})

    def before_forward(self) -> None:
        self._record_point()

    def poll(self, busy: bool) -> list[TransferResult]:
        if self._new_stores:
            self._record_point()
        if self._copier.error is not None:
            raise RuntimeError("the device failed while blocks were copied") from self._copier.error
        results = [self._copier.results.popleft() for _ in range(len(self._copier.results))]
        self._num_open -= len(results)
        return results

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self._record_point()
        jobs = np.fromiter(job_ids, dtype=np.int64)
        blocks = None if device_blocks is None else np.fromiter(device_blocks, dtype=np.int64)
        self._copier.fence(jobs, blocks, self._device.engine_stream())
        # Loads that are submitted from now on come after what the engine's stream waits for.
        self._record_point()
        self._wake.set()

    def wait_any(self, timeout_s: float) -> None:
        if self._new_stores:
            self._record_point()
        deadline = time.monotonic() + timeout_s
        while self._num_open and not self._copier.results and self._copier.error is None:
            left = deadline - time.monotonic()
            if left <= 0 or self._is_closed:
                return
            if self._thread is None:
                self.advance()
                continue
            self._ended.wait(left)
            self._ended.clear()

    def advance(self) -> bool:
        """Makes one step of the copies that wait, as the thread does. Returns whether there was anything to do."""
        if self._is_closed or self._copier.error is not None:
            return False
        return self._copier.advance()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.set()
        deadline = time.monotonic() + self._limits.close_deadline_s
        if self._thread is not None:
            self._thread.join(self._limits.close_deadline_s)
        if (self._thread is None or not self._thread.is_alive()) and self._wait_until_idle(deadline):
            self._registration.release()
            self._device.close()
        else:
            logger.warning(
                "kvoffload: copies did not end within %g s, or the device failed; their memory is not freed",
                self._limits.close_deadline_s,
            )
            _ABANDONED.append((self._device, self._copier, self._pool_data))

    def _record_point(self) -> None:
        """Records a point of the engine's stream: stores submitted before it, and loads submitted after it, wait for
        it."""
        if self._point.is_used:
            events = self._copier.free_events
            self._point = Point(self._point.number + 1, events.popleft() if events else self._device.new_event())
        self._device.record(self._point.event, self._device.engine_stream())
        if self._new_stores:
            specs, self._new_stores = list(self._new_stores.items()), {}
            for first in range(0, len(specs), self._limits.jobs_per_step):
                self._send(True, dict(specs[first : first + self._limits.jobs_per_step]))

    def _send(self, is_store: bool, specs: dict[int, TransferSpec]) -> None:
        self._point.is_used = True
        self._copier.inbox.append(Submitted(self._point, is_store, specs))
        if not self._wake.is_set():
            self._wake.set()

    def _wait_until_idle(self, deadline: float) -> bool:
        """Waits until the device does not copy any more, and returns whether its memory can be freed: not after an
        error. After one, copies that were issued before it must end too, because their loads are reported as failed,
        and the blocks that they fill belong to others then."""
        try:
            ends = self._copier.mark_end()
            # The engine's later work comes after them even if they do not end in time.
            for end in ends:
                self._device.wait(self._device.engine_stream(), end)
            while not all(map(self._device.is_done, ends)):
                if time.monotonic() > deadline:
                    return False
                time.sleep(MIN_PAUSE_S)
        except Exception:
            logger.exception("kvoffload: the device failed")
            return False
        return self._copier.error is None

    def _run(self) -> None:
        try:
            self._device.enter_thread()
            pause = MIN_PAUSE_S
            while not self._is_closed:
                if self._copier.advance():
                    pause = MIN_PAUSE_S
                    if self._copier.results:
                        self._ended.set()
                    continue
                self._wake.wait(pause if self._copier.is_in_flight else None)
                self._wake.clear()
                pause = min(2 * pause, MAX_PAUSE_S)
        except Exception as error:
            self._copier.fail(error)
            self._ended.set()
