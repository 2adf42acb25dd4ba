"""CPU time of the scheduler's calls while 12,400 requests wait and all tables are full, in microseconds per call,
beside the same calls in an idle server.

A host of 32,768 blocks is in front of two tiers. In the full server 4,000 requests are queued for blocks of the second
tier, 4,200 wait for its answer, and 4,200 have found their whole chain in host memory and get no device blocks. The
tables of origins, of open questions, of uses and of descriptions for events have had more entries than they may keep.
Figures are CPU time of the calling thread, the median over several calls.

Set ``KVOFFLOAD_BENCH_BASE`` to the directory ``src`` in a checkout of another version to compare with it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from benchmarks.steps import BenchRequest, measure_base
from kvoffload.abc import KVGroup, LookupState, OffloadKey, ScheduledStep, Slots, States, Tier, TierResult, TierStats
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings

HOST_BLOCKS = 1 << 15
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 16
NUM_QUEUED, NUM_ASKING, NUM_READY = 4000, 4200, 4200
"""Requests that wait."""
NUM_REMEMBERED = (1 << 16) + (1 << 14)
"""Blocks that are promoted, and described, before the measurement: more than the tables keep."""
LARGE = 512
"""Blocks of a long prompt."""
HELD, UNKNOWN, ABSENT = b"H", b"?", b"-"
"""First byte of a block's hash: the second tier has the block, does not know, or lacks it."""
_numbers = itertools.count()


class StubTier(Tier):
    """Answers by the first byte of a key. Reads end when ``finish`` says so, writes at once. Copies nothing."""

    block_bytes = 4096

    def __init__(self, name: str, knows: bool) -> None:
        self.name = name
        self._knows = knows
        self._reading: dict[OffloadKey, None] = {}
        self._ended: list[TierResult] = []

    def stats(self) -> TierStats:
        return TierStats()

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        states = {HELD: LookupState.HIT, UNKNOWN: LookupState.RETRY}
        found = [states.get(key[:1], LookupState.MISS) if self._knows else LookupState.MISS for key in keys]
        return np.array(found, dtype=np.uint8)

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        self._reading.update(dict.fromkeys(keys))
        return list(keys)

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        self._ended += [TierResult(key, False, None, 4096) for key in keys]
        return list(keys)

    def finish(self, most: int) -> None:
        """Ends the oldest reads."""
        for key in list(self._reading)[:most]:
            del self._reading[key]
            self._ended.append(TierResult(key, True, None, 4096))

    def poll(self) -> list[TierResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        pass

    def touch(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey] | None = None) -> None:
        pass

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        pass

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


