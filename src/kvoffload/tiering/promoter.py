"""Promotions: blocks are brought from lower tiers into host memory for the requests that wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.abc import (
    IntegrityError,
    KVGroup,
    LoadStoreSpec,
    MissReason,
    OffloadKey,
    ReqContext,
    TierError,
    TierResult,
)
from kvoffload.cache.keys import key_group_idx, num_of_group
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.tiering.events import Count
from kvoffload.tiering.health import TierState
from kvoffload.tiering.promotion import NONE, Located, PromotedPins, Promotion, PromotionState, waiting_for
from kvoffload.tiering.rates import Ended
from kvoffload.tiering.reads import ReadQueue, TierReads, Waits

PROMOTION_SHARE = 0.5
"""At most this share of the host's blocks is being read from lower tiers, or pinned for requests that waited for them.
"""
MAX_PROMOTIONS = 4096
"""Requests with a promotion. Above this limit, requests use only host memory."""


class Promoter:
    """Owns all promotions: their order, their room in the host, their deadlines, and the pins of the blocks that have
    arrived.

    Reads start in ``poll``, for the oldest promotion first. If a promotion needs room that others hold, the latest of
    the younger promotions gives up its pins; if there is none, one whose blocks have been pinned for a whole deadline
    does. The request of that promotion may wait again. ``count`` takes the counters of METRICS, by name; ``reasons``
    remembers why blocks were missed.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[TierState],
        *,
        groups: Sequence[KVGroup],
        deadline_s: float,
        count: Count,
        reasons: MissMemory,
        clock: Callable[[], float],
    ) -> None:
        self.max_blocks = max(1, int(host.num_blocks * PROMOTION_SHARE))
        """Blocks that may be under way or pinned."""
        self._host = host
        self._tiers = tiers
        self._reads = TierReads(host, tiers, deadline_s, count)
        self._num_states = sum(group.state for group in groups)
        self._num_kv_groups = len(groups) - self._num_states
        self._deadline_s = deadline_s
        self._count = count
        self._reasons = reasons
        self._clock = clock
        self._promotions: dict[str, Promotion] = {}
        """By request, the oldest first."""
        self._numbers = itertools.count()
        self._waits = Waits()
        self._answered: list[Promotion] = []
        """Promotions in the state ANSWERED."""
        self._queue = ReadQueue(len(tiers))
        self._new: list[Promotion] = []
        """Promotions that were in the state WANTED since the last ``poll``."""
        self._pins = PromotedPins(host)

    def __len__(self) -> int:
        return len(self._promotions)

    @property
    def is_idle(self) -> bool:
        """Whether no tier is being read, or is to be read."""
        return not self._queue.promotions and not any(tier.reads for tier in self._tiers)

    # The requests' side.

    def get(self, context: ReqContext) -> Promotion | None:
        """Returns the request's promotion. If its deadline has passed, its wait is over."""
        promotion = self._promotions.get(context.req_id)
        if promotion is not None and promotion.is_late(self._clock(), self._deadline_s):
            self._expire(promotion)
        return promotion

    def may_wait(self, promotion: Promotion | None) -> bool:
        """Returns whether a request may begin to wait. If not, it is answered from host memory now."""
        if promotion is None:
            return len(self._promotions) < MAX_PROMOTIONS
        if promotion.state is PromotionState.EXPIRED:
            promotion.state = PromotionState.ANSWERED
            self._answered.append(promotion)
        return promotion.state is not PromotionState.ANSWERED

    def room_for(self, promotion: Promotion | None, key: OffloadKey, in_all: bool = False) -> int:
        """Returns how many more blocks the request, which wants ``key``, may have promoted: of the KV cache group of
        ``key``, which has no states, or ``in_all``. A request needs one state of each of the others."""
        pinned = () if promotion is None else promotion.pinned
        most = max(1, int(self._host.most_blocks(key) * PROMOTION_SHARE))
        if in_all or self._num_kv_groups + self._num_states == 1:
            return most - len(pinned)
        share = (most - self._num_states) // max(1, self._num_kv_groups)
        return share - num_of_group(pinned, key_group_idx(key))

    def promote(self, wanted: Located, context: ReqContext) -> Promotion:
        """Makes the request wait for ``wanted`` too, each of which is in a tier or being read already. Returns its
        promotion. The reads begin in the next ``poll``."""
        promotion = self._promotions.get(context.req_id)
        if promotion is None:
            promotion = self._promotions[context.req_id] = Promotion(
                context, next(self._numbers), np.zeros(len(self._tiers), np.int64)
            )
        if not promotion.is_waiting:
            promotion.since = self._clock()
            self._waits.add(promotion, 2 * MAX_PROMOTIONS)
        self._queue.put(promotion, promotion.wanted.before(self._join_reads(promotion, wanted)).distinct())
        if promotion.state is not PromotionState.WANTED:
            promotion.state = PromotionState.WANTED
            self._new.append(promotion)
        promotion.end_wait_if_done()
        return promotion

    def withdraw(self, promotion: Promotion) -> None:
        """Ends the wait of a request that is not to have any of the blocks that it wants, of which none is read yet."""
        self._stop_waiting(promotion, PromotionState.READY)

    def take_pins(self, keys: Sequence[OffloadKey], context: ReqContext) -> LoadStoreSpec:
        """Returns a lease of ``keys``, as ``prepare_load`` does. The pins of those that were promoted for the request
        pass to it, without looking them up."""
        return self._pins.take(self._promotions.get(context.req_id), keys, context)

    def release(self, context: ReqContext) -> Promotion | None:
        """Ends the request's promotion, with its wait and its pins, and returns it."""
        promotion = self._promotions.pop(context.req_id, None)
        if promotion is not None:
            self._stop_waiting(promotion, PromotionState.RELEASED)
            if promotion.pinned:
                self._pins.remove(promotion, list(promotion.pinned))
        return promotion

    def release_all(self) -> None:
        for promotion in list(self._promotions.values()):
            self.release(promotion.context)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """Removes the pins of ``keys`` for all requests."""
        slots = self._host.table.find(keys)
        if self._pins.has_any(slots[slots >= 0]):
            for promotion in self._promotions.values():
                if not promotion.pinned.keys().isdisjoint(keys):
                    self._pins.remove(promotion, keys)

    def abandon(self, tier: TierState) -> None:
        """Ends the waits for blocks of a tier that is no longer used, and of all requests with blocks that are still to
        be read: they look these up again."""
        for promotion in waiting_for(set(tier.reads.values())):
            self._count("late_promotions", 1)
            self._reasons.record([key for key in promotion.reading if key in tier.reads], MissReason.NOT_IN_TIME)
            promotion.reading.difference_update(tier.reads)
            promotion.end_wait_if_done()
        for promotion in list(self._queue.promotions):
            self._stop_waiting(promotion, PromotionState.READY)

    def num_queued(self, tier: TierState) -> int:
        """Returns how many blocks are to be read from ``tier`` and are not under way yet."""
        return int(self._queue.num_blocks[tier.index])

    def _join_reads(self, promotion: Promotion, wanted: Located) -> Located:
        """Makes the promotion wait for those of ``wanted`` that are being read already. Returns the others."""
        for tier in self._tiers:
            if tier.reads and not tier.reads.keys().isdisjoint(wanted.keys):
                for key in wanted.keys:
                    batch = tier.reads.get(key)
                    if batch is not None and not batch.is_overdue:
                        batch.promotions[promotion] = None
                        promotion.reading.add(key)
                is_read = np.fromiter(map(tier.reads.__contains__, wanted.keys), np.bool_, len(wanted))
                wanted = wanted.select(~is_read)
        return wanted

    # Deadlines.

    def _expire(self, promotion: Promotion) -> None:
        """Ends the request's wait: it gets the blocks that have arrived, which stay pinned for it."""
        self._count("late_promotions", 1)
        self._reasons.record([*promotion.reading, *promotion.wanted.keys], MissReason.NOT_IN_TIME)
        self._stop_waiting(promotion, PromotionState.EXPIRED)

    def _stop_waiting(self, promotion: Promotion, state: PromotionState) -> None:
        self._queue.put(promotion, NONE)
        for tier in self._tiers if promotion.reading else ():
            for key in promotion.reading & tier.reads.keys():
                tier.reads[key].promotions.pop(promotion, None)
        promotion.stop_waiting(state)

    # Reads.

    def poll(self, may_take_back: bool) -> bool:
        """Ends waits whose deadline has passed and starts reads. Returns whether any were started.

        Promotions that each have some blocks pinned and want more could wait for each other. So if nothing else will
        make room (``may_take_back``), one gives up its pins.
        """
        now = self._clock()
        for promotion in self._answered:
            if promotion.state is PromotionState.ANSWERED:
                promotion.state = PromotionState.READY
        self._answered.clear()
        for promotion in self._waits.take_late(now, self._deadline_s) if self._waits.begun else ():
            self._expire(promotion)
        has_started = False
        for tier in self._tiers:
            if tier.probe is not None:
                has_started |= self._reads.probe(tier, self._num_free, now)
        if self._queue.promotions:
            has_started |= self._start(may_take_back, now)
        for promotion in self._new:
            if promotion.wanted.keys:
                promotion.state = PromotionState.QUEUED
        self._new.clear()
        return has_started

    def _start(self, may_take_back: bool, now: float) -> bool:
        may_take_back = may_take_back and not any(tier.num_reading for tier in self._tiers)
        has_started, room = False, self._room()
        if room <= 0 and not may_take_back:
            return False
        allowed = [self._reads.num_in_time(tier) for tier in self._tiers]
        for promotion in self._queue.promotions.copy():
            if may_take_back and room <= 0:
                self._take_back_for(promotion, now)
                room = self._room()
            is_allowed = [n > 0 and queued > 0 for n, queued in zip(allowed, self._queue.num_blocks, strict=True)]
            if room <= 0 or not any(is_allowed):
                break
            has_started |= self._read(promotion, room, allowed, now)
            may_take_back, room = False, self._room()
        return has_started

    def _room(self) -> int:
        """Blocks for which the host has room now."""
        return min(self._num_free, self._host.num_available_blocks)

    @property
    def _num_free(self) -> int:
        """How many more blocks may be under way or pinned."""
        return self.max_blocks - self._pins.num_pinned - sum([len(tier.reads) for tier in self._tiers])

    def _take_back_for(self, promotion: Promotion, now: float) -> None:
        """Makes room for ``promotion``: another one gives up its pins, the latest of the younger ones, otherwise the
        latest of those whose blocks have been pinned for a whole deadline."""
        if not self._pins.num_pinned:
            return
        holders = [other for other in reversed(self._promotions.values()) if other.pinned and other is not promotion]
        latest = now - self._deadline_s
        younger = (other for other in holders if other.number > promotion.number)
        idle = (other for other in holders if not other.is_waiting and other.pinned_at <= latest)
        other = next(younger, None) or next(idle, None)
        if other is not None:
            self._pins.remove(other, list(other.pinned))

    def _read(self, promotion: Promotion, room: int, allowed: list[int], now: float) -> bool:
        """Starts to read the next blocks of ``promotion``, at most ``room``, and ``allowed`` of each tier, which become
        fewer. Returns False if nothing has happened."""
        room = min(room, self._host.room.num_storable(promotion.wanted.keys[0]))
        now_read, later = promotion.wanted.split(room, allowed)
        if not now_read.keys:
            return False
        now_read = self._join_reads(promotion, now_read)
        if promotion.state is PromotionState.QUEUED:
            # Meanwhile a tier may have found that it cannot read them: then no block is evicted for them.
            now_read = self._reads.readable(now_read.keys)
        output = self._host.allocate(now_read.keys)
        if output is None:
            self._queue.put(promotion, now_read.before(later))
            return False
        self._count("evicted_blocks", len(output.evicted_keys))
        slots = dict(zip(output.keys_to_store, output.store_spec.slots.tolist(), strict=True))
        refused = self._reads.begin(slots, now_read, promotion, allowed, now)
        if refused:
            # Those that some tier still has are tried again.
            self._host.take_back(self._host.lease(refused.values()))
            later = self._reads.readable(list(refused)).before(later)
        self._queue.put(promotion, later)
        promotion.end_wait_if_done()
        return True

    def end_reads(self, tier: TierState, reads: Ended) -> None:
        """Takes in reads that have ended: blocks become ready and are pinned for the promotions that wait for them, or
        are misses."""
        tier.count("read_seconds", sum(reads.seconds))
        tier.count("read_bytes", sum(reads.good.nbytes))
        for batch, ended in tier.end_reads(reads, self._clock()).items():
            good = dict(zip(ended.keys, map(batch.slots.pop, ended.keys), strict=True))
            if not ended.all_ok:
                failed = [result for result in ended.results if not result.ok]
                self._host.take_back(self._host.lease([good.pop(result.key) for result in failed]))
                tier.writes.note_lost(len(failed))
                _explain_failures(tier, failed, self._reasons)
            if good:
                self._host.complete_store(self._host.lease(good.values()))
                self._count("promoted_blocks", len(good))
                for other in self._tiers:
                    other.writes.stored(good.keys())
            for promotion in batch.promotions:
                arrived = good
                if not promotion.reading.issuperset(good):
                    arrived = {key: slot for key, slot in good.items() if key in promotion.reading}
                promotion.reading.difference_update(ended.keys)
                if arrived:
                    self._pins.add(promotion, arrived, tier.name, self._clock())
                promotion.end_wait_if_done()

    def check_integrity(self) -> None:
        """Raises IntegrityError if pins and promotions do not match, or a promised block is not in the host."""
        self._pins.check_integrity(self._promotions.values())
        for promotion in self._promotions.values():
            if promotion.state is PromotionState.RELEASED:
                raise IntegrityError("a promotion was released and is still kept")
            if promotion.is_waiting != bool(promotion.wanted.keys or promotion.reading):
                raise IntegrityError(f"a promotion is {promotion.state.name} and does not match its blocks")
        self._queue.check_integrity(self._promotions.values())
        if self._num_free < 0:
            raise IntegrityError("more blocks were promoted than PROMOTION_SHARE allows")


def _explain_failures(tier: TierState, failed: Sequence[TierResult], reasons: MissMemory) -> None:
    corrupt = [result.key for result in failed if result.error is TierError.CORRUPT]
    unread = [result.key for result in failed if result.error in (TierError.IO, TierError.NO_SPACE, TierError.AWAY)]
    # Others have evicted it since the lookup, or this process has deleted it.
    reasons.record([result.key for result in failed if result.error is TierError.GONE], MissReason.EVICTED)
    for keys, counter, reason in (
        (corrupt, "bad_blocks", MissReason.CORRUPT),
        (unread, "read_failures", MissReason.READ_FAILED),
    ):
        tier.count(counter, len(keys))
        reasons.record(keys, reason)
