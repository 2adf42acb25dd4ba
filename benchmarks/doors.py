"""What a tier of kvoffload costs vLLM's scheduler, below vLLM's own host memory, beside vLLM's own file system tier.

Connector, manager, host memory and policy are vLLM's, with its configuration of a small model; only engine and workers
are missing. Both tiers hold the same number of chunks of 4 KiB and run in one process, in turn. A figure is the sum of
all calls of the scheduler that a request causes in all its steps: thread time or wall time, the median of the rounds.
Between two steps both tiers have the same time for their work in the background.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Row, publish

if TYPE_CHECKING:
    from benchmarks.door_driver import Door

LOOKUPS, STORES = (64, 512), (8, 64)
BUSY_STEPS, IDLE_STEPS = 20, 100
SLOT_BYTES = 4096 + 256 + 256
TIERS = ("fs", "kvoffload")


def measured(door: Door, call: Callable[[Door], None]) -> tuple[float, float, int]:
    """Returns microseconds of thread time and of wall time, and the number of steps."""
    door.cpu = door.wall = door.steps = 0
    call(door)
    found = door.cpu / 1e3, door.wall / 1e3, door.steps
    door.until_idle()
    return found


def steps(folder: Path, num_chunks: int, rounds: int) -> list[Row]:
    from benchmarks.door_driver import CHAIN_CHUNKS, Door

    doors = {kind: Door(kind, folder, 2 * num_chunks * SLOT_BYTES + (256 << 20)) for kind in TIERS}
    for door in doors.values():
        for chain in range(num_chunks // CHAIN_CHUNKS):
            door.store(CHAIN_CHUNKS, f"chain {chain}")
            door.until_idle()
    cases: dict[str, Callable[[Door], None]] = {}
    for n in LOOKUPS:
        cases[f"{n} chunks that are not there"] = partial(Door.look_up_misses, n=n)
    for n in LOOKUPS:
        cases[f"{n} chunks from the tier"] = partial(Door.load_hits, n=n)
    for n in STORES:
        cases[f"{n} chunks stored"] = partial(Door.store, n=n)
    cases[f"{BUSY_STEPS} steps, in each 64 chunks looked up and 64 stored"] = partial(Door.under_load, n=BUSY_STEPS)
    cases[f"{IDLE_STEPS} steps without requests"] = partial(Door.idle, n=IDLE_STEPS)
    rows = []
    for what, case in cases.items():
        figures: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in TIERS}
        for i in range(rounds):
            for kind in TIERS if i % 2 else TIERS[::-1]:
                figures[kind].append(measured(doors[kind], case))
        (fs_cpu, fs_wall, fs_steps), (cpu, wall, num_steps) = (
            [statistics.median(each) for each in zip(*figures[kind], strict=True)] for kind in TIERS
        )
        versus = f"fs, {fs_steps:.0f} steps"
        rows += [
            Row(f"{what}, {num_steps:.0f} steps, thread time", cpu, "us", versus, fs_cpu / cpu),
            Row(f"{what}, {num_steps:.0f} steps, wall time", wall, "us", versus, fs_wall / wall),
        ]
    for door in doors.values():
        door.scheduler.shutdown()
    return rows


def main(out: Path, quick: bool) -> None:
    base = os.environ.get("KVOFFLOAD_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=base or Path.cwd()) as temporary:
        rows = steps(Path(temporary), 8192 if quick else 100_000, 5 if quick else 31)
    publish("doors", "vLLM's scheduler above a tier (ratio: times as fast as above vLLM's fs tier)", rows, out)
