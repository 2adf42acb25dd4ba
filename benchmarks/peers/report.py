"""The table of faults as Markdown, with what must be known of each row, and whether it proves anything."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from benchmarks.peers.cells import FLIPS, PROMPTS
from benchmarks.peers.judge import Cell, Outcome, short
from benchmarks.peers.systems import System

WIDTH = 120
"""Of lines of the documentation."""

Rows = Mapping[str, Mapping[str, Sequence[Cell]]]
"""The cells of each system, by its name and by fault: what happened, and if that was bad, what happened again."""


def markdown(rows: Rows, systems: Sequence[System]) -> str:
    """Returns the table, then notes that name the rows by number."""
    faults = list(next(iter(rows.values())))
    lines = ["| system | " + " | ".join(faults) + " |", "|---" * (len(faults) + 1) + "|"]
    notes: dict[str, list[str]] = {}
    for number, system in enumerate(systems, 1):
        cells = rows[system.name]
        refused = next((c[0] for c in cells.values() if c[0].outcome is Outcome.REFUSED), None)
        shown = ["does not start", *[""] * (len(faults) - 1)] if refused else [short(cells[fault]) for fault in faults]
        lines.append(f"| {system.title} ({number}) | " + " | ".join(shown) + " |")
        said = [f"*{fault}*: {cell.message}" for fault, found in cells.items() for cell in found if cell.message]
        for note in [f"Does not start: {refused.message}"] if refused else dict.fromkeys([*system.notes, *said]):
            notes.setdefault(note, []).append(str(number))
    folded = [
        textwrap.fill(f"- ({', '.join(numbers)}) {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for text, numbers in notes.items()
    ]
    return "\n".join([*lines, "", *folded]).rstrip() + "\n"


def verdict(rows: Rows, systems: Sequence[System], distinct: int) -> list[str]:
    """Returns why the table proves nothing: controls that do not hold."""
    problems = []
    if distinct < PROMPTS:
        problems.append("some prompts have the same answers with the replaced weights")
    for system in systems:
        flips = rows[system.name].get(FLIPS)
        if system.is_control and flips is not None and flips[0].outcome is not Outcome.WRONG:
            problems.append(f"{system.name}: flipped bits do not reach what is loaded: {short(flips)}")
    return problems
