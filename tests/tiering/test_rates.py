"""How fast tiers read, and whether loading or computing is faster."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvoffload.abc import MissReason, TierResult
from kvoffload.tiering.lookup import RATE_TTL_S, num_worth_loading
from kvoffload.tiering.rates import Ended, ReadEstimator
from tests.tiering.rig import A, B, Rig, below, chain


def test_reads_at_the_same_time_count_once() -> None:
    estimator = ReadEstimator(4096)
    keys = chain("x", 8)

    def read(i: int, begun: float, ended: float) -> TierResult:
        return TierResult(keys[i], True, None, 4096, 0.001, begun, ended)

    estimator.add(Ended([read(i, 1.0, 2.0) for i in range(4)]), 2.0)
    assert estimator.seconds_to_read(4) == pytest.approx(1.0), "blocks of one batch"
    for i in range(4, 8):
        estimator.add(Ended([read(i, 2.0, 3.0)]), 3.0)
    assert estimator.seconds_to_read(8) == pytest.approx(2.0, rel=0.2), "reported one by one"


def test_blocks_that_others_wait_for_are_read_first() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1e6)
    other, late = chain("y", 4), chain("z", 4)
    rig.store_below(other + late)
    rig.measure(0.75)  # Four take 4 s to compute, and 3 s to read.
    assert rig.manager.lookup(other, A) is None
    assert rig.manager.lookup(late, B) == 0, "behind the others it would take 6 s"


@pytest.mark.parametrize(("seconds_per_block", "loads"), [(0.9, True), (1.1, False)])
def test_blocks_that_take_longer_to_load_than_to_compute_are_computed(seconds_per_block: float, loads: bool) -> None:
    rig = Rig(load_deadline_ms=1e6)
    keys, other = chain("x", 4), chain("y", 4)
    rig.store_below(keys + other)
    rig.measure(seconds_per_block)
    found = rig.manager.lookup(other, B)
    assert found is None if loads else found == 0
    if not loads:
        assert rig.manager.explain_miss(other[0]).reason is MissReason.FASTER_TO_COMPUTE
        rig.clock.now += RATE_TTL_S + 1
        assert rig.manager.lookup(other, B) is None, "an old rate is measured again"
        assert rig.manager.lookup(keys[1:], A) == 0, "by one request"


def test_load_only_if_faster_can_be_switched_off() -> None:
    rig, keys = below(4, load_only_if_faster=False, load_deadline_ms=1e6)
    rig.measure(1e6)
    assert rig.manager.lookup(keys, A) is None


# Load or compute, by tier.

C = 0.1
"""Seconds that one block takes to compute."""


def measured(seconds_per_block: float | None, at: float = 100.0) -> ReadEstimator:
    estimator = ReadEstimator(4096)
    if seconds_per_block is not None:
        keys = chain("m", 10)
        begun = at - seconds_per_block * 10
        estimator.add(Ended([TierResult(key, True, None, 4096, 0.0, begun, at) for key in keys]), at)
    return estimator


def worth(sources: list[int], rates: list[float | None], ahead: list[int] | None = None, now: float = 100.0) -> int:
    estimators = [measured(rate) for rate in rates]
    return num_worth_loading(C, np.array(sources, np.int8), ahead or [0] * len(rates), estimators, now)


FAST, SLOW = C / 10, 10 * C


def test_a_run_is_cut_as_trying_every_length_would_cut_it() -> None:
    rng = Random(0)
    for _ in range(300):
        rates = [rng.choice((FAST, 0.9 * C, 1.3 * C, SLOW)) for _ in range(3)]
        ahead = [rng.choice((0, 1, 7)) for _ in range(3)]
        sources = [rng.randrange(3) for _ in range(rng.randint(1, 12))]

        def seconds(
            n: int, sources: list[int] = sources, ahead: list[int] = ahead, rates: list[float] = rates
        ) -> float:
            loading = [(ahead[t] + sources[:n].count(t)) * rates[t] for t in range(3) if t in sources[:n]]
            return max(loading, default=0.0) + (len(sources) - n) * C

        found = worth(sources, [*rates], ahead)
        assert seconds(found) == pytest.approx(min(map(seconds, range(len(sources) + 1))))


def test_an_outdated_rate_is_measured_again_by_an_idle_tier() -> None:
    later = 100.0 + RATE_TTL_S + 1
    assert worth([0, 0], [SLOW], now=later) == 2
    assert worth([0, 0], [SLOW], ahead=[1], now=later) == 0
    assert worth([0, 0, 1, 1], [FAST, None]) == 4, "an unknown rate is measured"


def test_a_slow_tier_does_not_keep_a_fast_one_from_being_read() -> None:
    rig = Rig(host_blocks=32, num_tiers=2, load_deadline_ms=1e6)
    keys = chain("x", 8)
    rig.store(keys)
    rig.settle(8)
    rig.host.reset()
    rig.tiers[0].delete(keys[4:])
    for tier, seconds_per_block in zip(rig.tiers, (0.1, 30.0), strict=True):
        rig.measure(seconds_per_block, tier)
    rig.tiers[1].reads.clear()
    assert rig.manager.lookup(keys, B) is None
    rig.settle()
    assert rig.manager.lookup(keys, B) == 4, "the rest is computed"
    assert rig.tiers[1].reads == []
    assert rig.manager.explain_miss(keys[4]).reason is MissReason.FASTER_TO_COMPUTE
