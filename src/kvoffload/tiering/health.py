"""The health of tiers: their failures and hangs, and what each of them costs requests.

Reading a tier and writing to it are two abilities, each with a ``CircuitBreaker`` that decides when it is used.
``LowerTier`` is what the manager and its parts call a tier: the guarded tier (``LowerTier.tier``) with its reads under
way and everything else that is known about it.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress

import numpy as np

from kvoffload.abc import Ability, Keys, OffloadKey, TierError
from kvoffload.cache.bills import TenantCounts
from kvoffload.cache.manager import READ_STATE_EVERY_S
from kvoffload.tiering.common import Common, TierSettings
from kvoffload.tiering.guard import GuardedTier
from kvoffload.tiering.rates import Ended, ReadEstimator
from kvoffload.tiering.reads import ReadBatch, Wait
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
"""How often the transfers of one ability may hang before no more tests are made until one of them ends."""
MAX_UNANSWERED = 1 << 16
"""Keys remembered per tier because it has not answered for them."""
MISS_TTL_S = 1.0
"""How long a key counts as missing after a tier has not answered for it within the deadline."""
MAX_PAUSES_S = {Ability.READ: MAX_PAUSE_S, Ability.WRITE: MAX_WRITE_PAUSE_S}
FAILURES = {
    Ability.READ: frozenset([TierError.CORRUPT, TierError.IO]),
    Ability.WRITE: frozenset([TierError.IO, TierError.NO_SPACE]),
}
"""Errors that say that an ability does not work."""
WRITE_DEADLINE_S = 10.0
"""The writes of a tier hang if none has ended for this long, or for the load deadline if that is longer."""

FULL = (
    "kvoffload: THE %s TIER IS FULL: %s; reads go on, and blocks are stored there again when it has room. Give it more "
    "room, or let it evict what is not used"
)
PAUSED = {
    Ability.READ: "kvoffload: READS OF THE %s TIER ARE PAUSED: %s; requests compute what it holds, writes go on",
    Ability.WRITE: "kvoffload: WRITES TO THE %s TIER ARE PAUSED: %s; new blocks are not stored there, reads go on",
}
TESTED = (
    "after %.0f s, then after longer pauses, they are tested, and go on when a test succeeds. See the warnings of the "
    "tier above, and check that it can be reached and has no fault"
)


class BreakerState(enum.Enum):
    WORKING = enum.auto()
    """The ability is used."""
    OPEN = enum.auto()
    """It has failed too often, or its transfers hang: it is not used for a while."""
    HALF_OPEN = enum.auto()
    """The pause is over: one block is read or written as a test."""
    OFF = enum.auto()
    """It was switched off, and is not used again."""


class PauseLog:
    """What the log says of the pauses of one ability of the tier ``name``."""

    def __init__(self, name: str, ability: Ability) -> None:
        self.is_full = False
        """Whether the latest pause began because there is no room, which is no fault and is logged once."""
        self._name = name
        self._ability = ability
        self._is_logged = False
        """Whether the log says that it is paused."""

    def paused(self, reason: str, is_full: bool, pause_s: float) -> None:
        is_known = self.is_full if is_full else self._is_logged and not self.is_full
        self.is_full = is_full
        if is_known:
            return
        self._is_logged = True
        if is_full:
            logger.warning(FULL, self._name.upper(), reason)
        else:
            logger.warning(f"{PAUSED[self._ability]}; {TESTED}", self._name.upper(), reason, pause_s)

    def works_again(self) -> None:
        if self._is_logged:
            self._is_logged = False
            logger.warning("kvoffload: %ss of the %s tier work again", self._ability, self._name)


class CircuitBreaker:
    """Decides when one ability of the tier ``name`` is used. ``random`` returns numbers from 0 to 1, for the jitter.

    Failures count while the ability works. In the other states a test decides: it closes the breaker or opens it again,
    for a longer pause. So does a lookup that fails, but a lookup that succeeds closes nothing. Transfers hang if some
    are under way and none has ended for ``deadline_s``.
    """

    def __init__(self, name: str, ability: Ability, deadline_s: float, random: Callable[[], float]) -> None:
        self.state = BreakerState.WORKING
        self.pause_s = 0.0
        """The latest pause, without jitter."""
        self.was_paused = False
        """Whether it was paused and the manager has not ended the waits of requests for it yet."""
        self.deadline_s = deadline_s
        self.overdue: set[OffloadKey] = set()
        """Blocks that were under way when transfers hung, and still are."""
        self.num_hangs = 0
        """How often transfers have hung that have not ended since."""
        self._log = PauseLog(name, ability)
        self.ability = ability
        self._random = random
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._until = -math.inf
        """OPEN: when the pause ends. WORKING: until when a failure makes the next pause longer."""
        self._hangs = False
        """Whether it was paused because its transfers hang."""
        self._test: OffloadKey | None = None
        """HALF_OPEN: the block whose transfer is the test, None before that."""
        self._progress_at = -math.inf
        """When a transfer last ended, or when the first of those under way began."""

    @property
    def is_tested(self) -> bool:
        """Whether one block is transferred as a test, or will be as soon as there is one."""
        return self.state is BreakerState.HALF_OPEN and self.num_hangs < MAX_HANGS

    @property
    def may_test(self) -> bool:
        """Whether one block may be transferred as a test."""
        return self.is_tested and self._test is None

    @property
    def has_fault(self) -> bool:
        """Whether it has failed and is not used, or only tested."""
        return self.state not in (BreakerState.WORKING, BreakerState.OFF) and not self._log.is_full

    def update(self, now: float) -> None:
        """Ends the pause if it is over."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state = BreakerState.HALF_OPEN

    # Transfers.

    def begin_test(self, key: OffloadKey) -> None:
        self._test = key

    def begun(self, now: float, num_before: int) -> None:
        """Transfers have begun. ``num_before`` others were under way, without those that hang."""
        if num_before == 0:
            self._progress_at = now

    def ended(self, ended: Ended, now: float) -> Collection[OffloadKey]:
        """Transfers have ended, well or not. Returns the blocks that were overdue. If one of these is good, and the
        ability was paused for nothing else, it works again."""
        self._progress_at = now
        late = self.overdue.intersection(ended.keys) if self.overdue else ()
        if late:
            self.overdue -= late
            self.num_hangs = max(0, self.num_hangs - 1) if self.overdue else 0
            if self._hangs and self.state is not BreakerState.OFF and not late.isdisjoint(ended.good.keys):
                self._close(now)
        if not ended.all_ok or self._test is not None:
            self._judge(ended, now)
        return late

    def detect_hang(self, under_way: Collection[OffloadKey], now: float) -> None:
        """If transfers under way hang that have not hung before, all of them are overdue now, and the ability is
        paused."""
        stalled_s = now - self._progress_at
        if len(under_way) == len(self.overdue) or stalled_s < self.deadline_s:
            return
        self.overdue = set(under_way)
        self.num_hangs += 1
        if self.state not in (BreakerState.OPEN, BreakerState.OFF):
            self._open(now, f"it has ended none of them for {stalled_s:.1f} s")
            self._hangs = True

    # Failures.

    def _judge(self, ended: Ended, now: float) -> None:
        failures = Counter[str]()
        for key, error in zip(ended.keys, ended.errors, strict=True):
            is_failure = error in FAILURES[self.ability]
            if key == self._test:
                self._test = None
                # If the block was bad, or the part of the medium that has it is away, another one decides.
                if error not in (TierError.CORRUPT, TierError.AWAY):
                    self._decide(not is_failure, now, f"a test failed ({error})", error is TierError.NO_SPACE)
            elif is_failure:
                failures[str(error)] += 1
        if failures:
            self._add_failures(failures, now)

    def lookups_failed(self, num_lookups: int, now: float) -> None:
        """Takes in that lookups have failed, or were not answered in time."""
        if num_lookups > 0:
            self._decide(False, now, "a lookup failed")
            self._add_failures({"lookups": num_lookups}, now)

    def _add_failures(self, failures: Mapping[str, int], now: float) -> None:
        """Takes in failures that were no tests, by kind."""
        if self.state is not BreakerState.WORKING:
            return
        self._failures.extend([now] * min(sum(failures.values()), MAX_FAILURES))
        if len(self._failures) == MAX_FAILURES and now - self._failures[0] <= FAILURE_PERIOD_S:
            latest = ", ".join(f"{count} {kind}" for kind, count in failures.items())
            reason = f"{MAX_FAILURES} failures within {FAILURE_PERIOD_S:.0f} s (the latest: {latest})"
            self._open(now, reason, failures.keys() == {str(TierError.NO_SPACE)})

    def _decide(self, works: bool, now: float, reason: str, is_full: bool = False) -> None:
        """Ends the test, if the ability is being tested or to be tested: ``works`` says whether it is used again."""
        if self.state is BreakerState.HALF_OPEN and works:
            self._close(now)
        elif self.state is BreakerState.HALF_OPEN:
            self._open(now, reason, is_full)

    def _open(self, now: float, reason: str, is_full: bool = False) -> None:
        """Pauses the ability for ``reason``; ``is_full``: because the medium has no room."""
        is_again = self.state is not BreakerState.WORKING or now < self._until
        self.pause_s = min(MAX_PAUSES_S[self.ability], 2 * self.pause_s) if is_again else PAUSE_S
        self._until = now + self.pause_s * (1 + JITTER * self._random())
        # Otherwise no request waits for it.
        self.was_paused |= self.state is BreakerState.WORKING
        self.state, self._test = BreakerState.OPEN, None
        self._hangs = False
        self._failures.clear()
        self._log.paused(reason, is_full, self.pause_s)

    def _close(self, now: float) -> None:
        self.state, self._test = BreakerState.WORKING, None
        self._hangs = False
        self._until = now + min(FAILURE_PERIOD_S, TRUST_FACTOR * self.pause_s)
        self._log.works_again()


