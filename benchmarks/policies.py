"""Prefix-hit tokens of each policy on real traces, at each capacity, compared with vLLM's policies and the bound.

The traces are the ``*.jsonl.gz`` in the folder that KVOFFLOAD_TRACES names; without one, synthetic workloads. The
requests of the first half of a trace's time were used to tune the constants of ``auto``. The figures are those of the
second half, which begins with the cache that the first half has left.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Row, publish
from benchmarks.traces import trace_sources
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.model import DEFAULT_MODEL
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import CLAIRVOYANT, ReplayConfig, replay
from kvoffload.lab.trace import Ints, Trace

SINGLE = ("fifo", "lru", "arc", "s3fifo", "sieve", "lirs", "2q")
PEERS = ("vllm-lru", "vllm-arc")
POLICIES = (*SINGLE, "auto", *PEERS, CLAIRVOYANT)
CAPACITIES = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "20%", "50%", "5859")
SMALL = ("0.1%", "0.5%", "1%", "2%", "5%", "10%", "5859")
"""The capacities where most of the gap between LRU and the bound is."""
SYNTHETIC = ("synthetic:chat", "synthetic:agent", "synthetic:documents")


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
    for source in trace_sources(SYNTHETIC):
        trace = read_trace(source)
        if quick:
            trace = trace.between(0, 0.1)
        jobs = [(capacity, policy) for capacity in CAPACITIES for policy in POLICIES]
        with ProcessPoolExecutor(initializer=_start, initargs=(trace,)) as pool:
            cells += pool.map(_cell, jobs)
        show(cells[-len(jobs) :])
    out.mkdir(parents=True, exist_ok=True)
    (out / "policies-cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    publish("policies", "The self-tuning policy beside the others", list(summary(cells)), out)


_trace: Trace


def _start(trace: Trace) -> None:
    global _trace
    _trace = trace


def _cell(job: tuple[str, str]) -> Cell:
    capacity, policy = job
    blocks = parse_capacity(capacity, _trace, DEFAULT_MODEL)
    if policy in PEERS:
        hits, written = as_vllm(_trace, blocks, arc=policy == "vllm-arc")
        writes = written / _trace.num_accesses
    else:
        result = replay(_trace, ReplayConfig(policy, blocks))
        hits, writes = result.host_tokens, result.writes_per_access
    asked, times = _trace.input_tokens, _trace.times
    late = times >= (times[0] + times[-1]) / 2
    whole, second = (100 * float(hits[chosen].sum() / asked[chosen].sum()) for chosen in (asked > 0, late))
    return Cell(_trace.name, capacity, blocks, policy, whole, second, writes)


def show(cells: list[Cell]) -> None:
    by_place = {(cell.policy, cell.capacity): cell for cell in cells}
    print(f"\n{cells[0].trace}: prefix-hit tokens, % (second half of the trace's time)")
    print(f"  {'':<12}" + "".join(f"{capacity:>9}" for capacity in CAPACITIES))
    for policy in POLICIES:
        figures = "".join(f"{by_place[policy, capacity].second_half:9.2f}" for capacity in CAPACITIES)
        print(f"  {policy:<12}{figures}")
    shares = "".join(f"{100 * gap_share(by_place, capacity, 'second_half'):9.1f}" for capacity in CAPACITIES)
    print(f"  {'gap closed':<12}{shares}   by auto, % of the way from lru to the bound")


def gap_share(by_place: Mapping[tuple[str, str], Cell], capacity: str, part: str) -> float:
    """Returns how far ``auto`` goes from LRU to the bound; NaN where the bound finds no more than LRU."""
    lru, auto, bound = (getattr(by_place[policy, capacity], part) for policy in ("lru", "auto", CLAIRVOYANT))
    return float((auto - lru) / (bound - lru)) if bound > lru else float("nan")


def summary(cells: list[Cell]) -> Iterator[Row]:
    """Yields how far ``auto`` is from the best single policy, from LRU and from vLLM's policies, over all cells."""
    places = sorted({(cell.trace, cell.capacity) for cell in cells})
    by_place = {(cell.trace, cell.capacity, cell.policy): cell for cell in cells}
    for part in ("second_half", "whole"):
        found = {at: getattr(cell, part) for at, cell in by_place.items()}
        gaps = [found[*at, "auto"] - max(found[*at, policy] for policy in SINGLE) for at in places]
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
    for other in ("lru", "vllm-arc"):
        ratios = [by_place[*at, "auto"].writes / by_place[*at, other].writes for at in places]
        yield Row(f"blocks written by auto, in % of {other}", 100 * float(np.mean(ratios)), "%")


