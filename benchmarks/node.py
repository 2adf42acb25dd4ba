"""What the engines of one node find if their memory is split, shared, or split in front of a tier that all can read.

The engines serve the requests of real traces, as a router gives them out. Each has a device cache, so a figure is what
host memory and the tier add to it. The traces are the ``*.jsonl.gz`` in the folder that KVOFFLOAD_TRACES names; without
one, synthetic workloads. The cost of a hit is measured in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks import managers, shared_dir
from benchmarks.report import Row, publish
from benchmarks.traces import traces
from kvoffload.abc import OffloadKey, Slots, States, TierResult
from kvoffload.abc.tier import MISS
from kvoffload.host.pool import HostPool
from kvoffload.lab.device import DeviceCache
from kvoffload.lab.latency import Speeds
from kvoffload.lab.replay import ReplayConfig
from kvoffload.lab.replay import Run as Server
from kvoffload.lab.tier import CatalogTier
from kvoffload.lab.trace import UNKNOWN, Trace
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings

SYNTHETIC = {"chat": 2000, "agent": 2000}
ENGINES = (2, 4, 8)
GIB = 1 << 30
TOKEN_BYTES = 128 << 10
"""Of Llama-3.1-8B."""
DEVICE_GIB = 107
"""The longest request of the traces needs 103."""
HOST_GIB = 128
DISK_GIB = 512
"""All three are per engine. One pool, or a shared directory, has as much as all engines together."""
WORTH = {"device": 1.0, "host": 0.8, "own disk": 0.5, "shared directory": 0.4}
"""Of a block, as docs/routing.md has it."""
LEAST_WORTH = 0.5
"""Of a prompt, per block."""
LOAD_SLACK_S = 2.0
"""The prefix router takes no engine whose queue of prompts is longer than the shortest by more."""
POLICY = "auto"
TOKENS_PER_S = Speeds().prefill_tokens_per_s


class Memory(StrEnum):
    """How host memory and the tier are divided among n engines."""

    SPLIT = "split"
    """Each has its own host memory."""
    SPLIT_DISK = "split, own disks"
    """Each has its own host memory and disk."""
    SPLIT_SHARED = "split, shared directory"
    """The same, but each can read what the others have written to disk. kvoffload works like this today."""
    POOL = "one pool"
    """All use all of host memory."""


class Router(StrEnum):
    """How requests are given to engines."""

    ROUND_ROBIN = "round-robin"
    STICKY = "session"
    """All turns of a session to one engine."""
    PREFIX = "prefix"
    """To the engine for which the prefix that it can read is worth most, see WORTH. If that is less than half of the
    prompt, to the one that has computed least, so that new prefixes are spread. An engine whose queue is too long is
    left out."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The tokens found, in % of the prompts' tokens: on the devices, in host memory, on disks."""

    trace: str
    engines: int
    router: Router
    memory: Memory
    device: float
    host: float
    disk: float
    busiest: float
    """The tokens that the busiest engine computed, relative to the mean."""

    @property
    def found(self) -> float:
        return self.device + self.host + self.disk


class Seat(CatalogTier):
    """One engine's part of a shared directory: it writes to its own part, and reads from all. Requests run one after
    the other, so all transfers under way are those of one engine."""

    others: Sequence[Seat] = ()

    @property
    def is_busy(self) -> bool:
        return any(bool(seat._reads or seat._writes) for seat in (self, *self.others))

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        states = super().contains(keys)
        for other in self.others:
            absent = np.flatnonzero(states == MISS)
            if len(absent):
                states[absent] = CatalogTier.contains(other, [keys[i] for i in absent.tolist()])
        return states

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken: list[OffloadKey] = []
        for seat in (self, *self.others):
            states = CatalogTier.contains(seat, keys)
            here, elsewhere = np.flatnonzero(states != MISS), np.flatnonzero(states == MISS)
            taken += CatalogTier.read(seat, [keys[i] for i in here.tolist()], slots[here])
            keys, slots = [keys[i] for i in elsewhere.tolist()], slots[elsewhere]
        return taken

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        absent = np.flatnonzero(self.contains(keys) == MISS)
        return super().write([keys[i] for i in absent.tolist()], slots[absent])

    def poll(self) -> list[TierResult]:
        return [result for seat in (self, *self.others) for result in CatalogTier.poll(seat)]


