"""Prefix-hit tokens of each policy on real traces, at each capacity, compared with textbook policies as libcachesim
has them, with vLLM's policies and with the bound.

The traces are the ``*.jsonl.gz`` in the folder that KVOFFLOAD_TRACES names; without one, synthetic workloads. The
requests of the first half of a trace's time were used to tune the constants of ``auto``. The figures are those of the
second half, which begins with the cache that the first half has left.

libcachesim gets one block at a time, those of a request from the last to the first, so that a chain loses its tail
before its head. A request finds its leading blocks that are all there.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.bound import found_by_bound
from benchmarks.report import Row, publish
from benchmarks.traces import traces
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.model import DEFAULT_MODEL
from kvoffload.lab.replay import ReplayConfig, ReplayResult, replay
from kvoffload.lab.trace import Ints, Trace

TEXTBOOK = {"fifo": "FIFO", "s3fifo": "S3FIFO", "sieve": "Sieve", "lirs": "LIRS", "2q": "TwoQ"}
"""Classes of libcachesim."""
LEAST_BLOCKS = {"lirs": 2, "s3fifo": 10}
"""In fewer, libcachesim's LIRS takes no block, and S3FIFO aborts the process: a tenth of them is its small queue."""
SINGLE = ("lru", "arc", *(TEXTBOOK if importlib.util.find_spec("libcachesim") else ()))
PEERS = ("vllm:lru", "vllm:arc") if importlib.util.find_spec("vllm") else ()
"""Policies of vLLM, in its own manager."""
BOUND = "bound"
POLICIES = (*SINGLE, "auto", *PEERS, BOUND)
CAPACITIES = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "20%", "50%", "5859")
SMALL = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "5859")
"""The capacities where most of the gap between LRU and the bound is."""
SYNTHETIC = {"chat": 5000, "agent": 5000, "documents": 5000}


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one policy at one capacity: tokens found, in % of the prompts' tokens, and blocks written per
    access."""

    trace: str
    capacity: str
    capacity_blocks: int
    policy: str
    whole: float
    second_half: float
    writes: float


def main(out: Path, quick: bool) -> None:
    cells: list[Cell] = []
    for trace in traces(SYNTHETIC):
        if quick:
            trace = trace.between(0, 0.1)
        jobs = [(capacity, policy) for capacity in CAPACITIES for policy in POLICIES]
        with ProcessPoolExecutor(initializer=_start, initargs=(trace,)) as pool:
            found = [cell for cell in pool.map(_cell, jobs) if cell is not None]
        show(found)
        cells += found
    out.mkdir(parents=True, exist_ok=True)
    (out / "policies-cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    publish("policies", "The self-tuning policy beside the others", list(summary(cells)), out)


_trace: Trace


def _start(trace: Trace) -> None:
    global _trace
    _trace = trace


def _cell(job: tuple[str, str]) -> Cell | None:
    """Returns None if the policy cannot have that capacity."""
    capacity, policy = job
    blocks = parse_capacity(capacity, _trace, DEFAULT_MODEL)
    if blocks < LEAST_BLOCKS.get(policy, 1):
        return None
    if policy in TEXTBOOK:
        hits, writes = _simulated(_trace, TEXTBOOK[policy], blocks)
    elif policy == BOUND:
        hits, writes = found_by_bound(_trace, blocks)
    else:
        result = _replayed(_trace, policy, blocks)
        hits, writes = result.host_tokens, result.writes_per_access
    asked, times = _trace.input_tokens, _trace.times
    late = times >= (times[0] + times[-1]) / 2
    whole, second = (100 * float(hits[chosen].sum() / asked[chosen].sum()) for chosen in (asked > 0, late))
    return Cell(_trace.name, capacity, blocks, policy, whole, second, writes)


def _replayed(trace: Trace, policy: str, blocks: int) -> ReplayResult:
    if policy not in PEERS:
        return replay(trace, ReplayConfig(policy, blocks))
    from benchmarks.vllm_replay import replay_in_vllm

    return replay_in_vllm(trace, policy.removeprefix("vllm:"), blocks)


def _simulated(trace: Trace, policy: str, blocks: int) -> tuple[Ints, float]:
    """Returns the tokens that each request finds with a policy of libcachesim, and the blocks written per access."""
    libcachesim = importlib.import_module("libcachesim")
    cache, access = getattr(libcachesim, policy)(blocks), libcachesim.Request(obj_size=1)
    found, writes = np.zeros(trace.num_requests, dtype=np.int64), 0
    for request in range(trace.num_requests):
        chain = trace.chain(request).tolist()
        for block in chain[: trace.prompt_blocks[request]]:
            access.obj_id = block + 1
            if cache.find(access, False) is None:
                break
            found[request] += 1
        for block in reversed(chain):
            access.obj_id = block + 1
            writes += not cache.get(access)
    return np.minimum(found * trace.block_tokens, trace.input_tokens), writes / max(1, trace.num_accesses)


def show(cells: list[Cell]) -> None:
    by_place = {(cell.policy, cell.capacity): cell for cell in cells}
    print(f"\n{cells[0].trace}: prefix-hit tokens, % (second half of the trace's time)")
    print(f"  {'':<12}" + "".join(f"{capacity:>9}" for capacity in CAPACITIES))
    for policy in POLICIES:
        here = [by_place.get((policy, capacity)) for capacity in CAPACITIES]
        figures = "".join(f"{'-':>9}" if cell is None else f"{cell.second_half:9.2f}" for cell in here)
        print(f"  {policy:<12}{figures}")
    shares = "".join(f"{100 * gap_share(by_place, capacity, 'second_half'):9.1f}" for capacity in CAPACITIES)
    print(f"  {'gap closed':<12}{shares}   by auto, % of the way from lru to the bound")


def gap_share(by_place: Mapping[tuple[str, str], Cell], capacity: str, part: str) -> float:
    """Returns how far ``auto`` goes from LRU to the bound; NaN where the bound finds no more than LRU."""
    lru, auto, bound = (getattr(by_place[policy, capacity], part) for policy in ("lru", "auto", BOUND))
    return float((auto - lru) / (bound - lru)) if bound > lru else float("nan")


def summary(cells: list[Cell]) -> Iterator[Row]:
    """Yields how far ``auto`` is from the best single policy, from LRU and from vLLM's policies, over all cells."""
    places = sorted({(cell.trace, cell.capacity) for cell in cells})
    by_place = {(cell.trace, cell.capacity, cell.policy): cell for cell in cells}
    for part in ("second_half", "whole"):
        found = {at: getattr(cell, part) for at, cell in by_place.items()}
        gaps = [found[*at, "auto"] - max(found.get((*at, policy), 0.0) for policy in SINGLE) for at in places]
        name = part.replace("_", " ")
        yield Row(f"auto minus the best of {len(SINGLE)}, mean ({name})", float(np.mean(gaps)), "points")
        worst = int(np.argmin(gaps))
        yield Row(f"the worst: {' '.join(places[worst])}", gaps[worst], "points")
        for other in ("lru", *PEERS):
            over = [found[*at, "auto"] - found[*at, other] for at in places]
            yield Row(f"auto minus {other}, mean ({name})", float(np.mean(over)), "points")
            yield Row("the worst", min(over), "points")
    for trace in sorted({cell.trace for cell in cells}):
        here = {(cell.policy, cell.capacity): cell for cell in cells if cell.trace == trace}
        share = float(np.nanmean([gap_share(here, capacity, "whole") for capacity in SMALL]))
        yield Row(f"gap between lru and the bound closed by auto, up to 10%: {trace}", 100 * share, "%")
    for other in ("lru", *PEERS[1:]):
        ratios = [by_place[*at, "auto"].writes / by_place[*at, other].writes for at in places]
        yield Row(f"blocks written by auto, in % of {other}", 100 * float(np.mean(ratios)), "%")
