"""Benchmarks of the disk tier: GB/s beside fio with the same file system, block size and number of threads; the cost of
tiering on the scheduler's thread; the time to start with a full index.

The files are in $KVOFFLOAD_BENCH_DIR, by default the current directory. Both sides bypass the page cache (O_DIRECT);
fio reads and writes the tier's own slabs in random order, from its own buffers. If fio is not installed, a simple loop
of preadv and pwritev takes its place, in as many threads.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import KVGroup, LookupState, OffloadingManager, OffloadKey, ReqContext, ScheduledStep
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.host.pool import HostPool
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import FACTS, pack_records
from kvoffload.tiers.disk.layout import SLAB_BYTES
from kvoffload.tiers.disk.recovery import open_files
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.threads import NUM_THREADS

BLOCK_SIZES = (2 << 20, 64 << 10)
BLOCK_TOKENS = 16
FINGERPRINT = "b" * 64
ROUNDS = 5
DECODING = 256
"""Requests that decode in each step."""
STEPS = 400
PEER = "fio" if shutil.which("fio") else "a simple loop"
LONG_PROMPT = 8192
"""Blocks."""
CONTEXT = ReqContext("bench")


def new_keys(n: int) -> list[OffloadKey]:
    raw = os.urandom(32 * n)
    return [make_offload_key(raw[32 * i : 32 * i + 32], 0) for i in range(n)]


# Throughput.


def run_tier(tier: DiskTier, keys: list[OffloadKey], slots: np.ndarray[Any, Any], is_read: bool) -> float:
    """Returns GB/s from the first submission to the last result, with as many blocks in transfer as the tier allows."""
    begun = under_way = 0
    start = time.perf_counter()
    while begun < len(keys) or under_way:
        batch = keys[begun : begun + 1024]
        taken = (tier.read if is_read else tier.write)(batch, slots[begun : begun + 1024])
        assert taken == batch[: len(taken)]
        begun += len(taken)
        under_way += len(taken)
        tier.wait(0.05)
        for result in tier.poll():
            assert result.ok, result
            under_way -= 1
    return len(keys) * tier.block_bytes / (time.perf_counter() - start) / 1e9


def run_peer(slabs: list[Path], nbytes: int, block_bytes: int, is_read: bool) -> float:
    """Returns GB/s of PEER on the tier's own slabs, with one block in transfer per thread."""
    return (run_fio if PEER == "fio" else run_loop)(slabs, nbytes, block_bytes, is_read)


