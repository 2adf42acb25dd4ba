"""How much copies slow a decode loop. Steps beside stores and loads alternate with steps without.

A step reads its weights at the rate of the device's memory, and copies use the same memory. So a step may take longer
by the time in which the memory moves what was copied meanwhile, and by 1%: the gate of the median is
1 + passes x bytes / (rate x step) + 0.01. A block that is gathered passes the memory three times (page, staging
written, staging read), one that is copied directly once. The gather of a chunk also occupies multiprocessors, on which
a kernel of the step then has fewer programs: it delays the step by up to GATHER_DELAY_S, which the gate adds per chunk.
"""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.gpu import cuda
from benchmarks.gpu.decode import Decoder, Steps, percentiles
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from benchmarks.gpu.rig import Layout, Rig, make_views, registered_pool, slot_bytes
from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS

MARGIN = 0.01
GATHER_DELAY_S = 20e-6
"""16 programs of 512 threads take 45% of the registers of as many multiprocessors while they gather a chunk."""
PASSES = {Layout.MERGED: 3, Layout.PACKED: 1}
LAYERS, PAGE = 32, 16 << 10
NUM_BLOCKS = 4096
JOB_BLOCKS = 256
IN_FLIGHT = 3
"""Jobs per direction: the next begins before one has ended."""
PHASES, STEPS = 6, 150


class Load:
    """Keeps copies in flight: every step of an engine calls ``step``."""

    def __init__(
        self,
        rig: Rig,
        num_blocks: int,
        directions: tuple[str, ...],
        job_blocks: int = JOB_BLOCKS,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self._rig = rig
        self._in_flight = in_flight
        half = num_blocks // 2
        self._lists = itertools.cycle([np.arange(at, min(at + job_blocks, half)) for at in range(0, half, job_blocks)])
        self._half = half
        self._jobs: dict[str, list[int]] = {direction: [] for direction in directions}
        self.nbytes = 0

    def step(self) -> None:
        """As a worker's step: takes results in, then submits, then says that a forward pass begins."""
        self._rig.poll()
        for direction, jobs in self._jobs.items():
            for job in list(jobs):
                result = self._rig.take(job)
                if result is not None:
                    self.nbytes += result.nbytes
                    jobs.remove(job)
            while len(jobs) < self._in_flight:
                numbers = next(self._lists)
                if direction == "store":
                    jobs.append(self._rig.store(numbers, numbers))
                else:
                    jobs.append(self._rig.load(numbers + self._half, numbers + self._half))
        self._rig.transfer.before_forward()

    def drain(self) -> None:
        for jobs in self._jobs.values():
            while jobs:
                self.nbytes += self._rig.result(jobs.pop()).nbytes


def run(report: Report, options: Options) -> None:
    decoder = Decoder(options)
    num_blocks = 64 if options.dry_run else NUM_BLOCKS
    phases, steps = (1, 3) if options.dry_run else (PHASES, STEPS)
    decoder.run(steps)
    rate = cuda.memory_rate(options.size(cuda.PEAK_BYTES))
    report.add("rate of the device's memory", rate, "GB/s")
    for layout in PASSES:
        group = PageGroup(make_views(layout, LAYERS, num_blocks, options.size(PAGE) or 64))
        with registered_pool(num_blocks, slot_bytes([group])) as (pool, registration):
            rig = Rig([group], pool.data, registration)
            try:
                for directions in (("store",), ("load",), ("store", "load")):
                    load = Load(rig, num_blocks, directions)
                    what = f"{layout.value}, {' and '.join(directions)}"
                    delay = GATHER_DELAY_S / (DEFAULT_LIMITS.chunk_bytes / 1e9) if layout is Layout.MERGED else 0.0
                    _measure(report, decoder, load, (phases, steps), what, PASSES[layout] / rate + delay)
            finally:
                rig.close()
        cuda.empty_cache()


def _measure(
    report: Report, decoder: Decoder, load: Load, size: tuple[int, int], what: str, seconds_per_gb: float
) -> None:
    """Adds the times of steps with and without ``load``. ``seconds_per_gb``: by how much a GB that is copied may delay
    them."""
    alone, beside = Steps([], []), Steps([], [])
    for _ in range(size[0]):
        alone += decoder.run(size[1])
        beside += decoder.run(size[1], load.step)
        load.drain()
    seconds = sum(beside.device) / 1e3
    report.add(f"{what}: copied meanwhile", load.nbytes / seconds / 1e9, "GB/s")
    gate = 1 + seconds_per_gb * load.nbytes / 1e9 / seconds + MARGIN
    before = percentiles(alone.device)
    for name, value in percentiles(beside.device).items():
        report.add(f"{what}: {name} without copies", before[name], "ms")
        what_is = f"{what}: {name} with copies, relative"
        if name == "p50":
            report.at_most(round(gate, 3), what_is, value / before[name])
        else:
            report.add(what_is, value / before[name])
    for name, value in percentiles(beside.thread).items():
        report.add(f"{what}: engine's thread per step, {name}", value * 1e3, "us")