class Node:
    """``engines`` engines, and the queue of each."""

    def __init__(self, trace: Trace, engines: int, memory: Memory, router: Router) -> None:
        self.trace = trace
        self.router = router
        self.is_shared = memory is Memory.SPLIT_SHARED
        device, host, disk = (
            gib * GIB // (trace.block_tokens * TOKEN_BYTES) for gib in (DEVICE_GIB, HOST_GIB, DISK_GIB)
        )
        self.devices = [DeviceCache(device, trace.num_distinct) for _ in range(engines)]
        self.free_at = [0.0] * engines
        """When each engine has computed all prompts that it was given."""
        self.computed = [0.0] * engines
        pools = 1 if memory is Memory.POOL else engines
        has_disk = memory in (Memory.SPLIT_DISK, Memory.SPLIT_SHARED)
        config = ReplayConfig(POLICY, host * engines // pools, device, disk if has_disk else 0)
        servers = [Server(trace, config) for _ in range(pools)]
        self.servers = servers * (engines // pools)
        if self.is_shared:
            seats = [Seat(disk, 1, POLICY, server.clock) for server in servers]
            for server, seat in zip(servers, seats, strict=True):
                seat.others = [other for other in seats if other is not seat]
                server.tier = seat
                server.manager = TieredOffloadingManager(
                    server.host, [seat], TieringSettings([trace.block_tokens]), clock=server.clock
                )

    def serve(self) -> tuple[float, float, float]:
        """Serves all requests. Returns the tokens found on devices, in host memory and on disk, in % of all."""
        trace = self.trace
        found = np.zeros(3)
        for request in range(trace.num_requests):
            now, asked = float(trace.times[request]), int(trace.input_tokens[request])
            chain = trace.keys_of(trace.chain(request))
            prompt = chain[: int(trace.prompt_blocks[request])]
            engine = self.choose(request, now, prompt)
            server = self.servers[engine]
            for each in self.servers:
                each.now = now
            server.device = self.devices[engine]
            server.serve(request, chain, prompt)
            reach = np.minimum(np.cumsum(server.hits[-3:]) * trace.block_tokens, asked)
            found += np.diff(reach, prepend=0)
            rest = asked - int(reach[-1])
            self.computed[engine] += rest
            self.free_at[engine] = max(now, self.free_at[engine]) + rest / TOKENS_PER_S
        device, host, disk = (100 * found / trace.input_tokens.sum()).tolist()
        return device, host, disk

    def choose(self, request: int, now: float, prompt: list[OffloadKey]) -> int:
        n, session = len(self.devices), int(self.trace.sessions[request])
        if self.router is Router.STICKY and session != UNKNOWN:
            return session % n
        if self.router is not Router.PREFIX:
            return request % n
        waits = [max(0.0, free_at - now) for free_at in self.free_at]
        short = [engine for engine in range(n) if waits[engine] <= min(waits) + LOAD_SLACK_S]
        blocks: list[int] = self.trace.chain(request)[: len(prompt)].tolist()
        worth = {engine: self.worth(engine, blocks, prompt) for engine in short}
        best = max(short, key=lambda engine: (worth[engine], -waits[engine]))
        if worth[best] < LEAST_WORTH * len(prompt):
            return min(short, key=lambda engine: self.computed[engine])
        return best

    def worth(self, engine: int, blocks: list[int], prompt: list[OffloadKey]) -> float:
        """Returns the worth of the leading blocks of a prompt that the engine can read."""
        server = self.servers[engine]
        worth = np.where(server.host.table.find(prompt) >= 0, WORTH["host"], 0.0)
        worth[: self.devices[engine].lookup(blocks)] = WORTH["device"]
        if server.tier is not None:
            absent = np.flatnonzero(worth == 0)
            found = server.tier.contains([prompt[i] for i in absent.tolist()]) != MISS
            worth[absent[found]] = WORTH["shared directory" if self.is_shared else "own disk"]
        return float(worth.sum() if worth.all() else worth[: worth.argmin()].sum())


def cells_of(trace: Trace, engines: Sequence[int]) -> Iterator[Cell]:
    """Yields the cells of a trace, those of one line of the table after the other."""
    routers = [router for router in Router if router is not Router.STICKY or trace.num_sessions]
    for n, router, memory in product(engines, routers, Memory):
        node = Node(trace, n, memory, router)
        found = node.serve()
        yield Cell(trace.name, n, router, memory, *found, n * max(node.computed) / sum(node.computed))


def show(cells: Sequence[Cell]) -> None:
    """Prints the cells of one trace."""
    print(f"\n{cells[0].trace}: tokens found, % of the prompts' (in brackets: on the devices)")
    print(f"  {'engines':<9}{'router':<13}" + "".join(f"{memory:>25}" for memory in Memory))
    for i in range(0, len(cells), len(Memory)):
        first = cells[i]
        figures = "".join(f"{f'{cell.found:.2f} ({cell.device:.2f})':>25}" for cell in cells[i : i + len(Memory)])
        print(f"  {first.engines:<9}{first.router:<13}{figures}")


def summary(cells: Sequence[Cell]) -> Iterator[Row]:
    """Yields what sharing finds more, in points of all prompt tokens."""
    by_place = {(cell.trace, cell.engines, cell.router, cell.memory): cell.found for cell in cells}
    for name, more, less in (
        ("one pool instead of split pools", Memory.POOL, Memory.SPLIT),
        ("shared directory instead of own disks", Memory.SPLIT_SHARED, Memory.SPLIT_DISK),
        ("shared directory instead of one pool", Memory.SPLIT_SHARED, Memory.POOL),
    ):
        for router in dict.fromkeys(cell.router for cell in cells):
            gains = [
                found - by_place[*at[:3], less] for at, found in by_place.items() if at[2] == router and at[3] == more
            ]
            yield Row(f"{name}, {router}, mean", statistics.mean(gains), "points")
            yield Row("the most", max(gains), "points")


# The cost of a hit.


def own_pool(quick: bool) -> list[Row]:
    """Measures a hit in the own host pool: the scheduler's thread per block, and the copy of a 2 MiB block."""
    num_blocks = 64 if quick else 512
    pool = HostPool(num_blocks, shared_dir.BLOCK_BYTES)
    pool.wait_until_touched()
    device = np.zeros((num_blocks, shared_dir.BLOCK_BYTES), dtype=np.uint8)
    order = np.random.default_rng(0).permutation(num_blocks).tolist()
    copies = []
    for _ in range(shared_dir.ROUNDS + 1):
        start = time.perf_counter()
        for slot in order:
            np.copyto(device[slot], pool.data[slot])
        copies.append((time.perf_counter() - start) / num_blocks)
    pool.close()
    keys = managers.new_keys(managers.REQUEST_BLOCKS)
    ours = managers.Ours(managers.make_auto, 2 * len(keys))
    calls = ours.calls(keys)
    for name in ("touch", "lookup", *managers.STORE_PATH):
        calls[name]()
    spent = shared_dir.cost(lambda: [calls[name]() for name in managers.LOAD_PATH])
    return [
        Row("hit in the own host pool: copy of 2 MiB, one thread", statistics.median(copies[1:]) * 1e6, "us"),
        Row("the same: scheduler's thread, per block", spent * 1e6 / len(keys), "ns"),
    ]


def foreign_seat(quick: bool) -> list[Row]:
    """Measures a hit in the seat of another engine, see ``benchmarks.shared_dir``."""
    base = os.environ.get("KVOFFLOAD_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=base or Path.cwd()) as temporary:
        (speed, _, latency, *_), (thread,) = (
            measure(Path(temporary), quick) for measure in (shared_dir.reading, shared_dir.thread_cost)
        )
    read_us = shared_dir.BLOCK_BYTES / speed.value / 1e3
    return [
        Row("hit in another engine's seat: read and verify 2 MiB, all threads", read_us, "us"),
        Row("the same: latency of a block, median", latency.value * 1e3, "us"),
        Row("the same: scheduler's thread, per block", thread.value * 1e3, "ns"),
    ]


def main(out: Path, quick: bool) -> None:
    engines = ENGINES[:1] if quick else ENGINES
    cells: list[Cell] = []
    for trace in traces(SYNTHETIC):
        found = list(cells_of(trace.between(0, 0.01) if quick else trace, engines))
        show(found)
        cells += found
    out.mkdir(parents=True, exist_ok=True)
    (out / "node-cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    compute_us = shared_dir.BLOCK_BYTES / TOKEN_BYTES / TOKENS_PER_S * 1e6
    rows = [
        *summary(cells),
        *own_pool(quick),
        *foreign_seat(quick),
        Row(f"for comparison: 2 MiB computed, at {TOKENS_PER_S:,.0f} tokens/s", compute_us, "us"),
    ]
    publish("node", "The engines of a node: split pools, one pool, and a shared directory", rows, out)
