"""The bound: Belady's rule on single blocks, and no policy finds more on chains."""

from __future__ import annotations

from benchmarks.bound import found_by_bound
from benchmarks.synthetic import generate
from kvoffload.lab.replay import ReplayConfig, replay
from tests.lab.traces import make_trace


def hits(uses: list[int], blocks: int) -> int:
    count = len(uses)
    trace = make_trace("t", 16, list(range(count)), [16] * count, [1] * count, [[block] for block in uses])
    return int((found_by_bound(trace, blocks)[0] > 0).sum())


def test_the_block_that_is_needed_last_leaves_or_is_not_stored() -> None:
    """Belady's own example has 7 faults in 12 uses with 3 blocks; that a new block may be refused saves none there."""
    assert hits([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5], 3) == 5
    assert hits([1, 2, 3, 1], 1) == 1


def test_no_policy_finds_more() -> None:
    trace = generate("agent", 300)
    for blocks in (trace.num_distinct // 50, trace.num_distinct // 5):
        bound = found_by_bound(trace, blocks)[0].sum()
        for policy in ("lru", "arc", "auto"):
            assert replay(trace, ReplayConfig(policy, blocks)).host_hit_tokens <= bound
