"""The work collected for the next step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.abc import TransferSpec
from kvoffload.connector.adapters import AdapterNeed
from kvoffload.connector.jobs import HeldRequests, Job, JobTable
from kvoffload.connector.messages import StepMeta
from kvoffload.connector.request import RequestState


@dataclass(slots=True)
class UpcomingStep:
    """What the engine's calls between two steps leave for the next one."""

    meta: StepMeta = field(default_factory=StepMeta)
    allocated: set[str] = field(default_factory=set)
    """Requests that were given device blocks."""
    handed_out: list[int] = field(default_factory=list)
    """Device blocks that other connectors may fill before the step."""
    finished: list[tuple[RequestState, int]] = field(default_factory=list)
    """Requests that finished, with their computed tokens."""

    @property
    def loading(self) -> list[int]:
        """Device blocks that loads fill."""
        return [at for spec in self.meta.loads.values() for at in spec.device.block_ids.tolist()]

    def add_load(self, job_id: int, spec: TransferSpec, state: RequestState) -> None:
        """Adds a load of the request, or a piece of it."""
        self.meta.loads[job_id] = spec
        if state.adapter is not None and state.digests is not None:
            self.meta.needs[job_id] = AdapterNeed(state.adapter.number, state.digests, state.adapter.is_reread)

    def break_loads(self, jobs: JobTable) -> list[Job]:
        """Reports the loads of the next step as failed, and returns their jobs, which have ended."""
        meta, ended = self.meta, [jobs.fail(job_id) for job_id in self.meta.loads]
        for job in ended:
            self.break_load(job)
        meta.loads, meta.needs, meta.pieces = {}, {}, {}
        return ended

    def break_load(self, job: Job) -> None:
        """Reports a load as failed, once no worker has a piece of it in progress."""
        self.meta.broken_loads[job.states[0].context.req_id] = list(job.fills)

    def break_off(self, jobs: JobTable, held: HeldRequests) -> None:
        """Loads and stores nothing more: promised loads and stores are reported as failed."""
        meta = self.meta
        for job_id, job in jobs.jobs.items():
            if job_id in meta.loads or job.rest is not None:
                self.break_load(job)
        meta.loads, meta.pieces = {}, {}
        meta.stores = {}
        meta.fences = [job_id for job_id in meta.fences if job_id in jobs.jobs]
        meta.releases.extend(held.take_all())
        self.finished.clear()
