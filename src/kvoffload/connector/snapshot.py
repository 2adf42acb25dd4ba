"""The state of the scheduler half at one moment, for tests and tools: copies that nothing changes later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvoffload.abc import OffloadKey
from kvoffload.connector.jobs import HeldRequests, JobTable
from kvoffload.connector.request import Phase, RequestState, Storing


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One request that the engine has not finished."""

    req_id: str
    phase: Phase
    storing: Storing
    may_load: bool
    """False once a load of it has failed, or if its client asked for no loads."""
    next_store: tuple[int, ...]
    """Per group, the index of the first block that was not yet offered to the manager."""
    block_ids: tuple[tuple[int, ...], ...]
    """Per group, its device blocks from its first token on, as far as the scheduler half knows them."""
    num_jobs: int
    """Loads and stores in progress that read or fill its device blocks."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """One load or store that some worker has not reported yet."""

    job_id: int
    is_store: bool
    req_ids: tuple[str, ...]
    """The requests whose device blocks it reads or fills."""
    num_blocks: int
    """Slots that it copies."""
    device_blocks: frozenset[int]
    """Device blocks that it reads; empty for a load."""
    num_pending: int
    """Workers that have not reported it yet."""
    failed: bool
    """Whether it is known already that its blocks cannot be used."""


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """See ``OffloadingConnectorScheduler.snapshot``."""

    requests: Mapping[str, RequestSnapshot]
    """By request id."""
    jobs: Mapping[int, JobSnapshot]
    """By job id."""
    keys_loading: Mapping[OffloadKey, int]
    """Keys of blocks that are being loaded, and the number of loads that copy each."""
    held: tuple[str, ...]
    """Finished requests whose device blocks the engine keeps until they are stored (remote decode)."""
    num_resets: int
    off: bool


def take_snapshot(
    requests: Mapping[str, RequestState], jobs: JobTable, held: HeldRequests, off: bool
) -> SchedulerSnapshot:
    """Returns a copy of the state of the scheduler half."""
    return SchedulerSnapshot(
        {
            req_id: RequestSnapshot(
                req_id,
                state.phase,
                state.storing,
                state.may_load,
                state.blocks.next_store,
                tuple(map(tuple, state.blocks.tables)),
                state.num_jobs,
            )
            for req_id, state in requests.items()
        },
        {
            job_id: JobSnapshot(
                job_id,
                job.is_store,
                tuple(state.context.req_id for state in job.states),
                len(job.lease.slots),
                job.device_blocks,
                job.num_pending,
                job.failed,
            )
            for job_id, job in jobs.jobs.items()
        },
        dict(jobs.keys_loading),
        tuple(held.deadlines),
        jobs.changes.resets,
        off,
    )
