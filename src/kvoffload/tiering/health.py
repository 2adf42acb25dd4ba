"""The health of tiers: their failures and hangs, and what each of them costs requests.

``CircuitBreaker`` decides when a tier is used. ``TierState`` is what the manager and its parts call a tier: the guarded
tier (``TierState.tier``) with its reads under way and everything else that is known about it.
"""

from __future__ import annotations

import enum
import logging
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvoffload.abc import OffloadKey, TierError
from kvoffload.cache.bills import TenantCounts
from kvoffload.cache.manager import READ_STATE_EVERY_S
from kvoffload.tiering.events import Count
from kvoffload.tiering.guard import GuardedTier
from kvoffload.tiering.promotion import Promotion, ReadBatch
from kvoffload.tiering.rates import Ended, ReadEstimator
from kvoffload.tiering.writes import WriteThrough

logger = logging.getLogger(__name__)

MAX_FAILURES = 16
"""If one tier fails this often within FAILURE_PERIOD_S, it is paused."""
FAILURE_PERIOD_S = 60.0
PAUSE_S = 1.0
"""How long a tier is paused at first."""
MAX_PAUSE_S = 60.0
TRUST_FACTOR = 4
"""If a tier fails again before it has worked for this many times its latest pause, or FAILURE_PERIOD_S if that is
less, the next pause is twice as long. So a tier that passes its tests and then fails costs requests a bounded share of
their time."""
JITTER = 0.25
"""A pause is longer by up to this share of it, at random, so that not all servers test a store at the same time."""
MAX_HANGS = 4
"""How often the reads of one tier may hang before no more test reads are made until one of its reads ends."""
MAX_UNANSWERED = 1 << 16
"""Keys remembered per tier because it has not answered for them."""
MISS_TTL_S = 1.0
"""How long a key counts as missing after a tier has not answered for it within the deadline."""
WRITE_DEADLINE_S = 10.0
"""The writes of a tier hang if none has ended for this long, or for the load deadline if that is longer."""
FAILURES = (TierError.CORRUPT, TierError.IO)
"""Errors that say that the tier does not work."""


class BreakerState(enum.Enum):
    WORKING = enum.auto()
    """The tier is asked, read and written."""
    OPEN = enum.auto()
    """It has failed too often, or its transfers hang: it is neither asked nor read nor written for a while."""
    HALF_OPEN = enum.auto()
    """The pause is over: one block is to be read or written as a test."""
    TESTING = enum.auto()
    """One block is being read or written as a test."""
    OFF = enum.auto()
    """It was switched off, and is neither asked nor read nor written again."""


