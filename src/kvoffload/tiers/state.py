"""TierState: a tier and everything that the manager knows about it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from kvoffload.abc import OffloadKey, TierError
from kvoffload.tiers.breaker import FAILURE_PERIOD_S, MAX_FAILURES, MAX_HANGS, BreakerState, CircuitBreaker, Progress
from kvoffload.tiers.ended import Ended
from kvoffload.tiers.guard import GuardedTier
from kvoffload.tiers.promotion import Promotion, ReadBatch
from kvoffload.tiers.rates import ReadEstimator
from kvoffload.tiers.writethrough import WriteThrough

logger = logging.getLogger(__name__)

WRITE_DEADLINE_S = 10.0
"""The writes of a tier hang if none has ended for this long, or for the load deadline if that is longer."""
FAILURES = (TierError.CORRUPT, TierError.IO)
"""Errors that say that the tier does not work."""


class TierState:
    """A tier with its reads under way, its circuit breaker, its read rate and its write-through.

    Read its attributes freely; change them through its methods. ``index``: its place among the tiers of the manager,
    the fastest first. ``count`` adds to a counter ``tier_NAME`` of METRICS, by NAME.
    """

    def __init__(
        self,
        index: int,
        tier: GuardedTier,
        writes: WriteThrough,
        estimator: ReadEstimator,
        deadline_s: float,
        count: Callable[[str, float], None],
        random: Callable[[], float],
    ) -> None:
        self.index = index
        self.tier = tier
        self.writes = writes
        self.count = count
        self.breaker = CircuitBreaker(random)
        self.estimator = estimator
        self.reads: dict[OffloadKey, ReadBatch] = {}
        """Blocks under way from the tier to the host."""
        self.num_overdue = 0
        """How many of them are overdue."""
        self.overdue_writes: set[OffloadKey] = set()
        """Blocks that were being written when the tier's writes hung, and still are."""
        self._probe: tuple[OffloadKey, float] | None = None
        """``probe``, and when it was chosen."""
        self._deadline_s = deadline_s
        self._read_progress = Progress(deadline_s)
        self._write_progress = Progress(max(deadline_s, WRITE_DEADLINE_S))
        self._test: tuple[OffloadKey, bool] | None = None
        """Key and direction of the transfer that is a test."""
        self._num_failed_lookups = 0
        self._was_paused = False
        """Whether it has been paused since ``take_paused`` was last called."""

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def can_read(self) -> bool:
        """Whether the tier is asked and read for requests, which may wait for it."""
        return self.breaker.is_working

    @property
    def probe(self) -> OffloadKey | None:
        """A block to be read as a test while the breaker is half open."""
        return None if self._probe is None else self._probe[0]

    @property
    def may_probe(self) -> bool:
        """Whether one block may be read as a test."""
        return self.breaker.may_test and self._read_progress.num_hangs < MAX_HANGS

    @property
    def takes_chains(self) -> bool:
        """Whether the tier is given chains to write, now or soon."""
        return self.breaker.is_working or self.breaker.state in (BreakerState.HALF_OPEN, BreakerState.TESTING)

    @property
    def num_reading(self) -> int:
        """Blocks under way, without those that are overdue."""
        return len(self.reads) - self.num_overdue

    @property
    def has_transfers(self) -> bool:
        """Whether the tier has blocks to read or to write that it has not reported yet."""
        return bool(self.reads or self.writes.num_writing)

    # Reads.

    def begin_reads(self, slots: Mapping[OffloadKey, int], promotions: Iterable[Promotion], now: float) -> None:
        """Notes that the tier was given these blocks to read into these host slots."""
        if slots:
            self._read_progress.begun(now, self.num_reading)
            self.reads.update(dict.fromkeys(slots, ReadBatch(dict(slots), dict.fromkeys(promotions))))

    def choose_probe(self, key: OffloadKey | None, now: float) -> None:
        self._probe = None if key is None else (key, now)

    def await_probe(self, now: float) -> None:
        """Called when the tier does not know yet whether it holds ``probe``. If it does not say within the deadline,
        the test has failed."""
        if self._probe is not None and now - self._probe[1] >= self._deadline_s:
            self._probe = None
            self.lookups_failed(1, now)

    def begin_probe(self, key: OffloadKey, slot: int, now: float) -> None:
        """Notes that the tier was given a block to read as a test."""
        self.breaker.begin_test()
        self._test = (key, True)
        self.begin_reads({key: slot}, (), now)

    def end_reads(self, reads: Ended, now: float) -> dict[ReadBatch, Ended]:
        """Takes in reads that have ended. Returns them by batch."""
        batches = list(map(self.reads.pop, reads.keys))
        if batches.count(batches[0]) == len(batches):
            ended = {batches[0]: reads}
        else:
            indices: dict[ReadBatch, list[int]] = {}
            for i, batch in enumerate(batches):
                indices.setdefault(batch, []).append(i)
            ended = {batch: reads.select(chosen) for batch, chosen in indices.items()}
        in_time = reads
        if any(batch.is_overdue for batch in ended):
            in_time = reads.select(i for i, batch in enumerate(batches) if not batch.is_overdue)
        num_late = len(reads) - len(in_time)
        self.num_overdue -= num_late
        self.estimator.add(in_time, now)
        self._read_progress.ended(now, num_late, self.num_overdue)
        if any(None in results.errors for batch, results in ended.items() if batch.is_overdue):
            self._note_recovery(self.breaker.end_hang(now))
        return ended

    # Writes.

    def write(self, room: int, now: float) -> None:
        """Begins to write at most ``room`` blocks of the backlog: one, if that is a test."""
        num_in_time, num_hangs = self.writes.num_writing - len(self.overdue_writes), self._write_progress.num_hangs
        if self.breaker.may_test:
            # While writes hang, a read is a better test: it may end sooner.
            room = 0 if num_hangs else min(room, 1)
        elif not self.breaker.is_working:
            return
        elif num_hangs:
            room = 0 if num_in_time or num_hangs >= MAX_HANGS else min(room, 1)
        begun = self.writes.pump(room)
        if begun:
            self._write_progress.begun(now, num_in_time)
            if self.breaker.may_test:
                self.breaker.begin_test()
                self._test = (begun[0], False)

    def end_writes(self, writes: Ended, now: float) -> None:
        """Takes in writes that have ended."""
        self.writes.ended(writes)
        self._write_progress.ended(now, len(writes), 0)
        if self.overdue_writes:
            late = self.overdue_writes.intersection(writes.keys)
            self.overdue_writes -= late
            if any(result.ok and result.key in late for result in writes.results):
                self._note_recovery(self.breaker.end_hang(now))

    # Failures.

    def judge(self, ended: Ended, now: float) -> None:
        """Takes in whether transfers that have ended have failed."""
        if ended.all_ok and self._test is None:
            return
        failures = Counter[str]()
        for result in ended.results:
            if (result.key, result.is_read) == self._test:
                self._test = None
                if result.error is TierError.CORRUPT:
                    self.breaker.repeat_test()
                else:
                    self._note_recovery(self.breaker.end_test(result.error not in FAILURES, now))
            elif result.error in FAILURES:
                failures[str(result.error)] += 1
        if failures:
            self._add_failures(failures, now)

    def lookups_failed(self, num_lookups: int, now: float) -> None:
        """Takes in that lookups have failed, or were not answered in time."""
        if num_lookups:
            self.breaker.end_test(False, now)
            self._add_failures(Counter(lookups=num_lookups), now)

    def _add_failures(self, failures: Counter[str], now: float) -> None:
        if self.breaker.add_failures(failures.total(), now):
            latest = ", ".join(f"{count} {kind}" for kind, count in failures.items())
            reason = f"{MAX_FAILURES} failures within {FAILURE_PERIOD_S:.0f} s (the latest: {latest})"
            self._note_pause(reason)

    def update(self, now: float) -> None:
        """Takes in lookups that have failed, transfers that hang, and the end of a pause."""
        failed = self.tier.num_failed_lookups
        self.lookups_failed(failed - self._num_failed_lookups, now)
        self._num_failed_lookups = failed
        self.detect_hangs(now)
        self.breaker.update(now)

    def detect_hangs(self, now: float) -> None:
        """If the tier has ended no read, or no write, for a whole deadline, all of them are overdue, and it is
        paused."""
        stalled_s = now - self._read_progress.at
        if self._read_progress.detect_hang(now, self.num_reading):
            for batch in set(self.reads.values()):
                batch.is_overdue = True
            self.num_overdue = len(self.reads)
            if self.breaker.hang(now):
                self._note_pause(f"it has ended no read for {stalled_s:.1f} s")
        stalled_s = now - self._write_progress.at
        if self._write_progress.detect_hang(now, self.writes.num_writing - len(self.overdue_writes)):
            self.overdue_writes = self.writes.keys_writing
            if self.breaker.hang(now):
                self._note_pause(f"it has ended no write for {stalled_s:.1f} s")

    def take_paused(self) -> bool:
        """Returns whether the tier has been paused since the last call, so that no request may wait for it."""
        was_paused, self._was_paused = self._was_paused, False
        return was_paused

    def _note_pause(self, reason: str) -> None:
        self._was_paused = True
        logger.warning(
            "kvoffload: THE %s TIER IS PAUSED: %s; it is tested after %.0f s, then after longer pauses, and is "
            "used again when a test succeeds. Until then requests do without it",
            self.name.upper(),
            reason,
            self.breaker.pause_s,
        )

    def _note_recovery(self, works_again: bool) -> None:
        if works_again:
            logger.warning("kvoffload: the %s tier works again", self.name)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the tier's or the write-through's accounts do not balance."""
        self.writes.check_integrity()
        self.tier.check_integrity()
