"""Replays compared with simple models of a cache, and with results computed by hand for each tier."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from benchmarks.synthetic import generate
from kvoffload.abc import ConfigError, Hints, MissReason
from kvoffload.cache.policies import BUILTIN
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.config import HostContents
from kvoffload.lab.curves import LRUCurve, hit_curve
from kvoffload.lab.device import DeviceCache
from kvoffload.lab.model import ModelShape
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import ReplayConfig, ReplayResult, replay, replay_many
from kvoffload.lab.trace import Trace
from tests.lab.traces import TRACES, make_trace, needs_traces

SIZE = 16
"""Tokens per block."""


def make(chains: Sequence[Sequence[int]], inputs: Sequence[int] | None = None, **more: object) -> Trace:
    """Returns a trace with one request per second; by default every block is whole."""
    n = len(chains)
    tokens = [len(chain) * SIZE for chain in chains] if inputs is None else inputs
    return make_trace("made", SIZE, list(map(float, range(n))), tokens, [0] * n, chains, **more)  # type: ignore[arg-type]


def random_trace(seed: int, requests: int = 300) -> Trace:
    """Returns chains of random trees: equal ids mean an equal prefix."""
    rng = Random(seed)
    chains = []
    for _ in range(requests):
        node, chain = rng.randrange(6), []
        for _ in range(rng.randint(1, 12)):
            chain.append(node)
            node = node * 3 + 7 + rng.randrange(2) * (rng.random() < 0.3)
        chains.append(chain)
    return make(chains, [len(chain) * SIZE - rng.randrange(SIZE) for chain in chains])


@pytest.mark.parametrize("disk_blocks", [0, 20])
def test_hints_reach_the_host_and_the_disk(disk_blocks: int) -> None:
    """After two requests with chains that are used once comes one with a chain that returns."""
    once = [i for i in range(42) if i % 3]
    trace = make([[10 * i + 20 + k for k in range(4)] if i in once else [1, 2, 3, 4] for i in range(42)])
    config = ReplayConfig("lru", 9, disk_blocks=disk_blocks)
    without, named, dropped = (
        replay(trace, config, hints=hints)
        for hints in (
            None,
            [Hints(2 + i) for i in range(42)],
            [Hints(3 + i, drop=True) if i in once else Hints(2) for i in range(42)],
        )
    )
    assert named.host_tokens.tolist() == without.host_tokens.tolist()
    assert dropped.host_hit_tokens == 13 * 4 * SIZE > 2 * without.host_hit_tokens
    if disk_blocks:
        assert dropped.tiers[-1].written_bytes < without.tiers[-1].written_bytes / 10


def plain_lru(trace: Trace, capacity: int) -> list[int]:
    """Returns the prefix-hit tokens of each request."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in range(trace.num_requests):
        chain = trace.chain(request).tolist()
        hits = 0
        while hits < len(chain) and chain[hits] in cache:
            hits += 1
        found.append(min(hits * trace.block_tokens, int(trace.input_tokens[request])))
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found


@pytest.mark.parametrize("capacity", [1, 5, 17, 60, 1 << 20])
def test_lru_agrees_with_a_simple_model(capacity: int) -> None:
    trace = random_trace(capacity)
    result = replay(trace, ReplayConfig("lru", capacity))
    assert result.host_tokens.tolist() == plain_lru(trace, capacity)
    assert result.prefix_hit_tokens == sum(plain_lru(trace, capacity))
    assert (result.requests, result.accesses) == (trace.num_requests, trace.num_accesses)


class HeadFirst(LRUPolicy):
    """Evicts chains from their head."""

    def reorder(self, slots: np.ndarray, new: np.ndarray) -> None:
        super().reorder(slots[::-1], new[::-1])


def test_the_simple_model_would_notice_a_wrong_order() -> None:
    """Control: chains that are evicted from their head have fewer hits."""
    trace = random_trace(1)
    result = replay(trace, ReplayConfig(f"{__name__}:HeadFirst", 17))
    assert result.host_tokens.tolist() != plain_lru(trace, 17)


