"""Renders an examination: for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvoffload.doctor.examine import Examination
from kvoffload.doctor.findings import Area, Finding, Level
from kvoffload.printable import printable
from kvoffload.units import counted

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
"""Version of the JSON."""
MARKS = {Level.OK: "✓", Level.NOTE: "·", Level.WARNING: "!", Level.PROBLEM: "✗"}
PLAIN_MARKS = {Level.OK: "ok", Level.NOTE: "--", Level.WARNING: "!", Level.PROBLEM: "X"}
"""Where the output is not UTF-8."""
STYLES = {Level.OK: "green4", Level.NOTE: "dim", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
VERDICT_STYLES = {Level.OK: "bold green4", Level.WARNING: "bold yellow", Level.PROBLEM: "bold red"}
MIN_WIDTH = 40
TITLES = {Area.CONFIGURATION: "Configuration", Area.MACHINE: "This machine", Area.MODEL: "Model"}


def to_dict(examination: Examination) -> dict[str, Any]:
    """Returns plain JSON."""
    return {
        "format": FORMAT,
        "verdict": verdict(examination),
        "exit_status": examination.exit_status,
        **{f"num_{level}": examination.count(level) for level in Level},
        "findings": list(map(asdict, examination.findings)),
    }


def verdict(examination: Examination) -> str:
    """Returns one sentence about all findings."""
    problems, warnings = examination.count(Level.PROBLEM), examination.count(Level.WARNING)
    if problems:
        beside = f" and {counted(warnings, 'warning')}" if warnings else ""
        which = "it" if problems == 1 and not warnings else "the problem" if problems == 1 else "the problems"
        return f"{counted(problems, 'problem')}{beside}: fix {which} before you deploy."
    if warnings:
        return f"Nothing stops this deployment; {counted(warnings, 'warning')}."
    return "Nothing stops or slows this deployment."


def show(console: Console, examination: Examination) -> None:
    """Prints the findings by area, and the verdict."""
    from rich.text import Text

    marks, arrow = (PLAIN_MARKS, "->") if console.options.ascii_only else (MARKS, "→")
    for title, findings in _groups(examination):
        console.print(printable(title), style="bold", soft_wrap=True)
        for finding in findings:
            style = STYLES[finding.level]
            first, *rest = _wrapped(finding.text, console.width, marks[finding.level], 2)
            cut = first.index(marks[finding.level]) + len(marks[finding.level])
            plain = "none" if finding.level is Level.OK else style
            console.print(Text.assemble((first[:cut], style), (first[cut:], plain)), soft_wrap=True)
            for line in rest:
                console.print(line, style=plain, soft_wrap=True)
            for line in _wrapped(finding.fix, console.width, arrow, 4) if finding.fix else []:
                console.print(line, style="cyan", soft_wrap=True)
        console.print()
    problems, warnings = examination.count(Level.PROBLEM), examination.count(Level.WARNING)
    level = Level.PROBLEM if problems else Level.WARNING if warnings else Level.OK
    console.print(verdict(examination), style=VERDICT_STYLES[level], soft_wrap=True)


def _wrapped(text: str, width: int, mark: str, indent: int) -> list[str]:
    """Returns the lines of ``text`` behind ``mark``. Words are never broken, so that commands and paths can be
    copied."""
    begin = " " * indent + mark + " "
    return textwrap.wrap(
        printable(text),
        max(width, MIN_WIDTH),
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _groups(examination: Examination) -> Iterator[tuple[str, list[Finding]]]:
    """Yields the title and the findings of each group that has any: areas in their order, one group per tier."""
    titles = {**TITLES, Area.ENGINE: examination.engine}
    for area in Area:
        mine = [finding for finding in examination.findings if finding.area is area]
        if area is not Area.TIER:
            if mine:
                yield titles[area], mine
            continue
        for name in dict.fromkeys(finding.tier for finding in mine):
            place = examination.places.get(name)
            yield f"Tier {name}{f': {place}' if place else ''}", [each for each in mine if each.tier == name]
