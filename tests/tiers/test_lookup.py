"""Tiers that do not answer in time."""

from __future__ import annotations

from kvoffload.tiers.lookup import MISS_TTL_S
from tests.tiers.rig import (
    A,
    B,
    Rig,
    chain,
)


def test_a_tier_that_does_not_answer_in_time_does_not_hold_the_block() -> None:
    rig = Rig(lookup_deadline_ms=100)
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.tier.unsure = True
    assert rig.manager.lookup(keys, A) is None
    assert rig.manager.poll(), "the tier must be asked again"
    rig.clock.now += 0.099
    assert rig.manager.lookup(keys, A) is None
    rig.clock.now += 0.001
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(keys, B) == 0, "a miss is remembered"
    rig.clock.now += MISS_TTL_S + 0.1
    assert rig.manager.lookup(keys, B) is None, "for a while"
    rig.tier.unsure = False
    assert rig.manager.lookup(keys, B) is None
    rig.settle()
    assert rig.manager.lookup(keys, B) == 2
