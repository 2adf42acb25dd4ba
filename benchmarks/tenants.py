"""Prefix-hit tokens of tenants that share a host pool: beside an adversary, and among equals.

The traces are the ``*.jsonl.gz`` in the folder that KVOFFLOAD_TRACES names; without one, synthetic workloads. Every
tenant's keys have a namespace of its own, in all cells, so that only the shares differ.

- **Adversary.** The victim is a whole trace. After each of its requests come ten of an adversary, each as long as the
  victim's, with blocks that nobody asks for again; or five, each of them twice, so that every block counts as used
  again. Half of the pool is guaranteed to the victim.
- **Equals.** The requests of a trace belong to four tenants, by a hash of their first two blocks, so that each
  conversation belongs to one of them. A quarter of the pool is guaranteed to each, or is all that it may take as well,
  or nothing is guaranteed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.managers import REQUEST_BLOCKS, ROUNDS, new_keys
from benchmarks.report import Row, publish
from benchmarks.traces import traces
from kvoffload.abc import CachePolicy, OffloadKey
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import OTHER, Shares
from kvoffload.lab.trace import Trace

POLICIES = ("lru", "auto")
SHARE_PCT = (5, 20)
"""What is guaranteed to the victim, and the pool of the equals, in % of the distinct blocks of the trace."""
RATE = 10
SYNTHETIC = {"chat": 5000, "agent": 5000}

Request = tuple[int, list[OffloadKey], int, float]
"""Tenant, chain and tokens of the prompt, and the time of the request."""


def namespace(tenant: int) -> bytes:
    return b"tenant-%d" % tenant


def shares(num_blocks: int, guaranteed: Sequence[int], quota: int | None = None) -> Shares:
    """Returns the shares of as many tenants as there are guarantees, each with the same quota, by default all."""
    names = (*(str(t) for t in range(len(guaranteed))), OTHER)
    index_of = {namespace(t): t for t in range(len(guaranteed))}
    return Shares(names, index_of, (*guaranteed, 0), (quota or num_blocks,) * len(names), num_blocks)


def requests(trace: Trace, tenants: int = 1) -> Iterator[Request]:
    """Yields the requests of ``trace``, whose conversations belong to so many tenants."""
    for r in range(trace.num_requests):
        keys = trace.keys_of(trace.chain(r)[: trace.prompt_blocks[r]])
        tenant = zlib.crc32(b"".join(keys[:2])) % tenants
        yield tenant, [namespace(tenant) + key for key in keys], int(trace.input_tokens[r]), float(trace.times[r])


def with_adversary(victim: Iterable[Request], repeats: int) -> Iterator[Request]:
    """Yields the requests of ``victim``, tenant 0, and after each RATE ones of tenant 1, each block ``repeats``
    times."""
    number = 0
    for request in victim:
        yield request
        for _ in range(RATE // repeats):
            first, number = number, number + len(request[1])
            chain = [namespace(1) + i.to_bytes(16, "big") + bytes(4) for i in range(first, number)]
            for _ in range(repeats):
                yield 1, chain, 0, request[3]


def found_tokens(served: Iterable[Request], policy: CachePolicy, block_tokens: int, tenants: int) -> list[float]:
    """Returns the tokens that each tenant has found, in % of what it has asked for."""
    now = 0.0
    manager = PolicyOffloadingManager(HostBackend(block_tokens, policy.capacity), policy, clock=lambda: now)
    found, asked = [0] * tenants, [0] * tenants
    for tenant, keys, tokens, now in served:  # noqa: B007  (the clock reads it)
        if not keys:
            continue
        slots = manager.table.find(keys)
        manager.touch(keys, found=slots)
        ready = slots >= 0
        hits = len(keys) if ready.all() else int(ready.argmin())
        if tenant < tenants:
            found[tenant] += min(hits * block_tokens, tokens)
            asked[tenant] += tokens
        output = manager.prepare_store(keys[: manager.most_blocks(keys[0])])
        stored: list[OffloadKey] = []
        if output is not None:
            stored = output.keys_to_store
            manager.complete_store(output.store_spec)
        manager.end_chain(keys, stored)
    manager.check_integrity()
    return [100 * f / max(1, a) for f, a in zip(found, asked, strict=True)]


def adversary(trace: Trace, policy: str) -> Iterator[Row]:
    """Yields what the victim finds alone and beside the two adversaries."""
    size = trace.block_tokens
    for pct in SHARE_PCT:
        share = max(8, trace.num_distinct * pct // 100)
        what = f"{trace.name}, {policy}, victim's half {pct}%"
        (alone,) = found_tokens(requests(trace), make_policy(policy, share), size, 1)
        yield Row(f"{what}: alone in its half", alone, "% hits")
        (whole,) = found_tokens(requests(trace), make_policy(policy, 2 * share), size, 1)
        yield Row(f"{what}: alone in the pool", whole, "% hits")
        for repeats, name in ((1, "scan"), (2, "scan of pairs")):
            for guaranteed in (None, share):
                made = None if guaranteed is None else shares(2 * share, (guaranteed, 0))
                served = with_adversary(requests(trace), repeats)
                (hits,) = found_tokens(served, make_policy(policy, 2 * share, made), size, 1)
                tenants = "no tenants" if guaranteed is None else "tenants"
                ratio = hits / alone if alone else None
                yield Row(f"{what}: {name}, {tenants}", hits, "% hits", "alone in its half", ratio)


def equals(trace: Trace, policy: str) -> Iterator[Row]:
    """Yields what four tenants find together in one pool, without shares and with them."""
    size, served = trace.block_tokens, list(requests(trace, 4))
    weights = np.bincount([tenant for tenant, *_ in served], [tokens for _, _, tokens, _ in served], minlength=4)
    for pct in SHARE_PCT:
        num_blocks = max(32, trace.num_distinct * pct // 100)
        made = {
            "no tenants": None,
            "a quarter each": shares(num_blocks, (num_blocks // 4,) * 4),
            "at most a quarter each": shares(num_blocks, (num_blocks // 4,) * 4, num_blocks // 4),
            "nothing guaranteed": shares(num_blocks, (0,) * 4),
        }
        total = 0.0
        for name, each in made.items():
            hits = found_tokens(served, make_policy(policy, num_blocks, each), size, 4)
            mean = float(np.average(hits, weights=weights))
            total = total or mean
            what = f"{trace.name}, {policy}, pool {pct}%: four tenants, {name}"
            yield Row(what, mean, "% hits", "no tenants", mean / total if total else None)
            yield Row(f"{what}, least", min(hits), "% hits")


def cost(num_blocks: int) -> Iterator[Row]:
    """Yields the CPU time of the calls of a request on the scheduler's thread, in ns per block, with four tenants and
    without any, in turn in one process."""
    size = min(REQUEST_BLOCKS, num_blocks // 8)
    for policy in POLICIES:
        makers = {"no tenants": None, "4 tenants": shares(num_blocks, (num_blocks // 4,) * 4)}
        managers = {
            name: PolicyOffloadingManager(HostBackend(16, num_blocks), make_policy(policy, num_blocks, made))
            for name, made in makers.items()
        }
        times: dict[tuple[str, str], list[float]] = {(name, path): [] for name in makers for path in ("miss", "hit")}
        for i in range(num_blocks // size + ROUNDS):
            keys = [namespace(i % 4) + key for key in new_keys(size)]
            for name, manager in managers.items():
                start = time.thread_time_ns()
                manager.touch(keys)
                manager.lookup(keys)
                output = manager.prepare_store(keys)
                assert output is not None
                manager.complete_store(output.store_spec)
                manager.end_chain(keys, output.keys_to_store)
                middle = time.thread_time_ns()
                manager.touch(keys)
                manager.lookup(keys)
                manager.complete_load(manager.prepare_load(keys[: manager.lookup(keys)]))
                if i >= num_blocks // size:
                    times[name, "miss"].append((middle - start) / size)
                    times[name, "hit"].append((time.thread_time_ns() - middle) / size)
        for path in ("miss", "hit"):
            without, with_tenants = (float(np.median(times[name, path])) for name in makers)
            what = f"{path} path, {num_blocks} blocks, {policy}, 4 tenants"
            yield Row(what, with_tenants, "ns/block", "no tenants", without / with_tenants)


def main(out: Path, quick: bool) -> None:
    rows: list[Row] = []
    for trace in traces(SYNTHETIC):
        if quick:
            trace = trace.between(0, 0.01)
        for policy in POLICIES:
            rows += adversary(trace, policy)
            rows += equals(trace, policy)
    rows += cost(10_000 if quick else 100_000)
    publish("tenants", "Tenants that share a host pool (ratio: hits kept)", rows, out)