# The policies of vLLM 0.32.


def as_vllm(trace: Trace, capacity: int, arc: bool) -> tuple[Ints, int]:
    """Returns the hit tokens of each request and the number of blocks written, with vLLM's manager instead of ours.

    A request touches its whole chain, tail first, when it is looked up, and again when it has stored: then the blocks
    that it has stored move, which does not count as a second use.
    """
    cache = _ARC(capacity) if arc else _LRU(capacity)
    hits = np.zeros(trace.num_requests, dtype=np.int64)
    written = 0
    for request in range(trace.num_requests):
        chain = trace.chain(request).tolist()
        found = next((i for i, block in enumerate(chain) if block not in cache), len(chain))
        hits[request] = min(found * trace.block_tokens, int(trace.input_tokens[request]))
        for block in reversed(chain):
            cache.use(block)
        new = [block for block in chain[:capacity] if block not in cache]
        protected = set(chain[:capacity])
        cache.make_room(len(new), protected)
        for block in new:
            cache.insert(block)
        for block in reversed(chain):
            cache.move(block)
        written += len(new)
    return hits, written


Blocks = OrderedDict[int, None]


def _oldest(blocks: Blocks, protected: set[int]) -> int | None:
    return next((block for block in blocks if block not in protected), None)


class _LRU:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: Blocks = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    def use(self, block: int) -> None:
        self.move(block)

    def move(self, block: int) -> None:
        if block in self.blocks:
            self.blocks.move_to_end(block)

    def insert(self, block: int) -> None:
        self.blocks[block] = None

    def make_room(self, n: int, protected: set[int]) -> None:
        while len(self.blocks) + n > self.capacity and (victim := _oldest(self.blocks, protected)) is not None:
            del self.blocks[victim]


class _ARC:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.t1: Blocks = OrderedDict()
        self.t2: Blocks = OrderedDict()
        self.b1: Blocks = OrderedDict()
        self.b2: Blocks = OrderedDict()
        self.target = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self.t1 or block in self.t2

    def use(self, block: int) -> None:
        if block in self.t1:
            del self.t1[block]
            self.t2[block] = None
        elif block in self.t2:
            self.t2.move_to_end(block)
        elif block in self.b1:
            self.target = min(float(self.capacity), self.target + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.move_to_end(block)
        elif block in self.b2:
            self.target = max(0.0, self.target - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.move_to_end(block)

    def move(self, block: int) -> None:
        for blocks in (self.t1, self.t2):
            if block in blocks:
                blocks.move_to_end(block)

    def insert(self, block: int) -> None:
        self.t1[block] = None
        self.b1.pop(block, None)
        self.b2.pop(block, None)

    def make_room(self, n: int, protected: set[int]) -> None:
        for _ in range(len(self.t1) + len(self.t2) + n - self.capacity):
            one, two = _oldest(self.t1, protected), _oldest(self.t2, protected)
            from_t1 = one is not None and (len(self.t1) >= int(self.target) or two is None)
            blocks, ghosts, victim = (self.t1, self.b1, one) if from_t1 else (self.t2, self.b2, two)
            assert victim is not None
            del blocks[victim]
            ghosts[victim] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
