"""What hints bring: prefix-hit tokens with hints that are right, that half of the requests lack, and of which a tenth
is wrong, at each capacity, beside ``auto`` without hints and the bound.

The traces are those of ``benchmarks.policies``. A session is what the trace says, else requests whose prompts continue
each other. The hint is ``drop``, from a client that knows which request is the last of its session. "half absent": half
of the requests have no hint. "a tenth wrong": a tenth of the requests have the hint of a random other request.

The adversary: a tenth of the sessions lie. They say that each of their requests was the last one. The figure is what
the other sessions find, compared with no hints at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.bound import found_by_bound
from benchmarks.policies import SYNTHETIC
from benchmarks.report import Row, publish
from benchmarks.traces import traces
from kvoffload.abc import Hints
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.model import DEFAULT_MODEL
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.trace import UNKNOWN, Floats, Ints, Trace

CAPACITIES = ("1%", "5%", "10%")
QUALITIES = ("right", "half absent", "a tenth wrong")
LIAR_SHARE = 0.1
FIRST_SESSION = 2
SEED = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """The tokens found at one capacity, in % of the prompts' tokens. ``others``: the same for sessions that do not
    lie."""

    trace: str
    capacity: str
    hint: str
    quality: str
    found: float
    others: float | None = None


@dataclass(frozen=True, slots=True)
class Future:
    """What a client of each request knows."""

    sessions: Ints
    gaps: Floats
    """Seconds to the next request of the session; infinite for the last one."""


def main(out: Path, quick: bool) -> None:
    cells: list[Cell] = []
    for trace in traces(SYNTHETIC):
        if quick:
            trace = trace.between(0, 0.01)
        cells += measure(trace)
        show([cell for cell in cells if cell.trace == trace.name])
    out.mkdir(parents=True, exist_ok=True)
    (out / "hints-cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    publish("hints", "Hints beside none, in points of prefix-hit tokens", list(summary(cells)), out)


def measure(trace: Trace) -> Iterator[Cell]:
    future = future_of(trace)
    liars = np.random.default_rng(SEED).random(int(future.sessions.max()) + 1) < LIAR_SHARE
    lies = liars[future.sessions]
    for capacity in CAPACITIES:
        blocks = parse_capacity(capacity, trace, DEFAULT_MODEL)

        def found(hints: Sequence[Hints] | None = None, blocks: int = blocks) -> tuple[float, float]:
            hits = replay(trace, ReplayConfig("auto", blocks), hints=hints).host_tokens
            whole, others = (
                100 * float(hits[chosen].sum() / trace.input_tokens[chosen].sum()) for chosen in (lies >= 0, ~lies)
            )
            return whole, others

        yield Cell(trace.name, capacity, "none", "", *found())
        bound = 100 * float(found_by_bound(trace, blocks)[0].sum() / trace.input_tokens.sum())
        yield Cell(trace.name, capacity, "bound", "", bound)
        for quality in QUALITIES:
            yield Cell(trace.name, capacity, "drop", quality, found(drops_of(future, quality))[0])
        yield Cell(trace.name, capacity, "adversary", "drops always", *found(hints_of(future, lies)))


def future_of(trace: Trace) -> Future:
    """A request without a session, in a trace that has some, is a session of its own."""
    is_named = trace.sessions != UNKNOWN
    own = int(trace.sessions.max(initial=0)) + 1 + np.arange(trace.num_requests)
    sessions = np.where(is_named, trace.sessions, own) if is_named.any() else continued_sessions(trace)
    gaps = np.full(trace.num_requests, np.inf)
    next_at: dict[int, float] = {}
    for request in range(trace.num_requests - 1, -1, -1):
        session, now = int(sessions[request]), float(trace.times[request])
        gaps[request] = next_at.get(session, np.inf) - now
        next_at[session] = now
    return Future(sessions, gaps)


def continued_sessions(trace: Trace) -> Ints:
    """Returns the session of each request of a trace that does not say: that of the earlier request whose whole prompt
    it has, up to the last whole block. A prompt of which all blocks were shared from the start cannot be continued."""
    sessions = np.zeros(trace.num_requests, dtype=np.int64)
    made_by: dict[int, int] = {}
    """The session whose request had a block first."""
    ends: dict[int, int] = {}
    """The session of which a block was the last whole one of a prompt."""
    num_sessions = 0
    for request in range(trace.num_requests):
        chain: list[int] = trace.chain(request)[: trace.prompt_blocks[request]].tolist()
        session = next((ends[block] for block in reversed(chain) if block in ends), num_sessions)
        num_sessions = max(num_sessions, session + 1)
        sessions[request] = session
        for block in chain:
            made_by.setdefault(block, session)
        whole = chain[: int(trace.input_tokens[request]) // trace.block_tokens]
        if len(whole) > 1 and made_by[whole[-1]] == session:
            ends[whole[-1]] = session
    return sessions


def drops_of(future: Future, quality: str) -> list[Hints]:
    rng = np.random.default_rng(SEED)
    n = len(future.gaps)
    drops = future.gaps == np.inf
    if quality == "a tenth wrong":
        drops = np.where(rng.random(n) < 0.1, drops[rng.permutation(n)], drops)
    elif quality == "half absent":
        drops &= rng.random(n) >= 0.5
    return hints_of(future, drops)


def hints_of(future: Future, drops: npt.NDArray[np.bool_]) -> list[Hints]:
    """Returns hints that name the session of each request, and say of those in ``drops`` that they are its last."""
    sessions = zip(future.sessions.tolist(), drops.tolist(), strict=True)
    return [Hints(FIRST_SESSION + session, drop) for session, drop in sessions]


def show(cells: Sequence[Cell]) -> None:
    print(f"\n{cells[0].trace}: prefix-hit tokens, %")
    print(f"  {'':<34}" + "".join(f"{capacity:>9}" for capacity in CAPACITIES))
    rows: dict[str, dict[str, float]] = {}
    for cell in cells:
        name = f"{cell.hint} {cell.quality}".strip() + (", others" if cell.hint == "adversary" else "")
        figure = cell.found if cell.others is None or cell.hint == "none" else cell.others
        rows.setdefault(name, {})[cell.capacity] = figure
        if cell.hint == "none" and cell.others is not None:
            rows.setdefault("none, others", {})[cell.capacity] = cell.others
    for name, figures in rows.items():
        print(f"  {name:<34}" + "".join(f"{figures[capacity]:9.2f}" for capacity in CAPACITIES))


def summary(cells: Sequence[Cell]) -> Iterator[Row]:
    """Yields what hints bring over all traces and capacities, and what others lose by liars."""
    none = {(cell.trace, cell.capacity): cell for cell in cells if cell.hint == "none"}
    for quality in QUALITIES:
        chosen = [cell for cell in cells if (cell.hint, cell.quality) == ("drop", quality)]
        gains = [cell.found - none[cell.trace, cell.capacity].found for cell in chosen]
        yield Row(f"drop, {quality}: mean", float(np.mean(gains)), "points")
        yield Row("the worst", min(gains), "points")
    liars = [cell for cell in cells if cell.hint == "adversary"]
    losses = [(cell.others or 0) - (none[cell.trace, cell.capacity].others or 0) for cell in liars]
    yield Row("a tenth of the sessions drops always: others, mean", float(np.mean(losses)), "points")
    yield Row("the worst", min(losses), "points")