class CircuitBreaker:
    """The state of one tier. ``random`` returns numbers from 0 to 1, for the jitter.

    Failures count while the tier works. In the other states a test decides: it closes the breaker or opens it again,
    for a longer pause. So does a lookup that fails, but a lookup that succeeds closes nothing.
    """

    def __init__(self, random: Callable[[], float] = random.random) -> None:
        self.state = BreakerState.WORKING
        self.pause_s = 0.0
        """The latest pause, without jitter."""
        self._random = random
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._half_open_at = 0.0
        self._closed_at = float("-inf")
        self._hangs = False
        """Whether the tier was paused because its transfers hang."""

    @property
    def is_working(self) -> bool:
        return self.state is BreakerState.WORKING

    @property
    def may_test(self) -> bool:
        """Whether one block may be read or written to test the tier."""
        return self.state is BreakerState.HALF_OPEN

    @property
    def is_off(self) -> bool:
        return self.state is BreakerState.OFF

    @property
    def is_paused(self) -> bool:
        """Whether the tier has failed and is not used, or only tested."""
        return self.state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.TESTING)

    def update(self, now: float) -> None:
        """Ends the pause if it is over."""
        if self.state is BreakerState.OPEN and now >= self._half_open_at:
            self.state = BreakerState.HALF_OPEN

    def add_failures(self, num_failures: int, now: float) -> bool:
        """Takes in failures of reads, writes and lookups that were no tests. Returns whether they are too many for a
        tier that works, which is then paused."""
        if self.state is BreakerState.WORKING:
            self._failures.extend([now] * min(num_failures, MAX_FAILURES))
            is_full = len(self._failures) == MAX_FAILURES
            if is_full and now - self._failures[0] <= FAILURE_PERIOD_S:
                self._open(now)
                return True
        return False

    def hang(self, now: float) -> bool:
        """Pauses the tier because its transfers hang. Returns whether it has worked until now."""
        was_working = self.is_working
        if not self.is_off and self.state is not BreakerState.OPEN:
            self._open(now)
            self._hangs = True
        return was_working

    def begin_test(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.TESTING

    def repeat_test(self) -> None:
        """Called when a test has decided nothing: the medium has answered, but the block was bad."""
        if self.state is BreakerState.TESTING:
            self.state = BreakerState.HALF_OPEN

    def end_test(self, ok: bool, now: float) -> bool:
        """Takes in the result of a test, or of a lookup for one. Returns whether the tier works again."""
        if not self.is_paused or self.state is BreakerState.OPEN:
            return False
        if ok:
            self._close(now)
        else:
            self._open(now)
        return ok

    def end_hang(self, now: float) -> bool:
        """Called when a transfer that had hung has succeeded. Returns whether the tier works again: if it was paused
        for nothing else."""
        if not self.is_paused or not self._hangs:
            return False
        self._close(now)
        return True

    def switch_off(self) -> None:
        self.state = BreakerState.OFF

    def _open(self, now: float) -> None:
        trusted_after_s = min(FAILURE_PERIOD_S, TRUST_FACTOR * self.pause_s)
        is_again = not self.is_working or now - self._closed_at < trusted_after_s
        self.pause_s = min(MAX_PAUSE_S, 2 * self.pause_s) if is_again else PAUSE_S
        self._half_open_at = now + self.pause_s * (1 + JITTER * self._random())
        self.state = BreakerState.OPEN
        self._hangs = False
        self._failures.clear()

    def _close(self, now: float) -> None:
        self.state = BreakerState.WORKING
        self._closed_at = now


class Progress:
    """Watches the transfers of one tier in one direction.

    They hang if some are under way and none has ended for ``deadline_s``.
    """

    def __init__(self, deadline_s: float) -> None:
        self.at = float("-inf")
        """When a transfer last ended, or when the first of those under way began."""
        self.num_hangs = 0
        """How often transfers have hung that have not ended since."""
        self._deadline_s = deadline_s

    def begun(self, now: float, num_before: int) -> None:
        """``num_before`` others were under way, without those that hang."""
        if num_before == 0:
            self.at = now

    def detect_hang(self, now: float, num_under_way: int) -> bool:
        """Returns whether the transfers under way, without those that have hung before, hang now."""
        if num_under_way == 0 or now - self.at < self._deadline_s:
            return False
        self.num_hangs += 1
        return True

    def ended(self, now: float, num_late: int, num_hanging: int) -> None:
        """Called when transfers have ended: ``num_late`` of them had been hanging, ``num_hanging`` others still are."""
        if num_late:
            self.num_hangs = max(0, self.num_hangs - 1) if num_hanging else 0
        self.at = now


class OpenQuestions:
    """The keys for which one tier was asked and has not answered. Each may take ``deadline_s``."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.asked_at: OrderedDict[OffloadKey, float] = OrderedDict()
        """When the tier was first asked for each key, the earliest first."""
        self._failed_at = float("-inf")
        """When the latest keys were asked for of which an answer was late. Keys that are asked for together count as
        one lookup."""

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Takes in that the tier has answered for ``keys``."""
        if self.asked_at:
            for key in keys:
                self.asked_at.pop(key, None)

    def expire(self, now: float) -> None:
        """Forgets the keys that count as missing no longer: nobody may ask for them again."""
        while self.asked_at and now - next(iter(self.asked_at.values())) > self._deadline_s + MISS_TTL_S:
            self.asked_at.popitem(last=False)

    def find_late(self, keys: Sequence[OffloadKey], now: float) -> tuple[list[bool], int]:
        """Takes in that the tier does not know yet whether it holds ``keys``. Returns for which of them it is late, and
        how many lookups have failed by that."""
        self.expire(now)
        is_late, failed = [], set[float]()
        for key in keys:
            since = self.asked_at.setdefault(key, now)
            is_late.append(now - since >= self._deadline_s)
            if is_late[-1] and since > self._failed_at:
                failed.add(since)
        while len(self.asked_at) > MAX_UNANSWERED:
            self.asked_at.popitem(last=False)
        self._failed_at = max(failed, default=self._failed_at)
        return is_late, len(failed)


class Deadlines(NamedTuple):
    """How long requests wait for a tier."""

    load_s: float
    """For its reads."""
    lookup_s: float
    """Until it says whether it holds a block."""


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
        deadlines: Deadlines,
        count: Count,
        random: Callable[[], float],
    ) -> None:
        self.index = index
        self.tier = tier
        self.name = tier.name
        self.writes = writes
        self.count = count
        self.breaker = CircuitBreaker(random)
        self.estimator = estimator
        self.questions = OpenQuestions(deadlines.lookup_s)
        self.reads: dict[OffloadKey, ReadBatch] = {}
        """Blocks under way from the tier to the host."""
        self.num_overdue = 0
        """How many of them are overdue."""
        self.overdue_writes: set[OffloadKey] = set()
        """Blocks that were being written when the tier's writes hung, and still are."""
        self.was_paused = False
        """Whether it was paused and the manager has not ended the waits of requests for it yet."""
        self.probe: OffloadKey | None = None
        """A block to be read as a test while the breaker is half open."""
        self._probe_since = 0.0
        self._load_s = deadlines.load_s
        self._read_progress = Progress(deadlines.load_s)
        self._write_progress = Progress(max(deadlines.load_s, WRITE_DEADLINE_S))
        self._test: tuple[OffloadKey, bool] | None = None
        """Key and direction of the transfer that is a test."""
        self._num_failed_lookups = 0
        self._totals: dict[str, float] = {}
        """The totals that the tier keeps itself, when they were last counted."""
        self._tenants = TenantCounts(self.name)
        self._tenants_at = -math.inf
        """When the counts of its tenants are read again."""

    @property
    def can_read(self) -> bool:
        """Whether the tier is asked and read for requests, which may wait for it."""
        return self.breaker.state is BreakerState.WORKING

    @property
    def may_probe(self) -> bool:
        """Whether one block may be read as a test."""
        return self.breaker.may_test and self._read_progress.num_hangs < MAX_HANGS

    @property
    def takes_chains(self) -> bool:
        """Whether the tier is given chains to write, now or soon."""
        return self.breaker.state in (BreakerState.WORKING, BreakerState.HALF_OPEN, BreakerState.TESTING)

    @property
    def num_reading(self) -> int:
        """Blocks under way, without those that are overdue."""
        return len(self.reads) - self.num_overdue

    @property
    def has_transfers(self) -> bool:
        """Whether the tier has blocks to read or to write that it has not reported yet."""
        return bool(self.reads or self.writes.writing)

    def take_gauges(self, now: float) -> dict[str, float]:
        """Counts what the tier itself has counted, and returns its gauges and the counts of its tenants."""
        stats, name = self.tier.stats(), self.name
        failed = self.tier.num_failed_lookups
        for counter, total in (("evicted_blocks", stats.num_evicted), ("lookup_failures", failed)):
            self.count(counter, total - self._totals.get(counter, 0))
            self._totals[counter] = total
        sizes = {"blocks": stats.num_blocks, "used_bytes": stats.used_bytes, "capacity_bytes": stats.capacity_bytes}
        is_paused = self.breaker.is_paused or not stats.is_connected
        of_tenants = {}
        if now >= self._tenants_at:
            self._tenants_at = now + READ_STATE_EVERY_S
            of_tenants = self._tenants.take(self.tier.tenant_uses(), self.tier.block_bytes, now)
        return {
            **{f"tier_{gauge}:{name}": size for gauge, size in sizes.items() if size is not None},
            f"tier_off:{name}": float(self.breaker.is_off),
            f"tier_paused:{name}": float(is_paused and not self.breaker.is_off),
            **of_tenants,
        }

    # Reads.

    def begin_reads(self, slots: Mapping[OffloadKey, int], promotions: Iterable[Promotion], now: float) -> None:
        """Notes that the tier was given these blocks to read into these host slots, by ``tier.read``."""
        if slots:
            self._read_progress.begun(now, self.num_reading)
            self.reads.update(dict.fromkeys(slots, ReadBatch(dict(slots), dict.fromkeys(promotions))))

    def choose_probe(self, key: OffloadKey | None, now: float) -> None:
        self.probe, self._probe_since = key, now

    def await_probe(self, now: float) -> None:
        """Called when the tier does not know yet whether it holds ``probe``. If it does not say within the deadline,
        the test has failed."""
        if now - self._probe_since >= self._load_s:
            self.probe = None
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
        num_in_time, num_hangs = len(self.writes.writing) - len(self.overdue_writes), self._write_progress.num_hangs
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
        if num_lookups > 0:
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
        if failed != self._num_failed_lookups:
            self.lookups_failed(failed - self._num_failed_lookups, now)
            self._num_failed_lookups = failed
        if self.has_transfers:
            self.detect_hangs(now)
        if self.questions.asked_at:
            self.questions.expire(now)
        if self.breaker.state is BreakerState.OPEN:
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
        if self._write_progress.detect_hang(now, len(self.writes.writing) - len(self.overdue_writes)):
            self.overdue_writes = set(self.writes.writing)
            if self.breaker.hang(now):
                self._note_pause(f"it has ended no write for {stalled_s:.1f} s")

    def _note_pause(self, reason: str) -> None:
        self.was_paused = True
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
