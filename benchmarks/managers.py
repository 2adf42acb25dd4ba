"""Cost on the scheduler's thread, in ns per block: kvoffload's managers beside vLLM's own CPU manager.

Both hold the same blocks and serve the same requests of 8,192 blocks in turn, so that a busy machine slows both. A
figure is the median over the requests, in CPU time of the thread. The plain version, without native code, is measured
in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import Hints, LoadStoreSpec, OffloadingManager, ReqContext
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager, PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.policies.engine_arc import ARCOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.native import ENVIRONMENT_VARIABLE, describe

REQUEST_BLOCKS = 8192
ROUNDS = 24
MANY_ROUNDS = 2000
RESETS = 5
LOAD_PATH = ("lookup", "touch", "prepare_load", "complete_load")
STORE_PATH = ("prepare_store", "complete_store")
MISS_PATH = ("touch", "lookup", *STORE_PATH, "reorder_chain")
"""All calls of a request of which no block is cached."""


def new_keys(n: int) -> list[bytes]:
    raw = os.urandom(32 * n)
    return [make_offload_key(raw[32 * i : 32 * i + 32], 0) for i in range(n)]


class Ours:
    """One kvoffload manager, called as the connector calls it. With ``hinted`` every request has a session, and half of
    them are the last ones of theirs."""

    def __init__(self, make: Callable[[HostBackend], OffloadingManager], num_blocks: int, hinted: bool = False) -> None:
        self.manager = make(HostBackend(16, num_blocks))
        self._sessions = count(2) if hinted else None

    def calls(self, keys: list[bytes]) -> dict[str, Callable[[], Any]]:
        manager, context = self.manager, None
        if self._sessions is not None:
            session = next(self._sessions)
            context = ReqContext("r", hints=Hints(session, session % 2 == 0, 60.0))
        leases: list[LoadStoreSpec] = []

        def prepare_load() -> None:
            leases.append(manager.prepare_load(keys))

        def prepare_store() -> None:
            output = manager.prepare_store(keys, context)
            assert output is not None
            leases.append(output.store_spec)

        return {
            "lookup": lambda: manager.lookup(keys),
            "touch": lambda: manager.touch(keys, context),
            "prepare_load": prepare_load,
            "complete_load": lambda: manager.complete_load(leases.pop()),
            "prepare_store": prepare_store,
            "complete_store": lambda: manager.complete_store(leases.pop()),
            "reorder_chain": lambda: manager.end_chain(keys, keys, context),
        }


def make_auto(backend: HostBackend) -> OffloadingManager:
    return PolicyOffloadingManager(backend, make_policy("auto", backend.num_blocks))


class Theirs:
    """vLLM's CPUOffloadingManager, called as vLLM's connector calls it."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager = CPUOffloadingManager(num_blocks, cache_policy=policy)
        self._context = ReqContext

    def calls(self, keys: list[bytes]) -> dict[str, Callable[[], Any]]:
        manager, context = self.manager, self._context(req_id="bench")
        manager.on_new_request(context)

        def lookup() -> None:
            for key in keys:
                manager.lookup(key, context)

        return {
            "lookup": lookup,
            "touch": lambda: manager.touch(keys, context),
            "prepare_load": lambda: manager.prepare_load(keys, context),
            "complete_load": lambda: manager.complete_load(keys, context),
            "prepare_store": lambda: manager.prepare_store(keys, context),
            "complete_store": lambda: manager.complete_store(keys, context),
        }


