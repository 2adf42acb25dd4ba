"""The job table: loads and stores in progress, the keys being loaded, and requests held until their stores end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.abc import IntegrityError, LoadStoreSpec, OffloadKey, TransferSpec
from kvoffload.connector.layout import Block
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.request import Changes, RequestState

JOB_IDS = itertools.count()
"""Numbers of jobs, shared by all scheduler halves of this process: none takes another's report for that of its own
job."""


@dataclass(slots=True, eq=False)
class Job:
    """A load or a store that some worker has not reported yet."""

    is_store: bool
    states: Sequence[RequestState]
    """The requests for which it reads or fills device blocks: a load has one, a store of blocks that leave the device
    none."""
    lease: LoadStoreSpec
    """The host slots that it reads or fills, as the manager handed them out. Those that a load in pieces has read are
    given back."""
    keys: Sequence[OffloadKey]
    """What it copies."""
    blocks: Sequence[tuple[RequestState, Block]] = ()
    """What a store copies, in more detail, if events are to describe it."""
    device_blocks: frozenset[int] = frozenset()
    """What a store reads."""
    blocks_of: Mapping[int, int] = field(default_factory=dict)
    """For how many of its blocks a store of what leaves the device was made, by ``RequestState.number``: the requests
    may have ended."""
    began: int = field(default_factory=time.time_ns)
    """When it was made, in nanoseconds since 1970."""
    epoch: int = 0
    """The number of resets before it began."""
    num_pending: int = 0
    """Workers that have not reported it yet."""
    failed: bool = False
    rest: TransferSpec | None = None
    """What a load in pieces copies behind the piece in progress. Each piece has an id of its own."""
    fills: Sequence[int] = ()
    """The device blocks of a load, with all its pieces."""


@dataclass(slots=True)
class JobTable:
    """All jobs in progress. Each of ``num_workers`` workers reports a job once."""

    num_workers: int
    changes: Changes = field(default_factory=Changes)
    jobs: dict[int, Job] = field(default_factory=dict)
    """By job id."""
    keys_loading: dict[OffloadKey, int] = field(default_factory=dict)
    """Keys that are being loaded, and the number of loads that copy each."""

    def add(self, job: Job) -> int:
        """Adds a new job and returns its id."""
        job_id = next(JOB_IDS)
        job.num_pending, job.epoch = self.num_workers, self.changes.resets
        self.jobs[job_id] = job
        for state in job.states:
            state.num_jobs += 1
        for key in () if job.is_store else job.keys:
            self.keys_loading[key] = self.keys_loading.get(key, 0) + 1
        return job_id

    def is_current(self, job: Job) -> bool:
        """Whether there was no reset since the job began."""
        return job.epoch == self.changes.resets

    def take_reports(self, report: WorkerReport) -> Iterator[Job]:
        """Removes and yields one by one, so that none is lost if ending one of them raises, the jobs that every worker
        has reported now. Unknown jobs are ignored. A store that began before a reset counts as failed: a manager that
        keeps its contents after a reset would otherwise accept it.

        Raises IntegrityError if a job was reported more often than there are workers.
        """
        for job_id, count in report.done.items():
            job = self.jobs.get(job_id)
            if job is None:
                continue
            job.num_pending -= count
            job.failed |= job_id in report.failed or (job.is_store and job.epoch != self.changes.resets)
            if job.num_pending < 0:
                raise IntegrityError(f"job {job_id} was reported more often than there are workers")
            if job.num_pending == 0:
                yield self._remove(job_id)

    def fail(self, job_id: int) -> Job:
        """Ends a job that no worker has been given, and returns it."""
        job = self._remove(job_id)
        job.failed = True
        return job

    def _remove(self, job_id: int) -> Job:
        job = self.jobs.pop(job_id)
        for state in job.states:
            state.num_jobs -= 1
        for key in () if job.is_store else job.keys:
            left = self.keys_loading[key] - 1
            if left:
                self.keys_loading[key] = left
            else:
                del self.keys_loading[key]
        return job

    def fence(self, handed_out: Collection[int], overwritten: Collection[int]) -> tuple[list[int], frozenset[int]]:
        """Returns the stores that read some of the device blocks which now belong to others (``handed_out``), and these
        blocks: they must have been read before the step's forward pass. Stores that read blocks which may be
        ``overwritten`` before that count as failed, whatever the workers report."""
        for job_id in self.readers(overwritten):
            self.jobs[job_id].failed = True
        fences = self.readers(handed_out)
        read = (self.jobs[job_id].device_blocks.intersection(handed_out) for job_id in fences)
        return fences, frozenset[int]().union(*read)

    def readers(self, device_blocks: Collection[int]) -> list[int]:
        """Returns the stores that read some of these device blocks."""
        if not device_blocks:
            return []
        return [
            job_id
            for job_id, job in self.jobs.items()
            if job.is_store and not job.device_blocks.isdisjoint(device_blocks)
        ]

    def clear(self) -> None:
        """Forgets all jobs: their reports will be ignored."""
        self.jobs.clear()
        self.keys_loading.clear()


@dataclass(slots=True)
class HeldRequests:
    """Finished requests whose device blocks the engine keeps until all their blocks are stored, or a deadline."""

    deadlines: dict[str, tuple[RequestState, float]] = field(default_factory=dict)

    def hold(self, state: RequestState, deadline: float) -> None:
        self.deadlines[state.context.req_id] = state, deadline

    def take_due(self, now: float) -> list[str]:
        """Removes the requests that need not be held any more, and returns their ids."""
        due = [req_id for req_id, (state, end) in self.deadlines.items() if state.num_jobs == 0 or now >= end]
        for req_id in due:
            del self.deadlines[req_id]
        return due

    def take_all(self) -> list[str]:
        """Removes all requests and returns their ids."""
        req_ids = list(self.deadlines)
        self.deadlines.clear()
        return req_ids
