"""How much copies slow a decode loop. Steps beside stores and loads alternate with steps without."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.gpu import cuda
from benchmarks.gpu.decode import Decoder, percentiles
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from benchmarks.gpu.rig import Layout, Rig, make_views, registered_pool, slot_bytes
from kvoffload.abc import PageGroup

GATE = 1.02
"""The time of a step with copies, relative to one without."""
LAYERS, PAGE = 32, 16 << 10
NUM_BLOCKS = 4096
JOB_BLOCKS = 256
IN_FLIGHT = 3
"""Jobs per direction: the next begins before one has ended."""
PHASES, STEPS = 6, 150


class Load:
    """Keeps copies in flight: every step of an engine calls ``step``."""

    def __init__(self, rig: Rig, num_blocks: int, directions: tuple[str, ...]) -> None:
        self._rig = rig
        half = num_blocks // 2
        self._lists = itertools.cycle([np.arange(at, min(at + JOB_BLOCKS, half)) for at in range(0, half, JOB_BLOCKS)])
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
            while len(jobs) < IN_FLIGHT:
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
    for layout in (Layout.MERGED, Layout.PACKED):
        group = PageGroup(make_views(layout, LAYERS, num_blocks, options.size(PAGE) or 64))
        with registered_pool(num_blocks, slot_bytes([group])) as (pool, registration):
            rig = Rig([group], pool.data, registration)
            try:
                for directions in (("store",), ("load",), ("store", "load")):
                    _measure(report, decoder, rig, num_blocks, directions, (phases, steps), layout.value)
            finally:
                rig.close()
        cuda.empty_cache()


def _measure(
    report: Report,
    decoder: Decoder,
    rig: Rig,
    num_blocks: int,
    directions: tuple[str, ...],
    size: tuple[int, int],
    layout: str,
) -> None:
    alone: list[float] = []
    beside: list[float] = []
    load = Load(rig, num_blocks, directions)
    for _ in range(size[0]):
        alone += decoder.run(size[1])
        beside += decoder.run(size[1], load.step)
        load.drain()
    what = f"{layout}, {' and '.join(directions)}"
    report.add(f"{what}: copied meanwhile", load.nbytes / (sum(beside) / 1e3) / 1e9, "GB/s")
    before = percentiles(alone)
    for name, value in percentiles(beside).items():
        report.add(f"{what}: {name} without copies", before[name], "ms")
        report.at_most(GATE, f"{what}: {name} with copies, relative", value / before[name])
