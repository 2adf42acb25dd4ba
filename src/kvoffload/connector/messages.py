"""What the two halves of the connector send each other, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffload.abc import TransferSpec


@dataclass(slots=True)
class StepMeta:
    """What the scheduler half asks of every worker in one step."""

    loads: dict[int, TransferSpec] = field(default_factory=dict)
    """By job id. They may start at once; their device blocks are not used before they are reported."""
    stores: dict[int, TransferSpec] = field(default_factory=dict)
    """By job id. Their blocks are complete when this step's forward pass is done."""
    fences: list[int] = field(default_factory=list)
    """Stores that must have read their device blocks before this step's forward pass."""
    broken_loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests, with their device blocks, whose promised load cannot be done: to be reported as failed."""
    releases: list[str] = field(default_factory=list)
    """Finished requests whose device blocks the engine may free now."""
    has_tokens: bool = True
    """Whether the engine computes anything in this step."""
    epoch: int = 0
    """How often the scheduler half has been reset. Jobs of an earlier epoch count as failed."""
    check_weights: int | None = None
    """A job: to compare all weights with those accepted before this epoch. It fails if they differ."""


@dataclass(slots=True)
class WorkerReport:
    """What workers tell the scheduler half; reports of several workers add up."""

    done: dict[int, int] = field(default_factory=dict)
    """Job id to the number of workers that are through with it."""
    failed: set[int] = field(default_factory=set)
    """Those of ``done`` that failed on some worker."""
    store_bytes: int = 0
    load_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    broken: bool = False
    """The transfer engine of some worker has given up for good."""
    changed_at: int = -1
    """The epoch in which a worker found that its weights have changed; -1 if none has."""

    def add(self, other: WorkerReport) -> WorkerReport:
        for job_id, count in other.done.items():
            self.done[job_id] = self.done.get(job_id, 0) + count
        self.failed |= other.failed
        self.broken |= other.broken
        self.changed_at = max(self.changed_at, other.changed_at)
        self.store_bytes += other.store_bytes
        self.load_bytes += other.load_bytes
        self.store_seconds += other.store_seconds
        self.load_seconds += other.load_seconds
        return self
