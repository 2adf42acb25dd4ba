"""The messages between the two halves of the connector, one in each direction per step."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import chain

from kvoffload.abc import TransferSpec
from kvoffload.connector.adapters import Adapter, AdapterNeed, Digests

IDLE_WAIT_S = 0.002
"""How long each half waits in a step without tokens, the one for reads of lower tiers and the other for loads, so that
an idle engine neither spins nor competes for the CPU with the threads that read."""


@dataclass(slots=True)
class StepMeta:
    """The work of one step, from the scheduler half to every worker."""

    loads: dict[int, TransferSpec] = field(default_factory=dict)
    """Specs by job id. Nothing uses their device blocks before they are reported."""
    load_after: dict[int, list[int]] = field(default_factory=dict)
    """By load, the ids of stores that must have read its device blocks before it starts. Other loads start at once."""
    pieces: dict[int, list[int]] = field(default_factory=dict)
    """By job id, pieces of loads. The last one, with which the request is reported, has the device blocks of all."""
    stores: dict[int, TransferSpec] = field(default_factory=dict)
    """Specs by job id. Their device blocks are complete when this step's forward pass is done."""
    fences: list[int] = field(default_factory=list)
    """Ids of stores that must have read ``fenced_blocks`` before this step's forward pass."""
    fenced_blocks: frozenset[int] | None = None
    """Device blocks that belong to other requests from this step on. None: all blocks of the fences."""
    broken_loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests whose promised load cannot be done, with their device blocks. Workers report these loads as failed."""
    releases: list[str] = field(default_factory=list)
    """Ids of finished requests whose device blocks the engine may free now."""
    has_tokens: bool = True
    """Whether the engine computes anything in this step."""
    epoch: int = 0
    """The number of resets of the scheduler half. Jobs of an earlier epoch count as failed."""
    questions: dict[int, Adapter] = field(default_factory=dict)
    """Adapters whose digests the scheduler half asks for, by the number of the question."""
    needs: dict[int, AdapterNeed] = field(default_factory=dict)
    """By job id, the adapter that the request of a load computes with. With other bytes the load fails."""
    computes_with: dict[int, set[Digests]] = field(default_factory=dict)
    """By the number of an adapter, the digests for which the keys of the requests stand that this step computes."""
    check_weights: int | None = None
    """The id of a job that compares all weights with those accepted before this epoch, and fails if they differ."""

    def before_forward(self) -> Set[int]:
        """Returns those of ``stores`` that begin before the forward pass, from blocks that have left their requests."""
        return self.stores.keys() & chain(self.fences, *self.load_after.values())


COPIED = ("store_bytes", "store_seconds", "load_bytes", "load_seconds")
"""Numbers of a WorkerReport that add up, in it and in metrics."""


@dataclass(slots=True)
class WorkerReport:
    """The results of jobs, from the workers to the scheduler half. Reports of several workers add up."""

    done: dict[int, int] = field(default_factory=dict)
    """By job id, the number of workers that have ended the job."""
    failed: set[int] = field(default_factory=set)
    """Ids of those jobs in ``done`` that failed on some worker."""
    store_bytes: int = 0
    load_bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    broken: bool = False
    """Whether the transfer of some worker is closed for good."""
    answers: dict[int, list[bytes]] = field(default_factory=dict)
    """By question, the digest that each worker has found."""
    adapters: dict[int, set[bytes]] = field(default_factory=dict)
    """Digests of adapters that workers have loaded, or computed with against ``computes_with``, by number; DROPPED if
    one is not loaded any more."""
    changed_at: int = -1
    """The epoch in which a worker found that its weights have changed; -1 if none did."""

    def add(self, other: WorkerReport) -> WorkerReport:
        """Adds the report of another worker to this one, and returns this one."""
        for job_id, count in other.done.items():
            self.done[job_id] = self.done.get(job_id, 0) + count
        for question, digests in other.answers.items():
            self.answers.setdefault(question, []).extend(digests)
        for number, seen in other.adapters.items():
            self.adapters.setdefault(number, set()).update(seen)
        for name in COPIED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed |= other.failed
        self.broken |= other.broken
        self.changed_at = max(self.changed_at, other.changed_at)
        return self
