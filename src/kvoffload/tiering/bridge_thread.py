"""The thread of a TierBridge, which owns the manager, and the copies that it makes.

What the engine's workers are to the connector, this thread is to the bridge: it copies between foreign pages and
staging slots. Stores go into staging slots and stay there until the tiers have handled them; loads come in batches that
are promoted into the staging pool. The manager, and what is planned, are used under one lock that is never held while
bytes are copied or a medium is waited for.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, count
from typing import NamedTuple, TypeVar

import numpy as np

from kvoffload.abc import Keys, LoadStoreSpec, OffloadKey, ReqContext
from kvoffload.abc.tier import HIT, MISS
from kvoffload.locks import FairLock
from kvoffload.tiering.bridge_jobs import BridgeJob, Jobs, RequestChain
from kvoffload.tiering.health import BreakerState
from kvoffload.tiering.manager import TieredOffloadingManager
from kvoffload.tiering.plan import Bools

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Otherwise = TypeVar("Otherwise")

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
CALL_WAIT_S = 0.005
"""How long calls of an engine's scheduler wait for the lock of the manager. After that a lookup is answered RETRY. The
thread may hold it longer: for long chains, or while a tier hangs in a call."""
FIRST_DELAY_S, MAX_DELAY_S = 0.0001, 0.01
"""How long the thread waits for transfers: twice as long each time, while nothing happens."""
IDLE_DELAY_S = 0.25
"""The same while there are none: tiers connect again and end their pauses."""
FLUSH_DEADLINE_S = 2.0
"""How long ``close`` lets tiers take on what is staged."""
CLOSE_DEADLINE_S = 30.0
"""How long ``close`` waits for the thread. The tiers have deadlines of their own."""


class Copy(NamedTuple):
    """Blocks of ``job`` to copy, ``indices[i]`` from or into ``slots[i]``. ``end`` is called with the number of blocks
    that were copied, from the first one on: fewer than all only if the job has ended."""

    job: BridgeJob
    indices: list[int]
    slots: list[int]
    end: Callable[[int], None]


def _max_batch(share: float, jobs: Jobs) -> int:
    return max(1, min(int(share), BATCH_BYTES // jobs.block_bytes, MAX_BATCH))


class Staged(NamedTuple):
    """Blocks that are pinned in the staging pool until the tiers have handled them."""

    keys: list[OffloadKey]
    request: str
    lease: LoadStoreSpec
    deadline: float


@dataclass(slots=True)
class StoringRequest:
    """What is known of a request."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Its chain so far. No further use of these blocks is counted."""
    stored: list[OffloadKey] = field(default_factory=list)
    has_hole: bool = False
    """Some of its blocks were dropped: what comes behind them cannot be found."""


