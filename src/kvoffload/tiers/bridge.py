"""TierBridge: lower tiers behind host memory that belongs to somebody else.

The bridge is a TieredOffloadingManager with a small host pool of its own, the staging pool. What the engine's workers
are to the connector, the thread of the bridge is here: it copies between foreign pages and staging slots. It owns the
manager, under one lock that is never held while bytes are copied or a medium is waited for.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvoffload.abc import ByteArray, ConfigError, KVGroup, Miss, MissReason, OffloadingEvent, OffloadKey, States
from kvoffload.abc.tier import MISS, RETRY
from kvoffload.cache.admission import ReuseFilter, tracker_size
from kvoffload.cache.keys import NAMESPACE_BYTES, namespace
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.host.pool import HostPool, padded_slot_bytes
from kvoffload.locks import FairLock
from kvoffload.tiers.bridge_jobs import Job, JobEnd, Jobs, Page
from kvoffload.tiers.bridge_loads import Loads
from kvoffload.tiers.bridge_stores import MAX_CHAIN_KEYS, STORE_SHARE, RequestEnd, Stores
from kvoffload.tiers.config import TierConfig, TierContext, TierEntry
from kvoffload.tiers.disk.format import is_fingerprint
from kvoffload.tiers.manager import TieredOffloadingManager
from kvoffload.tiers.opening import open_tiers
from kvoffload.tiers.plan import ChainLayout
from kvoffload.units import format_bytes

__all__ = ["JobEnd", "Page", "TierBridge", "build_bridge"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Otherwise = TypeVar("Otherwise")

STAGING_BYTES = 256 << 20
"""Memory of the staging pool of a bridge."""
MIN_STAGING_BLOCKS = 32
"""Blocks of the staging pool at least, however large they are."""
MAX_PAGES = 1 << 14
"""Pages of stores that wait at the same time. Stores beyond that are dropped."""
MAX_INBOX = 4096
"""Calls that the thread has not seen yet. There are so many only while a tier hangs; those beyond are dropped."""
STORE_DEADLINE_S = 10.0
"""A store that has had no room in the staging pool for so long is dropped."""
CALL_WAIT_S = 0.005
"""How long calls of an engine's scheduler wait for the lock of the manager. After that a lookup is answered RETRY. The
thread may hold it longer: for long chains, or while a tier hangs in a call."""
LOCK_DEADLINE_S = 0.1
"""How long other calls wait for it."""
MAX_FORMER = 8
"""Resets of which it is known that a block was stored before them."""
FIRST_DELAY_S, MAX_DELAY_S = 0.0001, 0.01
"""How long the thread waits for transfers: twice as long each time, while nothing happens."""
IDLE_DELAY_S = 0.25
"""The same while there are none: tiers connect again and end their pauses."""
FLUSH_DEADLINE_S = 2.0
"""How long ``close`` lets tiers take on what is staged."""
CLOSE_DEADLINE_S = 30.0
"""How long ``close`` waits for the thread. The tiers have deadlines of their own."""


class TierBridge:
    """Stores blocks from foreign pages in tiers and loads them back.

    Any thread may call any method. No method raises because of a tier or waits for I/O; those that may wait say for how
    long. Pages are only touched by the thread of the bridge, between the submission of a job and the ``finished`` that
    reports it. Keys end with the index of their KV cache group, see ``kvoffload.cache.keys``.

    If a check fails in the bridge itself, the bridge is off: all jobs end as failed and all lookups are misses.

    ``manager``: in front of the tiers, with a host of as many blocks as ``slots`` has rows. ``start`` begins to serve;
    ``step`` does what the thread would do, for tests. ``close`` calls ``close_pool`` at the end.
    """

    def __init__(
        self,
        manager: TieredOffloadingManager,
        slots: ByteArray,
        block_bytes: int,
        fingerprint: str,
        *,
        lookup_deadline_ms: float = 100.0,
        load_deadline_ms: float = 1000.0,
        max_pages: int = MAX_PAGES,
        clock: Callable[[], float] = time.monotonic,
        close_pool: Callable[[], None] = lambda: None,
    ) -> None:
        self.block_bytes = block_bytes
        """Bytes of a block."""
        self.names = tuple(tier.name for tier in manager.tiers)
        """The names of the tiers in metrics and events, the fastest first. Empty if none could be opened."""
        self.fault: str | None = None
        """Why the bridge is off; None if it serves."""
        self._manager = manager
        self._lookup_deadline_s = lookup_deadline_ms / 1000
        self._load_deadline_s = load_deadline_ms / 1000
        self._clock = clock
        self._close_pool = close_pool
        self._expects = any(tier.tier.is_shared for tier in manager.tiers)
        """Whether tiers want to know what will be looked up next."""
        self._namespace = namespace(fingerprint)
        self._former: deque[tuple[bytes, float]] = deque(maxlen=MAX_FORMER)
        """The namespaces before resets, and when these came."""
        self._jobs = Jobs(slots, block_bytes, max_pages, clock)
        self._stores = Stores(manager, self._jobs, block_bytes, clock)
        self._loads = Loads(manager, self._jobs, block_bytes, clock)
        self._inbox: deque[Job | RequestEnd | list[OffloadKey]] = deque()
        """What the thread has not seen yet, at most MAX_INBOX. Keys are a chain that was used."""
        self._numbers = itertools.count()
        self._lock = FairLock()
        """Held while the manager, or what the thread has planned, is used."""
        self._stuck_since: float | None = None
        """Since when calls have waited for the lock in vain."""
        self._is_asking = False
        """Whether a lookup was answered RETRY since the last step."""
        self._served = self._namespace
        """The namespace of what the thread has seen: another one while it has not seen a reset."""
        self._is_closed = self._has_ended = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvoffload-bridge", daemon=True)
        self._thread.start()

    @property
    def tier_states(self) -> Mapping[str, str]:
        """By name, the state of each tier: "working", "paused" or "off"."""
        return self._ask(
            lambda: {
                tier.name: "off" if tier.breaker.is_off else "paused" if tier.breaker.is_paused else "working"
                for tier in self._manager.tiers
            },
            dict.fromkeys(self.names, "off"),
            LOCK_DEADLINE_S,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no job is open, ``finished`` has nothing to report and nothing is being written to a tier."""
        if self._jobs.num_open or self._jobs.has_reports:
            return False
        return self._is_closed or self.fault is not None or self._ask(lambda: not self._is_busy, False, LOCK_DEADLINE_S)

    # Jobs.

    def lookup(self, keys: Sequence[OffloadKey], chain: Sequence[OffloadKey] = ()) -> States:
        """Returns HIT, MISS or RETRY per key. RETRY: a tier has been asked, look again; it becomes MISS after
        ``lookup_deadline_ms``. ``chain``: what the request may look up next, behind ``keys``, so that a store beyond a
        network is asked for all of it at once."""
        prefix = self._namespace
        names = [prefix + key for key in keys]
        behind = [prefix + key for key in chain] if self._expects else []
        states = self._ask(lambda: self._manager.states(names, behind), None)
        if states is None:
            since = self._stuck_since
            may_wait = since is not None and self._clock() - since < self._lookup_deadline_s
            return np.full(len(keys), RETRY if may_wait else MISS, dtype=np.uint8)
        if not self._is_asking and (states == RETRY).any():
            self._is_asking = True
            self._wake.set()
        return states

    def store(
        self,
        job: int,
        keys: Sequence[OffloadKey],
        pages: Sequence[Page],
        chain: Sequence[OffloadKey],
        request: str,
    ) -> None:
        """Begins to store ``keys[i]`` from ``pages[i]``. The pages must not change until ``finished`` reports the job.

        ``chain`` is the request's whole chain so far, head first, the KV cache groups merged by the position at which
        blocks end; it has ``keys`` in it, and later calls for the same request extend it. It may grow later, but does
        not change otherwise. A block is written only if all blocks before it are held, or come. A job for which there
        is no room in time is dropped.
        """
        self._store(job, keys, pages, chain, request, True)

    def _store(
        self,
        number: int | None,
        keys: Sequence[OffloadKey],
        pages: Sequence[Page],
        chain: Sequence[OffloadKey],
        request: str,
        is_use: bool,
    ) -> Job:
        now = self._clock()
        job = Job(number, False, list(keys), list(pages), request, self._namespace, now, now + STORE_DEADLINE_S)
        job.chain, job.chain_length, job.is_use = chain, len(chain), is_use
        self._jobs.submit(job)
        # Also if it has ended at once: then its request has a hole.
        self._post(job)
        return job

    def load(self, job: int, keys: Sequence[OffloadKey], pages: Sequence[Page], request: str) -> None:
        """Begins to load ``keys[i]`` into ``pages[i]``. What has not arrived after ``load_deadline_ms`` is missing in
        the report, and so is what is corrupt or gone. The content of the pages of such keys is undefined."""
        self._load(job, keys, pages, request)

    def _load(self, number: int | None, keys: Sequence[OffloadKey], pages: Sequence[Page], request: str) -> Job:
        now = self._clock()
        deadline = now + self._load_deadline_s
        job = Job(number, True, list(keys), list(pages), request, self._namespace, now, deadline)
        self._jobs.submit(job)
        self._post(job)
        return job

    def _post(self, entry: Job | RequestEnd | list[OffloadKey]) -> None:
        """Hands ``entry`` to the thread."""
        if self._is_closed or self.fault is not None:
            return
        if len(self._inbox) < MAX_INBOX:
            self._inbox.append(entry)
            self._wake.set()
        elif isinstance(entry, Job):
            self._jobs.stop([entry])

    def finished(self) -> list[JobEnd]:
        """Returns the jobs that have ended since the last call, each once."""
        return self._jobs.finished()

    def end_request(self, request: str, chain: Sequence[OffloadKey]) -> None:
        """Takes in that a request has ended: it was one use of ``chain``, which is whole now. Call it once, after the
        last ``store`` of the request; for an aborted one too."""
        self._post(RequestEnd(request, chain, len(chain), self._namespace))

    # Calls that wait.

    def get(self, keys: Sequence[OffloadKey], pages: Sequence[Page]) -> list[bool]:
        """Loads ``keys[i]`` into ``pages[i]`` and counts a use of ``keys``, a chain. Returns which have arrived, after
        ``load_deadline_ms`` at the latest."""
        job = self._load(None, keys, pages, "")
        self._jobs.wait(job, self._load_deadline_s)
        if job.done:
            self._post([job.namespace + key for key in keys])
        return [i in job.done for i in range(len(keys))]

    def put(self, keys: Sequence[OffloadKey], pages: Sequence[Page], chain: Sequence[OffloadKey]) -> list[bool]:
        """Stores ``keys[i]`` from ``pages[i]``. ``chain``: the whole chain up to the last of them, head first. Returns
        which were taken over, or are held already, after STORE_DEADLINE_S at the latest."""
        request = f"put-{next(self._numbers)}"
        job = self._store(None, keys, pages, chain, request, False)
        self.end_request(request, chain)
        self._jobs.wait(job, STORE_DEADLINE_S)
        return [i in job.done for i in range(len(keys))]

    def exists(self, keys: Sequence[OffloadKey], chain: Sequence[OffloadKey] = ()) -> States:
        """Returns HIT or MISS per key, after ``lookup_deadline_ms`` at the latest."""
        deadline, delay = time.monotonic() + self._lookup_deadline_s, FIRST_DELAY_S
        while True:
            states = self.lookup(keys, chain)
            is_open = states == RETRY
            if is_open.any() and time.monotonic() < deadline:
                time.sleep(delay)
                delay = min(2 * delay, MAX_DELAY_S)
                continue
            states[is_open] = MISS
            return states

    # The end.

    def drain(self) -> None:
        """Returns when no page is touched any more, after the copy of one block at the latest. Jobs that were not
        copied end as failed, and ``finished`` reports them."""
        self._jobs.stop()

    def reset(self) -> None:
        """Forgets all blocks, because the weights may have changed: this process finds none that was stored before.
        Drains first. Tiers of this process keep their blocks for the next one; shared tiers are switched off."""
        self._former.append((self._namespace, self._clock()))
        self._namespace = os.urandom(NAMESPACE_BYTES)
        self._jobs.stop()
        self._wake.set()

    def close(self) -> None:
        """Drains and closes everything within CLOSE_DEADLINE_S. Afterwards lookups are misses, jobs end as failed, and
        no page is referred to. May be called twice."""
        self._is_closed = True
        self._jobs.close()
        self._wake.set()
        if self._thread is None:
            self._end()
            return
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            logger.warning(
                "kvoffload: the tiers have not closed within %.0f s, because one of them hangs; the process can end",
                CLOSE_DEADLINE_S,
            )

    # What others show.

    def explain(self, key: OffloadKey) -> Miss:
        """Returns why ``key`` cannot be loaded now: NOT_IN_TIME also if the bridge is busy or off."""
        return self._ask(lambda: self._explain(key), Miss(MissReason.NOT_IN_TIME))

    def _explain(self, key: OffloadKey) -> Miss:
        miss = self._manager.explain_miss(self._namespace + key)
        if miss.reason is MissReason.NEVER_STORED:
            for former, since in reversed(list(self._former)):
                tier = self._manager.explain_miss(former + key).tier
                if tier is not None:
                    return Miss(MissReason.RESET, self._clock() - since, tier)
        return miss

    def take_counts(self) -> Mapping[str, float]:
        """Returns counts since the last call, and gauges, by names of ``kvoffload.observe.metrics.METRICS``: "NAME" or
        "NAME:TIER"."""
        return self._ask(lambda: self._manager.take_counts(), {})

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events of the tiers since the last call, with the keys of the engine."""
        events = self._ask(lambda: list(self._manager.take_events()), list[OffloadingEvent]())
        # Those of the staging pool, which others need not know of, name no tier.
        events = [event for event in events if event.tier is not None]
        return [replace(event, keys=[key[NAMESPACE_BYTES:] for key in event.keys]) for event in events]

    # The thread.

    def _ask(self, call: Callable[[], Answer], otherwise: Otherwise, wait_s: float = CALL_WAIT_S) -> Answer | Otherwise:
        """Returns what ``call`` returns with the lock held; ``otherwise`` if the bridge is off or closed, or the thread
        has kept the lock for ``wait_s``. If a check fails in ``call``, the bridge is off."""
        if self._is_closed or self.fault is not None:
            return otherwise
        with self._lock(wait_s if self._stuck_since is None else 0) as is_held:
            if not is_held:
                self._stuck_since = self._clock() if self._stuck_since is None else self._stuck_since
                return otherwise
            self._stuck_since = None
            if self._is_closed or self.fault is not None:
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
        self._wake.set()

    def _run(self) -> None:
        try:
            delay = IDLE_DELAY_S
            while not self._is_closed and self.fault is None:
                if self.step():
                    delay = FIRST_DELAY_S
                    continue
                delay = min(2 * delay, MAX_DELAY_S) if self._is_busy else IDLE_DELAY_S
                self._wake.wait(delay)
                self._wake.clear()
            until = time.monotonic() + FLUSH_DEADLINE_S
            while self.fault is None and self._is_busy and time.monotonic() < until:
                self.step()
                time.sleep(FIRST_DELAY_S)
        except Exception as error:
            self._switch_off(error)
        finally:
            self._end()

    def step(self) -> bool:
        """Does what there is to do now. Returns whether any of it has brought jobs or transfers on."""
        before = self._progress
        with self._lock():
            self._is_asking = False
            self._forget_if_reset()
            self._manager.poll()
            self._take_in()
        # The lock is released often, lest lookups wait for it.
        with self._lock():
            batches = self._loads.begin(self._served)
        for batch in batches:
            with self._lock():
                arrived = self._loads.look(batch)
            if arrived is not None:
                num_copied = self._jobs.copy(batch.job, arrived.indices, arrived.slots)
                with self._lock():
                    self._loads.end(arrived, num_copied)
        with self._lock():
            staged = self._stores.plan(self._served)
        if staged is not None:
            num_copied = self._jobs.copy(staged.job, staged.indices, staged.slots)
            with self._lock():
                self._stores.end(staged, num_copied)
        return self._progress != before

    def _forget_if_reset(self) -> None:
        if self._served != self._namespace:
            self._served = self._namespace
            self._stores.forget()
            self._loads.forget()
            self._manager.forget()

    def _take_in(self) -> None:
        while self._inbox:
            entry = self._inbox.popleft()
            # What came after a reset must not be forgotten by it.
            self._forget_if_reset()
            if isinstance(entry, list):
                self._manager.touch(entry, None, [])
            elif isinstance(entry, Job) and entry.is_load:
                self._loads.submit(entry)
            else:
                self._stores.submit(entry)

    @property
    def _progress(self) -> tuple[int, ...]:
        transfers = ((len(tier.reads), tier.writes.num_writing) for tier in self._manager.tiers)
        ended = (self._jobs.num_settled, self._stores.num_ended, self._manager.num_promotions)
        return (*ended, *itertools.chain.from_iterable(transfers))

    @property
    def _is_busy(self) -> bool:
        if self._jobs.num_open or self._inbox or not self._stores.is_empty or self._is_asking:
            return True
        return self._manager.has_transfers or self._manager.has_pending_writes

    def _end(self) -> None:
        """Releases everything. The bridge is closed, or off."""
        if self._has_ended:
            return
        self._has_ended = True
        self._jobs.close()
        self._inbox.clear()
        try:
            with self._lock():
                self._stores.forget()
                self._loads.forget()
        except Exception:
            logger.exception("kvoffload: closing the tiers failed")
        try:
            with self._lock():
                self._manager.shutdown()
        except Exception:
            logger.exception("kvoffload: closing the tiers failed")
        # The arrays of the tiers keep the pool's memory mapped.
        del self._manager, self._stores, self._loads
        self._close_pool()


def build_bridge(
    entries: Sequence[TierEntry],
    groups: Sequence[KVGroup],
    block_bytes: int,
    fingerprint: str,
    *,
    identity: Mapping[str, str] | None = None,
    policy: str = "auto",
    engine: int = 0,
    engines: int = 1,
    lookup_deadline_ms: float = 100.0,
    load_deadline_ms: float = 1000.0,
    max_pages: int = MAX_PAGES,
    enable_events: bool = False,
    staging_bytes: int = STAGING_BYTES,
) -> TierBridge:
    """Returns a bridge to the tiers that ``entries`` ask for, the fastest first, ready to serve.

    ``groups``: the KV cache groups that keys name. ``block_bytes``: bytes of a block on all ranks together.
    ``fingerprint``: the result of ``kvoffload.fingerprint`` over everything that shapes the bytes of a block.
    ``identity``, ``policy``, ``engine`` and ``engines``: see TierContext. ``max_pages``: pages of stores that may wait
    at the same time. ``enable_events``: ``take_events`` returns events. ``staging_bytes``: memory between the pages and
    the tiers, at least MIN_STAGING_BLOCKS blocks.

    Raises ConfigError if a setting is wrong, there is too little memory or a tier's directory cannot be used. If a
    tier's medium itself fails, a warning says so and the others serve.
    """
    if not groups or not is_fingerprint(fingerprint):
        raise ConfigError(
            f"fingerprint={fingerprint!r}, groups={groups!r}: pass 64 hexadecimal digits and one KVGroup per group"
        )
    slot_bytes = padded_slot_bytes(block_bytes)
    num_blocks = max(MIN_STAGING_BLOCKS, staging_bytes // slot_bytes)
    # What is open already is closed again if the rest fails.
    with ExitStack() as opened:
        try:
            pool = HostPool(num_blocks, slot_bytes)
        except ConfigError as error:
            raise ConfigError(
                f"tiers: no memory for the staging pool of {format_bytes(num_blocks * slot_bytes)} between the "
                f"engine's memory and the tiers; free that much, or raise the container's limit ({error})"
            ) from error
        opened.callback(pool.close)
        context = TierContext(
            pools=[pool.data],
            handles=[pool.handle()],
            fingerprint=fingerprint,
            identity=identity or {},
            policy=policy,
            engine=engine,
            engines=engines,
            groups=groups,
            num_tokens=ChainLayout(groups).tokens,
        )
        below = open_tiers(entries, context, opened)
        manager = TieredOffloadingManager(
            PolicyOffloadingManager(
                HostBackend(groups[0].block_tokens, num_blocks), LRUPolicy(num_blocks), enable_events, must_store=True
            ),
            [tier for tier, _ in below],
            tokens_per_block=[float(group.block_tokens) for group in groups],
            groups=groups,
            lookup_deadline_ms=lookup_deadline_ms,
            lookup_deadlines_ms=[None if entry is None else entry.lookup_deadline_ms for _, entry in below],
            load_deadline_ms=load_deadline_ms,
            # The engine has decided to load when it asks.
            load_only_if_faster=False,
            write_share=STORE_SHARE,
            backlog_share=MAX_CHAIN_KEYS / num_blocks,
            admissions=[_admission(entry, slot_bytes * engines) for _, entry in below],
        )
        bridge = TierBridge(
            manager,
            pool.data,
            block_bytes,
            fingerprint,
            lookup_deadline_ms=lookup_deadline_ms,
            load_deadline_ms=load_deadline_ms,
            max_pages=max_pages,
            close_pool=pool.close,
        )
        opened.pop_all()
    logger.info(
        "kvoffload: staging pool of %s (%d blocks) between the engine's memory and the tiers %s; model fingerprint %s",
        format_bytes(pool.nbytes),
        num_blocks,
        ", ".join(bridge.names) or "(none)",
        fingerprint,
    )
    bridge.start()
    return bridge


def _admission(entry: TierConfig | None, bytes_per_block: int) -> ReuseFilter | None:
    """Returns what decides which blocks are worth writing to the tier of ``entry``, or None for all."""
    if entry is None or entry.store_threshold is None:
        return None
    return ReuseFilter(entry.store_threshold, tracker_size((entry.capacity_bytes or 0) // bytes_per_block))
