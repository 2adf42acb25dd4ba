"""CPU time to replay a million block accesses, compared with libcachesim on the same accesses in the same run, and
the time of several replays at once.

libcachesim simulates one policy in C, block by block. The replay runs the managers that serve an engine, request by
request: lookup, store, eviction, and the reason of each miss.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.report import Row, publish
from benchmarks.synthetic import generate
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import ReplayConfig, replay, replay_many
from kvoffload.lab.trace import Trace

ACCESSES = 1_000_000
CAPACITY_SHARE = 0.1
RUNS = 3
"""Their median counts."""
POLICIES = {"lru": "LRU", "arc": "ARC", "auto": "ARC"}
"""Our policies, and the policy of libcachesim that each is compared with; its only self-tuning one is ARC."""
PEER_RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""A record of libcachesim's oracleGeneral format."""


def workloads() -> Iterator[Trace]:
    """Yields a trace with long chains, one with short chains, and a public trace if it is available."""
    yield generate("agent", 4000)
    yield generate("chat", 20000)
    folder = os.environ.get("KVOFFLOAD_TRACES")
    if folder and (public := Path(folder, "mooncake_conversation.jsonl.gz")).is_file():
        yield read_trace(public)


def with_accesses(trace: Trace, accesses: int) -> Trace:
    """Returns the trace repeated until it has ``accesses`` block accesses."""
    times = -(-accesses // trace.num_accesses)
    span = float(trace.times[-1] - trace.times[0]) + 1.0
    offsets = [trace.offsets[1:] + i * trace.num_accesses for i in range(times)]
    longer = replace(
        trace,
        times=np.concatenate([trace.times + i * span for i in range(times)]),
        input_tokens=np.tile(trace.input_tokens, times),
        output_tokens=np.tile(trace.output_tokens, times),
        offsets=np.concatenate((np.zeros(1, dtype=np.int64), *offsets)),
        blocks=np.tile(trace.blocks, times),
        prompt_blocks=np.tile(trace.prompt_blocks, times),
    )
    last = int(np.searchsorted(longer.offsets, accesses))
    return replace(
        longer,
        times=longer.times[:last],
        input_tokens=longer.input_tokens[:last],
        output_tokens=longer.output_tokens[:last],
        offsets=longer.offsets[: last + 1],
        blocks=longer.blocks[: longer.offsets[last]],
        prompt_blocks=longer.prompt_blocks[:last],
    )


class Peer:
    """libcachesim on the blocks of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._records = np.zeros(trace.num_accesses, dtype=PEER_RECORD)
        self._records["id"] = trace.blocks + 1
        self._records["size"] = 1
        self._records["next"] = -1

    def seconds(self, policy: str, capacity: int) -> float:
        libcachesim = importlib.import_module("libcachesim")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.oracleGeneral"
            self._records.tofile(path)
            reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
            cache = getattr(libcachesim, policy)(capacity)
            start = time.process_time()
            cache.process_trace(reader)
            return time.process_time() - start


def runs_of(trace: Trace, capacity: int, peer: Peer | None, runs: int) -> dict[str, tuple[list[float], list[float]]]:
    """Returns for each policy the seconds of ``runs`` replays and those of the peer, measured in turn."""
    found: dict[str, tuple[list[float], list[float]]] = {policy: ([], []) for policy in POLICIES}
    trace.keys_of(trace.blocks[:1])
    for _ in range(runs):
        for policy, rival in POLICIES.items():
            start = time.process_time()
            replay(trace, ReplayConfig(policy, capacity))
            found[policy][0].append(time.process_time() - start)
            if peer is not None:
                found[policy][1].append(peer.seconds(rival, capacity))
    return found


def speedup_of_processes(trace: Trace, capacity: int) -> Row:
    """Compares one configuration per core, all at once, with the same one after the other."""
    cores = len(os.sched_getaffinity(0))
    configs = [ReplayConfig("lru", capacity + i) for i in range(cores)]
    seconds = []
    for processes in (1, cores):
        start = time.perf_counter()
        replay_many(trace, configs, processes=processes)
        seconds.append(time.perf_counter() - start)
    return Row(
        f"elapsed: {cores} replays with {cores} processes", seconds[1], "s", "one process", seconds[0] / seconds[1]
    )


def main(out: Path, quick: bool) -> None:
    have_peer = importlib.util.find_spec("libcachesim") is not None
    if not have_peer:
        print("libcachesim is not installed: there is no comparison")
    accesses = ACCESSES // 100 if quick else ACCESSES
    rows = []
    for workload in workloads():
        trace = with_accesses(workload, accesses)
        capacity = max(1, int(trace.num_distinct * CAPACITY_SHARE))
        peer = Peer(trace) if have_peer else None
        for policy, (ours, theirs) in runs_of(trace, capacity, peer, 1 if quick else RUNS).items():
            seconds = median(ours)
            ratio = None if peer is None else median(theirs) / seconds
            versus = "" if peer is None else f"libcachesim {POLICIES[policy]}"
            what = f"{accesses:,} accesses, {trace.name.split('?')[0]}, {policy}"
            rows.append(Row(what, seconds, "s", versus, ratio))
            rows.append(Row("  slowest run less the fastest", max(ours) - min(ours), "s"))
            rows.append(
                Row(
                    f"  per request of {trace.num_accesses / trace.num_requests:.0f} blocks",
                    seconds / trace.num_requests * 1e6,
                    "us",
                )
            )
    rows.append(speedup_of_processes(trace, capacity))
    publish(
        "replay",
        f"Replay, CPU time, with {CAPACITY_SHARE:.0%} of the distinct blocks (ratio: speedup over the peer)",
        rows,
        out,
    )
