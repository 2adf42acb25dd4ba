"""TierSteps: what is done with tiers in every step of the engine, and while it waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np

from kvoffload.abc import OffloadKey, TierResult
from kvoffload.cache.bills import MovedBytes
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering.health import TierState
from kvoffload.tiering.plan import Bools
from kvoffload.tiering.rates import Origins, by_direction
from kvoffload.tiering.requests import RequestChains
from kvoffload.tiering.waits import Waits

logger = logging.getLogger(__name__)

MAX_LOOKS = 64
"""How often an idle step looks for results."""
SERVED_WITHOUT = "requests are served from host memory or computed from here on"


class TierSteps:
    """Takes in what ``tiers`` have ended, begins reads and writes, and switches off tiers that have a fault."""

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[TierState],
        waits: Waits,
        chains: RequestChains,
        origins: Origins,
        moved: MovedBytes | None,
        clock: Callable[[], float],
    ) -> None:
        self.is_off = not tiers
        """Whether all tiers are off."""
        self.may_change = False
        """Whether lookups may have another result in the next step in any case: a tier did not know yet whether it
        holds a block, or was switched off."""
        self.on_device: set[OffloadKey] = set()
        """What the device holds of the requests that have ended, if ``host`` does not repeat it."""
        self.moved = moved
        self._host = host
        self._tiers = tiers
        self._waits = waits
        self._chains = chains
        self._origins = origins
        self._clock = clock

    def poll(self) -> bool:
        """Does what there is to do now. Returns whether a lookup may have another result now."""
        changed = False
        for tier in self._tiers:
            results = tier.tier.poll()
            if results:
                changed |= self._take_in(tier, results)
            tier.update(self._clock())
            if tier.read_health.was_paused:
                tier.read_health.was_paused, changed = False, True
                self._waits.abandon(tier)
            if tier.tier.fault is not None:
                self.switch_off(tier, tier.tier.fault)
        changed |= self._waits.poll(may_take_back=not changed)
        self._chains.write()
        return changed | self.may_change

    def _take_in(self, tier: TierState, results: Sequence[TierResult]) -> bool:
        """Takes in transfers of a tier that have ended. Returns whether there were reads."""
        reads, writes = by_direction(results)
        if writes.keys:
            tier.end_writes(writes, self._clock())
            if not self.on_device.isdisjoint(writes.keys):
                self.note_device([key for key in writes.keys if key in self.on_device])
        if reads.keys:
            self._waits.end_reads(tier, reads)
            if tier.index:
                self._origins.arrived((result.key for result in reads.results if result.ok), tier.index)
        for ended, health in ((writes, tier.write_health), (reads, tier.read_health)):
            health.judge(ended, self._clock())
            if self.moved is not None:
                self.moved.add(tier.name, ended.good.keys, ended.good.nbytes)
        return bool(reads.keys)

    def note_device(self, held: Sequence[OffloadKey] = (), left: Sequence[OffloadKey] = ()) -> None:
        """See ``OffloadingManager.note_device``. Of what the device holds, blocks leave the host first when all tiers
        have them."""
        self.on_device.difference_update(left)
        self.on_device.update(held)
        self._host.note_device(list(compress(held, self.are_written(held).tolist())) if held else [], left)

    def are_written(self, keys: Sequence[OffloadKey]) -> Bools:
        """Returns which of ``keys`` all tiers hold, or will not be given."""
        written = np.ones(len(keys), dtype=np.bool_)
        for tier in self._tiers:
            if not tier.is_off:
                written &= tier.writes.is_done(keys)
        return written

    def wait(self, timeout_s: float) -> bool:
        """Waits for tiers and polls them. Returns whether a lookup may have another result now."""
        changed = False
        for tier in self._tiers:
            waits = self._waits.waiting_for(tier) if tier.reads else ()
            for _ in range(MAX_LOOKS if waits else 0):
                begun = self._clock()
                tier.tier.wait(timeout_s)
                changed |= self.poll()
                timeout_s -= self._clock() - begun
                if timeout_s <= 0 or not all(wait.is_waiting for wait in waits):
                    return changed
            is_asked = self.may_change and tier is self._tiers[-1]
            if not waits and (tier.writes.is_busy or is_asked):
                tier.tier.wait(timeout_s)
                return changed | self.poll()
        return changed

    def switch_off(self, tier: TierState, reason: str, effect: str = SERVED_WITHOUT) -> None:
        """Stops reading and writing the tier, for good. Logs ``reason`` and ``effect``."""
        if not tier.is_off:
            tier.switch_off()
            self.is_off = all(each.is_off for each in self._tiers)
            logger.error("kvoffload: THE %s TIER IS OFF: %s; %s", tier.name.upper(), reason, effect)
            tier.writes.clear()
            self._waits.abandon(tier)
            self.may_change = True
