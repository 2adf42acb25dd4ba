"""The integrity board as a table: for the terminal, for the documentation, and whether it proves anything."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from benchmarks.peers.board_judge import Outcome

NOT_RUN = "not run"
UNDONE = ("not run", "the fault could not be planted")
"""How messages of cells begin that could have been run."""


def table_of(result: dict[str, Any]) -> Table:
    """Returns the board as one table, with a column per system."""
    table = Table(title=f"Integrity board: {result['prompts']} prompts per cell", show_lines=True)
    table.add_column("fault")
    for name in result["systems"]:
        table.add_column(name)
    for fault in result["faults"]:
        table.add_row(fault, *(row["cells"][fault]["text"] for row in result["systems"].values()))
    return table


def markdown(result: dict[str, Any]) -> str:
    """Returns the board as a section for the documentation: a column per system that starts, then what was said."""
    rows = result["systems"]
    started = {name: row for name, row in rows.items() if first_outcome(row) != Outcome.REFUSED}
    heads = [f"{name} ({number})" for number, name in enumerate(started, 1)]
    lines = ["| fault | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [
        f"| {fault} | " + " | ".join(short(row["cells"][fault]) for row in started.values()) + " |"
        for fault in result["faults"]
    ]
    notes = [f"- ({number}) {row['note']}" for number, row in enumerate(started.values(), 1) if row["note"]]
    notes += [
        f"- ({number}), {fault}: {cell['message']}"
        for number, row in enumerate(started.values(), 1)
        for fault, cell in row["cells"].items()
        if cell["message"] and (cell["outcome"] != Outcome.NOT_APPLICABLE or short(cell) == NOT_RUN)
    ]
    notes += [
        f"- {name} does not start: {next(iter(row['cells'].values()))['message']}"
        for name, row in rows.items()
        if name not in started
    ]
    notes += [f"- The board proves nothing here: {problem}" for problem in result["problems"]]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    head = f"{result['date']}, {result['seconds'] / 60:.0f} minutes, {result['prompts']} prompts per cell; {versions}."
    return "\n".join([head, "", *lines, "", *notes]).rstrip() + "\n"


def first_outcome(row: dict[str, Any]) -> str:
    return str(next(iter(row["cells"].values()))["outcome"])


def short(cell: dict[str, Any]) -> str:
    """Returns a cell in few words, with what should never happen in bold."""
    if cell["outcome"] == Outcome.NOT_APPLICABLE:
        return NOT_RUN if cell["message"].startswith(UNDONE) else "-"
    if cell["outcome"] == Outcome.REFUSED:
        return "does not start"
    parts = [
        f"{cell[key]} {words}" for key, words in (("from_cache", "from cache"), ("computed", "computed")) if cell[key]
    ]
    parts += [f"**{cell[key]} {words}**" for key, words in (("wrong", "wrong"), ("failed", "failed")) if cell[key]]
    if cell["outcome"] in (Outcome.HANG, Outcome.CRASH):
        parts.append(f"**{cell['outcome']}**" + (f", {cell['unanswered']} not answered" if cell["unanswered"] else ""))
    return ", ".join(parts)


def verdict(result: dict[str, Any]) -> list[str]:
    """Returns what is wrong with the board itself: controls that do not hold."""
    problems = []
    if result["controls"]["prompts_that_tell_the_weights_apart"] < result["prompts"]:
        problems.append("some prompts have the same answers with the replaced weights")
    for name, row in result["systems"].items():
        first, flips = row["cells"].get("no fault"), row["cells"].get("byte flips")
        if first is not None and first["outcome"] not in (Outcome.RIGHT, Outcome.REFUSED):
            problems.append(f"{name}: does not answer from the cache without a fault: {first['text']}")
        if row["is_control"] and flips is not None and flips["outcome"] != Outcome.WRONG:
            problems.append(f"{name}: flipped bits do not reach what is loaded: {flips['text']}")
    return problems
