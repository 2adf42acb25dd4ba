"""The health of tiers: their failures and hangs, and what each of them costs requests.

Reading a tier and writing to it are two abilities, each with a ``Health`` of its own, whose ``CircuitBreaker`` decides
when the ability is used. ``TierState`` is what the manager and its parts call a tier: the guarded tier
(``TierState.tier``) with its reads under way and everything else that is known about it.
"""

from __future__ import annotations

import enum
import logging
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvoffload.abc import Ability, OffloadKey, TierError
from kvoffload.cache.bills import TenantCounts
from kvoffload.cache.manager import READ_STATE_EVERY_S
from kvoffload.tiering.events import Count
from kvoffload.tiering.guard import GuardedTier
from kvoffload.tiering.rates import Ended, ReadEstimator
from kvoffload.tiering.waits import ReadBatch, Wait
from kvoffload.tiering.writes import WriteThrough

logger = logging.getLogger(__name__)

MAX_FAILURES = 16
"""If an ability of a tier fails this often within FAILURE_PERIOD_S, it is paused."""
FAILURE_PERIOD_S = 60.0
PAUSE_S = 1.0
"""How long it is paused at first."""
MAX_PAUSE_S = 60.0
"""The longest pause of reads, without jitter."""
MAX_WRITE_PAUSE_S = 6.0
"""The longest pause of writes: no request waits for one that fails."""
TRUST_FACTOR = 4
"""If an ability fails again before it has worked for this many times its latest pause, or FAILURE_PERIOD_S if that is
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
FAILURES = {
    Ability.READ: frozenset([TierError.CORRUPT, TierError.IO]),
    Ability.WRITE: frozenset([TierError.IO, TierError.NO_SPACE]),
}
"""Errors that say that an ability does not work."""
WRITE_DEADLINE_S = 10.0
"""The writes of a tier hang if none has ended for this long, or for the load deadline if that is longer."""


class BreakerState(enum.Enum):
    WORKING = enum.auto()
    """The ability is used."""
    OPEN = enum.auto()
    """It has failed too often, or its transfers hang: it is not used for a while."""
    HALF_OPEN = enum.auto()
    """The pause is over: one block is to be read or written as a test."""
    TESTING = enum.auto()
    """One block is being read or written as a test."""
    OFF = enum.auto()
    """It was switched off, and is not used again."""


class CircuitBreaker:
    """The state of one ability of a tier. ``random`` returns numbers from 0 to 1, for the jitter. No pause is longer
    than ``max_pause_s`` without jitter.

    Failures count while the ability works. In the other states a test decides: it closes the breaker or opens it again,
    for a longer pause. So does a lookup that fails, but a lookup that succeeds closes nothing.
    """

    def __init__(self, random: Callable[[], float] = random.random, max_pause_s: float = MAX_PAUSE_S) -> None:
        self.state = BreakerState.WORKING
        self.pause_s = 0.0
        """The latest pause, without jitter."""
        self._max_pause_s = max_pause_s
        self._random = random
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._half_open_at = 0.0
        self._closed_at = float("-inf")
        self._hangs = False
        """Whether it was paused because its transfers hang."""

    @property
    def is_working(self) -> bool:
        return self.state is BreakerState.WORKING

    @property
    def may_test(self) -> bool:
        """Whether one block may be read or written as a test."""
        return self.state is BreakerState.HALF_OPEN

    @property
    def is_off(self) -> bool:
        return self.state is BreakerState.OFF

    @property
    def is_paused(self) -> bool:
        """Whether it has failed and is not used, or only tested."""
        return self.state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.TESTING)

    def update(self, now: float) -> None:
        """Ends the pause if it is over."""
        if self.state is BreakerState.OPEN and now >= self._half_open_at:
            self.state = BreakerState.HALF_OPEN

    def add_failures(self, num_failures: int, now: float) -> bool:
        """Takes in failures that were no tests. Returns whether the ability works no more because they are too many."""
        if self.state is BreakerState.WORKING:
            self._failures.extend([now] * min(num_failures, MAX_FAILURES))
            is_full = len(self._failures) == MAX_FAILURES
            if is_full and now - self._failures[0] <= FAILURE_PERIOD_S:
                self._open(now)
                return True
        return False

    def hang(self, now: float) -> bool:
        """Opens the breaker because transfers hang. Returns whether the ability has worked until now."""
        was_working = self.is_working
        if not self.is_off and self.state is not BreakerState.OPEN:
            self._open(now)
            self._hangs = True
        return was_working

    def begin_test(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.TESTING

    def repeat_test(self) -> None:
        """Called when a test has decided nothing: the block was bad, or the part of the medium that has it is away."""
        if self.state is BreakerState.TESTING:
            self.state = BreakerState.HALF_OPEN

    def end_test(self, ok: bool, now: float) -> bool:
        """Takes in the result of a test, or of a lookup for one. Returns whether the ability works again."""
        if not self.is_paused or self.state is BreakerState.OPEN:
            return False
        if ok:
            self._close(now)
        else:
            self._open(now)
        return ok

    def end_hang(self, now: float) -> bool:
        """Called when a transfer that had hung has succeeded. Returns whether the ability works again: if it was paused
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
        self.pause_s = min(self._max_pause_s, 2 * self.pause_s) if is_again else PAUSE_S
        self._half_open_at = now + self.pause_s * (1 + JITTER * self._random())
        self.state = BreakerState.OPEN
        self._hangs = False
        self._failures.clear()

    def _close(self, now: float) -> None:
        self.state = BreakerState.WORKING
        self._closed_at = now


