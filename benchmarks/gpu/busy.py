"""Copies beside an engine's thread that runs Python, both directions at once, small rows, and launches of the kernel.

Python's lock is held by the engine's thread for a share of each step of 5 ms; copies must not need it.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from benchmarks.gpu import cuda
from benchmarks.gpu.interference import Load
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from benchmarks.gpu.rig import Blocks, Layout, Rig, make_views, registered_pool, slot_bytes
from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda import driver
from kvoffload.transfer.cuda.calls import MAX_BLOCKS, Kernel
from tests.transfer.cuda.calls import launch

KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 2 << 30
STEP_S = 5e-3
SHARES = (0.0, 0.3, 0.7, 0.95)
MEASURE_S = 0.4
IN_FLIGHT_BYTES = 768 << 20
"""What each direction has in flight: more than the bus moves in two steps."""
CASES = {(64 * KIB, 32): 0.0, (2 * MIB, 1): 0.945, (256 * KIB, 32): 0.89}
"""By bytes per block and layers: the least share of the memcpy peak of the same direction. 0.0: at least BUSY_GATE."""
BUSY_GATE = 0.95
"""The least share of the rate beside an idle thread."""
SMALL_ROWS = (4 * KIB, 8 * KIB, 16 * KIB, 28 * KIB)
PROGRAMS = (4, 8, 16, 32)


def run(report: Report, options: Options) -> None:
    peaks = cuda.memcpy_peaks(options.size(cuda.PEAK_BYTES))
    for (block_bytes, layers), gate in CASES.items():
        with_shares = SHARES if not options.dry_run else SHARES[:2]
        _measure(report, options, (block_bytes, layers), with_shares, {way: gate * peaks[way] for way in peaks})
    for block_bytes in SMALL_ROWS:
        _measure(report, options, (block_bytes, 1), SHARES[:1], {})
    _programs(report, options)


def _measure(
    report: Report, options: Options, shape: tuple[int, int], shares: tuple[float, ...], gates: dict[str, float]
) -> None:
    """Adds GB/s per direction and share. ``gates``: the least GB/s by direction."""
    block_bytes, layers = shape
    # A pool, and as much memory on the device.
    nbytes = min(options.size(POOL_BYTES), cuda.free_memory() // 4)
    num_blocks = max(16, nbytes // block_bytes)
    group = PageGroup(make_views(Layout.MERGED, layers, num_blocks, block_bytes // layers))
    with registered_pool(num_blocks, slot_bytes([group])) as (pool, registration):
        rig = Rig([group], pool.data, registration)
        try:
            for directions in (("store",), ("load",), ("store", "load")):
                least = gates.get("both" if len(directions) > 1 else directions[0])
                for share in shares:
                    speed = _speed(rig, num_blocks, directions, share, options)
                    if least == 0.0:
                        least = BUSY_GATE * speed
                    what = f"{block_bytes // KIB} KiB, {layers} layers, {' and '.join(directions)}"
                    what += f", engine's thread {share:.0%} busy"
                    if least is None:
                        report.add(what, speed, "GB/s")
                    else:
                        report.at_least(round(least, 1), what, speed, "GB/s")
        finally:
            rig.close()


def _speed(rig: Rig, num_blocks: int, directions: tuple[str, ...], share: float, options: Options) -> float:
    job_blocks = max(1, num_blocks // 32)
    job_bytes = job_blocks * rig.groups[0].block_bytes
    in_flight = max(2, min(8, options.size(IN_FLIGHT_BYTES) // job_bytes))
    load = Load(rig, num_blocks, directions, job_blocks, in_flight)
    load.step()
    begin = time.perf_counter()
    end = begin + (0.02 if options.dry_run else MEASURE_S)
    while (now := time.perf_counter()) < end:
        load.step()
        while time.perf_counter() < now + share * STEP_S:
            pass
        time.sleep(max(0.0, now + STEP_S - time.perf_counter()))
    load.drain()
    return load.nbytes / (time.perf_counter() - begin) / 1e9


def _programs(report: Report, options: Options) -> None:
    """Adds the rate of gathers alone, by the number of programs of a launch."""
    for page in (2 * KIB, 64 * KIB):
        blocks = np.random.default_rng(0).permutation(MAX_BLOCKS if not options.dry_run else 16)
        group = PageGroup(make_views(Layout.MERGED, 32, len(blocks), options.size(page) or 64))
        device = cuda.make_device([group])
        kernel = device.native_calls().kernels[0]
        if kernel is None:
            report.add(f"gather of pages of {page // KIB} KiB", "no kernel")
        else:
            staging, stream = device.allocate(len(blocks) * kernel.row_bytes), device.new_stream()
            for programs in PROGRAMS:
                speed = _gather_rate(kernel, programs, blocks, staging, stream, options)
                report.add(f"gather of pages of {page // KIB} KiB, {programs} programs", speed, "GB/s")
        device.close()


def _gather_rate(kernel: Kernel, programs: int, blocks: Blocks, staging: int, stream: int, options: Options) -> float:
    calls, exact = driver.Driver(0), dataclasses.replace(kernel, max_programs=programs, rows_per_program=1e-3)
    calls.use_context()

    def once() -> int:
        launch(calls, exact, exact.gather, stream, blocks, staging)
        return len(blocks) * kernel.row_bytes

    return cuda.bandwidth(once, options.rounds(5))
