"""TierState: a tier and everything that the manager knows about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvoffload.abc import OffloadKey, TierResult
from kvoffload.tiers.breaker import MAX_HANGS, CircuitBreaker
from kvoffload.tiers.guard import GuardedTier
from kvoffload.tiers.promotion import Promotion, ReadBatch
from kvoffload.tiers.rates import ReadEstimator
from kvoffload.tiers.writethrough import WriteThrough

logger = logging.getLogger(__name__)


class TierState:
    """A tier with its reads under way, its circuit breaker, its read rate and its write-through.

    Read its attributes freely; change them through its methods.
    """

    def __init__(
        self, tier: GuardedTier, writes: WriteThrough, deadline_s: float, count: Callable[[str, float], None]
    ) -> None:
        self.tier = tier
        self.writes = writes
        self.breaker = CircuitBreaker(deadline_s)
        self.estimator = ReadEstimator(tier.block_bytes)
        self.reads: dict[OffloadKey, ReadBatch] = {}
        """Blocks under way from the tier to the host."""
        self.count = count
        """Adds to a counter ``tier_NAME`` of METRICS, by NAME."""
        self.num_overdue = 0
        """How many of them are overdue."""
        self.probe: OffloadKey | None = None
        """A block to be read as a test while the tier is suspended."""

    @property
    def num_reading(self) -> int:
        """Blocks under way, without those that are overdue."""
        return len(self.reads) - self.num_overdue

    @property
    def has_transfers(self) -> bool:
        """Whether the tier has blocks to read or to write that it has not reported yet."""
        return bool(self.reads or self.writes.num_writing)

    def begin_reads(self, slots: Mapping[OffloadKey, int], promotions: Iterable[Promotion], now: float) -> None:
        """Notes that the tier was given these blocks to read into these host slots."""
        if slots:
            self.breaker.reads_begun(now, self.num_reading)
            self.reads.update(dict.fromkeys(slots, ReadBatch(dict(slots), dict.fromkeys(promotions))))

    def end_reads(self, results: Sequence[TierResult], now: float) -> dict[ReadBatch, list[TierResult]]:
        """Takes in reads that have ended. Returns their results by batch."""
        ended: dict[ReadBatch, list[TierResult]] = {}
        for result in results:
            ended.setdefault(self.reads.pop(result.key), []).append(result)
        in_time = [result for batch, reads in ended.items() if not batch.is_overdue for result in reads]
        num_late = len(results) - len(in_time)
        self.num_overdue -= num_late
        self.estimator.add(in_time, now)
        self.breaker.reads_ended(now, num_late, self.num_overdue)
        self.probe = None
        return ended

    def suspend_if_hanging(self, now: float) -> None:
        """If the tier has ended no read for a whole deadline, all its reads are overdue, and it is suspended."""
        stalled_s = now - self.breaker.progress_at
        if not self.breaker.detect_hang(now, self.num_reading):
            return
        for batch in set(self.reads.values()):
            batch.is_overdue = True
        self.num_overdue = len(self.reads)
        if self.breaker.num_hangs == 1:
            logger.warning(
                "kvoffload: the %s tier has ended no read for %.1f s; until it ends one, at most %d blocks are read, "
                "as a test",
                self.tier.name,
                stalled_s,
                MAX_HANGS - 1,
            )

    def check_integrity(self) -> None:
        """Raises IntegrityError if the tier's or the write-through's accounts do not balance."""
        self.writes.check_integrity()
        self.tier.check_integrity()