class OpenQuestions:
    """The keys for which one tier was asked and has not answered. Each may take ``deadline_s``."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.asked_at: OrderedDict[OffloadKey, float] = OrderedDict()
        """When the tier was first asked for each key, the earliest first."""
        self._failed_at = float("-inf")
        """When the latest keys were asked for of which an answer was late. Keys that are asked for together count as
        one lookup."""

    def forget(self, keys: Keys) -> None:
        """Takes in that the tier has answered for ``keys``."""
        if self.asked_at:
            for key in keys:
                self.asked_at.pop(key, None)

    def expire(self, now: float) -> None:
        """Forgets the keys that count as missing no longer: nobody may ask for them again."""
        while self.asked_at and now - next(iter(self.asked_at.values())) > self._deadline_s + MISS_TTL_S:
            self.asked_at.popitem(last=False)

    def find_late(self, keys: Keys, now: float) -> tuple[list[bool], int]:
        """Takes in that the tier does not know yet whether it holds ``keys``. Returns for which of them it is late, and
        how many lookups have failed by that."""
        self.expire(now)
        asked = [self.asked_at.setdefault(key, now) for key in keys]
        while len(self.asked_at) > MAX_UNANSWERED:
            self.asked_at.popitem(last=False)
        is_late = [now - since >= self._deadline_s for since in asked]
        failed = {since for since in compress(asked, is_late) if since > self._failed_at}
        self._failed_at = max(failed, default=self._failed_at)
        return is_late, len(failed)


class TierGauges:
    """The sizes and the state of ``tier``, and the counts of its tenants, by names of METRICS."""

    def __init__(self, tier: LowerTier) -> None:
        self._tier = tier
        self._num_evicted = 0
        """Blocks that it had evicted when that was last counted."""
        self._tenants = TenantCounts(tier.name)
        self._tenants_at = float("-inf")
        """When the counts of its tenants are read again."""

    def take(self, now: float) -> dict[str, float]:
        """Counts what the tier has evicted since the last call, and returns its gauges."""
        tier, stats = self._tier, self._tier.tier.stats()
        tier.count("evicted_blocks", stats.num_evicted - self._num_evicted)
        self._num_evicted = stats.num_evicted
        sizes = {"blocks": stats.num_blocks, "used_bytes": stats.used_bytes, "capacity_bytes": stats.capacity_bytes}
        gauges = {f"tier_{name}:{tier.name}": float(size) for name, size in sizes.items() if size is not None}
        gauges[f"tier_off:{tier.name}"] = float(tier.is_off)
        for health in (tier.read_health, tier.write_health):
            is_paused = not tier.is_off and (not stats.is_connected or health.has_fault)
            gauges[f"tier_paused:{health.ability},{tier.name}"] = float(is_paused)
        if now >= self._tenants_at:
            self._tenants_at = now + READ_STATE_EVERY_S
            gauges |= self._tenants.take(tier.tier.tenant_uses(), tier.tier.block_bytes, now)
        return gauges


class LowerTier:
    """A tier with its reads under way, the health of its abilities, its read rate and its write-through.

    Read its attributes freely; change them through its methods. ``index``: its place among the tiers of the manager,
    the fastest first.
    """

    def __init__(self, common: Common, index: int, tier: GuardedTier, random: Callable[[], float]) -> None:
        settings = common.settings
        own = settings.tiers[index] if settings.tiers else TierSettings()
        lookup_ms = settings.lookup_deadline_ms if own.lookup_deadline_ms is None else own.lookup_deadline_ms
        self.index = index
        self.tier = tier
        self.name = tier.name
        self._counts = common.counts
        self.writes = WriteThrough(common, tier, own.admission, self.count)
        self.read_health = CircuitBreaker(self.name, Ability.READ, common.load_deadline_s, random)
        write_s = max(common.load_deadline_s, WRITE_DEADLINE_S)
        self.write_health = CircuitBreaker(self.name, Ability.WRITE, write_s, random)
        self.estimator = ReadEstimator(tier.block_bytes)
        self.questions = OpenQuestions(lookup_ms / 1000)
        self.reads: dict[OffloadKey, ReadBatch] = {}
        """Blocks under way from the tier to the host."""
        self.probe: Keys = ()
        """Blocks of which one is to be read as a test while reads are half open."""
        self._num_failed_lookups = 0
        self.gauges = TierGauges(self)

    def count(self, name: str, amount: float) -> None:
        """Adds to a counter ``tier_NAME`` of METRICS."""
        self._counts[f"tier_{name}:{self.name}"] += amount

    @property
    def is_off(self) -> bool:
        return self.read_health.state is BreakerState.OFF

    def switch_off(self) -> None:
        """Neither reads the tier nor writes to it from now on."""
        self.read_health.state = self.write_health.state = BreakerState.OFF

    @property
    def can_read(self) -> bool:
        """Whether the tier is asked and read for requests, which may wait for it."""
        return self.read_health.state is BreakerState.WORKING

    @property
    def takes_chains(self) -> bool:
        """Whether the tier is given chains to write, now or soon."""
        return self.write_health.state not in (BreakerState.OPEN, BreakerState.OFF)

    @property
    def num_reading(self) -> int:
        """Blocks under way, without those that are overdue."""
        return len(self.reads) - len(self.read_health.overdue)

    # Transfers.

    def read(self, slots: Mapping[OffloadKey, int], waits: Iterable[Wait], now: float) -> list[OffloadKey]:
        """Begins to read blocks into these host slots. Returns those that the tier has taken on."""
        taken = self.tier.read(list(slots), np.fromiter(slots.values(), np.int64, len(slots)))
        if taken:
            self.read_health.begun(now, self.num_reading)
            batch = ReadBatch({key: slots[key] for key in taken}, dict.fromkeys(waits))
            self.reads.update(dict.fromkeys(taken, batch))
        return taken

    def end_reads(self, reads: Ended, now: float) -> Mapping[ReadBatch, Keys]:
        """Takes in reads that have ended. Returns their keys by batch."""
        batches = list(map(self.reads.pop, reads.keys))
        late = self.read_health.ended(reads, now)
        in_time = Ended([result for result in reads.results if result.key not in late]) if late else reads
        self.estimator.add(in_time, now)
        if batches.count(batches[0]) == len(batches):
            return {batches[0]: reads.keys}
        keys_of: dict[ReadBatch, list[OffloadKey]] = {}
        for key, batch in zip(reads.keys, batches, strict=True):
            keys_of.setdefault(batch, []).append(key)
        return keys_of

    def write(self, room: int, now: float) -> None:
        """Begins to write at most ``room`` blocks of the backlog: one, if that is a test."""
        health = self.write_health
        is_test = health.state is not BreakerState.WORKING
        if is_test and not health.may_test:
            return
        num_in_time = len(self.writes.writing) - len(health.overdue)
        begun = self.writes.pump(min(room, 1) if is_test else room)
        if begun:
            health.begun(now, num_in_time)
            if is_test:
                health.begin_test(begun[0])

    def update(self, now: float) -> None:
        """Takes in lookups that have failed, transfers that hang, and the end of a pause."""
        num_failed = self.tier.num_failed_lookups - self._num_failed_lookups
        if num_failed:
            self._num_failed_lookups += num_failed
            self.count("lookup_failures", num_failed)
            self.read_health.lookups_failed(num_failed, now)
        if self.reads or self.writes.writing:
            self.read_health.detect_hang(self.reads.keys(), now)
            self.write_health.detect_hang(self.writes.writing, now)
        if self.questions.asked_at:
            self.questions.expire(now)
        for health in (self.read_health, self.write_health):
            if health.state is BreakerState.OPEN:
                health.update(now)