class Health:
    """The health of one ability of the tier ``name``. Its transfers hang if some are under way and none has ended for
    ``deadline_s``."""

    def __init__(
        self, name: str, ability: Ability, deadline_s: float, random: Callable[[], float], max_pause_s: float
    ) -> None:
        self.breaker = CircuitBreaker(random, max_pause_s)
        self._deadline_s = deadline_s
        self._progress_at = -math.inf
        """When a transfer last ended, or when the first of those under way began."""
        self.num_hangs = 0
        """How often transfers have hung that have not ended since."""
        self.was_paused = False
        """Whether it was paused and the manager has not ended the waits of requests for it yet."""
        self.is_full = False
        """Whether it was paused because there is no room, which is no fault."""
        self._name = name
        self._ability = ability
        self._test: OffloadKey | None = None
        """The block whose transfer is a test."""
        self._is_logged = False
        """Whether the log says that it is paused. That there is no room is logged once."""

    @property
    def may_test(self) -> bool:
        """Whether one block may be transferred as a test."""
        return self.breaker.may_test and self.num_hangs < MAX_HANGS

    def begin_test(self, key: OffloadKey) -> None:
        self.breaker.begin_test()
        self._test = key

    def judge(self, ended: Ended, now: float) -> None:
        """Takes in whether transfers that have ended have failed."""
        if ended.all_ok and self._test is None:
            return
        failures = Counter[TierError]()
        for key, error in zip(ended.keys, ended.errors, strict=True):
            if key == self._test:
                self._test = None
                if error in (TierError.CORRUPT, TierError.AWAY):
                    self.breaker.repeat_test()
                elif error in FAILURES[self._ability]:
                    self.breaker.end_test(False, now)
                    self._note_pause(f"a test failed ({error})", is_full=error is TierError.NO_SPACE)
                else:
                    self._note_recovery(self.breaker.end_test(True, now))
            elif error is not None and error in FAILURES[self._ability]:
                failures[error] += 1
        if failures:
            self.add_failures({str(error): count for error, count in failures.items()}, now)

    def lookups_failed(self, num_lookups: int, now: float) -> None:
        """Takes in that lookups have failed, or were not answered in time."""
        if num_lookups > 0:
            self.breaker.end_test(False, now)
            self.add_failures({"lookups": num_lookups}, now)

    def add_failures(self, failures: Mapping[str, int], now: float) -> None:
        """Takes in failures that were no tests, by kind."""
        if self.breaker.add_failures(sum(failures.values()), now):
            latest = ", ".join(f"{count} {kind}" for kind, count in failures.items())
            self._note_pause(
                f"{MAX_FAILURES} failures within {FAILURE_PERIOD_S:.0f} s (the latest: {latest})",
                is_full=failures.keys() == {TierError.NO_SPACE},
            )

    def begun(self, now: float, num_before: int) -> None:
        """Transfers have begun. ``num_before`` others were under way, without those that hang."""
        if num_before == 0:
            self._progress_at = now

    def ended(self, now: float, num_late: int, num_hanging: int) -> None:
        """Transfers have ended: ``num_late`` of them had been hanging, ``num_hanging`` others still are."""
        if num_late:
            self.num_hangs = max(0, self.num_hangs - 1) if num_hanging else 0
        self._progress_at = now

    def detect_hang(self, now: float, num_under_way: int) -> bool:
        """Returns whether the transfers under way, without those that have hung before, hang now. Then the ability is
        paused."""
        stalled_s = now - self._progress_at
        if num_under_way == 0 or stalled_s < self._deadline_s:
            return False
        self.num_hangs += 1
        self.breaker.hang(now)
        self._note_pause(f"it has ended no {self._ability} for {stalled_s:.1f} s")
        return True

    def end_hang(self, now: float) -> None:
        """Called when a transfer that had hung has succeeded."""
        self._note_recovery(self.breaker.end_hang(now))

    def _note_pause(self, reason: str, is_full: bool = False) -> None:
        self.was_paused = True
        is_known = self.is_full if is_full else self._is_logged and not self.is_full
        self.is_full = is_full
        if is_known:
            return
        self._is_logged = True
        if is_full:
            logger.warning(
                "kvoffload: THE %s TIER IS FULL: %s; reads go on, and blocks are stored there again when it has room. "
                "Give it more room, or let it evict what is not used",
                self._name.upper(),
                reason,
            )
            return
        effect, other = {
            Ability.READ: ("requests compute what it holds; writes go on", "can be reached"),
            Ability.WRITE: ("new blocks are not stored there; reads go on", "may be written, and has no fault"),
        }[self._ability]
        logger.warning(
            "kvoffload: %sS %s THE %s TIER ARE PAUSED: %s; %s. They are tested after %.0f s, then after longer pauses, "
            "and go on when a test succeeds. See the warnings of the tier above, and check that it %s",
            self._ability.upper(),
            "OF" if self._ability is Ability.READ else "TO",
            self._name.upper(),
            reason,
            effect,
            self.breaker.pause_s,
            other,
        )

    def _note_recovery(self, works_again: bool) -> None:
        if works_again and self._is_logged:
            self._is_logged = False
            logger.warning("kvoffload: %ss of the %s tier work again", self._ability, self._name)


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
    """A tier with its reads under way, the health of its abilities, its read rate and its write-through.

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
        write_s = max(deadlines.load_s, WRITE_DEADLINE_S)
        self.read_health = Health(self.name, Ability.READ, deadlines.load_s, random, MAX_PAUSE_S)
        self.write_health = Health(self.name, Ability.WRITE, write_s, random, MAX_WRITE_PAUSE_S)
        self.estimator = estimator
        self.questions = OpenQuestions(deadlines.lookup_s)
        self.reads: dict[OffloadKey, ReadBatch] = {}
        """Blocks under way from the tier to the host."""
        self.num_overdue = 0
        """How many of them are overdue."""
        self.overdue_writes: set[OffloadKey] = set()
        """Blocks that were being written when the tier's writes hung, and still are."""
        self.probe: OffloadKey | None = None
        """A block to be read as a test while reads are half open."""
        self._probe_since = 0.0
        self._load_s = deadlines.load_s
        self._num_failed_lookups = 0
        self._totals: dict[str, float] = {}
        """The totals that the tier keeps itself, when they were last counted."""
        self._tenants = TenantCounts(self.name)
        self._tenants_at = -math.inf
        """When the counts of its tenants are read again."""

    @property
    def is_off(self) -> bool:
        return self.read_health.breaker.is_off

    def switch_off(self) -> None:
        """Neither reads the tier nor writes to it from now on."""
        self.read_health.breaker.switch_off()
        self.write_health.breaker.switch_off()

    @property
    def can_read(self) -> bool:
        """Whether the tier is asked and read for requests, which may wait for it."""
        return self.read_health.breaker.state is BreakerState.WORKING

    @property
    def takes_chains(self) -> bool:
        """Whether the tier is given chains to write, now or soon."""
        return self.write_health.breaker.state not in (BreakerState.OPEN, BreakerState.OFF)

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
        paused = {
            ability: not self.is_off and (not stats.is_connected or (health.breaker.is_paused and not health.is_full))
            for ability, health in ((Ability.READ, self.read_health), (Ability.WRITE, self.write_health))
        }
        of_tenants = {}
        if now >= self._tenants_at:
            self._tenants_at = now + READ_STATE_EVERY_S
            of_tenants = self._tenants.take(self.tier.tenant_uses(), self.tier.block_bytes, now)
        return {
            **{f"tier_{gauge}:{name}": size for gauge, size in sizes.items() if size is not None},
            f"tier_off:{name}": float(self.is_off),
            **{f"tier_paused:{ability},{name}": float(is_paused) for ability, is_paused in paused.items()},
            **of_tenants,
        }

    # Reads.

    def begin_reads(self, slots: Mapping[OffloadKey, int], waits: Iterable[Wait], now: float) -> None:
        """Notes that the tier was given these blocks to read into these host slots, by ``tier.read``."""
        if slots:
            self.read_health.begun(now, self.num_reading)
            self.reads.update(dict.fromkeys(slots, ReadBatch(dict(slots), dict.fromkeys(waits))))

    def choose_probe(self, key: OffloadKey | None, now: float) -> None:
        self.probe, self._probe_since = key, now

    def await_probe(self, now: float) -> None:
        """Called when the tier does not know yet whether it holds ``probe``. If it does not say within the deadline,
        the test has failed."""
        if now - self._probe_since >= self._load_s:
            self.probe = None
            self.read_health.lookups_failed(1, now)

    def begin_probe(self, key: OffloadKey, slot: int, now: float) -> None:
        """Notes that the tier was given a block to read as a test."""
        self.read_health.begin_test(key)
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
        self.read_health.ended(now, num_late, self.num_overdue)
        if any(None in results.errors for batch, results in ended.items() if batch.is_overdue):
            self.read_health.end_hang(now)
        return ended

    # Writes.

    def write(self, room: int, now: float) -> None:
        """Begins to write at most ``room`` blocks of the backlog: one, if that is a test."""
        health = self.write_health
        is_test = health.breaker.state is BreakerState.HALF_OPEN
        if is_test:
            room = min(room, 1) if health.may_test else 0
        elif health.breaker.state is not BreakerState.WORKING:
            return
        num_in_time = len(self.writes.writing) - len(self.overdue_writes)
        begun = self.writes.pump(room)
        if begun:
            health.begun(now, num_in_time)
            if is_test:
                health.begin_test(begun[0])

    def end_writes(self, writes: Ended, now: float) -> None:
        """Takes in writes that have ended."""
        self.writes.ended(writes)
        self.write_health.ended(now, len(writes), 0)
        if self.overdue_writes:
            late = self.overdue_writes.intersection(writes.keys)
            self.overdue_writes -= late
            if any(result.ok and result.key in late for result in writes.results):
                self.write_health.end_hang(now)

    # Failures.

    def update(self, now: float) -> None:
        """Takes in lookups that have failed, transfers that hang, and the end of a pause."""
        failed = self.tier.num_failed_lookups
        if failed != self._num_failed_lookups:
            self.read_health.lookups_failed(failed - self._num_failed_lookups, now)
            self._num_failed_lookups = failed
        if self.reads or self.writes.writing:
            self.detect_hangs(now)
        if self.questions.asked_at:
            self.questions.expire(now)
        for breaker in (self.read_health.breaker, self.write_health.breaker):
            if breaker.state is BreakerState.OPEN:
                breaker.update(now)

    def detect_hangs(self, now: float) -> None:
        """If the tier has ended no read, or no write, for a whole deadline, all of them are overdue, and that ability
        is paused."""
        if self.read_health.detect_hang(now, self.num_reading):
            for batch in set(self.reads.values()):
                batch.is_overdue = True
            self.num_overdue = len(self.reads)
        if self.write_health.detect_hang(now, len(self.writes.writing) - len(self.overdue_writes)):
            self.overdue_writes = set(self.writes.writing)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the tier's or the write-through's accounts do not balance."""
        self.writes.check_integrity()
        self.tier.check_integrity()