def measure(
    systems: dict[str, Ours | Theirs], num_blocks: int, store_path: tuple[str, ...] = STORE_PATH
) -> dict[str, dict[tuple[str, ...], dict[str, float]]]:
    """Returns, per system and path, the median of each call in ns per block. All systems are full from the start."""
    held = new_keys(num_blocks)
    size = min(REQUEST_BLOCKS, num_blocks // 4)
    for system in systems.values():
        fill(system, held, size)
    rng = np.random.default_rng(0)
    # First loads of cached blocks, then stores that evict.
    batches = [held[start : start + size] for start in rng.integers(0, num_blocks - 2 * size, ROUNDS) // size * size]
    medians: dict[str, dict[tuple[str, ...], dict[str, float]]] = {name: {} for name in systems}
    for path, requests in ((LOAD_PATH, batches), (store_path, [new_keys(size) for _ in range(ROUNDS)])):
        times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in systems}
        for keys in requests:
            for name, system in systems.items():
                calls = system.calls(keys)
                for call in path:
                    start = time.thread_time_ns()
                    calls[call]()
                    times[name][call].append((time.thread_time_ns() - start) / size)
        for name in systems:
            medians[name][path] = {call: statistics.median(t) for call, t in times[name].items()}
    return medians


def fill(system: Ours | Theirs, keys: list[bytes], size: int = REQUEST_BLOCKS) -> None:
    for start in range(0, len(keys) - size + 1, size):
        calls = system.calls(keys[start : start + size])
        calls["prepare_store"]()
        calls["complete_store"]()


def slowest_calls(num_blocks: int, rounds: int) -> dict[str, float]:
    """Returns the 99.9th percentile of each call of an LRU manager, in ms. Each round stores new blocks, and loads
    those of the fourth round before it: what was stored or loaded since then must fit too."""
    system = Ours(LRUOffloadingManager, num_blocks)
    fill(system, new_keys(num_blocks))
    recent: list[list[bytes]] = []
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        recent = [*recent[-4:], new_keys(REQUEST_BLOCKS)]
        for keys, path in ((recent[-1], STORE_PATH), (recent[0], LOAD_PATH)):
            calls = system.calls(keys)
            for call in path:
                start = time.thread_time_ns()
                calls[call]()
                times[call].append((time.thread_time_ns() - start) / 1e6)
    return {call: float(np.quantile(t, 0.999)) for call, t in times.items()}


def reset_ms(make: Callable[[HostBackend], OffloadingManager], num_blocks: int, rounds: int) -> float:
    """Returns the median time of a reset of a full manager."""
    system, times = Ours(make, num_blocks), []
    for _ in range(rounds):
        fill(system, new_keys(num_blocks))
        start = time.thread_time_ns()
        system.manager.reset()
        times.append((time.thread_time_ns() - start) / 1e6)
    return statistics.median(times)


def plain_sums(num_blocks: int) -> list[float]:
    """Returns ns per block of load path and store path of an LRU manager without native code."""
    program = f"from benchmarks.managers import print_sums; print_sums({num_blocks})"
    environment = {**os.environ, ENVIRONMENT_VARIABLE: "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    sums: list[float] = json.loads(ended.stdout.splitlines()[-1])
    return sums


def print_sums(num_blocks: int) -> None:
    ns = measure({"ours": Ours(LRUOffloadingManager, num_blocks)}, num_blocks)["ours"]
    print(json.dumps([sum(ns[path].values()) for path in (LOAD_PATH, STORE_PATH)]))


def bytes_per_block(make: Callable[[], Ours | Theirs], num_blocks: int) -> float:
    """Returns the memory of a full manager per block, without the keys themselves."""
    keys = new_keys(num_blocks)
    tracemalloc.start()
    calls = make().calls(keys)
    calls["prepare_store"]()
    calls["complete_store"]()
    del calls["prepare_store"], calls["complete_store"]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / num_blocks


def tracked_objects_per_block(num_blocks: int) -> float:
    """Returns how many objects the garbage collector must visit per block of an LRU manager."""
    keys = new_keys(num_blocks)
    gc.collect()
    before = len(gc.get_objects())
    system = Ours(LRUOffloadingManager, num_blocks)
    system.manager.prepare_store(keys)
    system.manager.complete_store(keys)
    gc.collect()
    return max(0, len(gc.get_objects()) - before) / num_blocks


def rows_of(ns: dict[str, dict[tuple[str, ...], dict[str, float]]], suffix: str, versus: str) -> Iterator[Row]:
    """Yields a row for each call and for each path."""
    for name, path, calls in (
        *((call, LOAD_PATH, (call,)) for call in LOAD_PATH),
        *((call, STORE_PATH, (call,)) for call in STORE_PATH),
        ("load path", LOAD_PATH, LOAD_PATH),
        ("store path", STORE_PATH, STORE_PATH),
    ):
        ours, *peer = (sum(medians[path][call] for call in calls) for medians in ns.values())
        yield Row(f"{name}, {suffix}", ours, "ns/block", versus if peer else "", peer[0] / ours if peer else None)


def main(out: Path, quick: bool) -> None:
    sizes = {"100k": 100_000} if quick else {"100k": 100_000, "1M": 1_000_000, "4M": 4_000_000}
    print(f"kvoffload runs on {describe()}")
    try:
        import vllm  # noqa: F401
    except ImportError:
        print("vLLM is not installed here: no peer to compare with")
        have_peer = False
    else:
        have_peer = True
    rows: list[Row] = []
    for label, num_blocks in sizes.items():
        if num_blocks > 1_000_000:
            rows += rows_of(
                measure({"ours": Ours(LRUOffloadingManager, num_blocks)}, num_blocks), f"{label} blocks", ""
            )
            continue
        for policy, make in (("LRU", LRUOffloadingManager), ("ARC", ARCOffloadingManager)):
            systems: dict[str, Ours | Theirs] = {"ours": Ours(make, num_blocks)}
            if have_peer:
                systems["peer"] = Theirs(policy.lower(), num_blocks)
            ns = measure(systems, num_blocks)
            if policy == "LRU":
                for name, path, plain in zip(
                    ("load path", "store path"), (LOAD_PATH, STORE_PATH), plain_sums(num_blocks), strict=True
                ):
                    ours = sum(ns["ours"][path].values())
                    rows.append(Row(f"{name}, {label} blocks, plain Python", plain, "ns/block", "native", ours / plain))
            rows += rows_of(ns, f"{label} blocks" + ("" if policy == "LRU" else f", {policy}"), f"vLLM {policy}")
            del systems
            gc.collect()
        autos = {"auto": Ours(make_auto, num_blocks), "hinted": Ours(make_auto, num_blocks, hinted=True)}
        ns = measure({**autos, "lru": Ours(LRUOffloadingManager, num_blocks)}, num_blocks, MISS_PATH)
        for name, path in (("load path", LOAD_PATH), ("miss path", MISS_PATH)):
            ours, hinted, lru = (sum(ns[policy][path].values()) for policy in ("auto", "hinted", "lru"))
            rows.append(Row(f"{name}, {label} blocks, auto", ours, "ns/block", "our LRU", lru / ours))
            rows.append(Row(f"{name}, {label} blocks, auto with hints", hinted, "ns/block", "without", ours / hinted))
        gc.collect()
    most = max(number for number in sizes.values() if number <= 1_000_000)
    for call, ms in slowest_calls(most, 100 if quick else MANY_ROUNDS).items():
        rows.append(Row(f"{call}, {most} blocks, 99.9th percentile", ms, "ms"))
    makers: dict[str, Callable[[HostBackend], OffloadingManager]] = {
        "LRU": LRUOffloadingManager,
        "ARC": ARCOffloadingManager,
        "auto": make_auto,
    }
    for policy, new in makers.items():
        rows.append(Row(f"reset, {most} blocks, {policy}", reset_ms(new, most, RESETS), "ms"))
    full = bytes_per_block(partial(Ours, LRUOffloadingManager, most), most)
    rows.append(Row(f"memory besides the key, {most} blocks", full, "B/block"))
    ours = bytes_per_block(partial(Ours, LRUOffloadingManager, 100_000), 100_000)
    theirs = bytes_per_block(partial(Theirs, "lru", 100_000), 100_000) if have_peer else None
    ratio = theirs / ours if theirs is not None else None
    rows.append(Row("memory besides the key, 100k blocks", ours, "B/block", "vLLM LRU" if have_peer else "", ratio))
    auto = bytes_per_block(partial(Ours, make_auto, 100_000), 100_000)
    rows.append(Row("memory besides the key, 100k blocks, auto", auto, "B/block", "our LRU", ours / auto))
    rows.append(Row("objects tracked by the garbage collector", tracked_objects_per_block(100_000), "/block"))
    publish("managers", "Scheduler thread, ns per block (ratio: times faster than the peer)", rows, out)
