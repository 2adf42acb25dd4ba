"""Counts by tier."""

from __future__ import annotations

from kvoffload.abc import TierStats
from kvoffload.observe.metrics import METRICS, Metrics
from tests.tiering.rig import SLOT_BYTES, A, Rig, SpyTier, below


def test_what_a_tier_has_done_is_counted_under_its_name() -> None:
    rig, keys = below(3)
    rig.manager.lookup(keys, A)
    rig.settle()
    counts = rig.counts()
    assert {name.partition(":")[0] for name in counts} <= METRICS.keys()
    assert counts["tier_write_blocks:memory"] == 3
    assert counts["tier_read_bytes:memory"] == 3 * SLOT_BYTES
    assert counts["tier_blocks:memory"] == 3
    assert counts["tier_capacity_bytes:memory"] == 64 * SLOT_BYTES
    assert counts["tier_off:memory"] == counts["tier_paused:read,memory"] == 0
    assert rig.manager.release_request(A) == {"memory": keys}
    assert "tier_write_blocks:memory" not in rig.counts(), "each is reported once"


def test_counters_do_not_fall_if_a_tier_counts_from_0_again() -> None:
    rig, metrics = Rig(tier_blocks=2), Metrics()
    name = "tier_evicted_blocks:memory"
    totals = []
    for num_evicted in (5, 0, 2, 2, 3):
        rig.tier.num_evicted = num_evicted
        metrics.take_in(rig.counts())
        assert metrics.take().get(name, 0) >= 0
        totals.append(metrics.snapshot()[name])
    assert totals == [5, 5, 7, 7, 8]


class Store(SpyTier):
    """A tier in a store that cannot be reached while it ``is_away``."""

    is_away = True

    def stats(self) -> TierStats:
        return super().stats()._replace(is_connected=not self.is_away)


def test_a_store_that_was_never_reached_is_paused() -> None:
    """It has no failures, because nothing is asked of it."""
    rig = Rig(tier_class=Store)
    assert rig.counts()["tier_paused:read,memory"] == 1
    assert isinstance(rig.tier, Store)
    rig.tier.is_away = False
    assert rig.counts()["tier_paused:read,memory"] == 0
