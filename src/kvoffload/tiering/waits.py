"""Waits: until when requests wait for lower tiers, and what is pinned for them because it has arrived."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Collection
from itertools import compress

import numpy as np

from kvoffload.abc import IntegrityError, Keys, LoadStoreSpec, MissReason, OffloadKey, ReqContext, Slots, TierError
from kvoffload.tiering.common import Common
from kvoffload.tiering.health import LowerTier
from kvoffload.tiering.rates import Ended
from kvoffload.tiering.reads import Reads, Wait

MAX_WAITS = 4096
"""Requests with a Wait. Above this limit, requests use only host memory."""
FAILED = {
    TierError.CORRUPT: (MissReason.CORRUPT, "bad_blocks"),
    # Others have evicted it since the lookup, or this process has deleted it.
    TierError.GONE: (MissReason.EVICTED, ""),
    TierError.IO: (MissReason.READ_FAILED, "read_failures"),
}
"""Why a block that could not be read is missing, and what is counted. All other errors are as IO."""


class Waits:
    """Begins the waits of requests, ends each when its blocks have arrived or at its deadline, and pins in the host
    what has arrived, once for each request that waited for it, until that is released.

    If a wait needs room that others hold, the latest of the younger ones gives up its pins; if there is none, one whose
    blocks have been pinned for a whole deadline does. Its request may wait again.
    """

    def __init__(self, common: Common) -> None:
        self.num_polls = 0
        """Grows with each ``poll``."""
        self.reads = Reads(common)
        self._host = common.host
        self._tiers = common.tiers
        self._deadline_s = common.load_deadline_s
        self._counts = common.counts
        self._reasons = common.reasons
        self._clock = common.clock
        self._by_request: dict[str, Wait] = {}
        """The oldest first."""
        self._begun: OrderedDict[Wait, float] = OrderedDict()
        """When each wait began, the earliest first. Some may have ended since."""
        self._numbers = itertools.count()
        self._pins = np.zeros(common.host.num_blocks, dtype=np.int32)
        """By host slot, the waits that it is pinned for."""

    def __len__(self) -> int:
        return len(self._by_request)

    # Requests.

    def get(self, request: str) -> Wait | None:
        if self._begun:
            self._give_up_late(self._clock())
        return self._by_request.get(request)

    def may_ask(self, wait: Wait | None) -> bool:
        """Returns whether tiers are asked for a request that waits for nothing, or was looked up since the last
        poll. If not, it is answered from host memory until the next one."""
        if wait is None:
            return len(self._by_request) < MAX_WAITS
        if wait.host_only_until < self.num_polls:
            return True
        wait.host_only_until = self.num_polls
        return False

    def begin(self, wanted: dict[OffloadKey, int], request: str) -> Wait:
        """Makes the request wait for ``wanted`` too: blocks that are being read, or are in the tiers with these
        indices, which are read from the next ``poll`` on."""
        if (wait := self._by_request.get(request)) is None:
            wait = self._by_request[request] = Wait(next(self._numbers))
        if not wait.is_waiting:
            self._begun.pop(wait, None)
            self._begun[wait] = self._clock()
        wait.asked_at = self.num_polls
        self.reads.put(wait, wait.wanted | self.reads.join(wait, wanted))
        return wait

    def end(self, wait: Wait) -> None:
        """The request waits for nothing any more. What has arrived stays pinned for it."""
        self.reads.put(wait, {})
        for tier in self._tiers if wait.reading else ():
            for key in wait.reading & tier.reads.keys():
                tier.reads[key].waits.pop(wait, None)
        wait.reading.clear()

    def release(self, request: str) -> Wait | None:
        """Ends the request's wait, with its pins, and returns it."""
        if (wait := self._by_request.pop(request, None)) is not None:
            self.end(wait)
            self._begun.pop(wait, None)
            if wait.pinned:
                self._unpin(wait, wait.pinned)
        return wait

    def release_all(self) -> None:
        for request in list(self._by_request):
            self.release(request)

    def waiting_for(self, tier: LowerTier) -> set[Wait]:
        """Returns the waits for reads of ``tier``."""
        batches = set(tier.reads.values())
        return {wait for batch in batches for wait in batch.waits if not wait.reading.isdisjoint(batch.slots)}

    def abandon(self, tier: LowerTier) -> None:
        """Ends the waits for blocks of a tier that is no longer used, and of all requests with blocks that are still to
        be read: they look these up again."""
        for wait in self.waiting_for(tier):
            self._counts["late_promotions"] += 1
            self._reasons.record([key for key in wait.reading if key in tier.reads], MissReason.NOT_IN_TIME)
            wait.reading.difference_update(tier.reads)
        for wait in self.reads.queue.copy():
            self.end(wait)

    # Steps.

    def poll(self, may_take_back: bool) -> bool:
        """Ends waits whose deadline has passed and begins reads. Returns whether any were begun.

        Requests that each have some blocks pinned and want more could wait for each other. So if nothing else will make
        room (``may_take_back``), one gives up its pins.
        """
        now, has_begun = self._clock(), False
        if self._begun:
            self._give_up_late(now)
        for tier in self._tiers:
            if tier.probe:
                has_begun |= self.reads.probe(tier, now)
        if self.reads.queue:
            if may_take_back and not any(tier.num_reading for tier in self._tiers):
                self._take_back_for(self.reads.queue[0], now)
            has_begun |= self.reads.begin(self.num_polls, now)
        self.num_polls += 1
        return has_begun

    def _give_up_late(self, now: float) -> None:
        """Ends the waits whose deadline has passed: their requests get the blocks that have arrived."""
        while self._begun and now - next(iter(self._begun.values())) >= self._deadline_s:
            wait, _ = self._begun.popitem(last=False)
            if wait.is_waiting:
                self._counts["late_promotions"] += 1
                self._reasons.record([*wait.reading, *wait.wanted], MissReason.NOT_IN_TIME)
                self.end(wait)
                wait.host_only_until = math.inf

    def _take_back_for(self, wait: Wait, now: float) -> None:
        """If there is no room for ``wait``, another one gives up its pins: the latest of the younger ones, otherwise
        the latest of those whose blocks have been pinned for a whole deadline."""
        if not self.reads.num_pinned or self.reads.room > 0:
            return
        holders = [other for other in reversed(self._by_request.values()) if other.pinned and other is not wait]
        younger = (other for other in holders if other.number > wait.number)
        latest = now - self._deadline_s
        idle = (other for other in holders if not other.is_waiting and other.pinned_at <= latest)
        other = next(younger, None) or next(idle, None)
        if other is not None:
            self._unpin(other, other.pinned)

    def end_reads(self, tier: LowerTier, reads: Ended) -> None:
        """Takes in reads that have ended: blocks become ready and are pinned for the requests that wait for them, or
        are misses."""
        tier.count("read_seconds", sum(reads.seconds))
        tier.count("read_bytes", sum(reads.good.nbytes))
        now = self._clock()
        errors = {} if reads.all_ok else {each.key: each.error for each in reads.results if each.error is not None}
        for batch, keys in tier.end_reads(reads, now).items():
            good = dict(zip(keys, map(batch.slots.pop, keys), strict=True))
            if errors:
                self._host.take_back(self._host.lease([good.pop(key) for key in keys if key in errors]))
            if good:
                self._host.complete_store(self._host.lease(good.values()))
                self._counts["promoted_blocks"] += len(good)
                for other in self._tiers:
                    other.writes.stored(good.keys())
            for wait in batch.waits:
                arrived = good
                if not wait.reading.issuperset(good):
                    arrived = {key: slot for key, slot in good.items() if key in wait.reading}
                wait.reading.difference_update(keys)
                if arrived:
                    self._pin(wait, arrived, tier.name, now)
        for key, error in errors.items():
            tier.writes.note_lost(1)
            reason, counter = FAILED.get(error, FAILED[TierError.IO])
            self._reasons.record([key], reason)
            if counter:
                tier.count(counter, 1)

    # Pins.

    def _pin(self, wait: Wait, slots: dict[OffloadKey, int], tier: str, now: float) -> None:
        """Pins blocks that have just come from ``tier``, but not those that were dropped while they were read."""
        lease = self._host.lease(slots.values())
        is_pinned = self._host.pin(lease)
        new = lease.slots[is_pinned]
        self.reads.num_pinned += int(np.count_nonzero(self._pins[new] == 0))
        self._pins[new] += 1
        arrived = dict(compress(slots.items(), is_pinned.tolist()))
        wait.pinned.update(arrived)
        wait.pinned_at = now
        wait.promoted.setdefault(tier, []).extend(arrived)

    def take_pins(self, keys: Keys, context: ReqContext | None) -> LoadStoreSpec:
        """Returns a lease of ``keys``, as ``prepare_load`` does. The pins of those that have arrived for the request
        pass to it, without looking them up."""
        wait = None if context is None else self._by_request.get(context.req_id)
        if wait is None or not wait.pinned:
            return self._host.prepare_load(keys, context)
        slots = np.array([wait.pinned.get(key, -1) for key in keys], dtype=np.int64)
        others = np.flatnonzero(slots < 0)
        if len(others):
            slots[others] = self._host.prepare_load([keys[i] for i in others.tolist()], context).slots
        self._forget(wait, keys)
        return self._host.lease(slots)

    def drop(self, keys: Keys) -> None:
        """Removes the pins of ``keys`` for all requests."""
        slots = self._host.table.find(keys)
        if self._pins[slots[slots >= 0]].any():
            for wait in self._by_request.values():
                if not wait.pinned.keys().isdisjoint(keys):
                    self._unpin(wait, keys)

    def _unpin(self, wait: Wait, keys: Collection[OffloadKey]) -> None:
        slots = self._forget(wait, list(keys))
        if len(slots):
            self._host.complete_load(self._host.lease(slots))

    def _forget(self, wait: Wait, keys: Keys) -> Slots:
        """Returns the slots of those of ``keys`` that were pinned for ``wait``; the pins are the caller's."""
        pinned = wait.pinned
        slots = np.array([pinned.pop(key) for key in keys if key in pinned], dtype=np.int64)
        self._pins[slots] -= 1
        self.reads.num_pinned -= int(np.count_nonzero(self._pins[slots] == 0))
        return slots

    def check_integrity(self) -> None:
        """Raises IntegrityError if a request waits without a deadline, or for what nobody reads, or if a block that was
        promised to it can be evicted."""
        waits, pins = self._by_request.values(), np.zeros_like(self._pins)
        under_way = {key: batch.waits for tier in self._tiers for key, batch in tier.reads.items()}
        for wait in waits:
            if wait.is_waiting and wait not in self._begun:
                raise IntegrityError("a request waits without a deadline")
            if any(wait not in under_way.get(key, ()) for key in wait.reading):
                raise IntegrityError("a request waits for a block that nobody reads")
            pins[list(wait.pinned.values())] += 1
            for key, slot in wait.pinned.items():
                status = self._host.block_status(key)
                is_pinned = status is not None and status.slot == slot and status.ref_cnt > 0
                if not is_pinned and not self._host.table.dropped[slot]:
                    raise IntegrityError("a block that is pinned for a request can be evicted")
        if (pins != self._pins).any() or np.count_nonzero(pins) != self.reads.num_pinned:
            raise IntegrityError("the pins of promoted blocks do not match the requests that waited for them")
        self.reads.check_integrity(waits)
