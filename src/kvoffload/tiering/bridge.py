"""TierBridge: lower tiers behind host memory that belongs to somebody else.

The bridge is a TieredOffloadingManager with a small host pool of its own, the staging pool, and a thread that copies
between foreign pages and staging slots.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from kvoffload.abc import (
    NOT_SET,
    ByteArray,
    ConfigError,
    Keys,
    KVGroup,
    Miss,
    MissReason,
    OffloadingEvent,
    OffloadKey,
    States,
)
from kvoffload.abc.tier import MISS, RETRY
from kvoffload.cache.admission import ReuseFilter, tracker_size
from kvoffload.cache.keys import NAMESPACE_BYTES, TRANSIENT, namespace
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.host.pool import HostPool, padded_slot_bytes
from kvoffload.tiering.bridge_jobs import BridgeJob, JobEnd, Jobs, Page, RequestChain
from kvoffload.tiering.bridge_thread import FIRST_DELAY_S, MAX_CHAIN_KEYS, MAX_DELAY_S, STORE_SHARE, BridgeThread
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings, TierSettings
from kvoffload.tiers.config import TierConfig, TierContext, TierEntry
from kvoffload.tiers.disk.format import is_fingerprint
from kvoffload.tiers.opening import open_tiers
from kvoffload.units import format_bytes

__all__ = ["BridgeSettings", "JobEnd", "Page", "TierBridge", "build_bridge"]

logger = logging.getLogger(__name__)


STAGING_BYTES = 256 << 20
"""Memory of the staging pool of a bridge."""
MIN_STAGING_BLOCKS = 32
"""Blocks of the staging pool at least, however large they are."""
MAX_PAGES = 1 << 14
"""Pages of stores that wait at the same time. Stores beyond that are dropped."""
STORE_DEADLINE_S = 10.0
"""A store that has had no room in the staging pool for so long is dropped."""
MAX_FORMER = 8
"""Resets of which it is known that a block was stored before them."""


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """How a bridge serves. ``identity``, ``policy``, ``engine`` and ``engines``: see TierContext."""

    identity: Mapping[str, str] = field(default_factory=dict)
    policy: str = "auto"
    engine: int = 0
    engines: int = 1
    lookup_deadline_ms: float = 100.0
    load_deadline_ms: float = 1000.0
    max_pages: int = MAX_PAGES
    """Pages of stores that may wait at the same time."""
    enable_events: bool = False
    """Whether ``take_events`` returns events."""
    staging_bytes: int = STAGING_BYTES
    """Memory between the pages and the tiers, at least MIN_STAGING_BLOCKS blocks."""


class TierBridge:
    """Stores blocks from foreign pages in tiers and loads them back.

    Any thread may call any method. No method raises because of a tier or waits for I/O; those that may wait say for how
    long. Pages are only touched by the thread of the bridge, between the submission of a job and the ``finished`` that
    reports it. Keys end with the index of their KV cache group, see ``kvoffload.cache.keys``.

    If a check fails in the bridge itself, the bridge is off: all jobs end as failed and all lookups are misses.

    ``manager``: in front of the tiers, with a host of as many blocks as ``slots`` has rows. ``start`` begins to serve;
    ``close`` calls ``close_pool`` at the end.
    """

    def __init__(
        self,
        manager: TieredOffloadingManager,
        slots: ByteArray,
        block_bytes: int,
        fingerprint: str,
        settings: BridgeSettings,
        clock: Callable[[], float] = time.monotonic,
        close_pool: Callable[[], None] = lambda: None,
    ) -> None:
        self.block_bytes = block_bytes
        """Bytes of a block."""
        self._lookup_deadline_s = settings.lookup_deadline_ms / 1000
        self._load_deadline_s = settings.load_deadline_ms / 1000
        self._expects = any(tier.tier.is_shared for tier in manager.tiers)
        """Whether tiers want to know what will be looked up next."""
        self._former: deque[tuple[bytes, float]] = deque(maxlen=MAX_FORMER)
        """The namespaces before resets, and when these came."""
        self._jobs = Jobs(slots[:, :block_bytes], settings.max_pages, clock)
        self._thread = BridgeThread(manager, self._jobs, namespace(fingerprint), close_pool)
        self.names = self._thread.names
        """The names of the tiers in metrics and events, the fastest first. Empty if none could be opened."""
        self._numbers = itertools.count()
        self._resets = itertools.count(int.from_bytes(os.urandom(4), "big"))
        """Numbers of resets, each once in a process."""

    @property
    def fault(self) -> str | None:
        """Why the bridge is off; None if it serves."""
        return self._thread.fault

    def start(self) -> None:
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether no job is open and nothing is being written to a tier. False also while the thread has the lock."""
        return self._jobs.is_closed or self._thread.ask(lambda: not self._thread.is_busy, False)

    # Jobs.

    def lookup(self, keys: Keys, chain: Keys = ()) -> States:
        """Returns HIT, MISS or RETRY per key. RETRY: a tier has been asked, look again; it becomes MISS after
        ``lookup_deadline_ms``. ``chain``: what the request may look up next, behind ``keys``, so that a store beyond a
        network is asked for all of it at once."""
        prefix = self._thread.namespace
        names = [prefix + key for key in keys]
        behind = [prefix + key for key in chain] if self._expects else []
        states = self._thread.ask(lambda: self._thread.manager.states(names, behind), None)
        if states is None:
            since = self._thread.stuck_since
            may_wait = since is not None and self._jobs.clock() - since < self._lookup_deadline_s
            return np.full(len(keys), RETRY if may_wait else MISS, dtype=np.uint8)
        if (states == RETRY).any():
            # The thread reads the answer.
            self._jobs.wake.set()
        return states

    def store(self, job: int, keys: Keys, pages: Sequence[Page], chain: Keys, request: str) -> None:
        """Begins to store ``keys[i]`` from ``pages[i]``. The pages must not change until ``finished`` reports the job.

        ``chain`` is the request's whole chain so far, head first, the KV cache groups merged by the position at which
        blocks end; it has ``keys`` in it, and later calls for the same request extend it. It may grow later, but does
        not change otherwise. A block is written only if all blocks before it are held, or come. A job for which there
        is no room in time is dropped.
        """
        self._submit(job, keys, pages, self._chain(request, chain))

    def load(self, job: int, keys: Keys, pages: Sequence[Page], request: str) -> None:
        """Begins to load ``keys[i]`` into ``pages[i]``. What has not arrived after ``load_deadline_ms`` is missing in
        the report, and so is what is corrupt or gone. The content of the pages of such keys is undefined."""
        self._submit(job, keys, pages, is_use=False)

    def _submit(
        self,
        number: int | None,
        keys: Keys,
        pages: Sequence[Page],
        chain: RequestChain | None = None,
        is_use: bool = True,
    ) -> BridgeJob:
        """Begins a store of blocks of ``chain``, without one a load."""
        since, prefix = self._jobs.clock(), self._thread.namespace if chain is None else chain.namespace
        deadline = since + (self._load_deadline_s if chain is None else STORE_DEADLINE_S)
        job = BridgeJob(number, list(keys), list(pages), prefix, since, deadline, chain, is_use)
        self._jobs.submit(job)
        return job

    def _chain(self, request: str, chain: Keys) -> RequestChain:
        return RequestChain(request, chain, len(chain), self._thread.namespace)

    def finished(self) -> list[JobEnd]:
        """Returns the jobs that have ended since the last call, each once."""
        return self._jobs.finished()

    def end_request(self, request: str, chain: Keys) -> None:
        """Takes in that a request has ended: it was one use of ``chain``, which is whole now. Call it once, after the
        last ``store`` of the request; for an aborted one too."""
        self._jobs.submit(self._chain(request, chain))

    # Calls that wait.

    def get(self, keys: Keys, pages: Sequence[Page]) -> list[bool]:
        """Loads ``keys[i]`` into ``pages[i]``, as a use of ``keys``, a chain. Returns which have arrived, after
        ``load_deadline_ms`` at the latest."""
        return self._jobs.wait(self._submit(None, keys, pages))

    def put(self, keys: Keys, pages: Sequence[Page], chain: Keys) -> list[bool]:
        """Stores ``keys[i]`` from ``pages[i]``. ``chain``: the whole chain up to the last of them, head first. Returns
        which were taken over, or are held already, after STORE_DEADLINE_S at the latest."""
        whole = self._chain(f"put-{next(self._numbers)}", chain)
        job = self._submit(None, keys, pages, whole, is_use=False)
        self._jobs.submit(whole)
        return self._jobs.wait(job)

    def exists(self, keys: Keys, chain: Keys = ()) -> States:
        """Returns HIT or MISS per key, after ``lookup_deadline_ms`` at the latest."""
        deadline, delay = time.monotonic() + self._lookup_deadline_s, FIRST_DELAY_S
        while ((states := self.lookup(keys, chain)) == RETRY).any() and time.monotonic() < deadline:
            time.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_S)
        states[states == RETRY] = MISS
        return states

    # The end.

    def reset(self) -> None:
        """Forgets all blocks, because the weights may have changed: this process finds none that was stored before.
        When it returns, after the copy of one block at the latest, no page is touched any more; jobs that were not
        copied end as failed. Tiers of this process keep their blocks for the next one, but not those stored after a
        reset; shared tiers are switched off."""
        self._former.append((self._thread.namespace, self._jobs.clock()))
        # No later process could find what is stored from here on.
        self._thread.namespace = TRANSIENT + (next(self._resets) % (1 << 32)).to_bytes(4, "big")
        self._jobs.stop()
        self._jobs.wake.set()

    def close(self) -> None:
        """Ends all jobs and closes everything within CLOSE_DEADLINE_S. Afterwards lookups are misses, jobs end as
        failed, and no page is referred to. May be called twice."""
        self._thread.close()

    # What others show.

    def explain(self, key: OffloadKey) -> Miss:
        """Returns why ``key`` cannot be loaded now: NOT_IN_TIME also if the bridge is busy or off."""
        return self._thread.ask(lambda: self._explain(key), Miss(MissReason.NOT_IN_TIME))

    def _explain(self, key: OffloadKey) -> Miss:
        miss = self._thread.manager.explain_miss(self._thread.namespace + key)
        if miss.reason is MissReason.NEVER_STORED:
            for former, since in reversed(list(self._former)):
                tier = self._thread.manager.explain_miss(former + key).tier
                if tier is not None:
                    return Miss(MissReason.RESET, self._jobs.clock() - since, tier)
        return miss

    def take_counts(self) -> Mapping[str, float]:
        """Returns counts since the last call, and gauges, by names of ``kvoffload.observe.metrics.METRICS``: "NAME" or
        "NAME:TIER"."""
        return self._thread.ask(lambda: self._thread.manager.take_counts(), {})

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events of the tiers since the last call, with the keys of the engine."""
        events = self._thread.ask(lambda: list(self._thread.manager.take_events()), list[OffloadingEvent]())
        # Those of the staging pool, which others need not know of, name no tier.
        events = [event for event in events if event.tier is not None]
        return [replace(event, keys=[key[NAMESPACE_BYTES:] for key in event.keys]) for event in events]


def build_bridge(
    entries: Sequence[TierEntry],
    groups: Sequence[KVGroup],
    block_bytes: int,
    fingerprint: str,
    settings: BridgeSettings,
) -> TierBridge:
    """Returns a bridge to the tiers that ``entries`` ask for, the fastest first, ready to serve.

    ``groups``: the KV cache groups that keys name. ``block_bytes``: bytes of a block on all ranks together.
    ``fingerprint``: the result of ``kvoffload.fingerprint`` over everything that shapes the bytes of a block.

    Raises ConfigError if a setting is wrong, there is too little memory or a tier's directory cannot be used. If a
    tier's medium itself fails, a warning says so and the others serve.
    """
    if not groups or not is_fingerprint(fingerprint):
        raise ConfigError(
            f"fingerprint={fingerprint!r}, groups={groups!r}: pass 64 hexadecimal digits and one KVGroup per group"
        )
    slot_bytes = padded_slot_bytes(block_bytes)
    num_blocks = max(MIN_STAGING_BLOCKS, settings.staging_bytes // slot_bytes)
    # What is open already is closed again if the rest fails.
    with ExitStack() as opened:
        try:
            pool = HostPool(num_blocks, slot_bytes)
        except ConfigError as error:
            raise ConfigError(
                "tiers",
                NOT_SET,
                f"no memory for the staging pool of {format_bytes(num_blocks * slot_bytes)} between "
                "the engine's memory and the tiers",
                f"free that much, or raise the container's limit ({error})",
            ) from error
        opened.callback(pool.close)
        context = TierContext(
            pools=[pool.data],
            handles=[pool.handle()],
            fingerprint=fingerprint,
            identity=settings.identity,
            policy=settings.policy,
            engine=settings.engine,
            engines=settings.engines,
            groups=groups,
        )
        below = open_tiers(entries, context, opened)
        host = PolicyOffloadingManager(
            HostBackend(groups[0].block_tokens, num_blocks),
            LRUPolicy(num_blocks),
            settings.enable_events,
            must_store=True,
        )
        tiering = TieringSettings(
            groups,
            # The engine has decided to load when it asks.
            load_only_if_faster=False,
            load_deadline_ms=settings.load_deadline_ms,
            lookup_deadline_ms=settings.lookup_deadline_ms,
            tiers=[_tier_settings(entry, slot_bytes * settings.engines) for _, entry in below],
            write_share=STORE_SHARE,
            backlog_share=MAX_CHAIN_KEYS / num_blocks,
        )
        manager = TieredOffloadingManager(host, [tier for tier, _ in below], tiering)
        bridge = TierBridge(manager, pool.data, block_bytes, fingerprint, settings, close_pool=pool.close)
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


def _tier_settings(entry: TierConfig, bytes_per_block: int) -> TierSettings:
    if entry.store_threshold is None:
        return TierSettings(entry.lookup_deadline_ms)
    size = tracker_size((entry.capacity_bytes or 0) // bytes_per_block)
    return TierSettings(entry.lookup_deadline_ms, ReuseFilter(entry.store_threshold, size))
