"""Renders ``peers.html``, which needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.measure import Result
from benchmarks.peers.plots import memory_plot, mixed_plot, ttft_plot
from benchmarks.peers.report import problems, tables
from benchmarks.peers.summary import shortfalls
from demo.view import BEST, Cell, Page, Section, Table, render

LEGEND = (
    "Again and first sight: median time to the first token, by that of a device hit and by that of recompute. Mixed "
    "load and CPU time: by recompute's. Disk: bytes on disk per byte of blocks."
)
STYLE = "main { max-width: 1080px; } th, td { padding-left: 12px; white-space: normal; }"


def render_page(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """Returns all tables and plots as one HTML page."""
    measured = [result for result in results if result.times]
    plots = [ttft_plot(measured), mixed_plot(measured), memory_plot(measured)] if measured else []
    found = [Section(title, tables=[_table(heads, rows)]) for title, heads, rows in tables(results)]
    behind = shortfalls(results)
    sections = [*found[:1], *([Section("Where kvoffload is not the best", behind)] if behind else [])]
    sections += [Section("", plots=[plot]) for plot in plots if plot]
    return render(
        Page(
            title="beside other systems",
            heading="kvoffload beside other systems",
            lead="; ".join(f"{name}: {value}" for name, value in facts.items()),
            sections=[*sections, *found[1:], Section("", [LEGEND, *problems(results)])],
            style=STYLE,
        )
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Returns a table of Markdown: what is bold there is the best of its column."""
    return Table("", heads, [[Cell(c[2:-2], BEST) if c.startswith("**") else c for c in row] for row in rows])
