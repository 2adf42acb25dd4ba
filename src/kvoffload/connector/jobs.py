"""Jobs: loads and stores in progress, how stores are made and end, and what the next step begins."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvoffload.abc import (
    DeviceSpec,
    IntegrityError,
    Keys,
    LoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ScheduledStep,
    TransferSpec,
)
from kvoffload.connector.layout import Block, KeyLayout
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.request import Changes, RequestState

if TYPE_CHECKING:
    from kvoffload.connector.observer import RequestObserver

JOB_IDS = itertools.count()
"""Numbers of jobs, shared by all scheduler halves of this process: none takes another's report for that of its job."""
NumberedBlocks: TypeAlias = Sequence[tuple[int, RequestState | None, Block]]
"""Blocks that a store copies, each with the ``ObservedRequest.number`` of a request, and one that can describe it."""


@dataclass(slots=True, eq=False)
class Job:
    """A load or a store that some worker has not reported yet."""

    is_store: bool
    requests: Sequence[RequestState]
    """The requests whose device blocks it copies: one for a load, none for a store of blocks that leave the device."""
    lease: LoadStoreSpec
    """The host slots that it reads or fills, as handed out. Those that a load in pieces has read are given back."""
    keys: Keys
    blocks: NumberedBlocks = ()
    """What a store copies."""
    device_blocks: frozenset[int] = frozenset()
    """What a store reads."""
    began: int = field(default_factory=time.time_ns)
    """When it was made, in nanoseconds since 1970."""
    epoch: int = 0
    """The number of resets before it began."""
    num_pending: int = 0
    failed: bool = False
    rest: TransferSpec | None = None
    """What a load in pieces copies behind the piece in progress. Each piece has an id of its own."""
    fills: Sequence[int] = ()
    """The device blocks of a load, with all its pieces."""


