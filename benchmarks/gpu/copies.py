"""The throughput of stores and loads, beside memcpy of page-locked memory and beside a copy per page, as vLLM's own
offloading copies. Blocks and slots are in random order; times are those of the wall clock, from submit to report."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.gpu import cuda
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from benchmarks.gpu.rig import Blocks, Layout, Reshaped, Rig, make_views, registered_pool
from kvoffload.abc import PageGroup
from kvoffload.host.registration import Registration
from kvoffload.transfer.cuda import driver
from tests.transfer.cuda.calls import copy

KIB, MIB = 1 << 10, 1 << 20
GATES = {64 * KIB: 0.0, 2 * MIB: 0.945, 256 * KIB: 0.89, MIB: 0.9}
"""By bytes per block: the least share of the memcpy peak, for GATED_BLOCKS blocks. 0.0: SMALL_GATE alone counts."""
SMALL_GATE = 0.9
"""The least share of a copy per page of blocks in one piece, which on the same machine copies as many bytes at once:
how fast a device copies small pieces differs from one machine to the next."""
LARGEST = 2 * MIB
DIRECTIONS = ("store", "load")
NUM_BLOCKS = (4096, 256, 16)
GATED_BLOCKS = 4096
LAYERS = (1, 32, 80)
"""With one layer, as where blocks are outermost, a block is one piece, which is copied directly."""
PAGE_ALIGNMENT = 16
MAX_PAGE_COPIES = 1 << 16
MIN_ROUND_S = 0.02
"""Few blocks are copied several times per round."""


def run(report: Report, options: Options) -> None:
    # A small GPU, or a part of one, takes fewer blocks.
    most = 32 if options.dry_run else min(GATED_BLOCKS, cuda.free_memory() // 2 // LARGEST)
    largest = 16 * KIB if options.dry_run else LARGEST
    gates = {8 * KIB: 0.0, largest: 0.0} if options.dry_run else GATES
    deadline = time.monotonic() + options.seconds * 0.9
    peaks = cuda.memcpy_peaks(options.size(cuda.PEAK_BYTES))
    for name, peak in peaks.items():
        report.add(f"memcpy of page-locked memory, {name}", peak, "GB/s")
    device_memory = cuda.empty(most * largest)
    device_memory.fill_(1)
    with registered_pool(most, largest) as (pool, registration):
        ready = registration.num_ready_slots
        report.must("the pool is registered", ready == most, f"{ready} of {most} slots")
        memory = pool.data.reshape(-1)
        try:
            simple: dict[tuple[int, str], float] = {}
            for block_bytes, layers in itertools.product(gates, LAYERS):
                if time.monotonic() > deadline:
                    raise TimeoutError("too little time for all sizes")
                page = block_bytes // layers // PAGE_ALIGNMENT * PAGE_ALIGNMENT
                slots = memory[: most * block_bytes].reshape(most, block_bytes)
                group = PageGroup(make_views(Layout.MERGED, layers, most, page, device_memory))
                rig = Rig([group], slots, Reshaped(registration, largest // block_bytes))
                try:
                    what = f"{block_bytes // KIB} KiB, {layers} layers"
                    if layers == 1:
                        orders = np.random.default_rng(0).permutation(most)
                        for way in DIRECTIONS:
                            simple[block_bytes, way] = _copy_per_page(rig, way, orders, options)
                    gate = gates[block_bytes]
                    least = {way: gate * peaks[way] or SMALL_GATE * simple[block_bytes, way] for way in DIRECTIONS}
                    _measure(report, options, rig, what, least, peaks)
                finally:
                    rig.close()
        finally:
            _release(registration)


def _measure(
    report: Report, options: Options, rig: Rig, what: str, least: Mapping[str, float], peaks: Mapping[str, float]
) -> None:
    """Adds the throughput of each direction and number of blocks, and of a copy per page. ``least``: GB/s by
    direction."""
    most = len(rig.slots)
    counts = (most, 16) if options.dry_run else (most, *NUM_BLOCKS[1:])
    rng = np.random.default_rng(0)
    for number in counts:
        places, blocks = rng.permutation(most)[:number], rng.permutation(most)[:number]
        _check(report, rig, places, blocks, f"{what}, {number} blocks")
        for direction in DIRECTIONS:
            speed = _speed(rig, direction, places, blocks, options)
            name = f"{what}, {direction} of {number} blocks"
            report.add(name, speed, "GB/s")
            if number == most:
                gate = 0.0 if options.dry_run else round(least[direction] / peaks[direction], 3)
                report.at_least(gate, f"{name}: share of memcpy", speed / peaks[direction])
    for direction in DIRECTIONS:
        speed = _copy_per_page(rig, direction, rng.permutation(most), options)
        report.add(f"{what}, {direction}, a copy per page", speed, "GB/s")


def _release(registration: Registration) -> None:
    cuda.synchronize()
    registration.release()


def _check(report: Report, rig: Rig, places: Blocks, blocks: Blocks, what: str) -> None:
    """Adds a failed gate unless a round trip of other bytes in each block has the right bytes."""
    nbytes = rig.groups[0].device_block_bytes
    chosen, some = blocks[:16], places[:16]
    rows = np.random.default_rng(len(blocks)).integers(0, 256, (len(chosen), nbytes), np.uint8)
    rig.write(0, chosen, rows)
    rig.result(rig.store(some, chosen))
    stored = np.array_equal(rig.slots[some, :nbytes], rows)
    rig.fill(0, chosen, 0xEE)
    rig.transfer.before_forward()
    rig.result(rig.load(some, chosen))
    if not stored or not np.array_equal(rig.rows(0, chosen), rows):
        report.must(f"{what}: right bytes", False, "wrong bytes")


def _speed(rig: Rig, direction: str, places: Blocks, blocks: Blocks, options: Options) -> float:
    submit = rig.store if direction == "store" else rig.load

    def once() -> int:
        result = rig.result(submit(places, blocks))
        assert result.ok
        return result.nbytes

    return cuda.bandwidth(_repeated(once, options), options.rounds(3))


def _copy_per_page(rig: Rig, direction: str, places: Blocks, options: Options) -> float:
    """Copies each page by itself in batches of the driver, or a call each if it has none."""
    calls = driver.Driver(0)
    calls.use_context()
    run = rig.tables[0].runs
    number = max(1, min(len(places), MAX_PAGE_COPIES // len(run)))
    blocks = np.random.default_rng(1).permutation(len(places))[:number]
    on_device = np.concatenate([each.base + each.stride * blocks for each in run])
    slot = int(rig.slots.ctypes.data) + rig.slots.shape[1] * places[:number]
    on_host = np.concatenate([slot + each.offset for each in run])
    sizes = np.repeat([each.nbytes for each in run], number)
    stream = rig.device.new_stream()
    sides = (on_host, on_device) if direction == "store" else (on_device, on_host)

    def once() -> int:
        copy(calls, stream, sides[0], sides[1], sizes)
        cuda.synchronize()
        return int(sizes.sum())

    return cuda.bandwidth(_repeated(once, options), options.rounds(3))


def _repeated(once: Callable[[], int], options: Options) -> Callable[[], int]:
    if options.dry_run:
        return once
    begin = time.perf_counter()
    once()
    repeats = max(1, int(MIN_ROUND_S / (time.perf_counter() - begin)))
    return lambda: sum(once() for _ in range(repeats))
