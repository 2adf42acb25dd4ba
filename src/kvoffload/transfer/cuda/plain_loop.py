"""The loop of copies in Python, for installations without native code."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvoffload.abc import ByteArray, TransferResult, TransferSpec
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.copier import Copier, Submitted
from kvoffload.transfer.cuda.device import Device
from kvoffload.transfer.cuda.limits import Limits
from kvoffload.transfer.cuda.loop import Loop
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.rows import Point
from kvoffload.transfer.cuda.slots import HostSlots, Registration

MIN_PAUSE_S, MAX_PAUSE_S = 100e-6, 1e-3
"""How long the thread sleeps between two looks at chunks in flight. The pause doubles while nothing ends."""


class PlainLoop(Loop):
    """Passes jobs to a Copier, which one thread advances, and takes its results."""

    num_threads = 1

    def __init__(
        self,
        device: Device,
        tables: Sequence[PageTable],
        pool_data: ByteArray,
        registration: Registration,
        limits: Limits,
    ) -> None:
        self._device = device
        self._limits = limits
        self._copier = Copier(device, tables, HostSlots(pool_data, registration), limits)
        self.staging_bytes = self._copier.staging_bytes
        self._point = Point(0, device.new_event())
        """What loads that are submitted now wait for."""
        self._new_stores: dict[int, TransferSpec] = {}
        """Stores that were submitted since ``_point``."""
        self._num_open = 0
        """Jobs that ``poll`` has not returned."""
        self._is_stopped = False
        self._wake = threading.Event()
        """Set when the thread may have something to do."""
        self._ended = threading.Event()
        """Set when there may be results, or an error."""
        self.record_point()

    @property
    def has_failed(self) -> bool:
        return self._copier.error is not None

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self._num_open += 1
        if is_store:
            self._new_stores[job_id] = spec
        else:
            self._send(False, {job_id: spec})

    def record_point(self) -> None:
        if self._point.is_used:
            events = self._copier.free_events
            self._point = Point(self._point.number + 1, events.popleft() if events else self._device.new_event())
        self._device.record(self._point.event, self._device.engine_stream())
        if self._new_stores:
            specs, self._new_stores = list(self._new_stores.items()), {}
            step = self._limits.jobs_per_step
            for first in range(0, len(specs), step):
                self._send(True, dict(specs[first : first + step]))

    def poll(self) -> list[TransferResult]:
        if self._new_stores:
            self.record_point()
        if self._copier.error is not None:
            raise RuntimeError("the device failed while blocks were copied") from self._copier.error
        results = [self._copier.results.popleft() for _ in range(len(self._copier.results))]
        self._num_open -= len(results)
        return results

    def fence(self, jobs: Numbers, blocks: Numbers | None) -> None:
        self._copier.fence(jobs, blocks, self._device.engine_stream())
        self._wake.set()

    def wait_any(self, timeout_s: float) -> None:
        if self._new_stores:
            self.record_point()
        deadline = time.monotonic() + timeout_s
        while self._num_open and not self._copier.results and self._copier.error is None and not self._is_stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._ended.wait(left)
            self._ended.clear()

    def advance(self) -> bool:
        return not self._is_stopped and self._copier.error is None and self._copier.advance()

    def run(self, thread: int) -> None:
        try:
            self._device.enter_thread()
            pause = MIN_PAUSE_S
            while not self._is_stopped:
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

    def stop(self) -> None:
        self._is_stopped = True
        self._wake.set()
        self._ended.set()

    def wait_until_idle(self, deadline: float) -> bool:
        ends = self._copier.mark_end()
        for end in ends:
            self._device.wait(self._device.engine_stream(), end)
        while not all(map(self._device.is_done, ends)):
            if time.monotonic() > deadline:
                return False
            time.sleep(MIN_PAUSE_S)
        return True

    def _send(self, is_store: bool, specs: dict[int, TransferSpec]) -> None:
        self._point.is_used = True
        self._copier.inbox.append(Submitted(self._point, is_store, specs))
        if not self._wake.is_set():
            self._wake.set()
