"""How fast tiers read, and whether loading or computing is faster."""

from __future__ import annotations

import pytest

from kvoffload.abc import (
    MissReason,
    ReqContext,
    TierResult,
)
from kvoffload.tiers.rates import RATE_TTL_S, ReadEstimator
from tests.tiers.rig import (
    A,
    B,
    Rig,
    chain,
)


def test_reads_at_the_same_time_count_once() -> None:
    estimator = ReadEstimator(4096)
    keys = chain("x", 8)

    def read(i: int, begun: float, ended: float) -> TierResult:
        return TierResult(keys[i], True, None, 4096, 0.001, begun, ended)

    estimator.add([read(i, 1.0, 2.0) for i in range(4)], 2.0)
    assert estimator.seconds_to_read(4) == pytest.approx(1.0), "blocks of one batch"
    for i in range(4, 8):
        estimator.add([read(i, 2.0, 3.0)], 3.0)
    assert estimator.seconds_to_read(8) == pytest.approx(2.0, rel=0.2), "reported one by one"


def test_blocks_that_others_wait_for_are_read_first() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1e6)
    keys, other, late = chain("x", 1), chain("y", 4), chain("z", 4)
    rig.store_below(keys + other + late)
    rig.tier.seconds_per_block = 0.75
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.manager.release_request(A)
    rig.manager.observe_prefill(160, 10.0)  # One block per second: four take 4 s to compute, and 3 s to read.
    assert rig.manager.lookup(other, A) is None
    assert rig.manager.lookup(late, B) == 0, "behind the others it would take 6 s"


@pytest.mark.parametrize(("seconds_per_block", "loads"), [(0.9, True), (1.1, False)])
def test_blocks_that_take_longer_to_load_than_to_compute_are_computed(seconds_per_block: float, loads: bool) -> None:
    rig = Rig(load_deadline_ms=1e6)
    keys, other = chain("x", 4), chain("y", 4)
    rig.store_below(keys + other)
    rig.tier.seconds_per_block = seconds_per_block
    rig.manager.lookup(keys[:1], A)
    rig.settle()
    rig.manager.observe_prefill(160, 10.0)  # One block of 16 tokens per second.
    found = rig.manager.lookup(other, B)
    assert found is None if loads else found == 0
    if not loads:
        assert rig.manager.explain_miss(other[0]).reason is MissReason.FASTER_TO_COMPUTE
        rig.clock.now += RATE_TTL_S + 1
        assert rig.manager.lookup(other, B) is None, "an old rate is measured again"
        assert rig.manager.lookup(keys[1:], ReqContext("c")) == 0, "by one request"


def test_load_only_if_faster_can_be_switched_off() -> None:
    rig = Rig(load_only_if_faster=False, load_deadline_ms=1e6)
    keys = chain("x", 4)
    rig.store_below(keys)
    rig.tier.seconds_per_block = 1e6
    rig.manager.lookup(keys[:1], A)
    rig.settle()
    rig.manager.observe_prefill(160, 0.001)
    assert rig.manager.lookup(keys[1:], B) is None