class Stores:
    """Plans the copies of stores, in the order of their submission, and offers the chains of requests to the tiers."""

    def __init__(self, manager: TieredOffloadingManager, jobs: Jobs) -> None:
        self.queue: deque[BridgeJob | RequestChain] = deque()
        """Jobs, and the chains of requests that have ended."""
        self._manager = manager
        self._jobs = jobs
        self._max_staged = max(1, int(manager.most_blocks() * STORE_SHARE))
        """Blocks that may be staged at the same time."""
        self._max_batch = _max_batch(self._max_staged // 4, jobs)
        self._staged: list[Staged] = []
        self._num_staged = 0
        self._requests: OrderedDict[str, StoringRequest] = OrderedDict()
        """The request that stored least recently first."""
        self._num_keys = 0

    # Copies.

    def plan(self) -> Copy | None:
        """Returns the next blocks to copy. None: there are none now, since the next job waits for room, or has ended,
        or since a request has ended."""
        is_writing = any(tier.writes.writing or tier.writes.backlog.num_ready for tier in self._manager.tiers)
        if self._staged and not is_writing:
            self._release()
        if not self.queue:
            return None
        entry = self.queue[0]
        if isinstance(entry, RequestChain):
            self._end_request(entry)
            self.queue.popleft()
            return None
        copy = self._plan_job(entry)
        if copy is None and entry.has_ended:
            self.queue.popleft()
        return copy

    def _plan_job(self, job: BridgeJob) -> Copy | None:
        """Returns the next blocks of ``job`` to copy. If there are none, it has ended, or it waits for room."""
        assert job.chain is not None
        if not job.names:
            job.name_keys()
            self._offer(job.chain, job.is_use)
        name = job.chain.request
        request = self._requests[name]
        while job.begun < len(job.names):
            indices = range(job.begun, min(len(job.names), job.begun + self._max_batch))
            names = [job.names[i] for i in indices]
            takers = [tier.writes for tier in self._manager.tiers if tier.takes_chains]
            is_lacking: Bools = np.logical_or.reduce([writes.lacks(names) for writes in takers])
            is_late = job.has_ended or self._jobs.clock() >= job.deadline
            if is_late or request.has_hole or not takers:
                # What is left of the job is given up.
                request.has_hole, left = True, range(job.begun, len(job.names))
                job.begun = len(job.names)
                self._manager.note_dropped(job.names[left.start :])
                self._jobs.settle(job, left, False)
            elif not is_lacking.any():
                job.begun += len(names)
                self._jobs.settle(job, indices, True)
            else:
                return self._begin(job, name, names, is_lacking)
        return None

    def _begin(self, job: BridgeJob, request: str, names: list[OffloadKey], is_lacking: Bools) -> Copy | None:
        """Returns as many of ``names``, the next blocks of ``job``, as there is room for. Of these, those that some
        tier lacks and the staging pool has not are to be copied."""
        room = self._max_staged - self._num_staged
        if np.count_nonzero(is_lacking) > room:
            room += self._release()
        num_names = int(np.searchsorted(np.cumsum(is_lacking), room, side="right"))
        lacking = list(compress(names[:num_names], is_lacking.tolist()))
        output = self._manager.prepare_store(lacking) if num_names else None
        if output is None:
            return None
        index_of = dict(zip(names[:num_names], count(job.begun)))
        slots = output.store_spec.slots

        def end(num_copied: int) -> None:
            if num_copied < len(slots):
                self._manager.complete_store(self._manager.host.lease(slots[num_copied:]), success=False)
            self._manager.complete_store(self._manager.host.lease(slots[:num_copied]))
            self._stage(request, lacking)
            if not job.has_ended:
                done = range(job.begun, job.begun + num_names)
                job.begun += num_names
                self._jobs.settle(job, done, True)

        return Copy(job, [index_of[key] for key in output.keys_to_store], slots.tolist(), end)

    # What is staged.

    def _stage(self, request: str, lacking: Keys) -> None:
        """Pins those of ``lacking`` that are in the staging pool."""
        host = self._manager.host
        keys = list(compress(lacking, (host.table.states(lacking) == HIT).tolist()))
        if keys:
            self._requests[request].stored += keys
            self._staged.append(Staged(keys, request, host.prepare_load(keys), self._jobs.clock() + STAGE_DEADLINE_S))
            self._num_staged += len(keys)

    def _release(self, everything: bool = False) -> int:
        """Lets staged blocks be evicted that the tiers have handled: they hold them, are writing them, or will not
        write them. Returns how many these are."""
        before, now, staged = self._num_staged, self._jobs.clock(), self._staged
        working = [tier.writes for tier in self._manager.tiers if tier.write_health.state is BreakerState.WORKING]
        self._staged = []
        for each in staged:
            may_be_written = any(writes.may_write(each.keys, each.request) for writes in working)
            if not everything and now < each.deadline and may_be_written:
                self._staged.append(each)
            else:
                self._num_staged -= len(each.keys)
                self._manager.host.complete_load(each.lease)
        return before - self._num_staged

    def forget(self) -> None:
        """Forgets all jobs, which have ended, and all requests, and unpins all staged blocks."""
        self.queue.clear()
        self._release(everything=True)
        self._requests.clear()
        self._num_keys = 0

    # Requests.

    def _offer(self, chain: RequestChain, is_use: bool = True) -> StoringRequest:
        """Returns the request of ``chain``, which is its chain now and is offered to the tiers. Counts a use of the
        blocks by which it has grown, before they are stored, if it ``is_use``."""
        request = self._requests.setdefault(chain.request, StoringRequest())
        self._requests.move_to_end(chain.request)
        known = num_used = len(request.keys)
        if known > chain.length or (known and not request.keys[-1].endswith(chain.keys[known - 1])):
            # Another request of the same name, or blocks were inserted.
            self._num_keys -= known
            request.keys.clear()
            known = 0
        request.keys += [chain.namespace + key for key in chain.keys[known : chain.length]]
        self._num_keys += len(request.keys) - known
        while len(self._requests) > 1 and (len(self._requests) > MAX_REQUESTS or self._num_keys > MAX_CHAIN_KEYS):
            _, forgotten = self._requests.popitem(last=False)
            self._num_keys -= len(forgotten.keys)
        used = request.keys[num_used:] if is_use else []
        self._manager.touch(used, ReqContext(chain.request, may_wait=False), request.keys)
        return request

    def _end_request(self, chain: RequestChain) -> None:
        request = self._offer(chain)
        used = request.keys if request.stored else []
        self._manager.end_chain(used, request.stored, ReqContext(chain.request), request.keys)
        del self._requests[chain.request]
        self._num_keys -= len(request.keys)


@dataclass(slots=True, eq=False)
class LoadBatch:
    """Blocks of ``job`` that are promoted together. ``left``: the indices of those that have not arrived, by key."""

    job: BridgeJob
    request: str
    left: dict[OffloadKey, list[int]]


class Loads:
    """Plans the copies of loads, which begin in the order of their submission."""

    def __init__(self, manager: TieredOffloadingManager, jobs: Jobs) -> None:
        self._manager = manager
        self._jobs = jobs
        self._max_batch = _max_batch(manager.max_promoted * LOAD_SHARE, jobs)
        self._queue: deque[BridgeJob] = deque()
        """Jobs of which some blocks belong to no batch yet."""
        self._batches: dict[LoadBatch, None] = {}
        self._numbers = count()

    def submit(self, job: BridgeJob) -> None:
        job.name_keys()
        if job.is_use:
            self._manager.touch(job.names, None, [])
        self._queue.append(job)

    def begin(self) -> list[LoadBatch]:
        """Begins the next batch, if there is room for it. Returns all that have begun."""
        while self._queue and (self._queue[0].has_ended or self._queue[0].begun == len(self._queue[0].names)):
            self._queue.popleft()
        if self._queue:
            job = self._queue[0]
            stop = min(len(job.names), job.begun + self._max_batch)
            num_under_way = sum(len(batch.left) for batch in self._batches)
            if not num_under_way or num_under_way + stop - job.begun <= self._manager.max_promoted:
                left: dict[OffloadKey, list[int]] = {}
                for i in range(job.begun, stop):
                    left.setdefault(job.names[i], []).append(i)
                job.begun = stop
                self._batches[LoadBatch(job, f"load-{next(self._numbers)}", left)] = None
        return list(self._batches)

    def look(self, batch: LoadBatch) -> Copy | None:
        """Returns the blocks of ``batch`` that are in the staging pool now, None if there are none. What is neither
        there nor on its way is given up. Ends the batch if it waits for nothing else."""
        arrived = None if batch.job.has_ended else self._look(batch)
        if batch.job.has_ended or not batch.left:
            del self._batches[batch]
            self._manager.release_request(ReqContext(batch.request))
        return arrived

    def _look(self, batch: LoadBatch) -> Copy | None:
        may_wait = self._jobs.clock() < batch.job.deadline
        context = ReqContext(batch.request, may_wait=may_wait)
        keys = list(batch.left)
        states = self._manager.lookup_each(keys, context)
        for i in np.flatnonzero(states == MISS if may_wait else states != HIT).tolist():
            # Nothing is promoted with it. The others are looked up again in the next step.
            self._jobs.settle(batch.job, batch.left.pop(keys[i]), False)
        ready = list(compress(keys, (states == HIT).tolist()))
        if not ready:
            return None
        lease = self._manager.prepare_load(ready, context)
        copies = [(i, slot) for key, slot in zip(ready, lease.slots.tolist(), strict=True) for i in batch.left.pop(key)]
        indices, slots = [i for i, _ in copies], [slot for _, slot in copies]

        def end(num_copied: int) -> None:
            self._manager.complete_load(lease)
            self._jobs.settle(batch.job, indices[:num_copied], True)

        return Copy(batch.job, indices, slots, end)


class BridgeThread:
    """The thread of a bridge, which owns the manager: it does what the inbox of ``jobs`` says, and makes their copies.

    If a check fails, it is off: all jobs end as failed. ``namespace``: that of keys at first.
    """

    def __init__(
        self, manager: TieredOffloadingManager, jobs: Jobs, namespace: bytes, close_pool: Callable[[], None]
    ) -> None:
        self.names = tuple(tier.name for tier in manager.tiers)
        self.fault: str | None = None
        """Why it is off; None if it serves."""
        self.namespace = namespace
        """The namespace of keys, another one after a reset."""
        self.lock = FairLock()
        """Held while the manager, or what the thread has planned, is used."""
        self.stuck_since: float | None = None
        """Since when calls have waited for the lock in vain."""
        self.thread: threading.Thread | None = None
        self.manager = manager
        self._jobs = jobs
        self._stores = Stores(manager, jobs)
        self._loads = Loads(manager, jobs)
        self._close_pool = close_pool
        self._served = namespace
        """The namespace of what the thread has seen: another one while it has not seen a reset."""
        self._has_ended = False

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="kvoffload-bridge", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends everything within CLOSE_DEADLINE_S."""
        self._jobs.close()
        if self.thread is None:
            self._end()
            return
        self.thread.join(CLOSE_DEADLINE_S)
        if self.thread.is_alive():
            logger.warning(
                "kvoffload: the tiers have not closed within %.0f s, because one of them hangs; the process can end",
                CLOSE_DEADLINE_S,
            )

    @property
    def is_busy(self) -> bool:
        """Whether something is to be done, or is being written to a tier."""
        if self._jobs.open or self._jobs.inbox or self._stores.queue:
            return True
        return self.manager.has_transfers or self.manager.has_pending_writes

    def ask(self, call: Callable[[], Answer], otherwise: Otherwise) -> Answer | Otherwise:
        """Returns what ``call`` returns with the lock held; ``otherwise`` if the bridge is off or closed, or the thread
        has kept the lock for CALL_WAIT_S. If a check fails in ``call``, the bridge is off."""
        if self._jobs.is_closed:
            return otherwise
        with self.lock(CALL_WAIT_S if self.stuck_since is None else 0) as is_held:
            if not is_held:
                self.stuck_since = self._jobs.clock() if self.stuck_since is None else self.stuck_since
                return otherwise
            self.stuck_since = None
            if self._jobs.is_closed:
                return otherwise
            try:
                return call()
            except Exception as error:
                self._switch_off(error)
                return otherwise

    def _switch_off(self, error: BaseException) -> None:
        """Ends the service because of a bug. Logs ``error``."""
        if self.fault is None:
            self.fault = f"{type(error).__name__}: {error}"
            logger.error(
                "kvoffload: THE TIERS %s ARE OFF: a check failed; requests are computed from here on. Restart to use "
                "them again, and report this error",
                ", ".join(self.names).upper(),
                exc_info=error,
            )
        self._jobs.close()

    def _run(self) -> None:
        try:
            delay = IDLE_DELAY_S
            while not self._jobs.is_closed:
                if self.step():
                    delay = FIRST_DELAY_S
                    continue
                delay = min(2 * delay, MAX_DELAY_S) if self.is_busy else IDLE_DELAY_S
                self._jobs.wake.wait(delay)
                self._jobs.wake.clear()
            until = time.monotonic() + FLUSH_DEADLINE_S
            while self.fault is None and self.is_busy and time.monotonic() < until:
                self.step()
                time.sleep(FIRST_DELAY_S)
        except Exception as error:
            self._switch_off(error)
        finally:
            self._end()

    def step(self) -> bool:
        """Does what there is to do now. Returns whether any of it has brought jobs or transfers on."""
        before = self._progress
        with self.lock():
            self._forget_if_reset()
            self.manager.poll()
            self._take_in()
        # The lock is released often, lest lookups wait for it.
        with self.lock():
            batches = self._loads.begin()
        for batch in batches:
            self._copy(partial(self._loads.look, batch))
        self._copy(self._stores.plan)
        return self._progress != before

    def _copy(self, plan: Callable[[], Copy | None]) -> None:
        """Copies what ``plan`` returns, without the lock."""
        with self.lock():
            copy = plan()
        if copy is not None:
            num_copied = self._jobs.copy(copy.job, copy.indices, copy.slots)
            with self.lock():
                copy.end(num_copied)

    def _forget_if_reset(self) -> None:
        if self._served != self.namespace:
            self._served = self.namespace
            self._stores.forget()
            self.manager.reset(keep_own=True)

    def _take_in(self) -> None:
        while self._jobs.inbox:
            entry = self._jobs.inbox.popleft()
            # What came after a reset must not be forgotten by it.
            self._forget_if_reset()
            if entry.namespace != self._served:
                # Its submission began before the reset.
                if isinstance(entry, BridgeJob):
                    self._jobs.stop([entry])
            elif isinstance(entry, BridgeJob) and entry.is_load:
                self._loads.submit(entry)
            else:
                self._stores.queue.append(entry)

    @property
    def _progress(self) -> tuple[int, ...]:
        transfers = ((len(tier.reads), len(tier.writes.writing)) for tier in self.manager.tiers)
        waiting = len(self._jobs.inbox) + len(self._stores.queue)
        return (self._jobs.num_settled, waiting, self.manager.num_promotions, *itertools.chain.from_iterable(transfers))

    def _end(self) -> None:
        """Releases everything. The bridge is closed, or off."""
        if self._has_ended:
            return
        self._has_ended = True
        self._jobs.close()
        self._jobs.inbox.clear()
        for release in (self._stores.forget, self.manager.shutdown):
            try:
                with self.lock():
                    release()
            except Exception:
                logger.exception("kvoffload: closing the tiers failed")
        # The arrays of the tiers keep the pool's memory mapped.
        del self.manager, self._stores, self._loads
        self._close_pool()
