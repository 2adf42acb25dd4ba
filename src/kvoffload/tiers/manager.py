"""TieredOffloadingManager: host memory first, then lower tiers that must not stall the engine."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
    Admission,
    IntegrityError,
    KVGroup,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    States,
    Tier,
    TierError,
    TierResult,
)
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.tiers.writethrough import WriteThrough

logger = logging.getLogger(__name__)

PROMOTION_SHARE = 0.5
"""Of the host's blocks: at most so many are on their way from lower tiers or kept ready for those who wait."""
WRITE_SHARE = 0.125
"""Of the host's blocks: at most so many are pinned for writes to lower tiers; beyond it blocks are written later."""
MAX_WAITERS = 4096
"""Requests that wait for lower tiers; beyond it a request loads what the host has."""
MAX_UNANSWERED = 1 << 16
"""Keys that a tier was too slow to tell of, remembered for MISS_TTL_S."""
MISS_TTL_S = 1.0
MAX_FAILURES = 16
"""Of one tier within FAILURE_PERIOD_S: then it is switched off."""
FAILURE_PERIOD_S = 60.0
RATE_TTL_S = 30.0
"""A measured read rate is believed for so long; after it one prefix is loaded to measure it again."""
MAX_WAITS = 64
"""Times that an idle step looks for results."""
MAX_HANGS = 4
"""How often reads of one tier may come to hang before it is probed no more until one of them ends."""
MAX_FLIGHTS = 1024
"""Blocks of one tier on their way at once."""
FIRST_CHUNK = 32
"""Keys that are looked for below the host at first; doubled while all are found."""


class MovingRate:
    """An amount per second, as a moving average in which larger samples weigh more."""

    KEEP = 0.9
    """Of what older samples weigh, whenever a new one comes."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * self.KEEP + amount
        self._seconds = self._seconds * self.KEEP + seconds

    def seconds_for(self, amount: float) -> float | None:
        """How long ``amount`` takes; None while that is not known."""
        return amount * self._seconds / self._amount if self._amount > 0 and self._seconds > 0 else None


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that was told to ask again."""

    context: ReqContext
    number: int
    """The later it came, the higher."""
    since: float = 0.0
    """When it last began to wait."""
    wanted: dict[OffloadKey, None] = field(default_factory=dict)
    """In a tier, to be promoted, in the order of their chain."""
    coming: set[OffloadKey] = field(default_factory=set)
    """On their way, and waited for."""
    reserved: list[OffloadKey] = field(default_factory=list)
    """Promoted, and pinned for it."""
    pinned_at: float = 0.0
    """When the last of them was."""
    num_promoted: int = 0
    """Blocks that came up for it, pinned or not any more."""
    is_late: bool = False
    """It has waited its deadline: its next answer is what the host has."""

    @property
    def is_waiting(self) -> bool:
        return bool(self.coming or self.wanted)


Flights: TypeAlias = dict[OffloadKey, dict[_Waiter, None]]
"""Blocks on their way from a tier into the host, and who waits for each."""


