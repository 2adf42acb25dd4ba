"""TierSteps: what is done with tiers in every step of the engine, and while it waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvoffload.abc import OffloadKey, TierResult
from kvoffload.cache.bills import MovedBytes
from kvoffload.tiering.health import TierState
from kvoffload.tiering.promoter import Promoter
from kvoffload.tiering.promotion import waiting_for
from kvoffload.tiering.rates import Origins, by_direction
from kvoffload.tiering.requests import RequestChains

logger = logging.getLogger(__name__)

MAX_WAITS = 64
"""How often an idle step looks for results."""
SERVED_WITHOUT = "requests are served from host memory or computed from here on"


class TierSteps:
    """Takes in what ``tiers`` have ended, begins reads and writes, and switches off tiers that have a fault."""

    def __init__(
        self,
        tiers: Sequence[TierState],
        promoter: Promoter,
        chains: RequestChains,
        origins: Origins,
        moved: MovedBytes | None,
        clock: Callable[[], float],
        written: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        """``written`` takes the blocks of writes that have ended."""
        self.is_off = not tiers
        """Whether all tiers are off."""
        self.is_asking = False
        """Whether, since the last step, a tier did not know yet whether it holds a block that was looked up."""
        self._tiers = tiers
        self._promoter = promoter
        self._chains = chains
        self._origins = origins
        self._moved = moved
        self._clock = clock
        self._written = written
        self._has_changed = False
        """Whether something has changed for waiting requests that ``poll`` has not reported yet."""

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
                self._promoter.abandon(tier)
            if tier.tier.fault is not None:
                self.switch_off(tier, tier.tier.fault)
        changed |= self._promoter.poll(may_take_back=not changed)
        changed |= self.is_asking | self._has_changed
        self._has_changed = False
        self._chains.write()
        return changed

    def _take_in(self, tier: TierState, results: Sequence[TierResult]) -> bool:
        """Takes in transfers of a tier that have ended. Returns whether there were reads."""
        reads, writes = by_direction(results)
        if writes.keys:
            tier.end_writes(writes, self._clock())
            self._written(writes.keys)
        if reads.keys:
            self._promoter.end_reads(tier, reads)
            if tier.index:
                self._origins.arrived((result.key for result in reads.results if result.ok), tier.index)
        for ended, health in ((writes, tier.write_health), (reads, tier.read_health)):
            health.judge(ended, self._clock())
            if self._moved is not None:
                self._moved.add(tier.name, ended.good.keys, ended.good.nbytes)
        return bool(reads.keys)

    def wait(self, timeout_s: float) -> bool:
        """Waits for tiers and polls them. Returns whether a lookup may have another result now."""
        changed = False
        for tier in self._tiers:
            promotions = waiting_for(set(tier.reads.values())) if tier.reads else ()
            for _ in range(MAX_WAITS if promotions else 0):
                begun = self._clock()
                tier.tier.wait(timeout_s)
                changed |= self.poll()
                timeout_s -= self._clock() - begun
                if timeout_s <= 0 or not all(promotion.is_waiting for promotion in promotions):
                    return changed
            is_asked = self.is_asking and tier is self._tiers[-1]
            if not promotions and (tier.writes.is_busy or is_asked):
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
            self._promoter.abandon(tier)
            self._has_changed = True