@needs_traces
def test_known_figures_of_a_public_trace() -> None:
    trace = read_trace(TRACES / "mooncake_synthetic.jsonl.gz")
    result = replay(trace, ReplayConfig("lru", trace.num_distinct // 10))
    assert result.prefix_hit_tokens_pct == pytest.approx(26.7, abs=0.05)


# Counts.


def test_hit_tokens_are_those_of_leading_blocks_and_end_with_the_prompt() -> None:
    result = replay(make([[1, 2, 3], [1, 2, 3]], [40, 40]), ReplayConfig("lru", 8))
    assert result.host_tokens.tolist() == [0, 40]
    assert result.prefix_hit_tokens_pct == 50.0
    result = replay(make([[1], [9], [1, 9]]), ReplayConfig("lru", 8))
    assert result.host_tokens.tolist() == [0, 0, 2 * SIZE]
    result = replay(make([[9], [1, 9]]), ReplayConfig("lru", 8))
    assert result.host_tokens.tolist() == [0, 0]
    assert result.block_hits == 1


def test_tokens_at_the_end_of_a_prompt_save_more_flops() -> None:
    trace = make([[1, 2], [1, 2, 3, 4]])
    flat, square = ModelShape("flat", 1.0, 1.0, 0.0), ModelShape("square", 1.0, 1e-9, 1.0)
    assert replay(trace, ReplayConfig("lru", 8), model=flat).saved_flops_pct == pytest.approx(100 * 2 / 6)
    assert replay(trace, ReplayConfig("lru", 8), model=square).saved_flops_pct == pytest.approx(100 * 4 / (4 + 16))


def test_outputs_are_stored_but_not_looked_up() -> None:
    trace = make([[1, 2, 3], [1, 2, 3], [1, 2, 3, 4]], [SIZE, SIZE, 4 * SIZE], prompt_blocks=[1, 1, 4])
    result = replay(trace, ReplayConfig("lru", 8))
    assert result.host_tokens.tolist() == [0, SIZE, 3 * SIZE]
    assert result.stored_blocks == 4
    assert result.writes_per_access == 4 / 10


def test_only_the_head_of_a_chain_longer_than_the_pool_is_kept() -> None:
    result = replay(make([[1, 2, 3, 4, 5]] * 2), ReplayConfig("lru", 3))
    assert result.host_tokens.tolist() == [0, 3 * SIZE]
    assert (result.stored_blocks, result.evicted_blocks) == (3, 0)


def test_reasons_of_misses() -> None:
    trace = make([[1, 2], [1, 3], [4, 5], [1, 2], [4, 5]])
    result = replay(trace, ReplayConfig("lru", 2))
    assert result.misses == {MissReason.NEVER_STORED: 3, MissReason.EVICTED: 2}
    filtered = replay(make([[1], [1], [1]]), ReplayConfig("lru", 2, store_threshold=2))
    assert filtered.misses == {MissReason.NEVER_STORED: 1, MissReason.NOT_ADMITTED: 1}
    assert filtered.host_tokens.tolist() == [0, 0, SIZE]
    assert filtered.stored_blocks == 1


# Tiers.


def inclusive(policy: str, capacity: int, device: int) -> ReplayConfig:
    return ReplayConfig(policy, capacity, device, host_contents=HostContents.INCLUSIVE)


def test_a_device_cache_serves_the_first_part_of_a_hit() -> None:
    # [7, 8] evicts the tail of [1, 2, 3] from the device.
    trace = make([[1, 2, 3], [7, 8], [1, 2, 3, 4]])
    result = replay(trace, ReplayConfig("lru", 8, device_blocks=4))
    assert result.device_tokens.tolist() == [0, 0, 2 * SIZE]
    assert result.host_tokens.tolist() == [0, 0, SIZE]
    assert replay(trace, ReplayConfig("lru", 8)).host_tokens.tolist() == [0, 0, 3 * SIZE]


def test_the_device_leaves_a_token_to_compute_and_ignores_incomplete_blocks() -> None:
    result = replay(make([[1, 2]] * 2), inclusive("lru", 8, 8))
    assert (result.device_tokens[1], result.host_tokens[1]) == (SIZE, SIZE)
    result = replay(make([[1, 2]] * 2, [2 * SIZE - 4] * 2), inclusive("lru", 8, 8))
    assert (result.device_tokens[1], result.host_tokens[1]) == (SIZE, SIZE - 4)


def exclusive(policy: str, capacity: int, device: int, threshold: int | None = None) -> ReplayConfig:
    """The default, if there is a device."""
    return ReplayConfig(policy, capacity, device, 0, threshold)


def test_exclusive_contents_are_what_has_left_the_device() -> None:
    # [7, 8] evicts the tail of [1, 2, 3] from the device, [1, 2, 3, 4] then [8] and [7].
    trace = make([[1, 2, 3], [7, 8], [1, 2, 3, 4], [7, 9]])
    result = replay(trace, exclusive("lru", 3, 4))
    assert result.device_tokens.tolist() == [0, 0, 2 * SIZE, 0]
    assert result.host_tokens.tolist() == [0, 0, SIZE, SIZE]
    # 3; 8 and 7; 4, for which 3 leaves host memory because the device has it too; 3 again, for which 8 leaves.
    assert (result.stored_blocks, result.evicted_blocks) == (5, 2)
    # The control: inclusive contents repeat the device, and neither 3 nor 7 is left when it returns.
    result = replay(trace, inclusive("lru", 3, 4))
    assert result.host_tokens.tolist() == [0, 0, 0, 0]


def test_what_leaves_for_a_long_load_is_stored_before_it() -> None:
    # [1, 2, 3] is loaded into the device blocks of [7, 8, 9, 10], and the head of that returns.
    trace = make([[1, 2, 3, 4], [7, 8, 9, 10], [1, 2, 3, 11], [7, 8, 9, 12]])
    enough = replay(trace, exclusive("lru", 16, 4))
    assert enough.host_tokens.tolist() == [0, 0, 3 * SIZE, 3 * SIZE]
    # It is loaded in pieces: what leaves for one of them takes the slots of those before it.
    short = replay(trace, exclusive("lru", 4, 4))
    assert short.host_tokens.tolist() == [0, 0, 3 * SIZE, 3 * SIZE]


def test_with_exclusive_contents_hints_concern_what_is_in_host_memory() -> None:
    """Chains of which a request is the last one leave first, and so the other one is found."""
    trace = make([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [1, 2, 3]])
    last = [Hints(3 + i, drop=True) for i in range(3)]
    found = [
        replay(trace, exclusive("lru", 6, 3), hints=[Hints(2), *others, Hints(2)]).host_tokens.tolist()
        for others in (last, [None] * 3)
    ]
    assert found == [[0, 0, 0, 0, 3 * SIZE], [0] * 5]


@pytest.mark.parametrize("seed", range(6))
def test_exclusive_contents_add_up_with_those_of_the_device(seed: int) -> None:
    """Two caches of which neither repeats the other find nearly what one of both sizes finds; inclusive ones do not."""
    trace = random_trace(seed)
    device = host = max(16, trace.num_distinct // 12)
    one = replay(trace, ReplayConfig("lru", device + host)).prefix_hit_tokens
    apart = replay(trace, exclusive("lru", host, device)).prefix_hit_tokens
    repeating = replay(trace, inclusive("lru", host, device)).prefix_hit_tokens
    assert repeating < 0.93 * one < apart


def test_exclusive_contents_need_a_device() -> None:
    assert ReplayConfig("lru", 8, 0, 8).host_contents is HostContents.INCLUSIVE
    assert ReplayConfig("lru", 8, 8, 8).host_contents is HostContents.EXCLUSIVE
    with pytest.raises(ConfigError, match="host_contents='exclusive': the size of the device's own cache is not given"):
        ReplayConfig("lru", 8, 0, 8, None, HostContents.EXCLUSIVE)


@pytest.mark.parametrize("seed", range(3))
def test_in_front_of_a_disk_exclusive_contents_spare_it_reads(seed: int) -> None:
    """The disk still gets every block, so both find the same."""
    trace = random_trace(seed)
    device = host = max(16, trace.num_distinct // 12)
    disk = trace.num_distinct
    found = {
        contents: replay(trace, ReplayConfig("lru", host, device, disk, None, contents)) for contents in HostContents
    }
    inclusive, exclusive = (found[contents] for contents in HostContents)
    assert exclusive.prefix_hit_tokens >= 0.99 * inclusive.prefix_hit_tokens
    assert exclusive.host_tokens.sum() > 1.05 * inclusive.host_tokens.sum()
    assert exclusive.disk_tokens.sum() < inclusive.disk_tokens.sum()
    written = [result.tiers[-1].written_bytes for result in (inclusive, exclusive)]
    assert written[1] == pytest.approx(written[0], rel=0.05)


def test_the_reuse_filter_judges_what_leaves_the_device() -> None:
    trace = make([[1, 2], [5, 6, 7], [1, 2], [5, 6, 7], [1, 2], [5, 6, 7]])
    assert replay(trace, exclusive("lru", 8, 3)).stored_blocks == 4
    # 1 and 2 leave the device when they were asked for three times, 6 and 7 only before.
    assert replay(trace, exclusive("lru", 8, 3, 3)).stored_blocks == 2


def test_blocks_evicted_from_the_host_are_found_on_disk() -> None:
    trace = make([[1, 2], [3, 4, 5, 6, 7, 8], [1, 2], [1, 2]])
    alone = replay(trace, ReplayConfig("lru", 6))
    assert alone.host_tokens.tolist() == [0, 0, 0, 2 * SIZE]
    result = replay(trace, ReplayConfig("lru", 6, disk_blocks=20))
    assert result.disk_tokens.tolist() == [0, 0, 2 * SIZE, 0]
    assert result.host_tokens.tolist() == [0, 0, 0, 2 * SIZE]
    host, disk = result.tiers
    assert (host.name, disk.name) == ("host", "disk")
    assert disk.hit_tokens_pct == pytest.approx(100 * 2 / 12)
    assert disk.written_bytes == 4 * disk.read_bytes > 0
    assert result.dropped_writes == 0
    assert sum(tier.hit_tokens for tier in result.tiers) == result.prefix_hit_tokens


@pytest.mark.parametrize("policy", sorted(BUILTIN))
def test_tiers_only_add_hits_for_every_policy(policy: str) -> None:
    trace = random_trace(3, requests=100)
    results = [replay(trace, ReplayConfig(policy, 40, device, disk)) for device, disk in ((0, 0), (0, 200), (20, 200))]
    for result in results:
        assert (result.device_tokens + result.host_tokens + result.disk_tokens <= trace.input_tokens).all()
        assert 0 < result.prefix_hit_tokens_pct < 100
        assert sum(result.misses.values()) <= result.requests
    assert all(result.prefix_hit_tokens > results[0].prefix_hit_tokens for result in results[1:])


# Many at once.


def same(a: ReplayResult, b: ReplayResult) -> bool:
    mine, other = a.to_dict(), b.to_dict()
    return {**mine, "seconds": 0} == {**other, "seconds": 0} and a.host_tokens.tolist() == b.host_tokens.tolist()


@pytest.mark.parametrize("processes", [1, 2])
def test_many_replays_in_order(processes: int) -> None:
    trace = random_trace(5, requests=60)
    configs = [ReplayConfig(policy, capacity) for policy in ("lru", "arc") for capacity in (8, 30)]
    shares: list[float] = []
    results = replay_many(trace, configs, processes=processes, on_progress=shares.append)
    alone = [replay(trace, config) for config in configs]
    assert all(same(one, other) for one, other in zip(results, alone, strict=True))
    assert not same(alone[0], alone[1])
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_an_error_in_another_process_is_raised() -> None:
    configs = [ReplayConfig("lru", 8), ReplayConfig("no-such-policy", 8)]
    with pytest.raises(ConfigError, match="no-such-policy"):
        replay_many(random_trace(6, requests=10), configs, processes=2)


def test_an_invalid_setting_is_an_error() -> None:
    for settings, words in (
        ({"capacity_blocks": 0}, "capacity_blocks=0: must be 1 or more"),
        ({"device_blocks": -1}, "device_blocks=-1"),
        ({"disk_blocks": -1}, "disk_blocks=-1"),
        ({"store_threshold": 1}, "store_threshold=1: must be 2 or more"),
    ):
        with pytest.raises(ConfigError, match=words):
            ReplayConfig(**{"policy": "lru", "capacity_blocks": 8, **settings})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device_blocks=2: the longest request needs 3"):
        replay(make([[1, 2, 3]]), ReplayConfig("lru", 8, device_blocks=2))
    endless = make_trace("endless", SIZE, [0], [SIZE], [1 << 40], [[1]])
    with pytest.raises(ConfigError, match=r"device_blocks=1099511627776: a replay supports at most"):
        replay(endless, ReplayConfig("lru", 8, device_blocks=1 << 40))
    empty = replay(make([]), ReplayConfig("lru", 8))
    assert empty.prefix_hit_tokens_pct == empty.saved_flops_pct == empty.writes_per_access == 0.0


# The device cache, compared with a simple model of a block pool.


@dataclass
class PlainBlock:
    content: int | None = None


class PlainPool:
    """A list of free blocks in the order of their allocation; every lookup searches it."""

    def __init__(self, num_blocks: int) -> None:
        self.free = [PlainBlock() for _ in range(num_blocks)]

    def lookup(self, chain: list[int]) -> int:
        cached = {block.content for block in self.free}
        hits = 0
        while hits < len(chain) and chain[hits] in cached:
            hits += 1
        return hits

    def serve(self, chain: list[int], hits: int, num_held: int) -> None:
        mine = [next(block for block in self.free if block.content == content) for content in chain[:hits]]
        self.free = [block for block in self.free if not any(block is one for one in mine)]
        fresh, self.free = self.free[: num_held - hits], self.free[num_held - hits :]
        for block in fresh:
            block.content = None
        for block, content in zip(fresh, chain[hits:], strict=False):
            for other in self.free + fresh:
                if other.content == content:
                    other.content = None
            block.content = content
        self.free += reversed(mine + fresh)


@pytest.mark.parametrize("seed", range(20))
def test_the_cache_agrees_with_a_simple_pool(seed: int) -> None:
    rng = Random(seed)
    num_blocks = rng.randint(8, 24)
    cache, plain = DeviceCache(num_blocks, 400), PlainPool(num_blocks)
    found = 0
    for _ in range(300):
        root, length = rng.randrange(8), rng.randint(1, 8)
        forks = rng.randrange(3)
        chain = [root * 50 + depth + (forks * 10 if depth > 3 else 0) for depth in range(length)]
        hits = cache.lookup(chain[: rng.randint(length - 1, length)])
        assert plain.lookup(chain[:hits]) == hits
        assert hits == length or plain.lookup(chain) in (hits, hits + 1)
        cache.serve(chain, hits, held := rng.randint(length, 8))
        plain.serve(chain, hits, held)
        found += hits
    assert 0 < found < 300 * 8


# Curves equal replays, request by request.


def random_chains(seed: int, requests: int = 60) -> Trace:
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
    trace = random_chains(seed)
    curve = LRUCurve(trace)
    totals = curve.total_hit_tokens()
    for capacity in (*range(1, 40, 3), trace.num_distinct, 10 * trace.num_distinct):
        expected = replayed(trace, "lru", capacity)
        assert curve.hit_tokens(capacity).tolist() == expected
        assert totals[min(capacity, trace.num_distinct)] == sum(expected)


def test_the_comparison_can_fail() -> None:
    """Control: another policy or capacity gives other hits."""
    trace = random_chains(0)
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
