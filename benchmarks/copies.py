"""Gather and scatter of KV pages compared with memcpy: native code, plain numpy, and one large piece of memory.

The device side is one array (layers, blocks, page bytes), the layout of vLLM's CPU backend; blocks are copied in random
order between it and the slots of a pool, both larger than the processor's caches. The best memcpy moves the same number
of bytes of one piece of memory: the faster of numpy's and libc's on one thread, and numpy's on two. The copies take
turns.

A figure is the median of ROUNDS rounds, a ratio the median of the rounds' ratios, with quartiles in brackets. Copies on
one thread are compared by its processor time, which other processes change least, and copies on two by wall time,
which says little on a busy machine.

At the end the copies of one of two ranks whose pages are in turn in the slots of one pool are compared with the same
copies to a pool of its own, on one thread, in jobs of several sizes.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import ByteArray
from kvoffload.host.pool import HostPool, padded_slot_bytes
from kvoffload.native import load
from kvoffload.transfer.blocks import BlockCopier, PlainBlockCopier
from kvoffload.transfer.copies import Numbers

KIB = 1 << 10
SHAPES = [
    *((32, row // 32) for row in (8 * KIB, 64 * KIB, 512 * KIB, 2048 * KIB)),
    *((1, row * KIB) for row in (8, 16, 32, 64, 128, 256, 1024, 2048)),
]
"""Layers and bytes per page: the pages of a block are as many pieces of memory as it has layers."""
RANKS = 2
PLACED_SHAPE = 32, 2048 * KIB // 32 // RANKS
PLACED_JOBS = 1, 8, 64
"""Blocks per job."""
TOTAL_BYTES = 256 << 20
ALIGNMENT = 4096
ROUNDS = 11

Copies = dict[str, Callable[[], object]]
ONE, TWO = "one thread", "two threads"
NATIVE = "native"


def aligned_bytes(nbytes: int) -> ByteArray:
    memory = np.ones(nbytes + ALIGNMENT, dtype=np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:nbytes]


def measure(copies: Copies, clock: Callable[[], float], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each copy in each round."""
    found: dict[str, list[float]] = {name: [] for name in copies}
    for _ in range(rounds):
        for name, copy in copies.items():
            begun = clock()
            copy()
            found[name].append(clock() - begun)
    return found


def memcpy_copies(to: ByteArray, from_: ByteArray, threads: ThreadPoolExecutor) -> dict[str, Copies]:
    """Returns copies of one piece of memory, by number of threads and name."""
    half = len(to) // 2

    def on_two_threads() -> None:
        other = threads.submit(np.copyto, to[:half], from_[:half])
        np.copyto(to[half:], from_[half:])
        other.result()

    libc = partial(ctypes.memmove, to.ctypes.data, from_.ctypes.data, len(to))
    return {
        ONE: {"memcpy, numpy": partial(np.copyto, to, from_), "memcpy, libc": libc},
        TWO: {"memcpy, numpy": on_two_threads},
    }


def page_copies(device: ByteArray, host: ByteArray, is_store: bool) -> dict[str, Copies]:
    """Returns the copies of all blocks in random order, by number of threads and name."""
    num_blocks = device.shape[1]
    job = (
        np.random.default_rng(0).permutation(num_blocks).astype(np.int64),
        np.random.default_rng(1).permutation(num_blocks).astype(np.int64),
        np.zeros(num_blocks, dtype=np.int64),
        is_store,
    )
    arguments = list(device), host, [layer * device.shape[2] for layer in range(len(device))]
    plain = partial(PlainBlockCopier(*arguments).copy, *job)
    copies: dict[str, Copies] = {ONE: {"plain": plain}, TWO: {"plain": plain}}
    if load("_copies") is not None:
        copier: Any = BlockCopier(*arguments)
        for threads, named in copies.items():
            named[NATIVE] = partial(copier.copy_rows, *job, threads == TWO)
    return copies


def compared(what: str, times: dict[str, list[float]], nbytes: int) -> list[Row]:
    """Returns the speed of native copies of pages compared with numpy, and of both with the best memcpy."""
    memcpy = min((name for name in times if name.startswith("memcpy")), key=lambda name: statistics.median(times[name]))
    rows = []
    for name, seconds in times.items():
        peers = {"plain": "plain"} if name == NATIVE else {}
        if name in ("plain", NATIVE):
            peers["best memcpy"] = memcpy
        for versus, peer in peers.items():
            ratios = [each / own for own, each in zip(seconds, times[peer], strict=True)]
            low, median, high = statistics.quantiles(ratios, n=4)
            speed = nbytes / statistics.median(seconds) / 1e9
            rows.append(Row(f"{what}, {name} ({low:.2f} to {high:.2f})", speed, "GB/s", versus, median))
    return rows


