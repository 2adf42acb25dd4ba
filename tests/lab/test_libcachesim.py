"""Policies compared with libCacheSim, which has most of the same algorithms in C: block by block, and chain by chain.

libCacheSim gets each request's blocks as objects of size 1, last block first, the order in which a chain is used here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.abc import CachePolicy
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.lab.policies import KNOWN
from kvoffload.lab.policies.lirs import LIRSPolicy
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.trace import Trace
from tests.lab.traces import make_trace

libcachesim = pytest.importorskip("libcachesim")

Hits = npt.NDArray[np.bool_]


class LIRSWithFewerKeys(LIRSPolicy):
    """Like libCacheSim, whose stack has twice the cache's size: about one key per block besides the blocks."""

    keys_per_block = 1


ALGORITHMS: dict[str, tuple[type[CachePolicy], Callable[..., object]]] = {
    "fifo": (KNOWN["fifo"], libcachesim.FIFO),
    "lru": (KNOWN["lru"], libcachesim.LRU),
    "arc": (KNOWN["arc"], libcachesim.ARC),
    "s3fifo": (KNOWN["s3fifo"], libcachesim.S3FIFO),
    "sieve": (KNOWN["sieve"], libcachesim.Sieve),
    "lirs": (LIRSWithFewerKeys, libcachesim.LIRS),
    "2q": (KNOWN["2q"], libcachesim.TwoQ),
}
CAPACITIES = (30, 300)


def conversations(seed: int, num_requests: int) -> Trace:
    """Returns conversations that grow by a few blocks per turn, each after one of four common prefixes."""
    rng = random.Random(seed)
    live: list[list[int]] = []
    chains: list[list[int]] = []
    for _ in range(num_requests):
        if not live or rng.random() < 0.2:
            live.append([10**6 * rng.randrange(4) + depth for depth in range(5)])
        talk = live.pop(-min(len(live), 1 + int(rng.expovariate(0.1))))
        talk += [10**9 + len(chains) * 100 + n for n in range(rng.randint(1, 6))]
        chains.append(list(talk))
        if len(talk) < 30:
            live.append(talk)
    n = len(chains)
    return make_trace("conversations", 1, list(range(n)), list(map(len, chains)), [0] * n, chains)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return conversations(seed=3, num_requests=150)


def last_first(trace: Trace) -> list[int]:
    return [block for request in range(trace.num_requests) for block in trace.chain(request)[::-1].tolist()]


def hits_there(cache: Callable[..., object], accesses: list[int], capacity: int) -> Hits:
    simulated = cache(cache_size=capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = np.zeros(len(accesses), dtype=np.bool_)
    for i, block in enumerate(accesses):
        request.obj_id = block + 1
        hits[i] = simulated.get(request)  # type: ignore[attr-defined]
    return hits


def hits_here(policy: type[CachePolicy], trace: Trace, accesses: list[int], capacity: int) -> Hits:
    """Returns which accesses are hits, one block at a time."""
    manager = PolicyOffloadingManager(HostBackend(1, capacity), policy(capacity))
    hits = np.zeros(len(accesses), dtype=np.bool_)
    for i, block in enumerate(accesses):
        key = trace.keys_of(np.array([block]))
        manager.touch(key)
        hits[i] = manager.lookup(key)
        output = manager.prepare_store(key)
        assert output is not None
        manager.complete_store(output.keys_to_store)
    return hits


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_policies_agree_block_by_block(name: str, capacity: int, trace: Trace) -> None:
    """All agree in every access, except that LIRS bounds its keys a little differently and agrees in hits."""
    ours, theirs = ALGORITHMS[name]
    accesses = last_first(trace)
    here, there = hits_here(ours, trace, accesses, capacity), hits_there(theirs, accesses, capacity)
    assert 0.02 < there.mean() < 0.98
    if name == "lirs":
        assert abs(here.mean() - there.mean()) < 0.001
    else:
        assert np.array_equal(here, there)


def test_the_algorithms_differ_on_this_trace(trace: Trace) -> None:
    """Control: otherwise their agreement would prove nothing."""
    accesses = last_first(trace)
    hits = [hits_there(theirs, accesses, 60).sum() for _, theirs in ALGORITHMS.values()]
    assert len(set(hits)) == len(hits)


@pytest.mark.parametrize("name", ["fifo", "lru", "arc", "s3fifo", "2q"])
def test_policies_agree_chain_by_chain(name: str, trace: Trace) -> None:
    """A request looks up all its blocks at once and makes room for all of them at once, so it may find a few more. With
    SIEVE it may find many more: block by block, a round that spares all others evicts the request's previous block."""
    _, theirs = ALGORITHMS[name]
    there = 100 * hits_there(theirs, last_first(trace), 500).mean()
    result = replay(trace, ReplayConfig(name, 500))
    assert 100 * result.block_hits / result.accesses == pytest.approx(there, abs=0.4)
