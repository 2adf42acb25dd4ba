"""UnwrittenPins: what a tier is to retain or hand over, and has not got yet, stays in host memory until it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import compress, takewhile
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.abc import HandedOver, Hints, IntegrityError, Keys, OffloadKey, Retained, RetainRefusal, Tier
from kvoffload.abc.tier import HIT
from kvoffload.tiering.plan import ChainLayout

if TYPE_CHECKING:
    from kvoffload.tiering.chains import Backlog
    from kvoffload.tiering.common import Common
    from kvoffload.tiering.health import LowerTier

UNWRITTEN_SHARE = 0.125
"""At most this share of the host's blocks waits, pinned, to be written to such tiers."""
WRITE_WITHIN_S = 30.0
"""A block that was not written within this time is not pinned any more, and not retained."""
_NOT_PINNED = -1


class UnwrittenPins:
    """Pins blocks in the host until the tiers to which they were promised have them, see PromisedBlocks."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._host = common.host
        self._layout = ChainLayout(common.settings.groups)
        self.most = max(1, int(common.host.num_blocks * UNWRITTEN_SHARE))
        self.slots: dict[OffloadKey, int] = {}
        """Host slots, read only for others; _NOT_PINNED while a block is being copied to the host."""

    def retain_below(self, keys: Keys, hints: Hints, in_host: Retained) -> Retained:
        """Retains ``keys`` in the first tier whose quota has room for them, if the host, which has answered
        ``in_host``, has none. What the tier has not got yet stays in host memory until it is written. Or ends what the
        session of ``hints`` has retained."""
        asked = [tier for tier in self._common.tiers if not tier.is_off]
        if hints.drop or not hints.retain_s:
            for tier in asked if hints.session is not None else ():
                tier.tier.retain((), hints.session, 0.0)
            return in_host
        if in_host.refusal in (None, RetainRefusal.NOTHING):
            return in_host
        answer = in_host
        for tier in asked:
            lacking = _lacking(tier, keys)
            may_wait = tier.takes_chains and self.num_with_room(lacking) == len(lacking)
            refusal: RetainRefusal | None = RetainRefusal.NOT_WRITTEN
            if not lacking or may_wait:
                refusal = tier.tier.retain(keys, hints.session, hints.retain_s)
            if refusal is None:
                tier.writes.promised.add(lacking)
                return Retained(None, tier.name, len(keys))
            if refusal is not RetainRefusal.NO_QUOTA:
                answer = Retained(refusal)
        return answer

    def hand_over(self, keys: Keys) -> HandedOver:
        """Promises ``keys`` to the shared tiers that can hold all of them beside what is promised there. What one has
        not got yet stays in host memory until it has, if there is room for all of that."""
        places, most = dict[str, str](), 0
        for tier in self._common.tiers:
            if tier.tier.is_shared and tier.takes_chains and tier.tier.stats().capacity_bytes != 0:
                lacking, promised = _lacking(tier, keys), tier.writes.promised
                num_waiting = self.num_with_room(lacking)
                num_here = keys.index(lacking[num_waiting]) if num_waiting < len(lacking) else len(keys)
                most_blocks = tier.tier.most_blocks(keys[0]) if keys else None
                if most_blocks is not None:
                    room = max(0, most_blocks - len(promised.deadlines.keys() - set(keys)))
                    num_here = min(num_here, len(keys) * room // self._num_written(keys))
                if num_here == len(keys):
                    places[tier.name] = tier.tier.hand_over(keys)
                    promised.add(lacking)
                most = max(most, num_here)
        return HandedOver(places, most)

    def _num_written(self, keys: Keys) -> int:
        """Returns how many blocks a tier is given so that it has ``keys``: earlier ones of groups with windows, too."""
        layout, by_group = self._layout, self._layout.split(list(keys))
        num_units = max(len(of_group) // n for of_group, n in zip(by_group, layout.blocks_per_unit, strict=True))
        return max(len(keys), num_units * layout.kv_blocks_per_unit + layout.num_states)

    def num_with_room(self, keys: Keys) -> int:
        """Returns how many of the distinct ``keys`` may be added, the first ones first. Those that wait count once."""
        new = [i for i, key in enumerate(keys) if key not in self.slots]
        room = self.most - len(self.slots)
        return new[room] if room < len(new) else len(keys)

    def entered(self, keys: Collection[OffloadKey]) -> None:
        """Takes note of blocks that became ready in the host."""
        waiting = [key for key in keys if self.slots.get(key) == _NOT_PINNED]
        ready = np.flatnonzero(self._host.table.states(waiting) == HIT).tolist()
        if ready:
            pinned = [waiting[i] for i in ready]
            self.slots.update(zip(pinned, self._host.prepare_load(pinned).slots.tolist(), strict=True))

    def release(self, keys: Collection[OffloadKey]) -> None:
        """Unpins those of ``keys`` for which no tier waits any more."""
        tiers = self._common.tiers
        over = [key for key in keys if not any(key in tier.writes.promised.deadlines for tier in tiers)]
        if slots := [slot for slot in map(self.slots.pop, over) if slot != _NOT_PINNED]:
            self._host.complete_load(self._host.lease(slots))

    def check_integrity(self) -> None:
        """Raises IntegrityError if more blocks are pinned than may be, or no tier waits for them."""
        if self.slots.keys() != {key for tier in self._common.tiers for key in tier.writes.promised.deadlines}:
            raise IntegrityError("blocks are pinned for writing for ever")
        if len(self.slots) > self.most:
            raise IntegrityError("more blocks are pinned for writing than may be")


def _lacking(tier: LowerTier, keys: Keys) -> list[OffloadKey]:
    return list(compress(keys, (tier.tier.contains(keys) != HIT).tolist()))


class PromisedBlocks:
    """What ``tier`` is to retain or hand over and has not got yet, for at most WRITE_WITHIN_S, out of ``backlog``."""

    def __init__(self, common: Common, backlog: Backlog, tier: Tier) -> None:
        self._pins = common.unwritten
        self._backlog = backlog
        self._tier = tier
        self._clock = common.clock
        self.deadlines: OrderedDict[OffloadKey, float] = OrderedDict()
        """Read only for others. The first to end first."""

    def add(self, keys: Collection[OffloadKey]) -> None:
        """The tier is promised ``keys`` from now on; see ``UnwrittenPins.num_with_room``."""
        deadline = self._clock() + WRITE_WITHIN_S
        for key in keys:
            self.deadlines[key] = deadline
            self.deadlines.move_to_end(key)
            self._pins.slots.setdefault(key, _NOT_PINNED)
        self._pins.entered(keys)

    def written(self, keys: Collection[OffloadKey]) -> None:
        """The tier has ``keys`` now."""
        ended = [key for key in keys if self.deadlines.pop(key, None) is not None]
        if ended:
            self._backlog.settle(ended)
            self._pins.release(ended)

    def give_up(self, keys: Collection[OffloadKey]) -> None:
        """Those of ``keys`` that the tier has not got yet will not be written: it does not retain them any more."""
        lost = [key for key in keys if key in self.deadlines]
        if lost:
            self.written(lost)
            self._tier.retain(lost, None, 0.0)

    def expire(self) -> None:
        """Gives up the blocks that were not written in time."""
        now = self._clock()
        self.give_up(list(takewhile(lambda key: self.deadlines[key] <= now, self.deadlines)))
