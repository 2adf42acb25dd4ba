"""CPU time that a step of the engine costs in the two halves of the connector, in microseconds per step.

256 requests decode one token each per step. All figures are CPU time of the calling thread, so that threads of lower
tiers and other processes do not count. A figure is the median over several periods. A period is as many steps as a
block has tokens, so that every request completes one block in it, and its time is divided by its steps. A full
pool evicts a block for every block that is stored.

Set ``KVOFFLOAD_BENCH_BASE`` to the directory ``src`` in a checkout of another version of kvoffload to compare with it:
that checkout's own benchmark runs in a second process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import KVGroup, OffloadingManager, PageGroup, ScheduledStep
from kvoffload.cache.manager import LRUOffloadingManager, PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.host.pool import HostPool
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.transfer.inline import InlineTransfer

DECODING = 256
LARGE_POOL, SMALL_POOL = 32_768, 2048
DEVICE_BLOCKS = 4096
PAGE_BYTES = 64
FINGERPRINT = "f" * 64


@dataclass
class BenchRequest:
    """A request that decodes, as the engine shows it to the connector, and its device blocks."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: Mapping[str, Any] | None = None
    ids: list[int] = field(default_factory=list)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


class Engine:
    """DECODING requests that get one token each in every step, over ``manager``, with or without a worker half.

    ``spread``: requests complete their blocks in different steps, else all in the same one. ``is_exclusive``: blocks
    are stored when they leave the device, which hands out DEVICE_BLOCKS in turn.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        block_tokens: int,
        spread: bool,
        has_worker: bool = False,
        is_exclusive: bool = False,
    ) -> None:
        self.block_tokens = block_tokens
        spec = EngineSpec([KVGroup(block_tokens)], next_free=self._next_free)
        self.scheduler = OffloadingConnectorScheduler(manager, spec, misses=MissMemory() if is_exclusive else None)
        self.worker = make_worker() if has_worker else None
        rng = np.random.default_rng(0)
        self.requests = []
        self._next_block = 1
        for i in range(DECODING):
            start = 1 + (int(rng.integers(1, block_tokens)) if spread else 0)
            request = BenchRequest(f"request-{i}", start, start - 1, ids=[self._new_block()])
            self.requests.append(request)
            self.scheduler.get_num_new_matched_tokens(request, 0)
            self.scheduler.update_state_after_alloc(request, request, 0)
        tables: dict[str, tuple[Sequence[int], ...]] = {each.request_id: (each.ids,) for each in self.requests}
        scheduled = {request.request_id: max(1, request.num_computed_tokens) for request in self.requests}
        self.scheduler.build_connector_meta(ScheduledStep(scheduled, tables, frozenset(tables)))

    def _new_block(self) -> int:
        self._next_block += 1
        return self._next_block % DEVICE_BLOCKS + 1

    def _next_free(self, n: int) -> Iterator[int]:
        return ((self._next_block + i) % DEVICE_BLOCKS + 1 for i in range(1, n + 1))

    def step(self) -> tuple[int, int]:
        """Nanoseconds of CPU time in the scheduler half and in the worker half."""
        block_ids: dict[str, tuple[Sequence[int], ...]] = {}
        for request in self.requests:
            if request.num_computed_tokens % self.block_tokens == 0 and request.num_computed_tokens:
                block_ids[request.request_id] = ([self._new_block()],)
            if request.num_tokens % self.block_tokens == 0:
                request.block_hashes.append(os.urandom(32))
        step = ScheduledStep({request.request_id: 1 for request in self.requests}, block_ids)
        start = time.thread_time_ns()
        meta = self.scheduler.build_connector_meta(step)
        spent = time.thread_time_ns() - start
        in_worker = 0
        if self.worker is not None:
            start = time.thread_time_ns()
            report = run_worker(self.worker, meta)
            in_worker = time.thread_time_ns() - start
        else:
            report = WorkerReport(done=dict.fromkeys(meta.stores, 1))
        start = time.thread_time_ns()
        self.scheduler.update_connector_output(report or WorkerReport())
        spent += time.thread_time_ns() - start
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_tokens += 1
        return spent, in_worker

    def run(self, num_steps: int) -> tuple[float, float]:
        """Mean microseconds per step in each half."""
        times = [self.step() for _ in range(num_steps)]
        return statistics.fmean(a for a, _ in times) / 1e3, statistics.fmean(b for _, b in times) / 1e3


def make_worker() -> OffloadingConnectorWorker:
    views = [np.zeros((1 << 16, PAGE_BYTES), np.uint8)]
    pool = np.zeros((LARGE_POOL, PAGE_BYTES), np.uint8)
    return OffloadingConnectorWorker(InlineTransfer([PageGroup(views)], pool))


def run_worker(worker: OffloadingConnectorWorker, meta: StepMeta) -> WorkerReport | None:
    worker.begin_step(meta)
    worker.start_loads(meta)
    worker.end_step(meta)
    worker.get_finished(meta)
    return worker.take_report()


def median_of_periods(engine: Engine, periods: int) -> tuple[float, float]:
    engine.run(((SMALL_POOL + DEVICE_BLOCKS) // DECODING + 1) * engine.block_tokens)
    # The engine would freeze what lives long too; a collection in the middle of a period is no cost of a step.
    gc.collect()
    gc.freeze()
    figures = [engine.run(engine.block_tokens) for _ in range(periods)]
    gc.unfreeze()
    assert not engine.scheduler.off
    return statistics.median(a for a, _ in figures), statistics.median(b for _, b in figures)


def idle_steps(manager: OffloadingManager, num_steps: int) -> tuple[float, float]:
    """Medians of steps in which no request completes a block."""
    engine = Engine(manager, 2 * num_steps, spread=False, has_worker=True)
    times = [engine.step() for _ in range(num_steps)]
    assert not engine.scheduler.off
    return statistics.median(a for a, _ in times) / 1e3, statistics.median(b for _, b in times) / 1e3


def measure(directory: Path, quick: bool) -> dict[str, float]:
    """Microseconds per step, by what is measured."""

    def host(num_blocks: int = LARGE_POOL) -> LRUOffloadingManager:
        return LRUOffloadingManager(HostBackend(16, num_blocks))

    found: dict[str, float] = {}
    found["nothing to store, scheduler half"], found["nothing to store, worker half"] = idle_steps(host(), 200)
    for block_tokens, periods in ((16, 4 if quick else 64), (128, 1 if quick else 10)):
        what = f"blocks of {block_tokens} tokens"

        def run(
            manager: OffloadingManager,
            spread: bool = True,
            size: int = block_tokens,
            n: int = periods,
            worker: bool = False,
            is_exclusive: bool = False,
        ) -> tuple[float, float]:
            return median_of_periods(Engine(manager, size, spread, worker, is_exclusive), n)

        found[f"{what}, scheduler half"], _ = run(host())
        found[f"{what}, scheduler half, all completed in the same step"], _ = run(host(), spread=False)
        found[f"{what}, scheduler half, full pool"], _ = run(host(SMALL_POOL))
        behind = PolicyOffloadingManager(
            HostBackend(16, SMALL_POOL), LRUPolicy(SMALL_POOL), must_store=True, device_blocks=DEVICE_BLOCKS
        )
        found[f"{what}, scheduler half, full pool that does not repeat the device"], _ = run(behind, is_exclusive=True)
        _, found[f"{what}, worker half"] = run(host(), worker=True)
        pool = HostPool(LARGE_POOL, 4096)
        root = str(directory / f"disk{block_tokens}")
        tier = open_disk_tier(root, 512 << 20, TierContext([pool.data], FINGERPRINT))
        manager = TieredOffloadingManager(host(), [tier], TieringSettings([KVGroup(block_tokens)]))
        found[f"{what}, scheduler half, with a disk tier"], _ = run(manager)
        manager.shutdown()
        pool.close()
    return found


def measure_here(quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(
        prefix="kvoffload-bench-", dir=os.environ.get("KVOFFLOAD_BENCH_DIR") or Path.cwd()
    ) as temporary:
        return measure(Path(temporary), quick)


def measure_base(source: str, quick: bool, module: str = "benchmarks.steps") -> Any:
    """What ``module`` of the checkout with the directory ``source`` prints, in a process of its own."""
    command = [sys.executable, "-m", module, *(["--quick"] if quick else [])]
    environment = {**os.environ, "PYTHONPATH": source}
    checkout = Path(source).resolve().parent
    done = subprocess.run(command, env=environment, cwd=checkout, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(out: Path, quick: bool) -> None:
    here, source = measure_here(quick), os.environ.get("KVOFFLOAD_BENCH_BASE")
    base = measure_base(source, quick) if source else {}
    rows = [
        Row(what, value, "us/step", "the base" if what in base else "", base[what] / value if what in base else None)
        for what, value in here.items()
    ]
    rows += [Row(f"the base: {what}", value, "us/step") for what, value in base.items()]
    publish("steps", f"Steps of {DECODING} decoding requests, CPU time (ratio: times as fast as the base)", rows, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    print(json.dumps(measure_here(parser.parse_args().quick)))
