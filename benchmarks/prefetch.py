"""What prefetching brings: hits on disk that become hits in host memory, where clients say when their sessions return,
and the share of its reads that was wasted.

The traces and sessions are those of ``benchmarks.hints``; the hint is ``expect_return_s``, from a client that knows
when its session returns. "rough": the time is wrong by a factor, log-normal with sigma 1. A *hinted* hit on disk is one
of a request whose session had a request before. "without": nothing is prefetched, although the hints are the same. The
disk is as fast as in all replays; requests come at their times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.hints import FIRST_SESSION, SEED, Future, future_of
from benchmarks.policies import SYNTHETIC
from benchmarks.report import Row, publish
from benchmarks.traces import traces
from kvoffload.abc import Hints
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.latency import DEFAULT_SPEEDS
from kvoffload.lab.model import DEFAULT_MODEL
from kvoffload.lab.replay import ReplayConfig, Run
from kvoffload.lab.trace import Trace
from kvoffload.tiering import prefetch

SIZES = (("5%", "50%"), ("2%", "20%"))
"""Of host memory and disk."""
QUALITIES = ("right", "rough")


@dataclass(frozen=True, slots=True)
class Cell:
    """Hits in % of the prompts' tokens. ``left``: hinted hits on disk, as a share of those without prefetching."""

    trace: str
    host: str
    disk: str
    quality: str
    prefetches: bool
    host_hits: float
    disk_hits: float
    left: float
    blocks_read: int
    wasted: float


def main(out: Path, quick: bool) -> None:
    cells: list[Cell] = []
    for trace in traces(SYNTHETIC):
        if quick:
            trace = trace.between(0, 0.01)
        cells += measure(trace)
        show([cell for cell in cells if cell.trace == trace.name])
    out.mkdir(parents=True, exist_ok=True)
    (out / "prefetch-cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    publish("prefetch", "Prefetching before expected returns", list(summary(cells)), out)


def measure(trace: Trace) -> Iterator[Cell]:
    future = future_of(trace)
    first = np.unique(future.sessions, return_index=True)[1]
    returned = np.ones(trace.num_requests, dtype=np.bool_)
    returned[first] = False
    for host, disk in SIZES:
        for quality in QUALITIES:
            hints = returns_of(future, quality)
            with mock.patch.object(prefetch, "HELD_SHARE", 0.0):
                without = serve(trace, host, disk, hints, returned)
            yield cell_of(trace, host, disk, quality, False, without, without)
            yield cell_of(trace, host, disk, quality, True, serve(trace, host, disk, hints, returned), without)


def returns_of(future: Future, quality: str) -> list[Hints]:
    gaps = future.gaps.copy()
    if quality == "rough":
        gaps *= np.exp(np.random.default_rng(SEED).standard_normal(len(gaps)))
    return [
        Hints(FIRST_SESSION + session, expect_return_s=gap if gap < np.inf else None)
        for session, gap in zip(future.sessions.tolist(), gaps.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Served:
    host_hits: float
    disk_hits: float
    hinted: int
    blocks_read: int
    blocks_used: int


def serve(trace: Trace, host: str, disk: str, hints: Sequence[Hints | None], returned: npt.NDArray[np.bool_]) -> Served:
    config = ReplayConfig(
        "auto",
        parse_capacity(host, trace, DEFAULT_MODEL),
        disk_blocks=parse_capacity(disk, trace, DEFAULT_MODEL),
    )
    run = Run(trace, config, hints)
    for _ in run.serve_all():
        pass
    counts = run.take_counts()
    result, asked = run.result(DEFAULT_MODEL, DEFAULT_SPEEDS, 0.0), int(trace.input_tokens.sum())
    return Served(
        100 * result.host_hit_tokens / asked,
        100 * result.disk_hit_tokens / asked,
        int(result.disk_tokens[returned].sum()),
        int(counts.get("prefetched_blocks", 0)),
        int(counts.get("prefetched_used_blocks", 0)),
    )


def cell_of(
    trace: Trace, host: str, disk: str, quality: str, prefetches: bool, served: Served, without: Served
) -> Cell:
    left = served.hinted / without.hinted if without.hinted else 0.0
    wasted = 1 - served.blocks_used / served.blocks_read if served.blocks_read else 0.0
    return Cell(
        trace.name,
        host,
        disk,
        quality,
        prefetches,
        served.host_hits,
        served.disk_hits,
        left,
        served.blocks_read,
        wasted,
    )


def show(cells: Sequence[Cell]) -> None:
    print(f"\n{cells[0].trace}: hits in % of all prompt tokens")
    print(f"  {'host, disk, hints':<26}{'host':>8}{'disk':>8}{'hinted disk hits left':>24}{'reads wasted':>14}")
    for cell in cells:
        name = f"{cell.host}, {cell.disk}, {cell.quality if cell.prefetches else 'without'}"
        shown = f"{100 * cell.left:23.0f}%{100 * cell.wasted:13.1f}%" if cell.prefetches else ""
        print(f"  {name:<26}{cell.host_hits:8.2f}{cell.disk_hits:8.2f}{shown}")


def summary(cells: Sequence[Cell]) -> Iterator[Row]:
    for quality in QUALITIES:
        chosen = [cell for cell in cells if cell.prefetches and cell.quality == quality]
        if chosen:
            converted = [100 * (1 - cell.left) for cell in chosen]
            yield Row(f"{quality}: hinted disk hits that became host hits, mean", float(np.mean(converted)), "%")
            yield Row("the least", min(converted), "%")
            yield Row("reads wasted, most", 100 * max(cell.wasted for cell in chosen), "%")
