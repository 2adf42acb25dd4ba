"""Reads: what requests wait for from lower tiers, and which of it is read next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.abc import IntegrityError, Keys, OffloadKey
from kvoffload.abc.tier import HIT, RETRY
from kvoffload.tiering.common import Common

if TYPE_CHECKING:
    from kvoffload.tiering.health import LowerTier

PROMOTION_SHARE = 0.5
"""At most this share of the host's blocks is being read from lower tiers, or pinned for requests that waited for them.
"""
MAX_READS = 1024
"""Maximum number of blocks that are read from one tier at a time."""

_number = attrgetter("number")


@dataclass(slots=True, eq=False)
class Wait:
    """The blocks of one request that come from lower tiers: ``wanted`` are to be read, ``reading`` are under way,
    ``pinned`` have arrived and cannot be evicted. It waits for ``wanted`` and ``reading``; what further lookups of the
    poll ``asked_at`` find is added. A tier may lose what is wanted."""

    number: int
    """Grows from request to request: a higher number means that it came later."""
    asked_at: int = -1
    """How many polls there had been when a lookup last found blocks for it."""
    host_only_until: float = -1.0
    """Up to so many polls, lookups are answered from host memory. The deadline makes it infinite; the next lookup sets
    it to the present number."""
    wanted: dict[OffloadKey, int] = field(default_factory=dict)
    """The index of the tier that holds each, in the order of the chain."""
    reading: set[OffloadKey] = field(default_factory=set)
    pinned: dict[OffloadKey, int] = field(default_factory=dict)
    """Host slots, with one pin each."""
    pinned_at: float = 0.0
    """When a block was last pinned for it."""
    promoted: dict[str, list[OffloadKey]] = field(default_factory=dict)
    """By name of the tier, blocks that have arrived for it, whether or not they are still pinned."""
    chain: Keys = ()
    """The request's chain, which is offered to the tiers when the request does not wait any more."""

    @property
    def is_waiting(self) -> bool:
        return bool(self.wanted or self.reading)


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Blocks that a tier was given to read in one call."""

    slots: dict[OffloadKey, int]
    """Host slots of the blocks that are still under way."""
    waits: dict[Wait, None]
    """Those of requests that wait for some of them. Some may have stopped waiting."""


class Reads:
    """Gives the tiers what requests wait for to read into slots of the host, while there is room for it."""

    def __init__(self, common: Common) -> None:
        self.max_blocks = max(1, int(common.host.num_blocks * PROMOTION_SHARE))
        """Blocks that may be under way, or pinned for requests."""
        self.num_pinned = 0
        """Blocks that have arrived and are pinned for some request. Set by Waits."""
        self._host = common.host
        self._tiers = common.tiers
        self._deadline_s = common.load_deadline_s
        self._counts = common.counts
        self.queue: list[Wait] = []
        """The waits with blocks that are to be read, the oldest first. Read only for others."""
        self.num_queued = [0] * len(common.tiers)
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
                # No request waits for reads that hang. Their host slots are not free until the tier reports them.
                for key in shared - tier.read_health.overdue:
                    tier.reads[key].waits[wait] = None
                    wait.reading.add(key)
                wanted = {key: source for key, source in wanted.items() if key not in shared}
        return wanted

    # Reading.

    @property
    def room(self) -> int:
        """For how many more blocks the host has room now."""
        num_taken = self.num_pinned + sum([len(tier.reads) for tier in self._tiers])
        return min(self.max_blocks - num_taken, self._host.num_available_blocks)

    def begin(self, num_polls: int, now: float) -> bool:
        """Begins to read what is queued. Returns whether anything was begun. A tier may have lost what was found before
        poll ``num_polls``."""
        has_begun = False
        # What each tier can still read within the deadline. Blocks of one that is not read are looked up in others.
        allowed = [
            tier.estimator.num_blocks_within(self._deadline_s, MAX_READS) - tier.num_reading
            if tier.can_read
            else MAX_READS
            for tier in self._tiers
        ]
        for wait in self.queue.copy():
            room = self.room
            if room <= 0 or not any(n > 0 < queued for n, queued in zip(allowed, self.num_queued, strict=True)):
                break
            has_begun |= self._read(wait, room, allowed, wait.asked_at == num_polls, now)
        return has_begun

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
        slots = self._allocate(blocks)
        if slots is None:
            self.put(wait, blocks | later)
            return False
        for tier in self._tiers:
            mine = {key: slot for key, slot in slots.items() if blocks[key] == tier.index}
            if mine and tier.can_read:
                taken = tier.read(mine, (wait,), now)
                wait.reading.update(taken)
                allowed[tier.index] -= len(taken)
                slots = {key: slot for key, slot in slots.items() if key not in tier.reads}
        if slots:
            # Those that some tier still has are tried again.
            self._host.take_back(self._host.lease(slots.values()))
            later = self._readable(slots) | later
        self.put(wait, later)
        return True

    def _allocate(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int] | None:
        """Returns slots for those of ``keys`` that the host lacks; None if it has no room."""
        output = self._host.allocate(list(keys))
        if output is None:
            return None
        self._counts["evicted_blocks"] += len(output.evicted_keys)
        return dict(zip(output.keys_to_store, output.store_spec.slots.tolist(), strict=True))

    def _readable(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int]:
        """Returns those of ``keys`` that some tier can read now, with the fastest that can."""
        sources = dict.fromkeys(keys, -1)
        for tier in self._tiers:
            left = [key for key, source in sources.items() if source < 0] if tier.can_read else []
            for i in np.flatnonzero(tier.tier.contains(left) == HIT).tolist() if left else ():
                sources[left[i]] = tier.index
        return {key: source for key, source in sources.items() if source >= 0}

    def probe(self, tier: LowerTier, now: float) -> bool:
        """Reads a block for no request from a tier that was paused, to see whether it works again, if there is room
        for it."""
        keys = tier.probe
        if not tier.read_health.may_test:
            tier.probe = ()
            return False
        states = tier.tier.contains(keys)
        held, unanswered = np.flatnonzero(states == HIT), [keys[i] for i in np.flatnonzero(states == RETRY).tolist()]
        if unanswered and not len(held):
            if not any(tier.questions.find_late(unanswered, now)[0]):
                return False
            tier.read_health.lookups_failed(1, now)
        tier.probe = ()
        slots = self._allocate([keys[int(held[0])]]) if len(held) and self.room > 0 else None
        if not slots:
            return False
        if taken := tier.read(slots, (), now):
            tier.read_health.begin_test(taken[0])
        else:
            self._host.take_back(self._host.lease(slots.values()))
        return bool(taken)

    def check_integrity(self, waits: Collection[Wait]) -> None:
        """Raises IntegrityError if these are not those of ``waits`` that have blocks to be read, or if too many blocks
        were promoted."""
        if self.queue != sorted((wait for wait in waits if wait.wanted), key=_number):
            raise IntegrityError("the queue of reads lacks a wait, has one that wants nothing, or is not in order")
        sources = [source for wait in self.queue for source in wait.wanted.values()]
        if self.num_queued != [sources.count(tier) for tier in range(len(self._tiers))]:
            raise IntegrityError("the blocks that are to be read are miscounted")
        if self.num_pinned + sum(len(tier.reads) for tier in self._tiers) > self.max_blocks:
            raise IntegrityError("more blocks were promoted than PROMOTION_SHARE allows")


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