@dataclass(eq=False)
class JobTable:
    """All jobs in progress, each of which ``num_workers`` workers report, and what calls leave for the next step."""

    manager: OffloadingManager
    layout: KeyLayout
    observer: RequestObserver
    num_workers: int
    changes: Changes = field(default_factory=Changes)
    jobs: dict[int, Job] = field(default_factory=dict)
    keys_loading: Counter[OffloadKey] = field(default_factory=Counter)
    """Keys that are being loaded, and the number of loads that copy each."""
    held: dict[str, tuple[RequestState, float]] = field(default_factory=dict)
    """Finished requests whose device blocks the engine keeps until all their blocks are stored, or a deadline."""
    meta: StepMeta = field(default_factory=StepMeta)
    allocated: set[str] = field(default_factory=set)
    """Requests that were given device blocks since the last step."""
    handed_out: list[int] = field(default_factory=list)
    """Device blocks that other connectors may fill before the next step."""
    finished: dict[RequestState, int] = field(default_factory=dict)
    """Requests that finished since the last step, with their computed tokens."""

    def take_step(self, has_tokens: bool) -> StepMeta:
        """Returns the message to the workers, and begins that of the next step."""
        meta, changes = self.meta, self.changes
        meta.has_tokens, meta.epoch, changes.was_reset = has_tokens, changes.resets, False
        self.meta, self.allocated, self.handed_out, self.finished = StepMeta(), set(), [], {}
        return meta

    @property
    def has_promises(self) -> bool:
        """Whether the engine waits for what the next steps say."""
        return bool(self.meta.broken_loads or self.meta.releases or self.held or self.changes.was_reset)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Polls the manager's lower tiers; waits at most ``timeout_s`` for one of them."""
        if self.manager.poll(timeout_s):
            self.changes.contents += 1
            self.changes.wakeups += 1

    def break_load(self, job: Job) -> None:
        """Reports a load as failed, once no worker has a piece of it in progress."""
        self.meta.broken_loads[job.requests[0].context.req_id] = list(job.fills)

    def break_off(self) -> None:
        """Loads and stores nothing more: promised loads and stores are reported as failed."""
        meta = self.meta
        for job_id, job in self.jobs.items():
            if job_id in meta.loads or job.rest is not None:
                self.break_load(job)
        meta.loads, meta.pieces, meta.stores, meta.questions = {}, {}, {}, {}
        meta.fences = [job_id for job_id in meta.fences if job_id in self.jobs]
        meta.releases += self.held
        for table in (self.jobs, self.keys_loading, self.held, self.finished):
            table.clear()

    def add(self, job: Job) -> int:
        """Adds a new job and returns its id."""
        job_id = next(JOB_IDS)
        job.num_pending, job.epoch = self.num_workers, self.changes.resets
        self.jobs[job_id] = job
        for state in job.requests:
            state.num_jobs += 1
        self.keys_loading.update(() if job.is_store else job.keys)
        return job_id

    def add_store(self, new: NumberedBlocks, output: PrepareStoreOutput, states: Sequence[RequestState] = ()) -> None:
        """Adds the job that stores ``new`` blocks in the next step, for ``states`` or for requests that have ended."""
        if output.evicted_keys:
            self.observer.metrics.add("evicted_blocks", len(output.evicted_keys))
        # The slots of the lease stand in this order: with any other, blocks would be stored under wrong keys.
        if [block.key for _, _, block in new] != output.keys_to_store:
            raise IntegrityError("the manager has room for other blocks than it was offered, or in another order")
        if not new:
            return
        num_groups = len(self.layout.groups)
        ids_of, firsts = [list[int]() for _ in range(num_groups)], [0] * num_groups
        for _, _, block in new:
            if not ids_of[block.group]:
                firsts[block.group] = block.first_device_block
            ids_of[block.group] += block.device_blocks
        lease = host = output.store_spec
        if num_groups > 1:
            by_group = sorted(range(len(new)), key=lambda i: new[i][2].group)
            host = LoadStoreSpec(lease.medium(), lease.slots[by_group])
        ids = list(itertools.chain(*ids_of))
        job = Job(True, states, lease, output.keys_to_store, new, frozenset(ids))
        device = DeviceSpec(np.array(ids, dtype=np.int64), tuple(map(len, ids_of)), tuple(firsts))
        self.meta.stores[self.add(job)] = TransferSpec(states[0].context.req_id if states else "", host, device)

    def refuse_store(self) -> None:
        """Counts a store for which the manager has no room."""
        self.observer.metrics.add("refused_stores")
        self.observer.warn("kvoffload: no room in the host pool, every block is in use; stores wait")

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
            if (job := self.jobs.get(job_id)) is None:
                continue
            job.num_pending -= count
            job.failed |= job_id in report.failed or (job.is_store and not self.is_current(job))
            if job.num_pending < 0:
                raise IntegrityError(f"job {job_id} was reported more often than there are workers")
            if job.num_pending == 0:
                yield self.remove(job_id)

    def remove(self, job_id: int) -> Job:
        """Removes a job that has ended, or that no worker has been given, and returns it."""
        job = self.jobs.pop(job_id)
        for state in job.requests:
            state.num_jobs -= 1
        for key in () if job.is_store else job.keys:
            self.keys_loading[key] -= 1
            if not self.keys_loading[key]:
                del self.keys_loading[key]
        return job

    def fence(self, step: ScheduledStep, requests: Mapping[str, RequestState], handed_out: set[int]) -> None:
        """Adds to the step which stores must have read blocks that now belong to others (``handed_out``), or that are
        computed again, before the step's forward pass, and which before a load may start. Stores of what may be
        overwritten before that count as failed, whatever the workers report."""
        meta = self.meta
        for req_id in step.num_scheduled_tokens:
            state = requests.get(req_id)
            if state is not None and state.request.num_computed_tokens < state.blocks.stored_end:
                handed_out.update(state.blocks.computed_again())
        for job_id, spec in meta.loads.items():
            filled = frozenset(spec.device.block_ids.tolist())
            # Only the load overwrites these, unless the engine writes to them first, so that the step need not wait.
            handed_out.difference_update(filled.difference(step.written))
            if readers := self._readers(filled):
                meta.load_after[job_id] = readers
        for job_id in self._readers(step.overwritten):
            self.jobs[job_id].failed = True
        meta.fences = self._readers(handed_out)
        read = (self.jobs[job_id].device_blocks.intersection(handed_out) for job_id in meta.fences)
        meta.fenced_blocks = frozenset[int]().union(*read)

    def _readers(self, device_blocks: Collection[int]) -> list[int]:
        """Returns the stores that read some of these device blocks."""
        if not device_blocks:
            return []
        stores = ((job_id, job.device_blocks) for job_id, job in self.jobs.items() if job.is_store)
        return [job_id for job_id, read in stores if not read.isdisjoint(device_blocks)]

    def take_unheld(self, now: float) -> list[str]:
        """Returns the ids of the requests that need not be held any more, and forgets them."""
        due = [req_id for req_id, (state, end) in self.held.items() if state.num_jobs == 0 or now >= end]
        for req_id in due:
            del self.held[req_id]
        return due
