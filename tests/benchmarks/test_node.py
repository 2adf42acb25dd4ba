"""The benchmark of a node: one engine finds what a replay finds, and a shared directory adds what the others wrote."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import node
from benchmarks.node import Memory, Node, Router, Seat
from benchmarks.synthetic import generate
from kvoffload.abc.tier import HIT, MISS
from kvoffload.cache.keys import make_offload_key
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.trace import Trace
from tests.lab.traces import make_trace

BLOCK_TOKENS = 256


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has 1 GiB: 200 blocks on the device, 60 in host memory and 90 on disk, per engine."""
    monkeypatch.setattr(node, "TOKEN_BYTES", node.GIB // BLOCK_TOKENS)
    for name, blocks in (("DEVICE_GIB", 200), ("HOST_GIB", 60), ("DISK_GIB", 90)):
        monkeypatch.setattr(node, name, blocks)


@pytest.mark.soak
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("router", Router)
def test_one_engine_finds_what_a_replay_finds(memory: Memory, router: Router) -> None:
    trace = generate("documents", 150)
    has_disk = memory in (Memory.SPLIT_DISK, Memory.SPLIT_SHARED)
    result = replay(trace, ReplayConfig("auto", 60, 200, 90 if has_disk else 0))
    assert result.device_hit_tokens > 0
    assert result.host_hit_tokens + result.disk_hit_tokens > 0
    served = Node(trace, 1, memory, router)
    found = served.serve()
    wanted = [result.device_hit_tokens, result.host_hit_tokens, result.disk_hit_tokens]
    assert np.array(found) / 100 * result.prompt_tokens == pytest.approx(wanted)
    assert sum(served.computed) == result.prompt_tokens - result.prefix_hit_tokens


def prompts(*chains: list[int], every_s: float = 60.0) -> Trace:
    tokens = [BLOCK_TOKENS * len(chain) for chain in chains]
    times = [every_s * i for i in range(len(chains))]
    return make_trace("t", BLOCK_TOKENS, times, tokens, [1] * len(chains), chains)


@pytest.mark.usefixtures("small")
def test_round_robin_finds_again_only_what_is_shared() -> None:
    trace = prompts([1, 2, 3], [1, 2, 3], list(range(10, 54)))
    found = {memory: Node(trace, 2, memory, Router.ROUND_ROBIN).serve() for memory in Memory}
    assert found[Memory.SPLIT] == found[Memory.SPLIT_DISK] == (0, 0, 0)
    assert found[Memory.POOL] == (0, 6, 0)
    assert found[Memory.SPLIT_SHARED] == (0, 0, 6)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("memory", Memory)
def test_the_prefix_router_finds_the_engine_and_spreads_what_is_new(memory: Memory) -> None:
    trace = prompts([1, 2, 3], [4, 5, 6], [4, 5, 6, 7], [1, 2, 3, 8])
    served = Node(trace, 2, memory, Router.PREFIX)
    assert served.serve() == pytest.approx((100 * 6 / 14, 0, 0))
    assert served.computed == [4 * BLOCK_TOKENS] * 2


@pytest.mark.usefixtures("small")
def test_the_prefix_router_leaves_out_an_engine_with_a_long_queue() -> None:
    chain = list(range(100))
    apart, together = (prompts(chain, chain, every_s=every_s) for every_s in (60.0, 0.1))
    assert Node(apart, 2, Memory.SPLIT, Router.PREFIX).serve() == pytest.approx((49.5, 0, 0))
    # 25,600 tokens take more than two seconds.
    assert Node(together, 2, Memory.SPLIT, Router.PREFIX).serve() == (0, 0, 0)


@pytest.mark.usefixtures("small")
def test_a_session_stays_on_its_engine() -> None:
    trace = make_trace(
        "t", BLOCK_TOKENS, range(4), [512] * 4, [1] * 4, [[1, 2], [3, 4], [5, 6], [1, 2]], None, ["a", "b", "c", "a"]
    )
    served = Node(trace, 2, Memory.SPLIT, Router.STICKY)
    assert sum(served.serve()) == 25
    assert served.computed == [1024, 512]


def test_a_seat_writes_to_its_own_part_and_reads_from_all() -> None:
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(4)]
    one, other = (Seat(8, 1, "lru", lambda: 0.0) for _ in range(2))
    one.others, other.others = [other], [one]
    slots = np.arange(4)
    assert one.write(keys[:2], slots[:2]) == keys[:2]
    assert one.is_busy
    one.poll()
    assert not one.is_busy
    # Blocks of the other seat are not written again.
    assert other.write(keys[:3], slots[:3]) == keys[2:3]
    other.poll()
    assert (one.num_written, other.num_written) == (2, 1)
    assert other.contains(keys).tolist() == [HIT, HIT, HIT, MISS]
    assert sorted(other.read(keys[:3], slots[:3])) == sorted(keys[:3])
    results = other.poll()
    assert sorted(result.key for result in results) == sorted(keys[:3])
    assert all(result.error is None for result in results)
    other.others = []
    assert other.contains(keys).tolist() == [MISS, MISS, HIT, MISS]