class Server:
    """A scheduler half over host memory and two tiers, and what an engine does for it."""

    def __init__(self) -> None:
        self.slow = StubTier("slow", knows=True)
        host = LRUOffloadingManager(HostBackend(BLOCK_TOKENS, HOST_BLOCKS), enable_events=True)
        self.manager = TieredOffloadingManager(
            host,
            [StubTier("fast", knows=False), self.slow],
            TieringSettings(
                [KVGroup(BLOCK_TOKENS)], lookup_deadline_ms=1e9, load_deadline_ms=1e9, load_only_if_faster=False
            ),
            clock=lambda: 1.0,
        )
        self.scheduler = OffloadingConnectorScheduler(
            self.manager,
            EngineSpec([KVGroup(BLOCK_TOKENS)], enable_events=True),
            load_deadline_ms=1e9,
            clock=lambda: 1.0,
        )
        self._device = itertools.count(1)

    def request(self, kind: bytes, num_blocks: int = CHAIN_BLOCKS, like: BenchRequest | None = None) -> BenchRequest:
        hashes = [kind + os.urandom(31) for _ in range(num_blocks)] if like is None else like.block_hashes
        return BenchRequest(f"request-{next(_numbers)}", len(hashes) * BLOCK_TOKENS + 1, 0, hashes)

    def look_up(self, request: BenchRequest) -> Any:
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0]

    def step(self, scheduled: dict[str, int] | None = None, tables: dict[str, Any] | None = None) -> Any:
        scheduled = {"another": 1} if scheduled is None else scheduled
        return self.scheduler.build_connector_meta(ScheduledStep(scheduled, tables or {}, frozenset(tables or ())))

    def report(self, jobs: Sequence[int] = ()) -> None:
        self.scheduler.update_connector_output(WorkerReport(done=dict.fromkeys(jobs, 1)))

    def compute(self, num_blocks: int) -> tuple[BenchRequest, list[int]]:
        """A request computes new blocks. Returns it with the jobs that store them."""
        request = self.request(ABSENT, num_blocks)
        request.ids = [next(self._device) % 1_000_000 + 1 for _ in range(num_blocks + 1)]
        self.look_up(request)
        self.scheduler.update_state_after_alloc(request, request, 0)
        meta = self.step({request.request_id: request.num_tokens}, {request.request_id: (request.ids,)})
        request.num_computed_tokens = request.num_tokens
        return request, list(meta.stores)

    def end(self, request: BenchRequest) -> None:
        self.scheduler.request_finished(request)

    def end_and_step(self, request: BenchRequest) -> None:
        self.end(request)
        self.step()

    def promote(self, num_blocks: int) -> None:
        """A request has blocks of the second tier promoted, and is aborted."""
        request = self.request(HELD, num_blocks)
        self.look_up(request)
        self.step()
        self.slow.finish(num_blocks)
        self.report()
        self.end(request)

    def fill(self, share: float) -> None:
        """Fills the tables and lets requests wait; ``share`` of what the module's text says."""
        for _ in range(int(NUM_REMEMBERED * share) // LARGE):
            self.promote(LARGE)
        for _ in range(int(NUM_REMEMBERED * share) // LARGE):
            request, jobs = self.compute(LARGE)
            self.report(jobs)
            self.end(request)
        like, jobs = self.compute(CHAIN_BLOCKS)
        self.report(jobs)
        assert self.look_up(self.request(ABSENT, like=like)) == CHAIN_BLOCKS * BLOCK_TOKENS
        for _ in range(int(NUM_READY * share)):
            self.look_up(self.request(ABSENT, like=like))
        for _ in range(int(NUM_QUEUED * share)):
            self.look_up(self.request(HELD))
        for _ in range(int(NUM_ASKING * share)):
            self.look_up(self.request(UNKNOWN))
        self.step()


def measure(server: Server, rounds: int) -> dict[str, float]:
    """Returns the median CPU time of each call in microseconds."""
    times: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        begun = time.thread_time_ns()
        result = call()
        times.setdefault(what, []).append((time.thread_time_ns() - begun) / 1e3)
        return result

    for _ in range(rounds):
        for kind, what in ((HELD, "in a tier"), (UNKNOWN, "that a tier is asked for")):
            request = server.request(kind)
            assert timed(f"lookup, {CHAIN_BLOCKS} blocks {what}", partial(server.look_up, request)) is None
            timed(f"abort, {CHAIN_BLOCKS} blocks {what}", partial(server.end, request))
        for _ in range(8):
            # Until nothing is to be written.
            server.step()
            server.report()
        timed("step", server.step)
        timed(
            "state dropped from the host",
            lambda: server.manager.drop([make_offload_key(os.urandom(32), 0)], only_host=True),
        )
        keys = [make_offload_key(ABSENT + os.urandom(31), 0) for _ in range(LARGE)]
        timed(f"prepare_store of {LARGE} blocks", partial(server.manager.prepare_store, keys))
        server.manager.complete_store(keys)
        request, jobs = server.compute(LARGE)
        timed(f"report of a store of {LARGE} blocks", partial(server.report, jobs))
        timed("end of a request, and the next step", partial(server.end_and_step, request))
        reader = server.request(HELD, LARGE)
        server.look_up(reader)
        server.step()
        server.slow.finish(LARGE)
        timed(f"arrival of {LARGE} blocks", server.report)
        server.end(reader)
    assert not server.scheduler.off
    # Last, because it empties the descriptions.
    for _ in range(rounds):
        list(server.scheduler.take_events())
        keys = [make_offload_key(ABSENT + os.urandom(31), 0) for _ in range(LARGE)]
        server.manager.prepare_store(keys)
        server.manager.complete_store(keys)
        timed(f"take_events, {LARGE} blocks that no request knows", lambda: list(server.scheduler.take_events()))
    server.manager.check_integrity()
    return {what: statistics.median(values) for what, values in times.items()}


def measure_here(quick: bool) -> dict[str, list[float]]:
    """Returns, per call, its time in an idle server and in a full one."""
    idle, full, share = Server(), Server(), 0.05 if quick else 1.0
    full.fill(share)
    gc.collect()
    gc.freeze()
    found = [measure(server, 5 if quick else 9) for server in (idle, full)]
    gc.unfreeze()
    return {what: [each[what] for each in found] for what in found[0]}


def main(out: Path, quick: bool) -> None:
    source = os.environ.get("KVOFFLOAD_BENCH_BASE")
    versions = {"": measure_here(quick)}
    if source:
        versions["the base: "] = measure_base(source, quick, "benchmarks.waiting")
    rows = [
        Row(f"{prefix}{what}", full, "us", f"idle {idle:,.0f} us; 1 is as fast", full / max(idle, 1e-3))
        for prefix, found in versions.items()
        for what, (idle, full) in found.items()
    ]
    publish("waiting", "Scheduler's calls while many wait, CPU time (ratio: to an idle server)", rows, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    print(json.dumps(measure_here(parser.parse_args().quick)))