class _Lane:
    """A tier, and what is known of it."""

    def __init__(self, tier: Tier, writes: WriteThrough) -> None:
        self.tier = tier
        self.writes = writes
        self.off = False
        self.flights: Flights = {}
        self.overdue: set[OffloadKey] = set()
        """Of those, the ones that were on their way when the tier came to hang. Nobody waits for them, and their slots
        are not free before the tier has reported them."""
        self.is_suspended = False
        """Reads hang: but for probes nothing is read until one ends."""
        self.num_hangs = 0
        """How often reads came to hang that have not ended yet."""
        self.probe: OffloadKey | None = None
        """A block to be read next, to see whether the tier reads."""
        self.failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self.read_rate = MovingRate()
        self.measured = float("-inf")
        """When ``read_rate`` was."""
        self.progress = float("-inf")
        """When a read ended, or the first of several began."""
        self._busy_until = float("-inf")
        """Up to when time is in ``read_rate``."""

    @property
    def writing(self) -> Collection[OffloadKey]:
        return self.writes.writing

    @property
    def can_read(self) -> bool:
        return not self.off and not self.is_suspended

    @property
    def num_reading(self) -> int:
        """Blocks on their way, without those that are overdue."""
        return len(self.flights) - len(self.overdue)

    def seconds_to_read(self, num_blocks: int) -> float:
        """How long so many blocks would take; 0 while that is not known."""
        return self.read_rate.seconds_for(num_blocks * self.tier.block_bytes) or 0.0

    def most_flights(self, deadline_s: float) -> int:
        """Blocks that can be read within a deadline, as far as that is known."""
        seconds = self.read_rate.seconds_for(self.tier.block_bytes)
        return MAX_FLIGHTS if not seconds else max(1, min(MAX_FLIGHTS, int(deadline_s / seconds)))

    def begin(self, keys: Collection[OffloadKey], waiters: Iterable[_Waiter], now: float) -> None:
        """Reads have begun."""
        if not self.num_reading:
            self.progress = now
        self.flights.update((key, dict.fromkeys(waiters)) for key in keys)

    def has_come_to_hang(self, now: float, deadline_s: float) -> bool:
        """Whether no read has ended for a whole deadline, though some are under way: they are overdue from now on."""
        if not self.num_reading or now - self.progress < deadline_s:
            return False
        self.overdue.update(self.flights)
        self.is_suspended = True
        self.num_hangs += 1
        return True

    def end(self, reads: list[TierResult], now: float) -> None:
        """Reads have ended: the tier works."""
        in_time = [result for result in reads if result.key not in self.overdue]
        self.measure(in_time, now)
        if len(in_time) < len(reads):
            self.overdue.difference_update(result.key for result in reads)
            self.num_hangs = max(0, self.num_hangs - 1) if self.overdue else 0
        self.is_suspended = False
        self.probe = None
        self.progress = now

    def measure(self, reads: list[TierResult], now: float) -> None:
        """Bytes over the time in which at least one of them was read."""
        good = sorted((result for result in reads if result.ok), key=lambda result: result.begun)
        busy = 0.0
        for result in good:
            busy += max(0.0, result.ended - max(result.begun, self._busy_until))
            self._busy_until = max(self._busy_until, result.ended)
        if good:
            self.read_rate.add(sum(result.nbytes for result in good), busy)
            self.measured = now


