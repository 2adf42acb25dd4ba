"""Benchmark of the remote tier on a Mooncake Store over TCP on this machine: GB/s and latency per block beside the
store's own client in a plain script, and what the tier costs the scheduler's thread.

The script runs in a process of its own, like the tier's client, and moves as many bytes with one call of
batch_put_from and batch_get_into into registered memory. It verifies nothing. Both sides take turns, so that they share
whatever else the machine does.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import OffloadKey, Slots, Tier
from kvoffload.cache.keys import make_offload_key
from kvoffload.demo.shared.mooncake import MooncakeStore, missing
from kvoffload.host.pool import HostPool
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.mooncake.config import MooncakeConfig
from kvoffload.tiers.remote.tier import RemoteTier

BLOCK_BYTES = 2 << 20
NUM_BLOCKS = 128
"""Blocks moved per round, by the script in one call: twice what the tier has under way at most."""
ROUNDS = 15
SINGLES = 200
LONG_PROMPT = 8192
"""Blocks."""
CONNECT_DEADLINE_S = 60.0

PEER = """
import mmap, os, sys, time
import numpy as np
from mooncake.store import MooncakeDistributedStore
master, count, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
memory = np.frombuffer(mmap.mmap(-1, count * nbytes), dtype=np.uint8)
rows = memory.reshape(count, nbytes)
rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, dtype=np.uint8)
assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
print("ready", flush=True)
for line in sys.stdin:
    do, name, number = line.split()
    number = int(number)
    keys = [f"peer/{name}/{i}" for i in range(number)]
    places, sizes = [row.ctypes.data for row in rows[:number]], [nbytes] * number
    begun = time.perf_counter()
    if do == "put":
        assert set(store.batch_put_from(keys, places, sizes)) == {0}
    elif do == "get":
        assert set(store.batch_get_into(keys, places, sizes)) == {nbytes}
    else:
        store.batch_remove(keys, True)
    print(time.perf_counter() - begun, flush=True)
