"""What hints bring: prefix-hit tokens with hints that are right, that half of the requests lack, and of which a tenth
is wrong, at each capacity, beside ``auto`` without hints and the bound.

The traces are those of ``benchmarks.policies``. A session is what the trace says, else requests whose prompts continue
each other. Hints are those of a client that knows when its session returns, and which request is its last. "half
absent": half of the requests have no hint. "a tenth wrong": a tenth of the requests have the hint of a random other
request. "rough": the time to the return is wrong by a factor, log-normal with sigma 1.

The adversary: a tenth of the sessions lie. They always say that they return at once, or that each of their requests was
the last one. The figure is what the other sessions find, compared with no hints at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.policies import SYNTHETIC
from benchmarks.report import Row, publish
from benchmarks.traces import traces
from kvoffload.abc import Hints
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.model import DEFAULT_MODEL
from kvoffload.lab.replay import CLAIRVOYANT, ReplayConfig, replay
from kvoffload.lab.trace import UNKNOWN, Floats, Ints, Trace

CAPACITIES = ("1%", "5%", "10%")
KINDS = ("drop", "expect_return_s", "both")
QUALITIES = ("right", "half absent", "a tenth wrong", "rough")
LIARS = ("returns at once", "drops always")
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

        def found(policy: str, hints: Sequence[Hints] | None = None, blocks: int = blocks) -> tuple[float, float]:
            hits = replay(trace, ReplayConfig(policy, blocks), hints=hints).host_tokens
            whole, others = (
                100 * float(hits[chosen].sum() / trace.input_tokens[chosen].sum()) for chosen in (lies >= 0, ~lies)
            )
            return whole, others

        yield Cell(trace.name, capacity, "none", "", *found("auto"))
        yield Cell(trace.name, capacity, "bound", "", found(CLAIRVOYANT)[0])
        for kind in KINDS:
            for quality in QUALITIES:
                if kind != "drop" or quality != "rough":
                    yield Cell(trace.name, capacity, kind, quality, found("auto", hints_of(future, kind, quality))[0])
        for lie in LIARS:
            yield Cell(trace.name, capacity, "adversary", lie, *found("auto", lies_of(future, lies, lie)))


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


def hints_of(future: Future, kind: str, quality: str) -> list[Hints]:
    rng = np.random.default_rng(SEED)
    n = len(future.gaps)
    gaps = future.gaps.copy()
    if quality == "a tenth wrong":
        gaps = np.where(rng.random(n) < 0.1, gaps[rng.permutation(n)], gaps)
    elif quality == "rough":
        gaps *= np.exp(rng.standard_normal(n))
    is_silent: npt.NDArray[np.bool_] = rng.random(n) < (0.5 if quality == "half absent" else 0)
    hints = []
    for session, gap, silent in zip(future.sessions.tolist(), gaps.tolist(), is_silent.tolist(), strict=True):
        drop = gap == np.inf and kind != "expect_return_s" and not silent
        expected = gap if gap < np.inf and kind != "drop" and not silent else None
        hints.append(Hints(FIRST_SESSION + session, drop, expected))
    return hints


def lies_of(future: Future, lies: npt.NDArray[np.bool_], lie: str) -> list[Hints]:
    """Returns the hints of liars; the others name only their sessions."""
    sessions = zip(future.sessions.tolist(), lies.tolist(), strict=True)
    lying = {"drop": True} if lie == "drops always" else {"expect_return_s": 0.0}
    return [Hints(FIRST_SESSION + session, **(lying if is_lying else {})) for session, is_lying in sessions]


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
    for kind in KINDS:
        for quality in QUALITIES:
            chosen = [cell for cell in cells if (cell.hint, cell.quality) == (kind, quality)]
            gains = [cell.found - none[cell.trace, cell.capacity].found for cell in chosen]
            if gains:
                yield Row(f"{kind}, {quality}: mean", float(np.mean(gains)), "points")
                yield Row("the worst", min(gains), "points")
    for lie in LIARS:
        chosen = [cell for cell in cells if (cell.hint, cell.quality) == ("adversary", lie)]
        losses = [(cell.others or 0) - (none[cell.trace, cell.capacity].others or 0) for cell in chosen]
        yield Row(f"a tenth of the sessions {lie}: others, mean", float(np.mean(losses)), "points")
        yield Row("the worst", min(losses), "points")
