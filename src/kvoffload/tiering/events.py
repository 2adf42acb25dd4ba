"""What tiers have done: events of blocks that became readable or have left, and counts for metrics."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from kvoffload.abc import OffloadingEvent, OffloadKey, Tier, TierError, TierResult, TierStats
from kvoffload.cache.bills import TenantCounts
from kvoffload.cache.history import MAX_PENDING_EVENTS
from kvoffload.cache.manager import READ_STATE_EVERY_S

STORAGE_MEDIUM = "STORAGE"
"""The medium of every lower tier, as vLLM names it. Events distinguish tiers by their names."""


class TierEvents:
    """The events of ``tier``, in order, at most MAX_PENDING_EVENTS blocks of them: beyond it the oldest are lost.

    A block is announced when its write has ended well, also if a shared medium held it already, and when it was read,
    so that a router learns of blocks that the tier held before this process started. What has left is announced before
    what has ended, because a block that ends now was given to the tier before, and may have left before that.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._pending: deque[tuple[OffloadKey, bool]] = deque(maxlen=MAX_PENDING_EVENTS)
        """Blocks, and whether they have left."""
        self._deleted: list[OffloadKey] = []
        tier.take_evicted()

    def deleted(self, keys: Sequence[OffloadKey]) -> None:
        """Notes that the tier was given ``keys`` to delete."""
        self._deleted += keys
        if len(self._deleted) > MAX_PENDING_EVENTS:
            self._flush([])

    def ended(self, results: Iterable[TierResult]) -> None:
        """Takes in what ``poll`` of the tier has reported."""
        ok = []
        for result in results:
            if result.ok:
                ok.append(result.key)
            elif result.is_read and result.error in (TierError.CORRUPT, TierError.GONE):
                self._deleted.append(result.key)
        self._flush(ok)

    def _flush(self, stored: list[OffloadKey]) -> None:
        left, self._deleted = [*self._deleted, *self._tier.take_evicted()], []
        if left:
            self._pending.extend((key, True) for key in dict.fromkeys(left[-MAX_PENDING_EVENTS:]))
        if stored:
            self._pending.extend((key, False) for key in stored)

    def take(self) -> Iterator[OffloadingEvent]:
        """Yields the events since the last call."""
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        for removed, blocks in groupby(pending, key=lambda each: each[1]):
            keys = [key for key, _ in blocks]
            yield OffloadingEvent(keys, STORAGE_MEDIUM, removed, tier=self._tier.name, is_shared=self._tier.is_shared)


Count = Callable[[str, float], None]
"""Adds an amount to a counter of METRICS, by name."""


class TierCounts:
    """Counts since the last ``take``, under the names of METRICS: "NAME", or "NAME:TIER" for those of one tier."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float) -> None:
        self._counts[name] += amount

    def of(self, tier: str) -> Count:
        """Returns a function that adds to ``tier_NAME`` of ``tier``, by NAME."""
        return partial(self._add_to_tier, tier)

    def _add_to_tier(self, tier: str, name: str, amount: float) -> None:
        self._counts[f"tier_{name}:{tier}"] += amount

    def take(self) -> Mapping[str, float]:
        """Returns the counts since the last call, without those that are 0."""
        counts, self._counts = self._counts, defaultdict(float)
        return {name: count for name, count in counts.items() if count}


class TierGauges:
    """The sizes of ``tier`` and of its tenants, by names of METRICS."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._num_evicted = 0
        """Blocks that it had evicted when that was last counted."""
        self._tenants = TenantCounts(tier.name)
        self._tenants_at = float("-inf")
        """When the counts of its tenants are read again."""

    def take(self, stats: TierStats, count: Count, now: float) -> dict[str, float]:
        """``stats``: those of the tier. Its evictions since the last call are added to ``count``."""
        count("evicted_blocks", stats.num_evicted - self._num_evicted)
        self._num_evicted = stats.num_evicted
        sizes = {"blocks": stats.num_blocks, "used_bytes": stats.used_bytes, "capacity_bytes": stats.capacity_bytes}
        gauges = {f"tier_{name}:{self._tier.name}": float(size) for name, size in sizes.items() if size is not None}
        if now >= self._tenants_at:
            self._tenants_at = now + READ_STATE_EVERY_S
            gauges |= self._tenants.take(self._tier.tenant_uses(), self._tier.block_bytes, now)
        return gauges
