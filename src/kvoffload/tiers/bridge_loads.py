"""Loads of a bridge: batches of blocks are promoted into the staging pool and copied to their pages."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.abc import LoadStoreSpec, LookupState, OffloadKey, ReqContext
from kvoffload.tiers.bridge_jobs import Job, Jobs
from kvoffload.tiers.bridge_stores import BATCH_BYTES, MAX_BATCH
from kvoffload.tiers.manager import TieredOffloadingManager

BATCH_SHARE = 0.25
"""A batch has at most this share of the blocks that may be promoted at a time."""
LOST = frozenset({LookupState.MISS})
LOST_WHEN_LATE = frozenset(LookupState) - {LookupState.HIT}
"""States of blocks that do not arrive any more, before and after the deadline."""


@dataclass(slots=True, eq=False)
class LoadBatch:
    """Blocks of ``job`` that are promoted together. ``left``: the indices of those that have not arrived, by key."""

    job: Job
    request: str
    left: dict[OffloadKey, list[int]]


@dataclass(slots=True, eq=False)
class Arrived:
    """Blocks of ``batch`` to be copied: ``indices[i]`` of its job from ``slots[i]``, all pinned by ``lease``."""

    batch: LoadBatch
    indices: list[int]
    slots: list[int]
    lease: LoadStoreSpec


class Loads:
    """Plans the copies of loads, which begin in the order of their submission.

    All methods but ``submit`` are called with the lock of the bridge held.
    """

    def __init__(
        self, manager: TieredOffloadingManager, jobs: Jobs, block_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._jobs = jobs
        self._block_bytes = block_bytes
        self._clock = clock
        most = int(manager.max_promoted * BATCH_SHARE)
        self._max_batch = max(1, min(most, BATCH_BYTES // block_bytes, MAX_BATCH))
        self._queue: deque[Job] = deque()
        """Jobs of which some blocks belong to no batch yet."""
        self._batches: dict[LoadBatch, None] = {}
        self._numbers = itertools.count()

    @property
    def is_empty(self) -> bool:
        return not self._queue and not self._batches

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def begin(self, namespace: bytes) -> list[LoadBatch]:
        """Begins the next batch, if there is room for it. Returns all that have begun. ``namespace``: that of keys now;
        jobs with another one were submitted before a reset."""
        num_under_way = sum(len(batch.left) for batch in self._batches)
        while self._queue:
            job = self._queue[0]
            if job.namespace != namespace:
                self._jobs.stop([job])
            if not job.has_ended and job.begun < len(job.keys):
                job.name_keys()
                stop = min(len(job.keys), job.begun + self._max_batch)
                if num_under_way and num_under_way + stop - job.begun > self._manager.max_promoted:
                    break
                left: dict[OffloadKey, list[int]] = {}
                for i in range(job.begun, stop):
                    left.setdefault(job.names[i], []).append(i)
                job.begun = stop
                self._batches[LoadBatch(job, f"load-{next(self._numbers)}", left)] = None
                break
            self._queue.popleft()
        return list(self._batches)

    def look(self, batch: LoadBatch) -> Arrived | None:
        """Returns the blocks of ``batch`` that are in the staging pool now, None if there are none. What is neither
        there nor on its way is given up. Ends the batch if it waits for nothing else."""
        arrived = None if batch.job.has_ended else self._look(batch)
        if batch.job.has_ended or not batch.left:
            self._remove(batch)
        return arrived

    def _look(self, batch: LoadBatch) -> Arrived | None:
        may_wait = self._clock() < batch.job.deadline
        context = ReqContext(batch.request, may_wait=may_wait)
        keys = list(batch.left)
        states = self._manager.lookup_each(keys, context)
        lost = LOST if may_wait else LOST_WHEN_LATE
        for key, state in zip(keys, states, strict=True):
            if state in lost:
                # Nothing is promoted with it. The others are looked up again in the next step.
                self._jobs.settle(batch.job, batch.left.pop(key), False)
        ready = [key for key, state in zip(keys, states, strict=True) if state is LookupState.HIT]
        if not ready:
            return None
        lease = self._manager.prepare_load(ready, context)
        indices, slots = [], []
        for key, slot in zip(ready, lease.slots.tolist(), strict=True):
            for i in batch.left.pop(key):
                indices.append(i)
                slots.append(slot)
        return Arrived(batch, indices, slots, lease)

    def end(self, arrived: Arrived, num_copied: int) -> None:
        """Takes in that the first ``num_copied`` blocks of ``arrived`` were copied: all, or the job has ended."""
        self._manager.complete_load(arrived.lease)
        self._jobs.settle(arrived.batch.job, arrived.indices[:num_copied], True, num_copied * self._block_bytes)

    def _remove(self, batch: LoadBatch) -> None:
        del self._batches[batch]
        self._manager.release_request(ReqContext(batch.request))

    def forget(self) -> None:
        """Ends all batches, whose jobs have ended."""
        self._queue.clear()
        for batch in list(self._batches):
            self._remove(batch)
