"""Copies of a bridge: stores into staging slots, kept there until the tiers have handled them, and loads of batches
that are promoted into the staging pool.

All methods but ``submit`` are called with the lock of the bridge held.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvoffload.abc import LoadStoreSpec, OffloadKey, ReqContext
from kvoffload.abc.tier import HIT, MISS
from kvoffload.tiering.bridge_jobs import BridgeJob, Jobs
from kvoffload.tiering.manager import TieredOffloadingManager
from kvoffload.tiering.plan import Bools

STORE_SHARE = 0.5
"""At most this share of the staging pool holds blocks that are still to be written. The rest is for promotions."""
BATCH_BYTES = 16 << 20
"""The most bytes of one copy, unless one block has more."""
MAX_BATCH = 256
"""The most blocks of one copy."""
STAGE_DEADLINE_S = 10.0
"""After this time a staged block may be evicted although a tier has not taken it on."""
MAX_REQUESTS = 4096
MAX_CHAIN_KEYS = 1 << 20
"""Requests whose chains are remembered, and keys of these chains. The oldest is forgotten: its blocks may count as used
twice."""
LOAD_SHARE = 0.25
"""A batch of loads has at most this share of the blocks that may be promoted at a time."""


class Copy(NamedTuple):
    """Blocks of ``job`` to be copied: ``indices[i]`` from or into ``slots[i]``. ``end`` takes in how many were copied,
    from the first one on: all, or the job has ended."""

    job: BridgeJob
    indices: list[int]
    slots: list[int]
    end: Callable[[int], None]


class RequestEnd(NamedTuple):
    """The end of ``request``: the first ``chain_length`` keys of ``chain`` are its whole chain."""

    request: str
    chain: Sequence[OffloadKey]
    chain_length: int
    namespace: bytes


@dataclass(slots=True)
class Staged:
    """Blocks that are pinned in the staging pool until the tiers have handled them."""

    keys: list[OffloadKey]
    request: str
    lease: LoadStoreSpec
    deadline: float


@dataclass(slots=True)
class RequestChain:
    """What is known of a request."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Its chain so far."""
    num_used: int = 0
    """Leading blocks of which a use was counted."""
    stored: list[OffloadKey] = field(default_factory=list)
    has_hole: bool = False
    """Some of its blocks were dropped: what comes behind them cannot be found."""


