"""Curves equal replays, request by request."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.synthetic import generate
from kvoffload.lab.curves import LRUCurve, hit_curve
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.trace import Trace
from tests.lab.traces import make_trace


def random_trace(seed: int, requests: int = 60) -> Trace:
    """Returns chains of a random tree, which share prefixes, and unrelated chains, some longer than most caches."""
    rng = random.Random(seed)
    chains = []
    for _ in range(requests):
        if rng.random() < 0.7:
            chain, block = [], 0
            for _ in range(rng.randrange(12)):
                block = 3 * block + rng.randrange(1, 3)
                chain.append(block)
        else:
            chain = rng.sample(range(10**6, 10**6 + 30), rng.randrange(20))
        chains.append(chain)
    tokens = [max(0, 4 * len(chain) - rng.randrange(4)) for chain in chains]
    prompts = [rng.randrange(len(chain) + 1) if rng.random() < 0.5 else len(chain) for chain in chains]
    return make_trace("random", 4, range(requests), tokens, [0] * requests, chains, prompts)


def replayed(trace: Trace, policy: str, capacity: int) -> list[int]:
    tokens: list[int] = replay(trace, ReplayConfig(policy, capacity)).host_tokens.tolist()
    return tokens


# LRU.


def test_a_curve_computed_by_hand() -> None:
    trace = make_trace("by hand", 10, range(4), [30, 20, 25, 30], [0] * 4, [[1, 2, 3], [1, 4], [1, 2, 3], [1, 4, 5]])
    curve = LRUCurve(trace)
    never = curve.NEVER
    # The stack after each request: 1 2 3; 1 4 2 3; 1 2 3 4; 1 4 5 2 3.
    assert curve.needed.tolist() == [never, never, never, 1, never, 1, 3, 4, 1, 4, never]
    assert curve.hit_tokens(3).tolist() == [0, 10, 20, 10]
    assert curve.hit_tokens(4).tolist() == [0, 10, 25, 20]
    assert curve.total_hit_tokens().tolist() == [0, 30, 30, 40, 55, 55]


@pytest.mark.parametrize("seed", range(4))
def test_lru_equals_a_replay_of_random_traces(seed: int) -> None:
    trace = random_trace(seed)
    curve = LRUCurve(trace)
    totals = curve.total_hit_tokens()
    for capacity in (*range(1, 40, 3), trace.num_distinct, 10 * trace.num_distinct):
        expected = replayed(trace, "lru", capacity)
        assert curve.hit_tokens(capacity).tolist() == expected
        assert totals[min(capacity, trace.num_distinct)] == sum(expected)


def test_the_comparison_can_fail() -> None:
    """Control: another policy or capacity gives other hits."""
    trace = random_trace(0)
    assert LRUCurve(trace).hit_tokens(16).tolist() != replayed(trace, "arc", 16)
    assert LRUCurve(trace).hit_tokens(16).tolist() != replayed(trace, "lru", 24)


def test_a_chain_that_repeats_a_block() -> None:
    chains = [[1, 2, 1, 3], [7, 8, 9], [1, 2, 1, 3], [3, 1], [5, 6, 7, 5], [2, 8, 6]]
    trace = make_trace("twice", 1, range(6), [4, 3, 4, 2, 4, 3], [0] * 6, chains)
    for capacity in (4, 5, 6):
        assert LRUCurve(trace).hit_tokens(capacity).tolist() == replayed(trace, "lru", capacity)


def test_long_and_empty_traces() -> None:
    none = make_trace("none", 16, [], [], [], [])
    assert LRUCurve(none).total_hit_tokens().tolist() == [0]
    assert LRUCurve(none).hit_tokens(5).tolist() == []
    # 200,000 requests of one block each: an algorithm that is not near linear would not end.
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.3, 200_000) % 50_000
    trace = make_trace("long", 1, np.arange(len(ids)).tolist(), [1] * len(ids), [0] * len(ids), ids[:, None].tolist())
    totals = LRUCurve(trace).total_hit_tokens()
    assert (np.diff(totals) >= 0).all()
    assert totals[-1] == len(ids) - trace.num_distinct


# Other policies.


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_curve_has_the_hits_of_replays(policy: str) -> None:
    trace = generate("chat", 500)
    seen: list[float] = []
    curve = hit_curve(trace, policy, [300, 100, 100], processes=1, on_progress=seen.append)
    assert curve.capacities == (100, 300)
    assert [tokens.tolist() for tokens in curve.hit_tokens] == [replayed(trace, policy, c) for c in (100, 300)]
    asked = int(trace.input_tokens.sum())
    assert curve.hit_pct.tolist() == [100 * int(tokens.sum()) / asked for tokens in curve.hit_tokens]
    assert policy == "lru" or (seen == sorted(seen) and seen[-1] == pytest.approx(1.0))
