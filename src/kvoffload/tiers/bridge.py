"""TierBridge: lower tiers behind host memory that belongs to somebody else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import KVGroup, Miss, OffloadingEvent, OffloadKey, States
from kvoffload.tiers.config import TierEntry

Page: TypeAlias = Sequence[npt.NDArray[np.uint8]]
"""The memory of one block: one-dimensional contiguous arrays, ``block_bytes`` bytes together, in order."""

STAGING_BYTES = 256 << 20
"""Memory of the staging pool of a bridge."""
MIN_STAGING_BLOCKS = 32
"""Blocks of the staging pool at least, however large they are."""


class JobEnd(NamedTuple):
    """How a store or a load has ended.

    ``done``: of a load, the keys whose pages have the right bytes; of a store, those that were copied or that every
    tier held already. ``ok``: whether these are all. ``nbytes`` were copied; ``seconds`` have passed since the job was
    submitted.
    """

    job: int
    is_load: bool
    done: frozenset[OffloadKey]
    ok: bool
    nbytes: int
    seconds: float


class TierBridge:
    """Stores blocks from foreign pages in tiers and loads them back.

    Any thread may call any method. No method raises because of a tier or waits for I/O; those that may wait say for how
    long. Pages are only touched by the thread of the bridge, between the submission of a job and the ``finished`` that
    reports it. Keys end with the index of their KV cache group, see ``kvoffload.cache.keys``.

    If a check fails in the bridge itself, the bridge is off: all jobs end as failed and all lookups are misses.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tiers in metrics and events, the fastest first. Empty if none could be opened."""
        raise NotImplementedError

    @property
    def fault(self) -> str | None:
        """Why the bridge is off; None if it serves."""
        raise NotImplementedError

    @property
    def tier_states(self) -> Mapping[str, str]:
        """By name, the state of each tier: "working", "paused" or "off"."""
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """Whether no job is open, ``finished`` has nothing to report and nothing is being written to a tier."""
        raise NotImplementedError

    # Jobs.

    def lookup(self, keys: Sequence[OffloadKey], chain: Sequence[OffloadKey] = ()) -> States:
        """Returns HIT, MISS or RETRY per key. RETRY: a tier has been asked, look again; it becomes MISS after
        ``lookup_deadline_ms``. ``chain``: what the request may look up next, behind ``keys``, so that a store beyond a
        network is asked for all of it at once."""
        raise NotImplementedError

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
        blocks end; it has ``keys`` in it, and later calls for the same request extend it. A block is written only if
        all blocks before it are held, or come. A job for which there is no room in time is dropped.
        """
        raise NotImplementedError

    def load(self, job: int, keys: Sequence[OffloadKey], pages: Sequence[Page], request: str) -> None:
        """Begins to load ``keys[i]`` into ``pages[i]``. What has not arrived after ``load_deadline_ms`` is missing in
        the report, and so is what is corrupt or gone. The content of the pages of such keys is undefined."""
        raise NotImplementedError

    def finished(self) -> list[JobEnd]:
        """Returns the jobs that have ended since the last call, each once."""
        raise NotImplementedError

    def end_request(self, request: str, chain: Sequence[OffloadKey]) -> None:
        """Takes in that a request has ended: it was one use of ``chain``, which is whole now. Call it once, after the
        last ``store`` of the request; for an aborted one too."""
        raise NotImplementedError

    # Calls that wait.

    def get(self, keys: Sequence[OffloadKey], pages: Sequence[Page]) -> list[bool]:
        """Loads ``keys[i]`` into ``pages[i]`` and counts a use of ``keys``, a chain. Returns which have arrived, after
        ``load_deadline_ms`` at the latest."""
        raise NotImplementedError

    def put(self, keys: Sequence[OffloadKey], pages: Sequence[Page], chain: Sequence[OffloadKey]) -> list[bool]:
        """Stores ``keys[i]`` from ``pages[i]``. ``chain``: the whole chain up to the last of them, head first. Returns
        which were taken over, or are held already, after STORE_DEADLINE_S at the latest."""
        raise NotImplementedError

    def exists(self, keys: Sequence[OffloadKey], chain: Sequence[OffloadKey] = ()) -> States:
        """Returns HIT or MISS per key, after ``lookup_deadline_ms`` at the latest."""
        raise NotImplementedError

    # The end.

    def drain(self) -> None:
        """Returns when no page is touched any more, after the copy of one block at the latest. Jobs that were not
        copied end as failed, and ``finished`` reports them."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets all blocks, because the weights may have changed: this process finds none that was stored before.
        Drains first. Tiers of this process keep their blocks for the next one; shared tiers are switched off."""
        raise NotImplementedError

    def close(self) -> None:
        """Drains and closes everything within CLOSE_DEADLINE_S. Afterwards lookups are misses, jobs end as failed, and
        no page is referred to. May be called twice."""
        raise NotImplementedError

    # What others show.

    def explain(self, key: OffloadKey) -> Miss:
        """Returns why ``key`` cannot be loaded now."""
        raise NotImplementedError

    def take_counts(self) -> Mapping[str, float]:
        """Returns counts since the last call, and gauges, by names of ``kvoffload.observe.metrics.METRICS``: "NAME" or
        "NAME:TIER"."""
        raise NotImplementedError

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events of the tiers since the last call, with the keys of the engine."""
        raise NotImplementedError


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
    enable_events: bool = False,
    staging_bytes: int = STAGING_BYTES,
) -> TierBridge:
    """Returns a bridge to the tiers that ``entries`` ask for, the fastest first, ready to serve.

    ``groups``: the KV cache groups that keys name. ``block_bytes``: bytes of a block on all ranks together.
    ``fingerprint``: the result of ``kvoffload.fingerprint`` over everything that shapes the bytes of a block.
    ``identity``, ``policy``, ``engine`` and ``engines``: see TierContext. ``enable_events``: ``take_events`` returns
    events. ``staging_bytes``: memory between the pages and the tiers, at least MIN_STAGING_BLOCKS blocks.

    Raises ConfigError if a setting is wrong, there is too little memory or a tier's directory cannot be used. If a
    tier's medium itself fails, a warning says so and the others serve.
    """
    raise NotImplementedError
