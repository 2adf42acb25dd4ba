"""TierCounts: what tiers have done, by tier, and the sums over all tiers under their older names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvoffload.tiers.state import TierState

Count = Callable[[str, float], None]
"""Adds an amount to a counter of METRICS, by name."""

SUMMED = frozenset(
    {
        "read_bytes",
        "read_seconds",
        "read_failures",
        "bad_blocks",
        "write_blocks",
        "write_bytes",
        "write_seconds",
        "write_failures",
        "dropped_writes",
        "evicted_blocks",
    }
)
"""Counters ``tier_NAME`` whose sum over all tiers is counted as ``disk_NAME`` too. Deprecated."""


class TierCounts:
    """Counts since the last ``take``, under the names of METRICS: "NAME", or "NAME:TIER" for those of one tier."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._totals: dict[str, float] = {}
        """The totals that tiers keep themselves, when they were last taken."""

    def add(self, name: str, amount: float) -> None:
        self._counts[name] += amount

    def of(self, tier: str) -> Count:
        """Returns a function that adds to ``tier_NAME`` of ``tier``, by NAME."""
        return partial(self._add_to_tier, tier)

    def _add_to_tier(self, tier: str, name: str, amount: float) -> None:
        self._counts[f"tier_{name}:{tier}"] += amount
        if name in SUMMED:
            self._counts[f"disk_{name}"] += amount

    def take(self, tiers: Sequence[TierState]) -> Mapping[str, float]:
        """Returns the counts since the last call, without those that are 0, and the gauges of ``tiers``."""
        gauges = dict.fromkeys(("disk_blocks", "disk_used_bytes", "disk_bytes", "disk_off"), 0.0)
        for tier in tiers:
            medium, name = tier.tier, tier.tier.name
            self._take_total(name, "evicted_blocks", medium.num_evicted)
            self._take_total(name, "lookup_failures", medium.num_failed_lookups)
            sizes = {
                "blocks": medium.num_blocks,
                "used_bytes": medium.used_bytes,
                "capacity_bytes": medium.capacity_bytes,
            }
            gauges |= {f"tier_{gauge}:{name}": size for gauge, size in sizes.items() if size is not None}
            gauges["disk_blocks"] += sizes["blocks"] or 0
            gauges["disk_used_bytes"] += sizes["used_bytes"] or 0
            gauges["disk_bytes"] += sizes["capacity_bytes"] or 0
            gauges[f"tier_off:{name}"] = float(tier.breaker.is_off)
            is_paused = tier.breaker.is_paused or not medium.is_connected
            gauges[f"tier_paused:{name}"] = float(is_paused and not tier.breaker.is_off)
            gauges["disk_off"] = max(gauges["disk_off"], gauges[f"tier_off:{name}"])
        counts, self._counts = self._counts, defaultdict(float)
        return {**{name: count for name, count in counts.items() if count}, **gauges}

    def _take_total(self, tier: str, name: str, total: float) -> None:
        """Counts the increase of a total that the tier keeps."""
        before = self._totals.get(f"{name}:{tier}", 0.0)
        self._totals[f"{name}:{tier}"] = total
        self._add_to_tier(tier, name, total - before)