def placed_copies(device: ByteArray, pool: ByteArray, is_store: bool, blocks_per_job: int) -> Copies:
    """Returns the copies of all blocks, in random order, to a pool of this rank and to one that it shares."""
    layers, num_blocks, page = device.shape
    order = [np.random.default_rng(seed).permutation(num_blocks).astype(np.int64) for seed in range(2)]
    cuts = range(blocks_per_job, num_blocks, blocks_per_job)
    jobs = list(zip(*(np.split(each, cuts) for each in order), strict=True))
    copies: Copies = {}
    for name, ranks in (("own pool", 1), ("shared pool", RANKS)):
        row_bytes = ranks * layers * page
        host = pool.reshape(-1)[: num_blocks * row_bytes].reshape(num_blocks, 1, row_bytes)
        offsets = [layer * ranks * page for layer in range(layers)]
        copies[name] = partial(copy_jobs, BlockCopier(list(device), host, offsets), jobs, is_store)
    return copies


def copy_jobs(copier: Any, jobs: list[tuple[Numbers, Numbers]], is_store: bool) -> None:
    for blocks, slots in jobs:
        copier.copy_rows(blocks, slots, np.zeros_like(slots), is_store, False)


def placed_rows(memory: ByteArray, rounds: int) -> list[Row]:
    """Returns the speed of copies to a shared pool compared with those to a rank's own."""
    layers, page = PLACED_SHAPE
    num_blocks = len(memory) // (layers * page)
    device = memory.reshape(layers, num_blocks, page)
    pool = HostPool(num_blocks, padded_slot_bytes(RANKS * layers * page))
    pool.data[:] = 2
    pool.wait_until_touched()
    rows = []
    for direction, is_store in (("gather", True), ("scatter", False)):
        for blocks_per_job in PLACED_JOBS:
            times = measure(placed_copies(device, pool.data, is_store, blocks_per_job), time.thread_time, rounds)
            own, shared = times["own pool"], times["shared pool"]
            low, median, high = statistics.quantiles([a / b for a, b in zip(own, shared, strict=True)], n=4)
            what = f"{layers} x {page / KIB:g} KiB of {RANKS} ranks, {direction}, jobs of {blocks_per_job}"
            speed = len(memory) / statistics.median(shared) / 1e9
            rows.append(Row(f"{what} ({low:.2f} to {high:.2f})", speed, "GB/s", "a pool of its own", median))
    gc.collect()
    pool.close()
    return rows


def main(out: Path, quick: bool) -> None:
    rows: list[Row] = []
    nbytes, rounds = (TOTAL_BYTES // 16, 3) if quick else (TOTAL_BYTES, ROUNDS)
    if load("_copies") is None:
        print("There is no native code here: only plain copies are measured.")
    flat, memory = aligned_bytes(nbytes), aligned_bytes(nbytes)
    with ThreadPoolExecutor(1) as pool_of_threads:
        for layers, page in SHAPES[1:2] if quick else SHAPES:
            num_blocks = nbytes // (layers * page)
            pool = HostPool(num_blocks, padded_slot_bytes(layers * page))
            pool.data[:] = 2
            pool.wait_until_touched()
            device = memory.reshape(layers, num_blocks, page)
            host = pool.data.reshape(num_blocks, 1, -1)[:, :, : layers * page]
            large = memcpy_copies(flat, memory, pool_of_threads)
            for direction, is_store in (("gather", True), ("scatter", False)):
                for threads, copies in page_copies(device, host, is_store).items():
                    clock = time.thread_time if threads == ONE else time.perf_counter
                    what = f"{layers} x {page / KIB:g} KiB, {direction}, {threads}"
                    times = measure(large[threads] | copies, clock, rounds)
                    rows += compared(what, times, nbytes)
                    del copies
            del host
            gc.collect()
            pool.close()
    if load("_copies") is not None:
        rows += placed_rows(memory, rounds)
    publish("copies", f"Copies of {nbytes >> 20} MiB", rows, out)