def run_loop(slabs: list[Path], nbytes: int, block_bytes: int, is_read: bool) -> float:
    files = [os.open(slab, os.O_RDWR | os.O_DIRECT) for slab in slabs]
    blocks = [(fd, at) for fd in files for at in range(0, os.fstat(fd).st_size - block_bytes + 1, block_bytes)]
    order = np.random.default_rng(2).permutation(len(blocks))[: nbytes // block_bytes].tolist()

    def run(part: list[int]) -> None:
        with mmap.mmap(-1, block_bytes) as buffer:
            for i in part:
                fd, at = blocks[i]
                done = os.preadv(fd, [buffer], at) if is_read else os.pwritev(fd, [buffer], at)
                assert done == block_bytes

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        start = time.perf_counter()
        list(threads.map(run, [order[i::NUM_THREADS] for i in range(NUM_THREADS)]))
        seconds = time.perf_counter() - start
    for fd in files:
        os.close(fd)
    return len(order) * block_bytes / seconds / 1e9


def run_fio(slabs: list[Path], nbytes: int, block_bytes: int, is_read: bool) -> float:
    per_thread = nbytes // NUM_THREADS // len(slabs) // block_bytes * block_bytes
    command = [
        "fio",
        "--name=kvoffload",
        f"--filename={':'.join(map(str, slabs))}",
        f"--rw={'randread' if is_read else 'randwrite'}",
        f"--bs={block_bytes}",
        f"--size={per_thread * len(slabs)}",
        f"--offset_increment={per_thread}",
        f"--numjobs={NUM_THREADS}",
        "--thread",
        "--direct=1",
        "--ioengine=psync",
        "--group_reporting",
        "--output-format=json",
        "--randrepeat=0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]["read" if is_read else "write"]
    return float(job["bw_bytes"]) / 1e9


def throughput(directory: Path, block_bytes: int, quick: bool) -> list[Row]:
    nbytes = (256 << 20) if quick else (2 << 30)
    num_blocks = nbytes // block_bytes
    pool = HostPool((512 << 20) // block_bytes, block_bytes)
    pool.wait_until_touched()
    pool.data[:] = np.random.default_rng(0).integers(0, 256, pool.data.shape[1], dtype=np.uint8)
    speeds: dict[str, list[float]] = {name: [] for name in ("write", "read", "chain", "peer write", "peer read")}
    shuffled = np.random.default_rng(1).permutation(num_blocks)
    for i in range(ROUNDS):
        root = directory / f"tier{i}"
        tier = open_disk_tier(str(root), nbytes * 5 // 4 + (64 << 20), TierContext([pool.handle().open()], FINGERPRINT))
        keys = new_keys(num_blocks)
        slots = np.arange(num_blocks) % pool.num_blocks
        # The first writes to allocated room cost the file system more. fio does not have them, so they are not timed.
        run_tier(tier, keys, slots, is_read=False)
        tier.delete(keys)
        while tier.has_jobs:
            tier.wait(0.05)
            tier.poll()
        keys = new_keys(num_blocks)
        speeds["write"].append(run_tier(tier, keys, slots, is_read=False))
        order = [keys[j] for j in shuffled]
        speeds["read"].append(run_tier(tier, order, slots, is_read=True))
        speeds["chain"].append(run_tier(tier, keys, slots, is_read=True))
        tier.close()
        slabs = sorted((root / FINGERPRINT).glob("slab-*"))
        for is_read in (True, False):
            speeds["peer read" if is_read else "peer write"].append(run_peer(slabs, nbytes, block_bytes, is_read))
        shutil.rmtree(root)
    pool.close()
    rows = []
    size = f"{block_bytes >> 10} KiB blocks"
    for name, peer_name, what in (
        ("write", "write", "write"),
        ("read", "read", "read in random order"),
        ("chain", "read", "read in the order of the chain"),
    ):
        ours, peer = statistics.median(speeds[name]), statistics.median(speeds[f"peer {peer_name}"])
        rows.append(Row(f"{what}, {size}, {NUM_THREADS} threads, checksums on", ours, "GB/s", PEER, ours / peer))
    return rows + [
        Row(f"{PEER}, random {name}, {size}", statistics.median(speeds[f"peer {name}"]), "GB/s")
        for name in ("write", "read")
    ]


# Cost on the scheduler's thread.


@dataclass(eq=False)
class BenchRequest:
    """A request that decodes."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass
class Blocks:
    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


def connector(manager: OffloadingManager) -> OffloadingConnectorScheduler:
    return OffloadingConnectorScheduler(manager, EngineSpec([KVGroup(BLOCK_TOKENS)]))


def decode_steps(manager: OffloadingManager, steps: int) -> float:
    """Returns the thread time per step in ms, median, if DECODING requests get one token each in every step."""
    scheduler = connector(manager)
    rng = np.random.default_rng(0)
    requests = []
    next_block = 1
    for i in range(DECODING):
        start = int(rng.integers(1, BLOCK_TOKENS))
        request = BenchRequest(f"r{i}", start, start - 1)
        requests.append(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, Blocks([next_block]), 0)
        scheduler.build_connector_meta(
            ScheduledStep({request.request_id: start - 1}, {request.request_id: ([next_block],)}, frozenset([f"r{i}"]))
        )
        next_block += 1
    times = []
    for _ in range(steps):
        block_ids: dict[str, tuple[Sequence[int], ...]] = {}
        for request in requests:
            if request.num_computed_tokens % BLOCK_TOKENS == 0 and request.num_computed_tokens:
                block_ids[request.request_id] = ([next_block],)
                next_block += 1
            if request.num_tokens % BLOCK_TOKENS == 0:
                request.block_hashes.append(os.urandom(32))
        step = ScheduledStep({request.request_id: 1 for request in requests}, block_ids)
        start_ns = time.thread_time_ns()
        meta = scheduler.build_connector_meta(step)
        scheduler.update_connector_output(WorkerReport(done=dict.fromkeys(meta.stores, 1)))
        times.append((time.thread_time_ns() - start_ns) / 1e6)
        for request in requests:
            request.num_computed_tokens += 1
            request.num_tokens += 1
    assert not scheduler.off
    return statistics.median(times)


def lookup_cost(manager: OffloadingManager) -> dict[str, float]:
    """Returns the thread time per call in ms, median, for a long prompt."""
    keys = new_keys(LONG_PROMPT)

    def cost(call: Callable[[], Any]) -> float:
        return statistics.median(timed(call) for _ in range(20))

    def look_up() -> int | None:
        return manager.lookup(keys, CONTEXT)

    def touch() -> None:
        manager.touch(keys, CONTEXT)

    def end() -> None:
        manager.end_chain(keys, keys, CONTEXT)

    found = {"miss": cost(look_up)}
    manager.prepare_store(keys)
    manager.complete_store(keys)
    found |= {"hit": cost(look_up), "touch": cost(touch)}
    return {**found, "use": statistics.median(timed(touch) + timed(end) for _ in range(20))}


def timed(call: Callable[[], Any]) -> float:
    """Returns the thread time of ``call`` in ms."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e6


def scheduler_cost(directory: Path, quick: bool) -> list[Row]:
    steps = STEPS // (8 if quick else 1)
    host_blocks = 20_000
    pool = HostPool(host_blocks, 4096)
    figures: dict[str, dict[str, float]] = {}
    for name in ("host", "disk"):
        host = LRUOffloadingManager(HostBackend(BLOCK_TOKENS, host_blocks))
        manager: OffloadingManager = host
        if name == "disk":
            tier = open_disk_tier(str(directory / "cost"), 512 << 20, TierContext([pool.data], FINGERPRINT))
            manager = TieredOffloadingManager(host, [tier], TieringSettings([KVGroup(BLOCK_TOKENS)]))
        figures[name] = {"decode": decode_steps(manager, steps), **lookup_cost(manager)}
        manager.shutdown()
    rows = []
    for call, what in (
        ("decode", f"step of {DECODING} decoding requests"),
        ("miss", f"lookup of {LONG_PROMPT:,} absent blocks"),
        ("hit", f"lookup of {LONG_PROMPT:,} blocks in the host"),
        ("touch", f"touch of {LONG_PROMPT:,} blocks"),
        ("use", f"touch, and reorder at the end, of {LONG_PROMPT:,} blocks"),
    ):
        value = figures["disk"][call]
        rows.append(Row(f"{what}, with a disk tier", value, "ms", "host alone", figures["host"][call] / value))
    return rows


def promotion_cost(directory: Path) -> list[Row]:
    """Measures the thread time per block of a write to disk and of a promotion, over all calls on the scheduler's
    thread."""
    n = 4096
    pool = HostPool(3 * n, 4096)
    host = LRUOffloadingManager(HostBackend(BLOCK_TOKENS, 3 * n))
    tier = open_disk_tier(str(directory / "promotion"), 512 << 20, TierContext([pool.data], FINGERPRINT))
    manager = TieredOffloadingManager(host, [tier], TieringSettings([KVGroup(BLOCK_TOKENS)], load_deadline_ms=60_000))
    keys = new_keys(n)
    down = up = 0.0

    def poll_until_idle() -> float:
        spent = 0.0
        while tier.has_jobs:
            tier.wait(0.05)
            spent += timed(manager.poll)
        return spent

    stored: Iterable[list[OffloadKey]] = [keys[i : i + 128] for i in range(0, n, 128)]
    down += timed(lambda: manager.touch(keys, CONTEXT))
    for part in stored:
        host.prepare_store(part)
        down += timed(partial(manager.complete_store, part))
        down += poll_until_idle()
    down += timed(lambda: manager.end_chain(keys, keys, CONTEXT)) + poll_until_idle()
    written = int((tier.contains(keys) == LookupState.HIT).sum())
    host.reset()
    up += timed(lambda: manager.lookup(keys, CONTEXT)) + timed(manager.poll)
    up += poll_until_idle()
    found = manager.lookup(keys, CONTEXT) or 0
    manager.shutdown()
    assert found == written > 0, (found, written)
    return [
        Row("scheduler's thread, per block written to disk", 1e3 * down / written, "us"),
        Row("scheduler's thread, per block promoted", 1e3 * up / found, "us"),
    ]


def restart_time(directory: Path, quick: bool) -> list[Row]:
    """Measures the start with a full index. The payloads are not written, since a start does not read them."""
    num_slots = 100_000 if quick else 1_000_000
    root = directory / "restart"
    capacity = num_slots * (4096 + 256) + (64 << 20)
    files = open_files(DirectoryStorage(root), FINGERPRINT, [4096], capacity, SLAB_BYTES, lambda: 7)
    while files.num_allocated < num_slots:
        files.grow()
    for start in range(0, num_slots, 4096):
        keys = new_keys(min(4096, num_slots - start))
        facts = np.zeros(len(keys), dtype=FACTS)
        facts["payload_checksum"] = np.arange(len(keys))
        facts["sequence"] = start + np.arange(len(keys))
        records = pack_records(files.index.header, keys, facts)
        files.index.write_records(start, records.reshape(-1))
    files.close()
    pool = HostPool(1, 4096)
    begin = time.perf_counter()
    tier = open_disk_tier(root, capacity, TierContext([pool.data], FINGERPRINT))
    seconds = time.perf_counter() - begin
    assert tier.stats().num_blocks == num_slots
    tier.close()
    shutil.rmtree(root)
    return [Row(f"start with {num_slots:,} blocks on disk", seconds, "s")]


def main(out: Path, quick: bool) -> None:
    base = os.environ.get("KVOFFLOAD_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=base or Path.cwd()) as temporary:
        directory = Path(temporary)
        rows = [row for block_bytes in BLOCK_SIZES for row in throughput(directory, block_bytes, quick)]
        rows += scheduler_cost(directory, quick)
        rows += promotion_cost(directory)
        rows += restart_time(directory, quick)
    if PEER != "fio":
        print("fio is not installed: it is replaced by a simple loop of preadv and pwritev (apt-get install fio)")
    publish("disk", "Disk tier (ratio: speed relative to the other side)", rows, out)
