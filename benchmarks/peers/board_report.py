"""The integrity board as a table: for the terminal, for the documentation, and whether it proves anything.

``python -m benchmarks.peers.board_report peers-report/board.md docs/peers.md`` puts a board into the documentation.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.peers.board_judge import Cell, Outcome

WIDTH = 120
"""Of lines of the documentation."""
NOT_RUN = "not run"
UNDONE = ("not run", "the fault could not be planted")
"""How messages of cells begin that could have been run."""
BAD = {"wrong": "wrong", "failed": "failed", "unanswered": "not answered"}


def twice(first: Cell, second: Cell | None = None) -> dict[str, Any]:
    """Returns a cell of the result. ``second``: what happened the second time, if the first was bad."""
    text = str(first) if second is None else f"{first}; again: {second}"
    return {"first": first.to_dict(), "second": None if second is None else second.to_dict(), "text": text}


def is_confirmed(cell: dict[str, Any]) -> bool:
    """Returns whether something bad has happened both times."""
    return cell["second"] is not None and all(is_bad(cell[which]) for which in ("first", "second"))


def is_bad(once: dict[str, Any]) -> bool:
    return once["outcome"] in (Outcome.WRONG, Outcome.HANG, Outcome.CRASH, Outcome.FAILED)


def table_of(result: dict[str, Any]) -> Table:
    """Returns the board as one table, with a row per system."""
    table = Table(title=f"Integrity board: {result['prompts']} prompts per cell", show_lines=True)
    table.add_column("system")
    for fault in result["faults"]:
        table.add_column(fault)
    for name, row in result["systems"].items():
        table.add_row(name, *(short(row["cells"][fault]).replace("**", "") for fault in result["faults"]))
    return table


def markdown(result: dict[str, Any]) -> str:
    """Returns the board as a section for the documentation: a row per system, then what must be known of each."""
    rows = result["systems"]
    lines = [
        "| system | " + " | ".join(result["faults"]) + " |",
        "|---" * (len(result["faults"]) + 1) + "|",
    ]
    for number, (name, row) in enumerate(rows.items(), 1):
        cells = [short(row["cells"][fault]) for fault in result["faults"]]
        if first_outcome(row) == Outcome.REFUSED:
            cells = [cells[0], *("" for _ in cells[1:])]
        lines.append(f"| {name} ({number}) | " + " | ".join(cells) + " |")
    notes = [f"- ({numbers}) {text}" for text, numbers in _grouped(rows).items()]
    notes += [f"- The board proves nothing here: {problem}" for problem in result["problems"]]
    folded = [textwrap.fill(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for note in notes]
    first = textwrap.fill(head(result), WIDTH, break_on_hyphens=False)
    return "\n".join([first, "", *lines, "", *folded]).rstrip() + "\n"


def head(result: dict[str, Any]) -> str:
    """Returns when, where and with what the board was run."""
    versions = dict(result["versions"])
    for row in result["systems"].values():
        versions |= row["versions"]
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{result['date']}, {result['seconds'] / 60:.0f} minutes, {result['prompts']} prompts per cell; "
        f"{result['machine']}, load {result['load']:.1f} at the start; Python {result['python']}; {packages}."
    )


def _grouped(rows: dict[str, Any]) -> dict[str, str]:
    """Returns what the notes say, each with the numbers of its systems."""
    found: dict[str, list[str]] = {}
    for number, row in enumerate(rows.values(), 1):
        if first_outcome(row) == Outcome.REFUSED:
            found.setdefault(f"Does not start: {first_cell(row)['first']['message']}", []).append(str(number))
            continue
        for note in row["notes"]:
            found.setdefault(note, []).append(str(number))
        for fault, cell in row["cells"].items():
            for which in ("first", "second"):
                once = cell[which]
                if once and once["message"] and (once["outcome"] != Outcome.NOT_APPLICABLE or is_undone(once)):
                    numbers = found.setdefault(f"*{fault}*: {once['message']}", [])
                    if str(number) not in numbers:
                        numbers.append(str(number))
    return {text: ", ".join(numbers) for text, numbers in found.items()}


def first_cell(row: dict[str, Any]) -> dict[str, Any]:
    cell: dict[str, Any] = next(iter(row["cells"].values()))
    return cell


def first_outcome(row: dict[str, Any]) -> str:
    return str(first_cell(row)["first"]["outcome"])


def is_undone(once: dict[str, Any]) -> bool:
    return bool(once["message"].startswith(UNDONE))


def short(cell: dict[str, Any]) -> str:
    """Returns a cell in few words. What should never happen is bold if it has happened twice."""
    marks = "**" if is_confirmed(cell) else ""
    first = _short(cell["first"], marks)
    return first if cell["second"] is None else f"{first}; again: {_short(cell['second'], marks)}"


def _short(once: dict[str, Any], marks: str) -> str:
    if once["outcome"] == Outcome.NOT_APPLICABLE:
        return NOT_RUN if is_undone(once) else "-"
    if once["outcome"] == Outcome.REFUSED:
        return "does not start"
    parts = [
        f"{once[key]} {words}" for key, words in (("from_cache", "from cache"), ("computed", "computed")) if once[key]
    ]
    if once["outcome"] in (Outcome.HANG, Outcome.CRASH):
        parts.append(f"{marks}{once['outcome']}{marks}")
    parts += [f"{marks}{once[key]} {words}{marks}" for key, words in BAD.items() if once[key]]
    return ", ".join(parts)


def index(result: dict[str, Any], logs: Path) -> str:
    """Returns a page with a row per cell: what happened, and its logs below ``logs``."""
    lines = [head(result), "", "| system | fault | result | again | logs |", "|---|---|---|---|---|"]
    for row in result["systems"].values():
        for fault, cell in row["cells"].items():
            folder = f"{row['id']}/{result['faults'][fault]['folder']}"
            links = [
                f"[{path.relative_to(logs / row['id'])}]({path.relative_to(logs)})"
                for each in (folder, f"{folder}-again")
                for path in sorted((logs / each).glob("*.log"))
            ]
            if links:
                second = "" if cell["second"] is None else words(cell["second"])
                lines.append(f"| {row['id']} | {fault} | {words(cell['first'])} | {second} | {' '.join(links)} |")
    return "\n".join(lines) + "\n"


def words(once: dict[str, Any]) -> str:
    """Returns what happened once, with its message."""
    return _short(once, "") + (f": {once['message']}" if once["message"] else "")


def publish(page: str, board: str) -> str:
    """Returns ``page`` with ``board`` in the place of its marked part. Raises ValueError if it has no such part."""
    begin, end = "<!-- Board: replace from here", "<!-- End of the board. -->"
    before, found, rest = page.partition(begin)
    comment, line, rest = rest.partition("\n")
    _, end_found, after = rest.partition(end)
    if not (found and line and end_found):
        raise ValueError(f'the page has no part from "{begin}" to "{end}"')
    return f"{before}{found}{comment}\n\n{board.strip()}\n\n{end}{after}"


def verdict(result: dict[str, Any]) -> list[str]:
    """Returns what is wrong with the board itself: controls that do not hold."""
    problems = []
    if any(each["prompts_that_tell_the_weights_apart"] < result["prompts"] for each in result["controls"]):
        problems.append("some prompts have the same answers with the replaced weights")
    for name, row in result["systems"].items():
        first, flips = row["cells"].get("no fault"), row["cells"].get("byte flips")
        expected = (Outcome.RIGHT, Outcome.REFUSED)
        # What is bad twice is what the system does, and bold.
        if first is not None and first["first"]["outcome"] not in expected and not is_confirmed(first):
            problems.append(f"{name}: does not answer from the cache without a fault: {first['text']}")
        if row["is_control"] and flips is not None and flips["first"]["outcome"] != Outcome.WRONG:
            problems.append(f"{name}: flipped bits do not reach what is loaded: {flips['text']}")
    return problems


if __name__ == "__main__":
    board_path, page_path = map(Path, sys.argv[1:])
    page_path.write_text(publish(page_path.read_text(encoding="utf-8"), board_path.read_text(encoding="utf-8")))
