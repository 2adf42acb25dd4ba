"""What a tier of kvoffload costs vLLM's scheduler, below vLLM's own host memory, beside vLLM's own file system tier.

Connector, manager, host memory and policy are vLLM's, with its configuration of a small model; only engine and workers
are missing. Both tiers hold the same number of chunks of 4 KiB and run in one process in turns. A figure is the sum over
all calls of the scheduler that one request causes, from its arrival to its end, in all steps: thread time or wall time,
the median of the rounds. Between two steps both have the same time for their work in the background, as much as it needs.

The last row is a restart: from the construction of the tier to the first chunk that is found. Only the index on disk is
full; the payloads are not written, since a start does not read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish

PREFIX_CHUNKS = 512
"""Chunks per prompt that the tiers hold."""
HOST_CHUNKS = 2048
LOOKUPS, STORES = (64, 512), (8, 64)
PAUSE_S = 0.03
"""Between two steps of a request."""
DEADLINE_S = 60.0
TIERS = ("fs", "kvoffload")


def entry(kind: str, folder: Path, nbytes: int) -> dict[str, Any]:
    """Returns the entry of ``secondary_tiers``."""
    if kind == "fs":
        return {"type": "fs", "root_dir": str(folder)}
    tier = {"kind": "disk", "dir": str(folder), "bytes": nbytes}
    return {"type": "KVOffloadTier", "module_path": "kvoffload.vllm.secondary_tier", "tier": tier}


def hashes(num_chunks: int, name: str) -> list[bytes]:
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(num_chunks)]


class Door:
    """vLLM's scheduler half over one tier, and the time that it has taken."""

    def __init__(self, kind: str, folder: Path, nbytes: int) -> None:
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        from kvoffload.testing.vllm_servers import Server, offloading_scheduler

        made = entry(kind, folder / kind, nbytes)
        size = HOST_CHUNKS * 4096
        self.scheduler, _ = offloading_scheduler(TieringOffloadingSpec, Server(), folder / "models", made, size)
        self.manager = self.scheduler.manager
        self.cpu = self.wall = 0
        self.steps = self.count = self.block = self.loaded = 0

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call(*arguments)
        self.cpu += time.thread_time_ns() - cpu
        self.wall += time.perf_counter_ns() - wall
        return result

    def step(self, new: Any = None, scheduled: int = 0, finished: Sequence[Any] = ()) -> None:
        """One step, in which ``new`` gets ``scheduled`` tokens. The workers' copies have ended before the next."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.core.sched.output import SchedulerOutput
        from vllm.v1.outputs import KVConnectorOutput

        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id for request in finished}
        if new is not None:
            output.scheduled_new_reqs = [Scheduled(new.request_id, (self.new_blocks(new.num_tokens // 16),))]
            output.num_scheduled_tokens = {new.request_id: scheduled}
        meta = self.timed(self.scheduler.build_connector_meta, output)
        done = OffloadingWorkerMetadata(dict.fromkeys([*meta.load_jobs, *meta.store_jobs], 1))
        self.timed(self.scheduler.update_connector_output, KVConnectorOutput(kv_connector_worker_meta=done))
        self.steps += 1

    def new_blocks(self, count: int) -> list[int]:
        self.block += count
        return list(range(self.block - count + 1, self.block + 1))

    def request(self, block_hashes: list[bytes], looks_up: bool = True) -> Any:
        """A request for a prompt with these hashes, as it arrives."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.count += 1
        tokens = [0] * (16 * len(block_hashes) + 1)
        request = Request(f"request-{self.count}", tokens, SamplingParams(max_tokens=1), None)
        request.block_hashes = block_hashes
        request.skip_reading_prefix_cache = not looks_up
        self.timed(self.scheduler.on_new_request, request)
        return request

    def match(self, request: Any) -> int:
        """Asks, step by step, for what can be loaded. Returns the number of chunks, whose load has ended."""
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        deadline = time.monotonic() + DEADLINE_S
        while (found := self.timed(self.scheduler.get_num_new_matched_tokens, request, 0)[0]) is None:
            self.step()
            self.settle()
            assert time.monotonic() < deadline
        if found:
            blocks = KVCacheBlocks(([KVCacheBlock(i) for i in self.new_blocks(found // 16)],))
            self.timed(self.scheduler.update_state_after_alloc, request, blocks, found)
        self.step()
        return int(found) // 16

    def settle(self) -> None:
        """Gives the tier time, as the model does."""
        time.sleep(PAUSE_S)

    def end(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_ABORTED
        self.timed(self.scheduler.request_finished, request)
        self.step(finished=[request])

    def until_idle(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.timed(self.manager.has_pending_work):
            assert time.monotonic() < deadline
            time.sleep(0.001)
            self.step()

    # What is measured.

    def look_up_misses(self, n: int) -> None:
        request = self.request(hashes(n, f"unknown {self.count}"))
        assert self.match(request) == 0
        self.end(request)

    def load_hits(self, n: int) -> None:
        """Loads a chain that host memory has forgotten since it was stored."""
        self.loaded += 1
        request = self.request(hashes(PREFIX_CHUNKS, f"chain {self.loaded}")[:n])
        assert self.match(request) == n
        assert self.steps > 2, "it was in host memory"
        self.end(request)

    def store(self, n: int, name: str, pause: bool = True) -> None:
        request = self.request(hashes(n, name), looks_up=False)
        self.timed(self.scheduler.get_num_new_matched_tokens, request, 0)
        self.step(request, 16 * n)
        if pause:
            self.settle()
        self.end(request)
        self.until_idle()

    def idle(self) -> None:
        for _ in range(100):
            self.step()


class Scheduled:
    """A request that is scheduled for the first time."""

    def __init__(self, req_id: str, block_ids: tuple[list[int], ...]) -> None:
        self.req_id, self.block_ids = req_id, block_ids


def measured(door: Door, call: Callable[[], None]) -> tuple[float, float, int]:
    """Returns microseconds of thread time and of wall time, and the number of steps."""
    door.cpu = door.wall = door.steps = 0
    call()
    found = door.cpu / 1e3, door.wall / 1e3, door.steps
    door.until_idle()
    return found


def steps(folder: Path, num_chunks: int, rounds: int) -> list[Row]:
    doors = {kind: Door(kind, folder, 2 * num_chunks * 4608 + (256 << 20)) for kind in TIERS}
    for door in doors.values():
        for chain in range(num_chunks // PREFIX_CHUNKS):
            door.store(PREFIX_CHUNKS, f"chain {chain}", pause=False)
    cases: dict[str, Callable[[Door, int], Callable[[], None]]] = {}
    for n in LOOKUPS:
        cases[f"{n} chunks that are not there"] = lambda door, i, n=n: partial(door.look_up_misses, n)
    for n in LOOKUPS:
        cases[f"{n} chunks from the tier"] = lambda door, i, n=n: partial(door.load_hits, n)
    for n in STORES:
        cases[f"{n} chunks stored"] = lambda door, i, n=n: partial(door.store, n, f"new {n} {i}")
    cases["100 steps without requests"] = lambda door, i: door.idle
    rows = []
    for what, case in cases.items():
        figures: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in TIERS}
        for i in range(rounds):
            for kind in TIERS if i % 2 else reversed(TIERS):
                figures[kind].append(measured(doors[kind], case(doors[kind], i)))
        medians = {kind: [statistics.median(each) for each in zip(*figures[kind], strict=True)] for kind in TIERS}
        (fs_cpu, fs_wall, fs_steps), (cpu, wall, num_steps) = medians["fs"], medians["kvoffload"]
        rows += [
            Row(f"{what}, thread time", cpu, "us", f"fs, {fs_steps:.0f} steps", fs_cpu / cpu),
            Row(f"{what}, wall time, {num_steps:.0f} steps", wall, "us", f"fs, {fs_steps:.0f} steps", fs_wall / wall),
        ]
    for door in doors.values():
        door.scheduler.shutdown()
    return rows


def main(out: Path, quick: bool) -> None:
    base = os.environ.get("KVOFFLOAD_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=base or Path.cwd()) as temporary:
        rows = steps(Path(temporary), 8192 if quick else 100_000, 5 if quick else 31)
    publish("doors", "vLLM's scheduler with a tier of kvoffload (ratio: times as fast as with vLLM's fs tier)", rows, out)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "bench-report"), "--quick" in sys.argv)
