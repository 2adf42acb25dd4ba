"""Gather and scatter of KV pages compared with the best memcpy: GB/s, and GB per second of processor time.

The device side is one array (layers, blocks, page bytes), the layout of vLLM's CPU backend; blocks are copied in random
order between it and the slots of a pool. The best memcpy moves the same number of bytes of one piece of memory. It is
the fastest of three, measured in the same run and in turn: numpy's on one thread and on two, and stores that bypass the
processor's caches on two threads.

There are RUNS runs of ROUNDS rounds. A figure is the median of the runs' medians, or bests, with the range of the runs
in brackets. On a machine that others use, trust processor time and ratios.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import Row, publish
from kvoffload.abc import ByteArray
from kvoffload.host.pool import HostPool, padded_slot_bytes
from kvoffload.native import load
from kvoffload.transfer.blocks import PlainBlockCopier, merge_views

LAYERS = 32
TOTAL_BYTES = 512 << 20
PIECE_BYTES = 64 << 10
"""Of one piece of memory, how much the copy that bypasses the caches calls a page."""
ALIGNMENT = 4096
RUNS = 3
ROUNDS = 7


@dataclass
class Times:
    """What each run found, in GB/s."""

    wall: list[float] = field(default_factory=list)
    """The median of its rounds."""
    best: list[float] = field(default_factory=list)
    """Its fastest round."""
    cpu: list[float] = field(default_factory=list)
    """The median of its rounds, per second of processor time of all threads."""


def aligned_bytes(nbytes: int) -> ByteArray:
    memory = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:nbytes]


def measure(copies: dict[str, Callable[[], object]], nbytes: int) -> dict[str, Times]:
    """Times every copy of ``nbytes``, in turn."""
    found = {name: Times() for name in copies}
    for _ in range(RUNS):
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in copies}
        for _ in range(ROUNDS):
            for name, copy in copies.items():
                wall, cpu = time.perf_counter(), time.process_time()
                copy()
                rounds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        for name, times in rounds.items():
            found[name].wall.append(nbytes / statistics.median(wall for wall, _ in times) / 1e9)
            found[name].best.append(nbytes / min(wall for wall, _ in times) / 1e9)
            found[name].cpu.append(nbytes / statistics.median(cpu for _, cpu in times) / 1e9)
    return found


def memcpy_copies(
    to: ByteArray, from_: ByteArray, threads: ThreadPoolExecutor, native: Any
) -> dict[str, Callable[[], object]]:
    half = len(to) // 2

    def on_two_threads() -> None:
        other = threads.submit(np.copyto, to[:half], from_[:half])
        np.copyto(to[half:], from_[half:])
        other.result()

    copies: dict[str, Callable[[], object]] = {
        "memcpy, numpy, one thread": partial(np.copyto, to, from_),
        "memcpy, numpy, two threads": on_two_threads,
    }
    if native is not None:
        n = len(to) // PIECE_BYTES
        copier = native.BlockCopier([from_.reshape(1, n, -1)], to.reshape(n, 1, -1))
        job = np.arange(n), np.arange(n), np.zeros(n, dtype=np.int64)
        for name, two in (("one thread", False), ("two threads", True)):
            copies[f"memcpy, past the caches, {name}"] = partial(copier.copy_rows, *job, True, True, two)
    return copies


def page_copies(
    device: npt.NDArray[np.uint8], host: npt.NDArray[np.uint8], native: Any
) -> dict[str, Callable[[], object]]:
    """Returns the copies of all blocks in random order, by name of what they do."""
    num_blocks = device.shape[1]
    job = (
        np.random.default_rng(0).permutation(num_blocks).astype(np.int64),
        np.random.default_rng(1).permutation(num_blocks).astype(np.int64),
        np.zeros(num_blocks, dtype=np.int64),
    )
    views = merge_views(list(device))
    plain = PlainBlockCopier(views, host)
    copies: dict[str, Callable[[], object]] = {}
    for direction, is_store in (("gather (store)", True), ("scatter (load)", False)):
        copies[f"{direction}, plain"] = partial(plain.copy, *job, is_store)
        if native is not None:
            copier = native.BlockCopier(views, host)
            for name, two in (("one thread", False), ("two threads", True)):
                copies[f"{direction}, native, {name}"] = partial(copier.copy_rows, *job, is_store, True, two)
    return copies


def main(out: Path, quick: bool) -> None:
    rows: list[Row] = []
    native = load("_copies")
    if native is None:
        print("There is no native code here: only plain copies are measured.")
    nbytes = TOTAL_BYTES // (32 if quick else 1)
    flat, memory = aligned_bytes(nbytes), aligned_bytes(nbytes)
    flat[:], memory[:] = 3, 1
    with ThreadPoolExecutor(1) as threads:
        for page in (8 << 10, 64 << 10):
            num_blocks = nbytes // (LAYERS * page)
            pool = HostPool(num_blocks, padded_slot_bytes(LAYERS * page))
            pool.data[:] = 2
            pool.wait_until_touched()
            copies = {
                **memcpy_copies(flat, memory, threads, native),
                **page_copies(memory.reshape(LAYERS, num_blocks, page), pool.data.reshape(num_blocks, 1, -1), native),
            }
            rows += table(f"{page >> 10} KiB", measure(copies, nbytes))
            del copies
            gc.collect()
            pool.close()
    publish("copies", f"Copies of {LAYERS} layers, {nbytes >> 20} MiB", rows, out)


def table(pages: str, times: dict[str, Times]) -> list[Row]:
    """Returns the rows, with each copy compared to the best memcpy, by each clock."""
    rows = []
    for clock in ("wall", "best", "cpu"):
        figures = {name: getattr(each, clock) for name, each in times.items()}
        best = max(statistics.median(runs) for name, runs in figures.items() if name.startswith("memcpy"))
        for name, runs in figures.items():
            speed = statistics.median(runs)
            what = f"{pages}, {clock}: {name} ({min(runs):.1f} to {max(runs):.1f})"
            rows.append(Row(what, speed, "GB/s", "best memcpy", speed / best))
    return rows
