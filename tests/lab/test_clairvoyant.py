"""The clairvoyant policy: as good as exhaustive search, never worse than another policy, and with the known figures of
real traces."""

from __future__ import annotations

import itertools
import random

import pytest

from kvoffload.abc import IntegrityError
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import BUILTIN
from kvoffload.cache.slots import HostBackend
from kvoffload.lab.clairvoyant import clairvoyant_policy
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import CLAIRVOYANT, ReplayConfig, ReplayResult, replay
from kvoffload.lab.trace import Trace
from tests.lab.traces import TRACES, make_trace, needs_traces


def trace_of(chains: list[list[int]], prompt_blocks: list[int] | None = None) -> Trace:
    n = len(chains)
    tokens = [10 * len(chain) for chain in chains]
    return make_trace("test", 10, list(range(n)), tokens, [0] * n, chains, prompt_blocks)


def random_chains(rng: random.Random, num_requests: int, num_roots: int, longest: int) -> list[list[int]]:
    """Returns random prefixes of a few sequences."""
    return [
        [root * 100 + depth for depth in range(rng.randint(1, longest))]
        for root in (rng.randrange(num_roots) for _ in range(num_requests))
    ]


def clairvoyant(trace: Trace, capacity: int) -> ReplayResult:
    return replay(trace, ReplayConfig(CLAIRVOYANT, capacity))


def best_block_hits(chains: list[list[int]], capacity: int) -> int:
    """Returns the most block hits possible, by a search over everything that a cache could hold after each request."""
    best = {frozenset[int](): 0}
    for chain in chains:
        following: dict[frozenset[int], int] = {}
        for cached, hits in best.items():
            hits += len(cached.intersection(chain))
            offered = sorted(cached.union(chain))
            for kept in itertools.combinations(offered, min(capacity, len(offered))):
                following[frozenset(kept)] = max(hits, following.get(frozenset(kept), 0))
        best = following
    return max(best.values())


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_has_more_hits(seed: int) -> None:
    """Of single blocks, and of blocks in chains."""
    rng = random.Random(seed)
    single, capacity = [[rng.randrange(6)] for _ in range(25)], rng.randint(1, 4)
    assert clairvoyant(trace_of(single), capacity).block_hits == best_block_hits(single, capacity)
    chains, capacity = random_chains(rng, 12, 3, 3), rng.randint(3, 5)
    assert clairvoyant(trace_of(chains), capacity).block_hits == best_block_hits(chains, capacity)


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_finds_more_and_the_clairvoyant_one_writes_less(seed: int) -> None:
    trace = trace_of(random_chains(random.Random(seed), 200, 30, 12))
    bound = clairvoyant(trace, 60)
    for policy in BUILTIN:
        found = replay(trace, ReplayConfig(policy, 60))
        assert found.prefix_hit_tokens <= bound.prefix_hit_tokens
        assert found.block_hits <= bound.block_hits
    lru = replay(trace, ReplayConfig("lru", 60))
    assert lru.block_hits < bound.block_hits
    assert lru.stored_blocks > bound.stored_blocks


def test_a_block_that_is_never_used_again_evicts_nothing() -> None:
    trace = trace_of([[1], [2], [3], [2]])
    result = clairvoyant(trace, 1)
    assert (result.block_hits, result.stored_blocks, result.evicted_blocks) == (1, 2, 1)


def test_an_output_is_kept_for_later_prompts_and_is_no_use_itself() -> None:
    # Request 0 generates block 2, and request 2 has it in its prompt.
    kept = trace_of([[1, 2], [3], [1, 2]], prompt_blocks=[1, 1, 2])
    assert clairvoyant(kept, 2).block_hits == 2
    # Here block 2 is only generated again, so block 3 is worth more.
    generated = trace_of([[1, 2], [3], [1, 2], [3]], prompt_blocks=[1, 1, 1, 1])
    assert clairvoyant(generated, 2).block_hits == 2


def test_its_state_is_consistent_while_the_heap_is_rebuilt() -> None:
    trace = trace_of(random_chains(random.Random(1), 300, 5, 8))
    policy = clairvoyant_policy(trace)(12)
    manager = PolicyOffloadingManager(HostBackend(1, 12), policy)
    for request in range(trace.num_requests):
        chain = trace.keys_of(trace.chain(request))
        manager.touch(chain)
        output = manager.prepare_store(chain)
        assert output is not None
        manager.complete_store(output.keys_to_store)
        manager.check_integrity()
    manager.reset()
    manager.check_integrity()


def test_another_trace_is_an_error() -> None:
    manager = PolicyOffloadingManager(HostBackend(1, 2), clairvoyant_policy(trace_of([[1, 2], [3]]))(2))
    other = trace_of([[1, 4], [3]])
    with pytest.raises(IntegrityError, match="request 0"):
        manager.touch(other.keys_of(other.chain(0)))


@needs_traces
@pytest.mark.parametrize(
    ("name", "share", "percent"), [("mooncake_synthetic", 0.1, 51.6), ("mooncake_conversation", 0.01, 25.1)]
)
def test_known_bounds_of_real_traces(name: str, share: float, percent: float) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    result = clairvoyant(trace, int(share * trace.num_distinct))
    assert result.prefix_hit_tokens_pct == pytest.approx(percent, abs=0.05)
