"""The state machine of copies: takes jobs, issues their rows chunk by chunk, and reports jobs whose rows have ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.abc import TransferResult, TransferSpec
from kvoffload.transfer.copies import Numbers, copy_rows
from kvoffload.transfer.cuda.device import Device, Event, Stream
from kvoffload.transfer.cuda.limits import Limits
from kvoffload.transfer.cuda.loop import WAITS_FOR_DRIVER
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.pipeline import Pipeline
from kvoffload.transfer.cuda.rows import JOB, NBYTES, Batch, Point, RowArray
from kvoffload.transfer.cuda.slots import HostSlots

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """Jobs of one direction, by id, that are copied after ``point``. At most ``Limits.jobs_per_step``."""

    point: Point
    is_store: bool
    specs: dict[int, TransferSpec]


@dataclass(slots=True)
class _Job:
    left: int
    """Rows that have not ended."""
    ok: bool = True
    nbytes: int = 0
    seconds: float = 0.0


class Copier:
    """Copies the jobs that are put into ``inbox``, loads before stores, and puts their results into ``results``.

    Each ``advance`` makes one step: it takes jobs in, issues a chunk, or takes note of a chunk that has ended. It never
    waits for the device. ``advance`` and ``fence`` may be called on different threads; one waits for the other, at
    most for one step. After an error of the device no step is made; ``error`` has it.
    """

    def __init__(self, device: Device, tables: Sequence[PageTable], slots: HostSlots, limits: Limits) -> None:
        self.inbox: deque[Submitted] = deque()
        """In the order of their points."""
        self.results: deque[TransferResult] = deque()
        self.free_events: deque[Event] = deque(device.new_event() for _ in range(4))
        """Events of points that no row waits for any more."""
        self.error: Exception | None = None
        self._factors = [table.factor for table in tables]
        self._num_blocks = [table.num_blocks if table.runs else 0 for table in tables]
        self._block_bytes = np.array([table.device_block_bytes for table in tables], dtype=np.int64)
        self._row_bytes = np.array([table.row_bytes for table in tables], dtype=np.int64)
        self._slots = slots
        self._limits = limits
        self._loads = Pipeline(device, tables, slots, limits, is_store=False)
        self._stores = Pipeline(device, tables, slots, limits, is_store=True)
        self.staging_bytes = self._loads.staging_bytes + self._stores.staging_bytes
        self._points: deque[Point] = deque()
        """Points that rows in the queues may wait for, oldest first."""
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()

    def advance(self) -> bool:
        """Makes one step. Returns whether there was anything to do."""
        with self._locked():
            return (
                self._finish(self._loads)
                or self._finish(self._stores)
                or self._take_in()
                or self._loads.issue()
                or self._stores.issue()
            )

    def fence(self, jobs: Numbers, blocks: Numbers | None, stream: Stream) -> None:
        """Makes ``stream`` wait until ``jobs`` have read, or filled, ``blocks`` (None: all of their device blocks).
        Their rows are issued first. Jobs with rows for which there is no room fail."""
        wanted = jobs.tolist()
        with self._locked():
            while any(job_id in submitted.specs for submitted in self.inbox for job_id in wanted):
                self._take_in()
            for pipeline in (self._loads, self._stores):
                for rows in pipeline.issue_now(jobs, blocks):
                    self._end_rows(rows, 0.0, ok=False)
                pipeline.make_wait(stream, jobs, blocks)

    @property
    def is_in_flight(self) -> bool:
        """Whether chunks are on the device, as far as ``advance`` has seen."""
        return not (self._loads.is_idle and self._stores.is_idle)

    def mark_end(self) -> list[Event]:
        """Returns events that are reached when the device has done all that was issued. Works after an error, too."""
        with self._locked(after_error=True):
            return [*self._loads.mark_end(), *self._stores.mark_end()]

    def fail(self, error: Exception) -> None:
        """Makes no further step."""
        if self.error is None:
            self.error = error

    @contextlib.contextmanager
    def _locked(self, after_error: bool = False) -> Iterator[None]:
        begin = time.monotonic()
        while not self._lock.acquire(timeout=self._limits.lock_warning_s):
            logger.warning(WAITS_FOR_DRIVER, time.monotonic() - begin)
        try:
            # The other thread may have failed while this one waited for the lock.
            if self.error is not None and not after_error:
                raise RuntimeError("the device failed before") from self.error
            yield
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._lock.release()

    def _take_in(self) -> bool:
        """Turns the first jobs in the inbox into rows."""
        if not self.inbox:
            return False
        taken: list[Submitted] = []
        left = self._limits.jobs_per_step
        while self.inbox and left > 0:
            taken.append(self.inbox.popleft())
            left -= len(taken[-1].specs)
        for is_store, pipeline in ((False, self._loads), (True, self._stores)):
            # Jobs with the same point become one batch.
            by_point: dict[int, tuple[Point, dict[int, TransferSpec]]] = {}
            for submitted in taken:
                if submitted.is_store is is_store:
                    by_point.setdefault(submitted.point.number, (submitted.point, {}))[1].update(submitted.specs)
            for point, specs in by_point.values():
                pipeline.queue.add(Batch(self._plan(specs), point))
        for submitted in taken:
            if not self._points or submitted.point.number > self._points[-1].number:
                self._points.append(submitted.point)
        self._release_points()
        return True

    def _plan(self, specs: dict[int, TransferSpec]) -> RowArray:
        """Returns the rows of these jobs. Jobs that copy nothing, or cannot be copied, have ended with that."""
        job_ids = np.fromiter(specs, dtype=np.int64, count=len(specs))
        rows, errors = copy_rows(list(specs.values()), self._factors, self._num_blocks, self._slots.num_slots)
        counts = np.bincount(rows.jobs, minlength=len(specs)).tolist()
        for position, job_id in enumerate(specs):
            if position in errors:
                logger.error("kvoffload: job %d cannot be copied: %s", job_id, errors[position])
                self.results.append(TransferResult(job_id, ok=False))
            elif counts[position]:
                self._jobs[job_id] = _Job(counts[position])
            else:
                self.results.append(TransferResult(job_id, ok=True))
        nbytes = self._block_bytes[rows.groups]
        offsets = rows.slots * self._slots.slot_bytes + rows.parts * self._row_bytes[rows.groups]
        return np.stack([job_ids[rows.jobs], rows.groups, rows.device_blocks, rows.slots, offsets, nbytes])

    def _finish(self, pipeline: Pipeline) -> bool:
        ended = pipeline.finish()
        if ended is None:
            return False
        self._end_rows(*ended, ok=True)
        return True

    def _end_rows(self, rows: RowArray, seconds: float, ok: bool) -> None:
        first = rows[JOB, 0]
        if (rows[JOB] == first).all():
            job_ids, counts, nbytes = [int(first)], [rows.shape[1]], [int(rows[NBYTES].sum())]
        else:
            unique, positions = np.unique(rows[JOB], return_inverse=True)
            job_ids, counts = unique.tolist(), np.bincount(positions).tolist()
            nbytes = np.bincount(positions, weights=rows[NBYTES]).tolist()
        total = sum(nbytes)
        for job_id, count, size in zip(job_ids, counts, nbytes, strict=True):
            job = self._jobs[job_id]
            job.left -= count
            job.ok &= ok
            job.nbytes += int(size)
            job.seconds += seconds * size / total
            if job.left == 0:
                del self._jobs[job_id]
                self.results.append(TransferResult(job_id, job.ok, job.nbytes, job.seconds))

    def _release_points(self) -> None:
        """Releases the events of points for which no row waits. The last one taken in may still get rows."""
        oldest = min((p.number for p in (self._loads.queue.oldest, self._stores.queue.oldest) if p), default=None)
        while len(self._points) > 1 and (oldest is None or self._points[0].number < oldest):
            self.free_events.append(self._points.popleft().event)
