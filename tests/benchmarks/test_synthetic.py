"""Synthetic workloads have the documented properties, and no policy finds more in them than the bound."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.bound import found_by_bound
from benchmarks.synthetic import KINDS, generate
from kvoffload.lab.replay import ReplayConfig, replay
from tests.lab.traces import make_trace

ALL = pytest.mark.parametrize("kind", KINDS)


@ALL
def test_the_same_options_give_the_same_trace(kind: str) -> None:
    a, b = generate(kind, 300, seed=5), generate(kind, 300, seed=5)
    for name in ("times", "input_tokens", "output_tokens", "blocks", "offsets", "ids", "prompt_blocks"):
        assert np.array_equal(getattr(a, name), getattr(b, name))
    other = generate(kind, 300, seed=6)
    assert not np.array_equal(a.times, other.times)
    assert not np.array_equal(a.input_tokens, other.input_tokens)
    # On every machine, and a longer one begins like it.
    assert generate("chat", 4, seed=1).input_tokens.tolist() == [971, 1007, 953, 1325]
    short, long = (generate(kind, n) for n in (100, 400))
    assert (short.num_requests, long.num_requests) == (100, 400)
    assert np.array_equal(long.times[:100], short.times)
    assert np.array_equal(long.blocks[: short.num_accesses], short.blocks)


@ALL
def test_the_trace_is_valid(kind: str) -> None:
    trace = generate(kind, 500, block_tokens=64)
    assert trace.block_tokens == 64
    assert (np.diff(trace.times) >= 0).all()
    assert (trace.input_tokens >= 1).all()
    assert np.array_equal(trace.prompt_blocks, trace.input_tokens // 64)
    assert np.array_equal(np.diff(trace.offsets), (trace.input_tokens + trace.output_tokens - 1) // 64)
    # A block's id determines its predecessor.
    before: dict[int, int] = {}
    for r in range(trace.num_requests):
        chain = trace.chain(r).tolist()
        for previous, block in zip([-1, *chain], chain, strict=False):
            assert before.setdefault(block, previous) == previous


def test_the_turns_of_a_session_continue_it() -> None:
    for kind in ("chat", "agent"):
        trace = generate(kind, 300)
        assert 1 < trace.num_sessions < 300
        for session in range(trace.num_sessions):
            turns = np.flatnonzero(trace.sessions == session).tolist()
            for turn, after in pairwise(turns):
                prompt = trace.chain(turn)[: trace.prompt_blocks[turn]]
                assert trace.chain(after)[: len(prompt)].tolist() == prompt.tolist()
    assert generate("documents", 50).num_sessions == 0


# The bound: Belady's rule on single blocks.


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
