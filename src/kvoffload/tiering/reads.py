"""Which blocks are read next: those that requests wait for, of the oldest first, as many as arrive in time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.abc import IntegrityError, OffloadKey
from kvoffload.abc.tier import HIT, RETRY
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering.events import Count

if TYPE_CHECKING:
    from kvoffload.tiering.health import TierState
    from kvoffload.tiering.waits import Wait

MAX_READS = 1024
"""Maximum number of blocks that are read from one tier at a time."""


class Reads:
    """Gives ``tiers`` what requests wait for to read into slots of ``host``. A request waits for ``deadline_s``;
    ``count`` takes the counters of METRICS, by name."""

    def __init__(
        self, host: PolicyOffloadingManager, tiers: Sequence[TierState], deadline_s: float, count: Count
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._deadline_s = deadline_s
        self._count = count
        self.queue: list[Wait] = []
        """The waits with blocks that are to be read, the oldest first. Read only for others."""
        self.num_queued = [0] * len(tiers)
        """By tier, how many blocks these are."""

    # The queue.

    def put(self, wait: Wait, wanted: dict[OffloadKey, int]) -> None:
        """Replaces the blocks that are to be read for ``wait``."""
        if not wanted and not wait.wanted:
            return
        at = bisect_left(self.queue, wait.number, key=_number)
        if not wanted:
            del self.queue[at]
        elif not wait.wanted:
            self.queue.insert(at, wait)
        before, after = list(wait.wanted.values()), list(wanted.values())
        for tier in range(len(self._tiers)):
            self.num_queued[tier] += after.count(tier) - before.count(tier)
        wait.wanted = wanted

    def join(self, wait: Wait, wanted: dict[OffloadKey, int]) -> dict[OffloadKey, int]:
        """Makes ``wait`` wait for those of ``wanted`` that are being read already. Returns the others."""
        for tier in self._tiers:
            if tier.reads and (shared := tier.reads.keys() & wanted.keys()):
                for key in shared:
                    batch = tier.reads[key]
                    if not batch.is_overdue:
                        batch.waits[wait] = None
                        wait.reading.add(key)
                wanted = {key: source for key, source in wanted.items() if key not in shared}
        return wanted

    # Reading.

    def room(self, most: int) -> int:
        """Returns for how many more blocks the host has room now, if ``most`` may be under way."""
        return min(most - sum([len(tier.reads) for tier in self._tiers]), self._host.num_available_blocks)

    def begin(self, most: int, step: int, now: float) -> bool:
        """Begins to read what is queued, while at most ``most`` blocks are under way. Returns whether anything was
        begun. A tier may have lost what was found before ``step``."""
        has_begun, allowed = False, [self._num_in_time(tier) for tier in self._tiers]
        for wait in self.queue.copy():
            room = self.room(most)
            if room <= 0 or not any(n > 0 < queued for n, queued in zip(allowed, self.num_queued, strict=True)):
                break
            has_begun |= self._read(wait, room, allowed, wait.asked_in == step, now)
        return has_begun

    def _num_in_time(self, tier: TierState) -> int:
        """Returns how many more blocks the tier can read within the deadline. Blocks of a tier that is not read are
        looked up in others."""
        if not tier.can_read:
            return MAX_READS
        return tier.estimator.num_blocks_within(self._deadline_s, MAX_READS) - tier.num_reading

    def _read(self, wait: Wait, room: int, allowed: list[int], is_new: bool, now: float) -> bool:
        """Begins to read the next blocks of ``wait``, at most ``room``, and ``allowed`` of each tier, which become
        fewer. Returns False if nothing has happened."""
        room = min(room, self._host.room.num_storable(next(iter(wait.wanted))))
        blocks, later = _split(wait.wanted, room, allowed)
        if not blocks:
            return False
        blocks = self.join(wait, blocks)
        if not is_new:
            # Then no block is evicted for what a tier has lost.
            blocks = self._readable(blocks)
        output = self._host.allocate(list(blocks))
        if output is None:
            self.put(wait, blocks | later)
            return False
        self._count("evicted_blocks", len(output.evicted_keys))
        slots = dict(zip(output.keys_to_store, output.store_spec.slots.tolist(), strict=True))
        for tier in self._tiers:
            mine = {key: slot for key, slot in slots.items() if blocks[key] == tier.index}
            if mine and tier.can_read:
                taken = tier.tier.read(list(mine), np.fromiter(mine.values(), np.int64, len(mine)))
                tier.begin_reads({key: slots.pop(key) for key in taken}, (wait,), now)
                wait.reading.update(taken)
                allowed[tier.index] -= len(taken)
        if slots:
            # Those that some tier still has are tried again.
            self._host.take_back(self._host.lease(slots.values()))
            later = self._readable(slots) | later
        self.put(wait, later)
        return True

    def _readable(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int]:
        """Returns those of ``keys`` that some tier can read now, with the fastest that can."""
        sources = dict.fromkeys(keys, -1)
        for tier in self._tiers:
            left = [key for key, source in sources.items() if source < 0] if tier.can_read else []
            for i in np.flatnonzero(tier.tier.contains(left) == HIT).tolist() if left else ():
                sources[left[i]] = tier.index
        return {key: source for key, source in sources.items() if source >= 0}

    def probe(self, tier: TierState, most: int, now: float) -> bool:
        """Reads a block for no request from a tier that was paused, to see whether it works again, if there is room
        for it."""
        key = tier.probe
        if key is None or not tier.read_health.may_test:
            tier.choose_probe(None, now)
            return False
        state = tier.tier.contains([key])[0]
        if state == RETRY:
            tier.await_probe(now)
            return False
        tier.choose_probe(None, now)
        if state != HIT or most <= sum([len(tier.reads) for tier in self._tiers]):
            return False
        output = self._host.allocate([key])
        if output is None or not output.keys_to_store:
            return False
        self._count("evicted_blocks", len(output.evicted_keys))
        slots = output.store_spec.slots
        if not tier.tier.read([key], slots):
            self._host.take_back(output.store_spec)
            return False
        tier.begin_probe(key, int(slots[0]), now)
        return True

    def check_integrity(self, waits: Collection[Wait]) -> None:
        """Raises IntegrityError if these are not those of ``waits`` that have blocks to be read."""
        if self.queue != sorted((wait for wait in waits if wait.wanted), key=_number):
            raise IntegrityError("the queue of reads lacks a wait, has one that wants nothing, or is not in order")
        sources = [source for wait in self.queue for source in wait.wanted.values()]
        if self.num_queued != [sources.count(tier) for tier in range(len(self._tiers))]:
            raise IntegrityError("the blocks that are to be read are miscounted")


def _split(
    wanted: dict[OffloadKey, int], room: int, allowed: Sequence[int]
) -> tuple[dict[OffloadKey, int], dict[OffloadKey, int]]:
    """Returns the next blocks to read, at most ``room``, and at most ``allowed`` of each tier; and the others."""
    if len(wanted) <= min(room, *allowed):
        return wanted, {}
    sources, left, blocks = list(wanted.values()), list(allowed), dict[OffloadKey, int]()
    most = min(room, sum(min(max(0, n), sources.count(tier)) for tier, n in enumerate(allowed)))
    for key, tier in wanted.items():
        if len(blocks) == most:
            break
        if left[tier] > 0:
            left[tier] -= 1
            blocks[key] = tier
    return blocks, {key: tier for key, tier in wanted.items() if key not in blocks}


def _number(wait: Wait) -> int:
    return wait.number