class TieredOffloadingManager(OffloadingManager):
    """``host`` in front of ``tiers``, fastest first.

    Chains that requests touch or store are written through to every tier by the tier's own threads, see WriteThrough.
    A lookup that finds blocks below the host answers None, and ``poll`` starts to promote them, together for all
    lookups of a step, each key at most once at a time. A request that has waited for ``load_deadline_ms`` gets the
    blocks that have arrived. Promoted blocks stay pinned for the requests that waited for them until these are given
    device blocks or end. If another request needs the room, the blocks of requests that came after it are unpinned
    first, then blocks that were pinned for longer than ``load_deadline_ms``; their requests may wait again. Without a
    context, only host memory is consulted.

    If a tier does not say within ``lookup_deadline_ms`` whether it holds a block, the block counts as missing for
    MISS_TTL_S. If reads are under way and none has ended for ``load_deadline_ms``, the tier is not read until one ends;
    once per deadline one block is read as a test, at most MAX_HANGS of them.

    ``groups``: the KV cache groups that keys name, by default with full attention and blocks of one size.
    ``tokens_per_block``: by KV cache group, the tokens that need not be computed for each block that is loaded. With
    ``load_only_if_faster`` a run of blocks that would take longer to read than to compute is left where it is.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[Tier],
        *,
        tokens_per_block: Sequence[float],
        groups: Sequence[KVGroup] | None = None,
        lookup_deadline_ms: float = 100.0,
        load_deadline_ms: float = 1000.0,
        load_only_if_faster: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self._counts: defaultdict[str, float] = defaultdict(float)
        groups = groups or [KVGroup(1)] * len(tokens_per_block)
        self._lanes = [_Lane(tier, WriteThrough(host, tier, groups, self._count, clock)) for tier in tiers]
        self._tokens_per_block = tokens_per_block
        self._lookup_deadline_s = lookup_deadline_ms / 1000
        self._load_deadline_s = load_deadline_ms / 1000
        self._load_only_if_faster = load_only_if_faster
        self._clock = clock
        self._prefill = MovingRate()
        self._waiters: dict[str, _Waiter] = {}
        """Who waits, or has waited and has not been given device blocks yet, the oldest first."""
        self._numbers = itertools.count()
        self._deadlines: deque[tuple[float, _Waiter]] = deque()
        """Who began to wait when, the oldest first; some may have ended their wait since."""
        self._answered: list[_Waiter] = []
        """Late ones that have been given what the host has since the last poll."""
        self._wanting: dict[_Waiter, None] = {}
        """Those who want blocks that are not on their way yet."""
        self._reserved: Counter[OffloadKey] = Counter()
        """Promoted blocks, and for how many waiters each is pinned."""
        self._max_promoted = max(1, int(host.num_blocks * PROMOTION_SHARE))
        self._max_held = max(1, int(host.num_blocks * WRITE_SHARE))
        self._unanswered: dict[OffloadKey, float] = {}
        """Since when a tier is being asked for a key."""
        self._look_again = False
        """Since the last poll something has changed for those who wait, or a tier was asked."""
        self._reasons = MissMemory(clock=clock)
        self._num_evicted = 0
        """Blocks that tiers have evicted, as far as they are counted."""

    # Lookup.

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        waiter = self._waiter_of(req_context)
        if waiter is not None and waiter.is_waiting:
            return None
        ready = self.host.lookup(keys, req_context)
        assert ready is not None
        if ready == len(keys) or req_context is None or not self._may_wait(waiter):
            return ready
        found, asking = self._find_run(keys, ready, waiter)
        if found and waiter is None and not self._is_faster_to_load(keys[ready], found):
            return ready
        if found:
            self._wait_for(found, req_context)
        return None if found or asking else ready

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        """A block that must be promoted first, or asked for, is RETRY. If some key cannot be had at all, or all
        together are more than may be promoted, nothing is promoted."""
        self.host.count_request(keys, req_context)
        waiter = self._waiter_of(req_context)
        if waiter is not None and waiter.is_waiting:
            return [LookupState.RETRY] * len(keys)
        states = self.host.states(keys)
        below = np.flatnonzero(states != LookupState.HIT)
        if len(below) and req_context is not None and self._may_wait(waiter):
            told = self._states_below([keys[i] for i in below.tolist()], states[below])
            coming = [keys[i] for i in below[told == LookupState.HIT].tolist()]
            if coming and np.isin(told, (LookupState.HIT, LookupState.RETRY)).all():
                num_held = 0 if waiter is None else len(waiter.reserved)
                if num_held + len(coming) > self._max_promoted:
                    self._reasons.record(coming, MissReason.TOO_LARGE)
                    told[told == LookupState.HIT] = LookupState.MISS
                else:
                    self._wait_for(coming, req_context)
            states[below] = np.where(told == LookupState.HIT, LookupState.RETRY, told)
        return list(map(LookupState, states.tolist()))

    def _waiter_of(self, context: ReqContext | None) -> _Waiter | None:
        waiter = None if context is None else self._waiters.get(context.req_id)
        if waiter is not None and waiter.is_waiting and self._clock() - waiter.since >= self._load_deadline_s:
            self._expire(waiter)
        return waiter

    def _may_wait(self, waiter: _Waiter | None) -> bool:
        """Whether a request may wait for lower tiers, or wait again."""
        if all(lane.off for lane in self._lanes):
            return False
        if waiter is None:
            return len(self._waiters) < MAX_WAITERS
        if waiter.is_late:
            self._answered.append(waiter)
        return not waiter.is_late

    def _find_run(
        self, keys: Sequence[OffloadKey], ready: int, waiter: _Waiter | None
    ) -> tuple[list[OffloadKey], bool]:
        """Of the run of keys that goes on after the first ``ready``: those that must be promoted first, as many as a
        request may have; and whether a tier is being asked where the run ends."""
        group = key_group_idx(keys[ready])
        held = sum(key_group_idx(key) == group for key in waiter.reserved) if waiter else 0
        room = self._max_promoted // len(self._tokens_per_block) - held
        found: list[OffloadKey] = []
        start, size = ready, FIRST_CHUNK
        while start < len(keys) and len(found) < room:
            chunk = keys[start : start + size]
            states = self.host.states(chunk)
            below = np.flatnonzero(states != LookupState.HIT)
            states[below] = self._states_below([chunk[i] for i in below.tolist()], states[below])
            bad = np.flatnonzero(states != LookupState.HIT)
            end = int(bad[0]) if len(bad) else len(chunk)
            found += [chunk[i] for i in below.tolist() if i < end]
            if len(bad):
                return found[:room], bool(states[bad[0]] == LookupState.RETRY)
            start, size = start + size, size * 2
        return found[:room], False

    def _states_below(self, keys: Sequence[OffloadKey], host_states: States) -> States:
        """HIT: on its way to the host, or in a tier that can be read. RETRY: a tier is being asked. PENDING: being
        stored from the device."""
        now = self._clock()
        states = np.where(host_states == LookupState.PENDING, host_states, LookupState.MISS).astype(np.uint8)
        for lane in self._lanes:
            self._suspend_if_it_hangs(lane, now)
            if lane.flights:
                on_its_way = np.fromiter((key in lane.flights for key in keys), np.bool_, len(keys))
                lost = np.fromiter((key in lane.overdue for key in keys), np.bool_, len(keys))
                states[on_its_way] = LookupState.MISS
                if lane.can_read:
                    states[on_its_way & ~lost] = LookupState.HIT
                elif lane.probe is None:
                    lane.probe = next((keys[i] for i in np.flatnonzero(~on_its_way)[:1].tolist()), None)
            open_keys = np.flatnonzero(states == LookupState.MISS)
            if lane.overdue:
                open_keys = np.array([i for i in open_keys.tolist() if keys[i] not in lane.overdue], dtype=np.int64)
            if not lane.can_read or not len(open_keys):
                continue
            told = lane.tier.contains([keys[i] for i in open_keys.tolist()])
            states[open_keys] = self._without_late(keys, open_keys, told, now)
        return states

    def _without_late(
        self, keys: Sequence[OffloadKey], asked: npt.NDArray[np.int64], told: States, now: float
    ) -> States:
        """Keys that a tier has been asked for longer than the lookup deadline count as missing, for a while."""
        for i in np.flatnonzero(told == LookupState.RETRY).tolist():
            key = keys[asked[i]]
            since = self._unanswered.get(key)
            if since is None or now - since > self._lookup_deadline_s + MISS_TTL_S:
                self._unanswered.pop(key, None)
                self._unanswered[key] = since = now
                while len(self._unanswered) > MAX_UNANSWERED:
                    del self._unanswered[next(iter(self._unanswered))]
            self._look_again = True
            if now - since >= self._lookup_deadline_s:
                told[i] = LookupState.MISS
                self._reasons.record([key], MissReason.NOT_IN_TIME)
        return told

    def _is_faster_to_load(self, first: OffloadKey, found: list[OffloadKey]) -> bool:
        """Whether reading ``found``, behind what others want, takes no longer than computing their tokens, as far as
        both are known."""
        computing = self._prefill.seconds_for(len(found) * self._tokens_per_block[key_group_idx(first)])
        if not self._load_only_if_faster or computing is None:
            return True
        before = sum(lane.num_reading for lane in self._lanes) + sum(len(waiter.wanted) for waiter in self._wanting)
        if before == 0 and self._clock() - min(lane.measured for lane in self._lanes) > RATE_TTL_S:
            return True
        if max(lane.seconds_to_read(before + len(found)) for lane in self._lanes) <= computing:
            return True
        self._reasons.record([first], MissReason.FASTER_TO_COMPUTE)
        return False

    def _wait_for(self, keys: list[OffloadKey], context: ReqContext) -> None:
        """The request waits for ``keys``, which are in a tier or on their way."""
        waiter = self._waiters.get(context.req_id)
        if waiter is None:
            waiter = self._waiters[context.req_id] = _Waiter(context, next(self._numbers))
        if not waiter.is_waiting:
            waiter.since = self._clock()
            self._deadlines.append((waiter.since, waiter))
        for key in keys:
            lane = next((lane for lane in self._lanes if key in lane.flights), None)
            if lane is None:
                waiter.wanted[key] = None
                self._wanting[waiter] = None
            elif key not in lane.overdue:
                lane.flights[key][waiter] = None
                waiter.coming.add(key)

    def _expire(self, waiter: _Waiter) -> None:
        """At its deadline the request gets the blocks that have arrived, which stay pinned for it."""
        waiter.is_late = True
        self._counts["late_promotions"] += 1
        self._reasons.record([*waiter.coming, *waiter.wanted], MissReason.NOT_IN_TIME)
        self._want_nothing(waiter)

    def _want_nothing(self, waiter: _Waiter) -> None:
        waiter.wanted.clear()
        self._wanting.pop(waiter, None)
        for key in waiter.coming:
            for lane in self._lanes:
                lane.flights.get(key, {}).pop(waiter, None)
        waiter.coming.clear()

    # Steps.

    def poll(self) -> bool:
        changed = False
        for lane in self._lanes:
            results = lane.tier.poll()
            if results:
                self._end_writes(lane, [result for result in results if not result.is_read])
                changed |= self._end_reads(lane, [result for result in results if result.is_read])
                self._count_failures(lane, results)
        now = self._clock()
        for waiter in self._answered:
            waiter.is_late = False
        self._answered.clear()
        while self._deadlines:
            since, waiter = self._deadlines[0]
            is_over = not waiter.is_waiting or waiter.since != since
            if not is_over and now - since < self._load_deadline_s:
                break
            self._deadlines.popleft()
            if not is_over:
                self._expire(waiter)
        for lane in self._lanes:
            self._suspend_if_it_hangs(lane, now)
            if lane.probe is not None:
                self._probe(lane)
        changed |= self._start_promotions(may_take_back=not changed) or self._look_again
        self._look_again = False
        self._write()
        return changed

    def _suspend_if_it_hangs(self, lane: _Lane, now: float) -> None:
        if lane.has_come_to_hang(now, self._load_deadline_s) and lane.num_hangs == 1:
            logger.warning(
                "kvoffload: the %s tier has ended no read for %.1f s; until it ends one, at most %d blocks are read, "
                "as a test",
                lane.tier.name,
                now - lane.progress,
                MAX_HANGS - 1,
            )

    def _probe(self, lane: _Lane) -> None:
        """Reads a block for which nobody waits from a tier that hangs."""
        key, lane.probe = lane.probe, None
        if key is None or lane.can_read or lane.off or lane.num_reading or lane.num_hangs >= MAX_HANGS:
            return
        if len(self._reserved) + self._num_flights >= self._max_promoted:
            return
        if lane.tier.contains([key])[0] == LookupState.HIT and (output := self.host.allocate([key])) is not None:
            self._counts["evicted_blocks"] += len(output.evicted_keys)
            taken = lane.tier.read(output.keys_to_store, output.store_spec.slots) if output.keys_to_store else []
            self.host.complete_store([key for key in output.keys_to_store if key not in taken], success=False)
            lane.begin(taken, (), self._clock())
            self._look_again = True

    @property
    def _num_flights(self) -> int:
        return sum(len(lane.flights) for lane in self._lanes)

    def _end_reads(self, lane: _Lane, reads: list[TierResult]) -> bool:
        if not reads:
            return False
        lane.end(reads, self._clock())
        arrived: dict[_Waiter, list[OffloadKey]] = {}
        ok = []
        for result in reads:
            waiters = lane.flights.pop(result.key)
            for waiter in waiters:
                waiter.coming.discard(result.key)
            self._counts["disk_read_seconds"] += result.seconds
            if result.ok:
                ok.append(result.key)
                self._counts["disk_read_bytes"] += result.nbytes
                for waiter in waiters:
                    arrived.setdefault(waiter, []).append(result.key)
            else:
                self.host.complete_store([result.key], success=False)
                lane.writes.lost(1)
                if result.error is TierError.GONE:
                    continue
                reason = MissReason.CORRUPT if result.error is TierError.CORRUPT else MissReason.READ_FAILED
                self._counts["disk_bad_blocks" if result.error is TierError.CORRUPT else "disk_read_failures"] += 1
                self._reasons.record([result.key], reason)
        if ok:
            self.host.complete_store(ok)
            self._counts["promoted_blocks"] += len(ok)
        for waiter, keys in arrived.items():
            self._pin(waiter, keys)
        return True

    def _pin(self, waiter: _Waiter, keys: list[OffloadKey]) -> None:
        """Keeps blocks ready for a request. A reset may have come before them."""
        keys = self._ready(keys)
        if keys:
            self.host.prepare_load(keys)
            waiter.num_promoted += len(keys)
            waiter.reserved += keys
            waiter.pinned_at = self._clock()
            self._reserved.update(keys)

    def _unpin(self, waiter: _Waiter) -> None:
        if waiter.reserved:
            self.host.complete_load(waiter.reserved)
            self._reserved.subtract(waiter.reserved)
            for key in waiter.reserved:
                if not self._reserved[key]:
                    del self._reserved[key]
            waiter.reserved.clear()

    def _end_writes(self, lane: _Lane, writes: list[TierResult]) -> None:
        if not writes:
            return
        lane.writes.ended(writes)
        for result in writes:
            self._counts["disk_write_seconds"] += result.seconds
            if result.ok:
                self._counts["disk_write_blocks"] += 1
                self._counts["disk_write_bytes"] += result.nbytes
            elif result.error is not TierError.GONE:
                self._counts["disk_write_failures"] += 1

    def _count_failures(self, lane: _Lane, results: list[TierResult]) -> None:
        now = self._clock()
        for result in results:
            if result.error in (TierError.CORRUPT, TierError.IO):
                lane.failures.append(now)
        if len(lane.failures) == MAX_FAILURES and now - lane.failures[0] <= FAILURE_PERIOD_S and not lane.off:
            kinds = Counter(str(result.error) for result in results if result.error is not None)
            self._switch_off(lane, f"{MAX_FAILURES} failures within {FAILURE_PERIOD_S:.0f} s (latest: {dict(kinds)})")

    def switch_off_tiers(self, reason: str) -> None:
        """No lower tier is read or written any more; the host goes on."""
        for lane in self._lanes:
            self._switch_off(lane, reason)

    def _switch_off(self, lane: _Lane, reason: str) -> None:
        if not lane.off:
            lane.off = True
            logger.error(
                "kvoffload: THE %s TIER IS OFF: %s; requests are served from host memory or computed from here on",
                lane.tier.name.upper(),
                reason,
            )
            lane.writes.clear()
            for waiter in list(self._wanting):
                self._want_nothing(waiter)
            self._look_again = True

    def _start_promotions(self, may_take_back: bool) -> bool:
        """Starts what was asked for, the request that waits longest first, as far as there is room.

        Requests that each hold some blocks and want more could wait for each other: if nothing else will make room
        (``may_take_back``), one has its blocks kept ready no longer, see ``_first_to_give_way``.
        """
        may_take_back = may_take_back and not any(lane.num_reading for lane in self._lanes)
        if not self._wanting or (self._room() <= 0 and not may_take_back):
            return False
        changed = False
        for waiter in sorted(self._wanting, key=lambda waiter: waiter.number):
            if may_take_back and self._room() <= 0:
                last = self._first_to_give_way(waiter)
                if last is not None:
                    self._unpin(last)
            room = self._room()
            if room <= 0:
                break
            keys = list(waiter.wanted)[:room]
            for key in keys:
                del waiter.wanted[key]
            if not waiter.wanted:
                del self._wanting[waiter]
            changed |= self._promote(waiter, keys)
            may_take_back = False
        return changed

    def _first_to_give_way(self, waiter: _Waiter) -> _Waiter | None:
        """Whose blocks are kept ready no longer if there is no room for ``waiter``: the last that came after it, else
        the last whose blocks have been ready for a whole deadline."""
        holders = [other for other in reversed(self._waiters.values()) if other.reserved and other is not waiter]
        latest = self._clock() - self._load_deadline_s
        later = (other for other in holders if other.number > waiter.number)
        idle = (other for other in holders if not other.is_waiting and other.pinned_at <= latest)
        return next(later, None) or next(idle, None)

    def _room(self) -> int:
        """Blocks that may be promoted now."""
        most_flights = min(lane.most_flights(self._load_deadline_s) for lane in self._lanes)
        num_reading = sum(lane.num_reading for lane in self._lanes)
        num_promoted = len(self._reserved) + self._num_flights
        return min(self._max_promoted - num_promoted, most_flights - num_reading, self.host.num_available_blocks)

    def _promote(self, waiter: _Waiter, keys: list[OffloadKey]) -> bool:
        # Others may have asked for the same since, or stored it, or found that it cannot be read.
        self._wait_for([key for key in keys if any(key in lane.flights for lane in self._lanes)], waiter.context)
        readable = [lane.tier.contains(keys) == LookupState.HIT for lane in self._lanes if lane.can_read]
        keys = [keys[i] for i in np.flatnonzero(np.any(readable, axis=0)).tolist()] if readable else []
        output = self.host.allocate(keys)
        if output is None:
            self._want_again(waiter, keys)
            return False
        self._counts["evicted_blocks"] += len(output.evicted_keys)
        left, slots = output.keys_to_store, output.store_spec.slots
        now = self._clock()
        for lane in self._lanes:
            if not lane.can_read or not left:
                continue
            taken = set(lane.tier.read(left, slots))
            lane.begin([key for key in left if key in taken], [waiter], now)
            waiter.coming |= taken
            keep = [i for i, key in enumerate(left) if key not in taken]
            left, slots = [left[i] for i in keep], slots[keep]
        if left:
            # No tier has taken them on: those that are still there are tried again.
            self.host.complete_store(left, success=False)
            for lane in self._lanes:
                if lane.can_read:
                    there = lane.tier.contains(left) == LookupState.HIT
                    self._want_again(waiter, [left[i] for i in np.flatnonzero(there).tolist()])
        return True

    def _want_again(self, waiter: _Waiter, keys: list[OffloadKey]) -> None:
        if keys:
            waiter.wanted = dict.fromkeys([*keys, *waiter.wanted])
            self._wanting[waiter] = None

    def wait(self, timeout_s: float) -> None:
        """Results come one by one; the engine has nothing to do before some request has all that it waits for, or more
        can be written."""
        for lane in self._lanes:
            waiters = {waiter for flight in lane.flights.values() for waiter in flight if waiter.is_waiting}
            for _ in range(MAX_WAITS if waiters else 0):
                begun = self._clock()
                lane.tier.wait(timeout_s)
                self._look_again |= self.poll()
                timeout_s -= self._clock() - begun
                if timeout_s <= 0 or not all(waiter.is_waiting for waiter in waiters):
                    return
            if not waiters and lane.writes.is_busy:
                lane.tier.wait(timeout_s)
                return

    def release_request(self, req_context: ReqContext) -> None:
        waiter = self._waiters.pop(req_context.req_id, None)
        if waiter is not None:
            self._want_nothing(waiter)
            self._unpin(waiter)

    def num_promoted(self, req_context: ReqContext) -> int:
        waiter = self._waiters.get(req_context.req_id)
        return waiter.num_promoted if waiter is not None else 0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefill.add(num_tokens, seconds)

    # Loads and stores.

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        return self.host.prepare_load(keys, req_context)

    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        self.host.complete_load(blocks, req_context)

    def set_admission(self, admission: Admission) -> None:
        self.host.set_admission(admission)

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.host.refuse(keys, req_context)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        self.host.drop(keys)
        for lane in self._lanes:
            lane.tier.delete(keys)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.host.touch(keys, req_context)
        for lane in self._lanes:
            if not lane.off:
                lane.tier.touch(keys)
                lane.writes.offer(keys, _name(req_context), is_whole=False)

    def reorder_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
    ) -> None:
        self.host.reorder_chain(keys, stored, req_context)
        for lane in self._lanes:
            if not lane.off:
                lane.tier.reorder_chain(keys, stored)

    def offer_chain(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        for lane in self._lanes:
            if not lane.off:
                lane.writes.offer(keys, _name(req_context), is_whole=True)
        self._write()

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        return self.host.prepare_store(keys, req_context)

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        self.host.complete_store(blocks, req_context, success)
        if success:
            keys = self.host.keys_of(blocks) if isinstance(blocks, LoadStoreSpec) else blocks
            for lane in self._lanes:
                lane.writes.stored(keys)
            self._write()

    def _ready(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those that the host can load."""
        ready = self.host.states(keys) == LookupState.HIT
        return [keys[i] for i in np.flatnonzero(ready).tolist()]

    def _write(self) -> None:
        """Begins to write what there is room for."""
        for lane in self._lanes:
            if lane.writes.has_backlog:
                lane.writes.pump(self._max_held - sum(len(lane.writing) for lane in self._lanes))

    @property
    def has_pending_writes(self) -> bool:
        return any(lane.writes.is_busy for lane in self._lanes)

    # Odds and ends.

    def _count(self, name: str, amount: float) -> None:
        self._counts[name] += amount

    def policy_state(self) -> Mapping[str, Any]:
        return self.host.policy_state()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Those of the host."""
        return self.host.take_events()

    def take_counts(self) -> Mapping[str, float]:
        evicted = sum(lane.tier.num_evicted for lane in self._lanes)
        self._counts["disk_evicted_blocks"] += evicted - self._num_evicted
        self._num_evicted = evicted
        counts, self._counts = self._counts, defaultdict(float)
        gauges = {
            "disk_blocks": sum(lane.tier.num_blocks for lane in self._lanes),
            "disk_used_bytes": sum(lane.tier.used_bytes for lane in self._lanes),
            "disk_bytes": sum(lane.tier.capacity_bytes for lane in self._lanes),
            "disk_off": int(any(lane.off for lane in self._lanes)),
        }
        return {**{name: count for name, count in counts.items() if count}, **gauges}

    def reset(self) -> None:
        for waiter in list(self._waiters.values()):
            self.release_request(waiter.context)
        self.host.reset()
        for lane in self._lanes:
            lane.writes.clear()
            lane.tier.reset()

    def shutdown(self) -> None:
        for lane in self._lanes:
            lane.tier.close()
            self._end_writes(lane, [result for result in lane.tier.poll() if not result.is_read])
            lane.writes.unpin_all()
            lane.writes.clear()
            lane.writes.writing.clear()
        self.host.shutdown()

    def explain_miss(self, key: OffloadKey) -> Miss:
        host, mine = self.host.explain_miss(key), self._reasons.explain(key)
        on_its_way = any(key in lane.flights for lane in self._lanes)
        if on_its_way or any(lane.tier.contains([key])[0] == LookupState.HIT for lane in self._lanes):
            is_choice = mine.reason in (MissReason.FASTER_TO_COMPUTE, MissReason.TOO_LARGE)
            return mine if is_choice else Miss(MissReason.NOT_IN_TIME)
        if host.reason is MissReason.BEING_WRITTEN or mine.age_s is None:
            return host
        return mine if host.age_s is None or mine.age_s <= host.age_s else host

    @property
    def num_blocks(self) -> int:
        return self.host.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.host.num_used_blocks

    def check_integrity(self) -> None:
        self.host.check_integrity()
        pinned: Counter[OffloadKey] = Counter()
        for waiter in self._waiters.values():
            pinned.update(waiter.reserved)
        if pinned != self._reserved:
            raise IntegrityError("blocks kept ready and the requests they are kept for do not match")
        if len(self._reserved) + self._num_flights > self._max_promoted:
            raise IntegrityError("more blocks were promoted than PROMOTION_SHARE allows")
        if sum(len(lane.writing) for lane in self._lanes) > self._max_held:
            raise IntegrityError("more blocks are being written to lower tiers than WRITE_SHARE allows")
        for lane in self._lanes:
            if not lane.overdue <= lane.flights.keys():
                raise IntegrityError("a read is overdue that is not under way")
            lane.writes.check_integrity()
            lane.tier.check_integrity()


def _name(context: ReqContext | None) -> str | None:
    return None if context is None else context.req_id
