"""What a tier of kvoffload costs vLLM's scheduler, below vLLM's own host memory, beside vLLM's own file system tier.

Connector, manager, host memory and policy are vLLM's, with its configuration of a small model; only engine and workers
are missing. Both tiers hold the same number of chunks of 4 KiB and run in one process, in turn. A figure is the sum of
all calls of the scheduler that a request causes in all its steps: thread time or wall time, the median of the rounds.
Between two steps both tiers have the same time for their work in the background.

The last row is a restart: from the construction of the tier to the first chunk that is found. Only the index on disk is
full; the payloads are not written, since a start does not read them.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import FACTS, is_fingerprint, pack_records
from kvoffload.tiers.disk.layout import SLAB_BYTES
from kvoffload.tiers.disk.recovery import open_files

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


def restart(folder: Path, num_chunks: int) -> list[Row]:
    from benchmarks.door_driver import Door, hashes

    capacity = num_chunks * SLOT_BYTES + (64 << 20)
    door = Door("kvoffload", folder, capacity)
    namespace = door.tier.bridge._thread.namespace
    door.scheduler.shutdown()
    root = folder / "kvoffload"
    # The group of every key is 0.
    (fingerprint,) = (path.name for path in root.iterdir() if is_fingerprint(path.name))
    files = open_files(DirectoryStorage(root), fingerprint, [4096], capacity, SLAB_BYTES, lambda: 7)
    while files.num_allocated < num_chunks:
        files.grow()
    prompt = hashes(1, "found")
    for start in range(0, num_chunks, 4096):
        count = min(4096, num_chunks - start)
        raw = os.urandom(32 * count)
        names = [raw[32 * i : 32 * i + 32] for i in range(count)]
        if start + count == num_chunks:
            names[-1:] = prompt
        facts = np.zeros(len(names), dtype=FACTS)
        facts["payload_checksum"] = np.arange(len(names))
        facts["sequence"] = start + np.arange(len(names))
        records = pack_records(files.index.header, [namespace + name + bytes(4) for name in names], facts)
        files.index.write_records(start, records.reshape(-1))
    files.close()
    begin = time.perf_counter()
    door = Door("kvoffload", folder, capacity)
    door.await_hit(prompt)
    seconds = time.perf_counter() - begin
    door.scheduler.shutdown()
    shutil.rmtree(root)
    return [Row(f"first hit after a start with {num_chunks:,} chunks on disk", seconds, "s")]


def main(out: Path, quick: bool) -> None:
    base = os.environ.get("KVOFFLOAD_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=base or Path.cwd()) as temporary:
        rows = steps(Path(temporary) / "steps", 8192 if quick else 100_000, 5 if quick else 31)
        rows += restart(Path(temporary) / "restart", 100_000 if quick else 1_000_000)
    publish("doors", "vLLM's scheduler above a tier (ratio: times as fast as above vLLM's fs tier)", rows, out)
