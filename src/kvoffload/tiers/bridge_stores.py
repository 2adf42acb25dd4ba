"""Stores of a bridge: into staging slots, and kept there until the tiers have handled them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvoffload.abc import LoadStoreSpec, OffloadKey, ReqContext
from kvoffload.abc.tier import HIT
from kvoffload.tiers.bridge_jobs import Job, Jobs
from kvoffload.tiers.manager import TieredOffloadingManager
from kvoffload.tiers.plan import Bools

STORE_SHARE = 0.5
"""At most this share of the staging pool holds blocks that are still to be written. The rest is for promotions."""
BATCH_BYTES = 16 << 20
MAX_BATCH = 256
"""Blocks of so many bytes, at least one, and at most so many blocks are copied at a time."""
STAGE_DEADLINE_S = 10.0
"""After this time a staged block may be evicted although a tier has not taken it on."""
MAX_REQUESTS = 4096
MAX_CHAIN_KEYS = 1 << 20
"""Requests whose chains are remembered, and keys of these chains. The oldest is forgotten: its blocks may count as used
twice."""


class RequestEnd(NamedTuple):
    """The end of ``request``: the first ``chain_length`` keys of ``chain`` are its whole chain."""

    request: str
    chain: Sequence[OffloadKey]
    chain_length: int
    namespace: bytes


@dataclass(slots=True)
class StoreBatch:
    """The next ``num_names`` blocks of ``job``. Some tier lacks ``lacking``. Of these, the blocks ``indices`` of the
    job are not in the staging pool either, and are to be copied into the slots of ``lease``."""

    job: Job
    num_names: int
    lacking: list[OffloadKey]
    indices: list[int]
    lease: LoadStoreSpec

    @property
    def slots(self) -> list[int]:
        slots: list[int] = self.lease.slots.tolist()
        return slots


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
    """Plans the copies of stores, in the order of their submission, and offers the chains of requests to the tiers.

    All methods but ``submit`` and ``end_request`` are called with the lock of the bridge held.
    """

    def __init__(
        self, manager: TieredOffloadingManager, jobs: Jobs, block_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._jobs = jobs
        self._block_bytes = block_bytes
        self._clock = clock
        self.max_staged = max(1, int(manager.num_blocks * STORE_SHARE))
        """Blocks that may be staged at the same time."""
        self._max_batch = max(1, min(self.max_staged // 4, BATCH_BYTES // block_bytes, MAX_BATCH))
        self._queue: deque[Job | RequestEnd] = deque()
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

    @property
    def num_staged(self) -> int:
        return self._num_staged

    def submit(self, entry: Job | RequestEnd) -> None:
        self._queue.append(entry)

    # Copies.

    def plan(self, namespace: bytes) -> StoreBatch | None:
        """Returns the next blocks to copy. None: there are none now, since the next job waits for room, or has ended,
        or since a request has ended. ``namespace``: that of keys now; what has another one was submitted before a
        reset."""
        if self._staged and not any(tier.writes.num_writing or tier.writes.has_backlog for tier in self._manager.tiers):
            self._release()
        if not self._queue:
            return None
        entry = self._queue[0]
        batch = None
        if entry.namespace != namespace:
            if isinstance(entry, Job):
                self._jobs.stop([entry])
        elif isinstance(entry, RequestEnd):
            self._end_request(entry)
        else:
            batch = self._plan_job(entry)
        if batch is None and (isinstance(entry, RequestEnd) or entry.has_ended):
            self._queue.popleft()
            self.num_ended += 1
        return batch

    def _plan_job(self, job: Job) -> StoreBatch | None:
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

    def _begin(self, job: Job, names: list[OffloadKey], is_lacking: Bools) -> StoreBatch | None:
        """Returns as many of ``names``, the next blocks of ``job``, as there is room for."""
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
        return StoreBatch(job, num_names, lacking, indices, output.store_spec)

    def end(self, batch: StoreBatch, num_copied: int) -> None:
        """Takes in that the first ``num_copied`` blocks of ``batch`` were copied: all, or its job has ended."""
        job, slots = batch.job, batch.lease.slots
        if num_copied < len(slots):
            self._manager.complete_store(self._manager.host.lease(slots[num_copied:]), success=False)
        self._manager.complete_store(self._manager.host.lease(slots[:num_copied]))
        self._pin(batch)
        if not job.has_ended:
            indices = range(job.begun, job.begun + batch.num_names)
            job.begun += batch.num_names
            self._jobs.settle(job, indices, True, num_copied * self._block_bytes)

    # What is staged.

    def _pin(self, batch: StoreBatch) -> None:
        host = self._manager.host
        is_ready = (host.states(batch.lacking) == HIT).tolist()
        keys = [key for key, ready in zip(batch.lacking, is_ready, strict=True) if ready]
        if keys:
            request = batch.job.request
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
            if not everything and now < each.deadline and self._may_be_written(each):
                self._staged.append(each)
            else:
                self._num_staged -= len(each.keys)
                self._manager.host.complete_load(each.lease)
        return before - self._num_staged

    def _may_be_written(self, staged: Staged) -> bool:
        return any(
            tier.breaker.is_working and tier.writes.may_write(staged.keys, staged.request)
            for tier in self._manager.tiers
        )

    def _drop(self, job: Job) -> None:
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
        self._manager.touch(grown, ReqContext(name), request.keys)

    def _end_request(self, end: RequestEnd) -> None:
        request = self._extend(end.request, end.namespace, end.chain, end.chain_length)
        self._offer(end.request, request)
        context = ReqContext(end.request)
        if request.stored:
            self._manager.reorder_chain(request.keys, request.stored, context)
        self._manager.offer_chain(request.keys, context)
        del self._requests[end.request]
        self._num_keys -= len(request.keys)