class Stores:
    """Plans the copies of stores, in the order of their submission, and offers the chains of requests to the tiers."""

    def __init__(
        self, manager: TieredOffloadingManager, jobs: Jobs, block_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._jobs = jobs
        self._block_bytes = block_bytes
        self._clock = clock
        self.max_staged = max(1, int(manager.most_blocks() * STORE_SHARE))
        """Blocks that may be staged at the same time."""
        self._max_batch = max(1, min(self.max_staged // 4, BATCH_BYTES // block_bytes, MAX_BATCH))
        self._queue: deque[BridgeJob | RequestEnd] = deque()
        self.num_ended = 0
        """Jobs and requests that have ended since the start."""
        self._staged: deque[Staged] = deque()
        self._num_staged = 0
        self._requests: OrderedDict[str, RequestChain] = OrderedDict()
        """The request that stored least recently first."""
        self._num_keys = 0

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def submit(self, entry: BridgeJob | RequestEnd) -> None:
        self._queue.append(entry)

    # Copies.

    def plan(self, namespace: bytes) -> Copy | None:
        """Returns the next blocks to copy. None: there are none now, since the next job waits for room, or has ended,
        or since a request has ended. ``namespace``: that of keys now; what has another one was submitted before a
        reset."""
        if self._staged and not any(
            tier.writes.writing or tier.writes.backlog.is_ready for tier in self._manager.tiers
        ):
            self._release()
        if not self._queue:
            return None
        entry, copy = self._queue[0], None
        if isinstance(entry, BridgeJob):
            if entry.namespace != namespace:
                self._jobs.stop([entry])
            else:
                copy = self._plan_job(entry)
        elif entry.namespace == namespace:
            self._end_request(entry)
        if copy is None and (isinstance(entry, RequestEnd) or entry.has_ended):
            self._queue.popleft()
            self.num_ended += 1
        return copy

    def _plan_job(self, job: BridgeJob) -> Copy | None:
        """Returns the next blocks of ``job`` to copy. If there are none, it has ended, or it waits for room."""
        if not job.names:
            job.name_keys()
            request = self._extend(job.request, job.namespace, job.chain, job.chain_length)
            request.num_used = request.num_used if job.is_use else len(request.keys)
            self._offer(job.request, request)
        request = self._requests[job.request]
        while job.begun < len(job.names):
            indices = range(job.begun, min(len(job.names), job.begun + self._max_batch))
            names = [job.names[i] for i in indices]
            is_lacking = self._is_lacking(names)
            is_late = job.has_ended or self._clock() >= job.deadline
            if is_late or request.has_hole or not any(tier.takes_chains for tier in self._manager.tiers):
                request.has_hole = True
                self._drop(job)
            elif not is_lacking.any():
                job.begun += len(names)
                self._jobs.settle(job, indices, True)
            else:
                return self._begin(job, names, is_lacking)
        return None

    def _is_lacking(self, names: Sequence[OffloadKey]) -> Bools:
        """Returns which of ``names`` some tier that can be written lacks."""
        lacking = np.zeros(len(names), dtype=np.bool_)
        for tier in self._manager.tiers:
            if tier.takes_chains:
                lacking |= tier.writes.lacks(names)
        return lacking

    def _begin(self, job: BridgeJob, names: list[OffloadKey], is_lacking: Bools) -> Copy | None:
        """Returns as many of ``names``, the next blocks of ``job``, as there is room for. Of these, those that some
        tier lacks and the staging pool has not are to be copied."""
        room = self.max_staged - self._num_staged
        if np.count_nonzero(is_lacking) > room:
            room += self._release()
        num_names = int(np.searchsorted(np.cumsum(is_lacking), room, side="right"))
        lacking = [name for name, is_mine in zip(names[:num_names], is_lacking.tolist(), strict=False) if is_mine]
        output = self._manager.prepare_store(lacking) if num_names else None
        if output is None:
            return None
        index_of = dict(zip(names, range(job.begun, job.begun + num_names), strict=False))
        indices = [index_of[key] for key in output.keys_to_store]
        slots = output.store_spec.slots

        def end(num_copied: int) -> None:
            if num_copied < len(slots):
                self._manager.complete_store(self._manager.host.lease(slots[num_copied:]), success=False)
            self._manager.complete_store(self._manager.host.lease(slots[:num_copied]))
            self._stage(job.request, lacking)
            if not job.has_ended:
                done = range(job.begun, job.begun + num_names)
                job.begun += num_names
                self._jobs.settle(job, done, True, num_copied * self._block_bytes)

        return Copy(job, indices, slots.tolist(), end)

    # What is staged.

    def _stage(self, request: str, lacking: Sequence[OffloadKey]) -> None:
        """Pins those of ``lacking`` that are in the staging pool."""
        host = self._manager.host
        keys = [lacking[i] for i in np.flatnonzero(host.table.states(lacking) == HIT).tolist()]
        if keys:
            self._requests[request].stored += keys
            deadline = self._clock() + STAGE_DEADLINE_S
            self._staged.append(Staged(keys, request, host.prepare_load(keys), deadline))
            self._num_staged += len(keys)

    def _release(self, everything: bool = False) -> int:
        """Lets staged blocks be evicted that the tiers have handled: they hold them, are writing them, or will not
        write them. Returns how many these are."""
        before, now, staged = self._num_staged, self._clock(), self._staged
        self._staged = deque()
        for each in staged:
            may_be_written = any(
                tier.write_health.breaker.is_working and tier.writes.may_write(each.keys, each.request)
                for tier in self._manager.tiers
            )
            if not everything and now < each.deadline and may_be_written:
                self._staged.append(each)
            else:
                self._num_staged -= len(each.keys)
                self._manager.host.complete_load(each.lease)
        return before - self._num_staged

    def _drop(self, job: BridgeJob) -> None:
        """Gives up what is left of ``job``."""
        indices = range(job.begun, len(job.names))
        self._manager.note_dropped(job.names[job.begun :])
        job.begun = len(job.names)
        self._jobs.settle(job, indices, False)

    def forget(self) -> None:
        """Forgets all requests, and unpins all staged blocks."""
        self._release(everything=True)
        self._requests.clear()
        self._num_keys = 0

    # Requests.

    def _extend(self, name: str, namespace: bytes, chain: Sequence[OffloadKey], length: int) -> RequestChain:
        """Returns the request ``name``, whose chain is the first ``length`` keys of ``chain`` now."""
        request = self._requests.setdefault(name, RequestChain())
        self._requests.move_to_end(name)
        known = len(request.keys)
        if known > length or (known and not request.keys[-1].endswith(chain[known - 1])):
            # Another request of the same name, or blocks were inserted.
            self._num_keys -= known
            request.keys.clear()
            request.num_used = min(request.num_used, length)
            known = 0
        request.keys += [namespace + key for key in chain[known:length]]
        self._num_keys += len(request.keys) - known
        while len(self._requests) > 1 and (len(self._requests) > MAX_REQUESTS or self._num_keys > MAX_CHAIN_KEYS):
            _, forgotten = self._requests.popitem(last=False)
            self._num_keys -= len(forgotten.keys)
        return request

    def _offer(self, name: str, request: RequestChain) -> None:
        """Counts a use of the blocks by which the chain has grown, before they are stored, and offers the chain."""
        grown = request.keys[request.num_used :]
        request.num_used = len(request.keys)
        self._manager.touch(grown, ReqContext(name, may_wait=False), request.keys)

    def _end_request(self, end: RequestEnd) -> None:
        request = self._extend(end.request, end.namespace, end.chain, end.chain_length)
        self._offer(end.request, request)
        used = request.keys if request.stored else []
        self._manager.end_chain(used, request.stored, ReqContext(end.request), request.keys)
        del self._requests[end.request]
        self._num_keys -= len(request.keys)


@dataclass(slots=True, eq=False)
class LoadBatch:
    """Blocks of ``job`` that are promoted together. ``left``: the indices of those that have not arrived, by key."""

    job: BridgeJob
    request: str
    left: dict[OffloadKey, list[int]]


class Loads:
    """Plans the copies of loads, which begin in the order of their submission."""

    def __init__(
        self, manager: TieredOffloadingManager, jobs: Jobs, block_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._jobs = jobs
        self._block_bytes = block_bytes
        self._clock = clock
        most = int(manager.max_promoted * LOAD_SHARE)
        self._max_batch = max(1, min(most, BATCH_BYTES // block_bytes, MAX_BATCH))
        self._queue: deque[BridgeJob] = deque()
        """Jobs of which some blocks belong to no batch yet."""
        self._batches: dict[LoadBatch, None] = {}
        self._numbers = itertools.count()

    def submit(self, job: BridgeJob) -> None:
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

    def look(self, batch: LoadBatch) -> Copy | None:
        """Returns the blocks of ``batch`` that are in the staging pool now, None if there are none. What is neither
        there nor on its way is given up. Ends the batch if it waits for nothing else."""
        arrived = None if batch.job.has_ended else self._look(batch)
        if batch.job.has_ended or not batch.left:
            self._remove(batch)
        return arrived

    def _look(self, batch: LoadBatch) -> Copy | None:
        may_wait = self._clock() < batch.job.deadline
        context = ReqContext(batch.request, may_wait=may_wait)
        keys = list(batch.left)
        states = self._manager.lookup_each(keys, context)
        for i in np.flatnonzero(states == MISS if may_wait else states != HIT).tolist():
            # Nothing is promoted with it. The others are looked up again in the next step.
            self._jobs.settle(batch.job, batch.left.pop(keys[i]), False)
        ready = [keys[i] for i in np.flatnonzero(states == HIT).tolist()]
        if not ready:
            return None
        lease = self._manager.prepare_load(ready, context)
        copies = [(i, slot) for key, slot in zip(ready, lease.slots.tolist(), strict=True) for i in batch.left.pop(key)]
        indices, slots = [i for i, _ in copies], [slot for _, slot in copies]

        def end(num_copied: int) -> None:
            self._manager.complete_load(lease)
            self._jobs.settle(batch.job, indices[:num_copied], True, num_copied * self._block_bytes)

        return Copy(batch.job, indices, slots, end)

    def _remove(self, batch: LoadBatch) -> None:
        del self._batches[batch]
        self._manager.release_request(ReqContext(batch.request))

    def forget(self) -> None:
        """Ends all batches, whose jobs have ended."""
        self._queue.clear()
        for batch in list(self._batches):
            self._remove(batch)