os._exit(0)
"""


class Peer:
    """The plain script."""

    def __init__(self, store: MooncakeStore) -> None:
        command = [sys.executable, "-c", PEER, store.address, str(NUM_BLOCKS), str(BLOCK_BYTES)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self) -> Peer:
        assert self._reply() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def seconds(self, do: str, name: str, number: int) -> float:
        """Returns how long the script has taken to put, get or remove ``number`` values."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{do} {name} {number}\n")
        self._process.stdin.flush()
        return float(self._reply())

    def _reply(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def new_keys(n: int) -> list[OffloadKey]:
    raw = np.random.default_rng().bytes(32 * n)
    return [make_offload_key(raw[32 * i : 32 * i + 32], 0) for i in range(n)]


def seconds(tier: Tier, move: Callable[[list[OffloadKey], Slots], list[OffloadKey]], keys: list[OffloadKey]) -> float:
    """Returns how long ``move`` takes for ``keys``, from the first call to the last result."""
    left = dict(zip(keys, range(len(keys)), strict=True))
    under_way = 0
    begun = time.perf_counter()
    while left or under_way:
        if left:
            taken = move(list(left), np.array(list(left.values()), dtype=np.int64))
            under_way += len(taken)
            for key in taken:
                del left[key]
        tier.wait(0.01)
        for result in tier.poll():
            assert result.ok, result
            under_way -= 1
    return time.perf_counter() - begun


def settle(tier: Tier, is_settled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CONNECT_DEADLINE_S
    while not is_settled():
        assert time.monotonic() < deadline, "the store does not answer"
        tier.wait(0.01)
        tier.poll()


def throughput(tier: RemoteTier, peer: Peer, rounds: int) -> list[Row]:
    measured: dict[str, list[float]] = {name: [] for name in ("write", "put", "read", "get")}
    for number in range(rounds):
        keys, name = new_keys(NUM_BLOCKS), f"round-{number}"
        measured["write"].append(seconds(tier, tier.write, keys))
        measured["put"].append(peer.seconds("put", name, NUM_BLOCKS))
        for _ in range(3):
            measured["read"].append(seconds(tier, tier.read, keys))
            measured["get"].append(peer.seconds("get", name, NUM_BLOCKS))
        tier.delete(keys)
        settle(tier, lambda keys=keys: not tier.contains(keys).any())  # type: ignore[misc]
        peer.seconds("remove", name, NUM_BLOCKS)
    rows = []
    for mine, theirs, call in (("write", "put", "batch_put_from"), ("read", "get", "batch_get_into")):
        rates = {side: NUM_BLOCKS * BLOCK_BYTES / statistics.median(measured[side]) / 1e9 for side in (mine, theirs)}
        # Each turn is compared with the next one of the other side, because the machine's speed changes meanwhile.
        ratio = statistics.median(b / a for a, b in zip(measured[mine], measured[theirs], strict=True))
        rows.append(Row(mine, rates[mine], "GB/s", call, ratio))
        rows.append(Row(f"  {call}", rates[theirs], "GB/s"))
    return rows


def latency(tier: RemoteTier, peer: Peer, singles: int) -> list[Row]:
    """Returns the time of one block at a time."""
    keys = new_keys(1)
    seconds(tier, tier.write, keys)
    peer.seconds("put", "single", 1)
    mine, theirs = [], []
    for _ in range(singles):
        mine.append(seconds(tier, tier.read, keys) * 1000)
        theirs.append(peer.seconds("get", "single", 1) * 1000)
    rows = []
    for percent in (50, 99):
        a, b = float(np.percentile(mine, percent)), float(np.percentile(theirs, percent))
        rows.append(Row(f"read of one block, p{percent}", a, "ms", f"batch_get_into: {b:.2f} ms", b / a))
    return rows


def scheduler_thread(tier: RemoteTier) -> list[Row]:
    """Returns the CPU time of the calling thread per block."""
    rows: list[Row] = []

    def measure(what: str, num_blocks: int, call: Callable[[], object]) -> None:
        begun = time.thread_time()
        call()
        rows.append(Row(f"scheduler thread: {what}", (time.thread_time() - begun) / num_blocks * 1e6, "us/block"))

    chain = new_keys(LONG_PROMPT)
    measure("expect of an unknown chain", LONG_PROMPT, lambda: tier.expect(chain))
    measure("contains while the store is asked", LONG_PROMPT, lambda: tier.contains(chain))
    time.sleep(2.0)
    measure("poll with the answers", LONG_PROMPT, tier.poll)
    settle(tier, lambda: 3 not in tier.contains(chain))
    measure("contains of a known chain", LONG_PROMPT, lambda: tier.contains(chain))
    keys, slots = new_keys(32), np.arange(32)
    for what, move in (("write", tier.write), ("read", tier.read)):
        taken: list[OffloadKey] = []

        def begin(move: Callable[[list[OffloadKey], Slots], list[OffloadKey]] = move) -> None:
            taken.extend(move(keys, slots))  # noqa: B023

        measure(what, len(keys), begin)
        time.sleep(2.0)
        measure(f"poll after that {what}", len(keys), tier.poll)
        settle(tier, lambda: bool(tier.contains(keys).all()))
    return rows


def main(out: Path, quick: bool = False) -> None:
    reason = missing()
    if reason is not None:
        print(f"\nstores: skipped, {reason}")
        return
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as logs:
        store = MooncakeStore(Path(logs))
        host = HostPool(NUM_BLOCKS, BLOCK_BYTES)
        try:
            host.data[:] = np.random.default_rng(0).integers(0, 256, host.data.shape, dtype=np.uint8)
            context = TierContext([host.data], "b" * 64, [host.handle()])
            tier = MooncakeConfig(master=store.address).open(context)
            assert isinstance(tier, RemoteTier)
            try:
                settle(tier, lambda: tier.is_connected)
                with Peer(store) as peer:
                    rows = throughput(tier, peer, 2 if quick else ROUNDS)
                    rows += latency(tier, peer, 20 if quick else SINGLES)
                rows += scheduler_thread(tier)
            finally:
                tier.close()
        finally:
            host.close()
            store.close()
            logging.disable(logging.NOTSET)
    publish("stores", f"Mooncake Store over TCP on this machine, blocks of {BLOCK_BYTES >> 20} MiB", rows, out)
