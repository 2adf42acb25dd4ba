"""What promotions wait for: which of them is read next, since when each waits, and how tiers are given reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import compress

import numpy as np

from kvoffload.abc import IntegrityError, LookupState, OffloadKey
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering.events import Count
from kvoffload.tiering.health import TierState
from kvoffload.tiering.promotion import Located, Promotion

MAX_READS = 1024
"""Maximum number of blocks that are read from one tier at a time."""


class ReadQueue:
    """Promotions with blocks that are to be read, from ``num_tiers`` tiers."""

    def __init__(self, num_tiers: int) -> None:
        self.promotions: list[Promotion] = []
        """The oldest first. Read only."""
        self.num_blocks = np.zeros(num_tiers, dtype=np.int64)
        """Blocks that are to be read, by tier."""

    def put(self, promotion: Promotion, wanted: Located) -> None:
        """Replaces the blocks of the promotion that are to be read."""
        if not wanted.keys and not promotion.wanted.keys:
            return
        at = bisect_left(self.promotions, promotion.number, key=_number)
        if promotion.wanted.keys and not wanted.keys:
            del self.promotions[at]
        elif wanted.keys and not promotion.wanted.keys:
            self.promotions.insert(at, promotion)
        self.num_blocks -= promotion.num_wanted
        promotion.wanted = wanted
        promotion.num_wanted = np.bincount(wanted.sources, minlength=len(self.num_blocks))
        self.num_blocks += promotion.num_wanted

    def check_integrity(self, promotions: Collection[Promotion]) -> None:
        """Raises IntegrityError if these are not those of ``promotions`` that have blocks to be read."""
        if self.promotions != sorted((each for each in promotions if each.wanted.keys), key=_number):
            raise IntegrityError(
                "the queue of promotions lacks one, has one that waits for nothing, or is not in order"
            )
        num_blocks = sum((each.num_wanted for each in self.promotions), np.zeros_like(self.num_blocks))
        if (num_blocks != self.num_blocks).any():
            raise IntegrityError("the blocks in the queue of promotions are miscounted")


def _number(promotion: Promotion) -> int:
    return promotion.number


class Waits:
    """Since when requests wait for promotions."""

    def __init__(self) -> None:
        self.begun: deque[tuple[float, Promotion]] = deque()
        """When each wait began, the earliest first. Some of them have ended since."""

    def add(self, promotion: Promotion, most: int) -> None:
        """Takes in that a wait has begun. With more than ``most``, forgets those that have ended."""
        self.begun.append((promotion.since, promotion))
        if len(self.begun) > most:
            self.begun = deque((since, each) for since, each in self.begun if _goes_on(each, since))

    def take_late(self, now: float, deadline_s: float) -> Iterator[Promotion]:
        """Removes and yields those that have waited for ``deadline_s``."""
        while self.begun and now - self.begun[0][0] >= deadline_s:
            since, promotion = self.begun.popleft()
            if _goes_on(promotion, since):
                yield promotion


def _goes_on(promotion: Promotion, since: float) -> bool:
    return promotion.is_waiting and promotion.since == since


class TierReads:
    """Begins reads from ``tiers`` into slots of ``host``. A request waits for ``deadline_s``; ``count`` takes the
    counters of METRICS, by name."""

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[TierState],
        deadline_s: float,
        count: Count,
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._deadline_s = deadline_s
        self._count = count

    def num_in_time(self, tier: TierState) -> int:
        """Returns how many more blocks the tier can read within the deadline. Blocks of a tier that is not read are
        looked up in others."""
        if not tier.can_read:
            return MAX_READS
        return tier.estimator.num_blocks_within(self._deadline_s, MAX_READS) - tier.num_reading

    def begin(
        self,
        slots: dict[OffloadKey, int],
        blocks: Located,
        promotion: Promotion,
        allowed: list[int],
        now: float,
    ) -> dict[OffloadKey, int]:
        """Gives those of ``blocks`` that have slots to their tiers to read. ``promotion`` waits for them from now on.
        Returns those that these have not taken on. ``allowed``: see ``num_in_time``; it becomes less."""
        refused: dict[OffloadKey, int] = {}
        for tier in self._tiers:
            mine = slots
            if len(self._tiers) > 1:
                its = compress(blocks.keys, (blocks.sources == tier.index).tolist())
                mine = {key: slots[key] for key in its if key in slots}
            if mine:
                left = self._give(tier, mine, promotion, now) if tier.can_read else mine
                allowed[tier.index] -= len(mine) - len(left)
                refused |= left
        return refused

    def _give(
        self, tier: TierState, slots: dict[OffloadKey, int], promotion: Promotion, now: float
    ) -> dict[OffloadKey, int]:
        """Gives blocks to the tier to read into ``slots``. Returns those that it has not taken on."""
        taken = tier.tier.read(list(slots), np.fromiter(slots.values(), np.int64, len(slots)))
        promotion.reading.update(taken)
        if len(taken) == len(slots):
            tier.begin_reads(slots, (promotion,), now)
            return {}
        tier.begin_reads({key: slots[key] for key in taken}, (promotion,), now)
        refused = slots.keys() - taken
        return {key: slot for key, slot in slots.items() if key in refused}

    def readable(self, keys: list[OffloadKey]) -> Located:
        """Returns those of ``keys`` that some tier can read now, in the fastest that can."""
        sources = np.full(len(keys), -1, dtype=np.int8)
        for tier in self._tiers:
            left = np.flatnonzero(sources < 0)
            if tier.can_read and len(left):
                is_held = tier.tier.contains([keys[i] for i in left.tolist()]) == LookupState.HIT
                sources[left[is_held]] = tier.index
        return Located(keys, sources).select(sources >= 0)

    def probe(self, tier: TierState, room: int, now: float) -> bool:
        """Reads a block for no request from a tier that was paused, to see whether it works again, if there is ``room``
        for it."""
        key = tier.probe
        if key is None or not tier.read_health.may_test:
            tier.choose_probe(None, now)
            return False
        state = tier.tier.contains([key])[0]
        if state == LookupState.RETRY:
            tier.await_probe(now)
            return False
        tier.choose_probe(None, now)
        if state != LookupState.HIT or room <= 0:
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
