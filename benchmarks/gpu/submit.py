"""What offloading costs the engine's thread and the engine's stream: submitting jobs, fences, and device memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.gpu import cuda
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from benchmarks.gpu.rig import Layout, Ready, Rig, make_views, registered_pool
from kvoffload.abc import PageGroup, TransferSpec

PAGE = 8 << 10
LAYERS = 32
NUM_BLOCKS = 8192
ROUNDS = 30
SUBMIT_GATE_MS = 1.0
FENCE_GATE_MS = 1.0
"""A gather of one chunk, behind the chunks that are in flight."""
MEMORY_GATE = 68 << 20
SMALL_ALLOCATIONS = 8 << 20
"""The driver takes multiples of 2 MiB for tables."""
MIB = 1 << 20


def run(report: Report, options: Options) -> None:
    num_blocks = 64 if options.dry_run else NUM_BLOCKS
    views = make_views(Layout.MERGED, LAYERS, num_blocks, options.size(PAGE) or 64)
    group = PageGroup(views)
    with registered_pool(num_blocks, -(-group.block_bytes // 4096) * 4096) as (pool, registration):
        # The first one loads kernels, which stay.
        Rig([group], pool.data, Ready(0)).close()
        cuda.synchronize()
        free = cuda.free_memory()
        rig = Rig([group], pool.data, registration)
        cuda.synchronize()
        report.at_most(
            round((MEMORY_GATE + SMALL_ALLOCATIONS) / MIB, 1),
            "device memory taken",
            (free - cuda.free_memory()) / MIB,
            "MiB",
        )
        try:
            _submit(report, options, rig, num_blocks)
            _fences(report, options, rig, num_blocks)
        finally:
            rig.close()


def _submit(report: Report, options: Options, rig: Rig, num_blocks: int) -> None:
    """Times ``submit`` and ``before_forward`` on this thread, while nothing else is in flight."""
    for number in (32, 64) if options.dry_run else (512, 6250):
        slots, blocks = np.random.default_rng(0).permutation(num_blocks)[:number], np.arange(number)
        specs = {
            "one job": [rig.spec(slots, blocks)],
            "a job per block": [rig.spec(slots[i : i + 1], blocks[i : i + 1]) for i in range(number)],
        }
        for how, jobs in specs.items():
            for is_store in (True, False):
                times = [_time_submit(rig, jobs, is_store) for _ in range(options.rounds(ROUNDS))]
                what = f"engine's thread, {'store' if is_store else 'load'} of {number} blocks, {how}"
                if number <= 512:
                    report.at_most(SUBMIT_GATE_MS, f"{what}, median", statistics.median(times), "ms")
                else:
                    report.add(f"{what}, median", statistics.median(times), "ms")
                report.add(f"{what}, longest", max(times), "ms")


def _time_submit(rig: Rig, specs: Sequence[TransferSpec], is_store: bool) -> float:
    ids = range(1 << 30, (1 << 30) + len(specs))
    begin = time.perf_counter()
    for job, spec in zip(ids, specs, strict=True):
        rig.transfer.submit(job, spec, is_store)
    rig.transfer.before_forward()
    elapsed = (time.perf_counter() - begin) * 1e3
    for job in ids:
        assert rig.result(job).ok
    return elapsed


def _fences(report: Report, options: Options, rig: Rig, num_blocks: int) -> None:
    """Times a fence of one block of a store of all blocks: on the engine's thread and on its stream."""
    blocks = np.arange(num_blocks)
    host: list[float] = []
    device: list[float] = []
    alone: list[float] = []

    def measure(fence: Callable[[], None], into: list[float]) -> None:
        start = cuda.record()
        begin = time.perf_counter()
        fence()
        host.append((time.perf_counter() - begin) * 1e3)
        end = cuda.record()
        end.synchronize()
        into.append(cuda.seconds_between(start, end) * 1e3)

    for i in range(options.rounds(ROUNDS)):
        job = rig.store(blocks, blocks)
        rig.transfer.before_forward()
        # The copy is under way.
        time.sleep(2e-3)
        victim = int(blocks[-1 - i])
        measure(lambda job=job, victim=victim: rig.transfer.wait([job], [victim]), device)  # type: ignore[misc]
        begin = time.perf_counter()
        assert rig.result(job).ok
        alone.append((time.perf_counter() - begin) * 1e3)
    nbytes = num_blocks * rig.groups[0].block_bytes
    report.add("store of the fence", nbytes / (1 << 30), "GiB")
    report.add("rest of the store after the fence, median", statistics.median(alone), "ms")
    report.at_most(FENCE_GATE_MS, "engine's stream waits for a fenced block, median", statistics.median(device), "ms")
    report.add("engine's stream waits for a fenced block, longest", max(device), "ms")
    report.add("engine's thread in a fence, median", statistics.median(host), "ms")
    report.add("engine's thread in a fence, longest", max(host), "ms")
