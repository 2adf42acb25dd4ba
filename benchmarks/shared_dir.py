"""Benchmarks of the shared directory tier: the time and memory to find what other servers hold; the cost of foreign
blocks on the scheduler's thread; GB/s and latency of reading them beside preadv of the same files.

The files are in $KVOFFLOAD_BENCH_DIR, by default the current directory. Both sides bypass the page cache (O_DIRECT), in
as many threads, one block at a time per thread; the tier verifies checksums.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import LookupState, OffloadKey
from kvoffload.cache.keys import make_offload_key
from kvoffload.host.pool import HostPool
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import FACTS, Header, pack_records
from kvoffload.tiers.disk.journal import MAX_ENTRIES, JournalHeader
from kvoffload.tiers.shared_dir.config import SharedDirConfig
from kvoffload.tiers.shared_dir.seats import HEARTBEAT_NAME, Heartbeat, SeatState, seat_name
from kvoffload.tiers.shared_dir.tier import SharedDirTier, Surroundings
from kvoffload.tiers.threads import NUM_THREADS
from tests.tiers.shared_dir.rig import still

FINGERPRINT = "b" * 64
BLOCK_BYTES = 2 << 20
SMALL_BYTES = 4096
NUM_WRITERS = 2
LONG_PROMPT = 8192
"""Blocks."""
ROUNDS = 5
RECORDS_AT_ONCE = 4096


def new_keys(n: int) -> list[OffloadKey]:
    raw = os.urandom(32 * n)
    return [make_offload_key(raw[32 * i : 32 * i + 32], 0) for i in range(n)]


def write_index(root: Path, writer: int, num_blocks: int) -> list[OffloadKey]:
    """Makes the index and the journal of another server, without payloads, since these are not read to find blocks.
    Returns some of the keys."""
    folder = root / seat_name(writer) / FINGERPRINT
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o700)
    header = Header(FINGERPRINT, (SMALL_BYTES,), 1 << 18, 7 + writer)
    some: list[OffloadKey] = []
    with (folder / "index").open("wb") as index:
        index.write(header.pack().tobytes())
        for start in range(0, num_blocks, RECORDS_AT_ONCE):
            keys = new_keys(min(RECORDS_AT_ONCE, num_blocks - start))
            facts = np.zeros(len(keys), dtype=FACTS)
            facts["payload_checksum"] = np.arange(len(keys))
            facts["sequence"] = start + np.arange(len(keys))
            records = pack_records(header, keys, facts)
            index.write(records.tobytes())
            if len(some) < LONG_PROMPT:
                some += keys
    journal = JournalHeader(MAX_ENTRIES, 3 + writer, header.generation, 0)
    (folder / "journal").write_bytes(journal.pack().tobytes())
    # Of another machine, so that this process does not adopt the seat.
    alive = Heartbeat("0" * 32, "elsewhere", 1, "another boot", SeatState.SERVING, 1, 0.0, 0)
    (folder.parent / HEARTBEAT_NAME).write_bytes(alive.pack().tobytes())
    for file in (*folder.iterdir(), folder.parent / HEARTBEAT_NAME):
        file.chmod(0o600)
    return some


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmRSS")


def finding(directory: Path, quick: bool) -> list[Row]:
    """Measures the first pass over the indexes of NUM_WRITERS other servers, and lookups after it."""
    num_blocks = 100_000 if quick else 1_000_000
    root = directory / "finding"
    root.mkdir(mode=0o700)
    some = [write_index(root, writer, num_blocks) for writer in range(NUM_WRITERS)]
    pool = HostPool(1024, SMALL_BYTES)
    context, surroundings = TierContext([pool.data], FINGERPRINT), Surroundings(repeat=partial(still, time.monotonic))
    tier = SharedDirTier(DirectoryStorage(root), context, 64 << 20, surroundings=surroundings)
    before = resident_bytes()
    start, cpu = time.perf_counter(), time.thread_time()
    tier.others.follow()
    seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
    found = len(tier.others.blocks)
    assert found == NUM_WRITERS * num_blocks, found
    resident = resident_bytes() - before
    keys, absent = some[0][:LONG_PROMPT], new_keys(LONG_PROMPT)
    assert (tier.contains(keys) == LookupState.HIT).all()
    costs = {name: cost(partial(tier.contains, asked)) for name, asked in (("hit", keys), ("miss", absent))}
    start = time.perf_counter()
    tier.others.follow()
    idle = time.perf_counter() - start
    tier.close()
    shutil.rmtree(root)
    return [
        Row(f"{NUM_WRITERS} writers of {num_blocks:,} blocks found", seconds, "s"),
        Row("the same, per 1,000,000 blocks", seconds / found * 1e6, "s", "at most 5 s", 5 / (seconds / found * 1e6)),
        Row("processor time of that", cpu, "s"),
        Row("memory per foreign block, resident", resident / found, "bytes", "at most 200", 200 / (resident / found)),
        Row("a pass without changes", idle * 1e3, "ms"),
        *(
            Row(f"contains, {name}, per block of {LONG_PROMPT:,}", ms * 1e6 / LONG_PROMPT, "ns")
            for name, ms in costs.items()
        ),
    ]


def cost(call: Callable[[], Any]) -> float:
    """Returns the thread time of ``call`` in ms, median."""
    times = []
    for _ in range(20):
        start = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - start) / 1e6)
    return statistics.median(times)


def open_tier(root: Path, capacity_bytes: int, pool: HostPool) -> SharedDirTier:
    context = TierContext([pool.handle().open()], FINGERPRINT)
    return SharedDirConfig(dir=str(root), bytes=capacity_bytes).open(context)


def run(
    tier: SharedDirTier, keys: list[OffloadKey], slots: np.ndarray[Any, Any], is_read: bool
) -> tuple[list[Any], float]:
    """Moves all blocks, at most as many at a time as there are slots. Returns the results and the thread time."""
    results: list[Any] = []
    spent = 0.0
    window = len(slots)
    begun = 0
    while len(results) < len(keys):
        start = time.thread_time()
        if begun < len(keys) and begun - len(results) <= window // 2:
            part = keys[begun : begun + window // 2]
            where = slots[(np.arange(len(part)) + begun) % window]
            taken = (tier.read if is_read else tier.write)(part, where)
            begun += len(taken)
        results += tier.poll()
        spent += time.thread_time() - start
        tier.wait(0.01)
    assert all(result.ok for result in results), [result for result in results if not result.ok][:3]
    return results, spent


def wait_until_found(tier: SharedDirTier, keys: list[OffloadKey]) -> None:
    deadline = time.monotonic() + 30
    while (tier.contains(keys) != LookupState.HIT).any():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def reading(directory: Path, quick: bool) -> list[Row]:
    """Measures reads of another server's blocks beside preadv of its slabs."""
    num_blocks = 64 if quick else 512
    pools = [HostPool(64, BLOCK_BYTES) for _ in range(2)]
    for pool in pools:
        pool.wait_until_touched()
    pools[0].data[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    root = directory / "reading"
    capacity = num_blocks * BLOCK_BYTES * 5 // 4 + (64 << 20)
    owner, reader = open_tier(root, capacity, pools[0]), open_tier(root, 64 << 20, pools[1])
    keys = new_keys(num_blocks)
    run(owner, keys, np.arange(64), is_read=False)
    wait_until_found(reader, keys)
    slabs = sorted((root / owner.seat.name / FINGERPRINT).glob("slab-*"))
    speeds: dict[str, list[float]] = {"tier": [], "preadv": []}
    latencies: dict[str, list[float]] = {"tier": [], "preadv": []}
    order = [keys[i] for i in np.random.default_rng(1).permutation(num_blocks).tolist()]
    for _ in range(ROUNDS):
        start = time.perf_counter()
        results, _ = run(reader, order, np.arange(64), is_read=True)
        speeds["tier"].append(num_blocks * BLOCK_BYTES / (time.perf_counter() - start) / 1e9)
        latencies["tier"] += [result.ended - result.begun for result in results]
        speed, times = read_plainly(slabs, num_blocks)
        speeds["preadv"].append(speed)
        latencies["preadv"] += times
    reader.close()
    owner.close()
    for pool in pools:
        pool.close()
    ours, plain = statistics.median(speeds["tier"]), statistics.median(speeds["preadv"])
    rows = [
        Row(f"read of another server's 2 MiB blocks, {NUM_THREADS} threads", ours, "GB/s", "preadv", ours / plain),
        Row("preadv of the same files", plain, "GB/s"),
    ]
    for name, percent in (("p50", 50), ("p99", 99)):
        mine, theirs = (float(np.percentile(latencies[side], percent)) * 1e3 for side in ("tier", "preadv"))
        rows.append(Row(f"latency of a block, {name}", mine, "ms", "preadv", theirs / mine))
    return rows


def read_plainly(slabs: list[Path], num_blocks: int) -> tuple[float, list[float]]:
    """Returns GB/s, and the seconds of each block."""
    files = [os.open(slab, os.O_RDONLY | os.O_DIRECT) for slab in slabs]
    blocks = [(fd, at) for fd in files for at in range(0, os.fstat(fd).st_size - BLOCK_BYTES + 1, BLOCK_BYTES)]
    order = np.random.default_rng(2).permutation(len(blocks))[:num_blocks].tolist()

    def read(part: list[int]) -> list[float]:
        times = []
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            for i in part:
                fd, at = blocks[i]
                start = time.perf_counter()
                assert os.preadv(fd, [buffer], at) == BLOCK_BYTES
                times.append(time.perf_counter() - start)
        return times

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        start = time.perf_counter()
        times = list(threads.map(read, [order[i::NUM_THREADS] for i in range(NUM_THREADS)]))
        seconds = time.perf_counter() - start
    for fd in files:
        os.close(fd)
    return len(order) * BLOCK_BYTES / seconds / 1e9, [each for part in times for each in part]


def thread_cost(directory: Path, quick: bool) -> list[Row]:
    """Measures the scheduler's thread per foreign block that is read, and per own block."""
    num_blocks = 1024 if quick else 8192
    pools = [HostPool(2048, SMALL_BYTES) for _ in range(2)]
    root = directory / "cost"
    capacity = num_blocks * SMALL_BYTES * 2 + (64 << 20)
    owner, reader = open_tier(root, capacity, pools[0]), open_tier(root, 64 << 20, pools[1])
    keys = new_keys(num_blocks)
    run(owner, keys, np.arange(2048), is_read=False)
    wait_until_found(reader, keys)
    spent = {
        name: statistics.median(run(tier, keys, np.arange(2048), is_read=True)[1] for _ in range(ROUNDS))
        for name, tier in (("own", owner), ("foreign", reader))
    }
    reader.close()
    owner.close()
    for pool in pools:
        pool.close()
    foreign, own = (spent[name] / num_blocks * 1e6 for name in ("foreign", "own"))
    return [Row("scheduler's thread, per foreign block read", foreign, "us", "own block", own / foreign)]


def main(out: Path, quick: bool) -> None:
    base = os.environ.get("KVOFFLOAD_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=base or Path.cwd()) as temporary:
        directory = Path(temporary)
        rows = finding(directory, quick) + reading(directory, quick) + thread_cost(directory, quick)
    publish("shared_dir", "Shared directory tier (ratio: relative to the other side, above 1 is better)", rows, out)
