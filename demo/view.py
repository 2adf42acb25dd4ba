"""What a report shows, on a page that needs no other file and in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table as TerminalTable
from rich.text import Text

from demo.act import Progress
from demo.protocol import RequestResult, Source
from kvoffload.lab.figures import BLUE, GREEN, ORANGE, PURPLE
from kvoffload.lab.page import environment

COLOURS = {Source.RECOMPUTE: ORANGE, Source.DEVICE: BLUE, Source.HOST: GREEN, Source.DISK: PURPLE}
GOOD, BAD = "good", "bad"
STYLES = {
    "": "",
    GOOD: "green",
    BAD: "bold red",
    Source.RECOMPUTE: "dark_orange3",
    Source.DEVICE: "dodger_blue2",
    Source.HOST: "green4",
    Source.DISK: "purple",
}
"""In the terminal, by the tone of a cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """``tone``: GOOD, BAD, or a Source, whose colour is shown."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names the rows, and is aligned to the left. Without ``columns`` there is no header.

    ``is_prose``: the second of two columns has sentences.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    is_prose: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """``notes`` come before plots and tables, ``foot`` behind them."""

    heading: str
    notes: Sequence[str] = ()
    plots: Sequence[str] = ()
    tables: Sequence[Table] = ()
    foot: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A report, which has ``failures`` in place of ``headline`` and ``verdict`` if there are any."""

    title: str
    heading: str
    lead: str
    sections: Sequence[Section]
    end: str = ""
    headline: str = ""
    verdict: str = ""
    failures: Sequence[str] = ()
    remarks: Sequence[str] = ()
    cards: Sequence[tuple[str, str]] = ()
    """Amounts, and what they are."""

    @property
    def tables(self) -> list[Table]:
        return [table for section in self.sections for table in section.tables]


def yes_no(value: bool, detail: str = "") -> Cell:
    return Cell(("yes" if value else "NO") + (detail and f", {detail}"), GOOD if value else BAD)


def render(page: Page) -> str:
    """Returns the HTML."""
    return environment("demo").get_template("report.html.j2").render(page=page, colours=COLOURS, bad=BAD)


def terminal_table(table: Table) -> TerminalTable:
    made = TerminalTable(
        box=box.SIMPLE_HEAD if table.columns else box.SIMPLE,
        show_header=bool(table.columns),
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        padding=0 if len(table.columns) > 5 else (0, 1),
    )
    if table.columns:
        for i, name in enumerate(table.columns):
            made.add_column(name, justify="right" if i else "left")
    else:
        made.add_column(style="dim")
    for row in table.rows:
        cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
        made.add_row(*(Text(cell.text, style=STYLES[cell.tone]) for cell in cells))
    return made


def verdict(page: Page) -> Text:
    """Returns remarks, then one sentence per failure, or the headline."""
    text = Text("".join(f"{sentence}\n" for sentence in page.remarks), style="yellow")
    if page.failures:
        return text.append("\n".join(page.failures), style="bold red")
    return text.append(page.headline, style="bold green")


class TerminalProgress(Progress):
    """A context manager that shows one progress bar per part of the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description:<32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def begin(self, title: str, requests: int) -> None:
        for task in self._bars.tasks:
            self._bars.stop_task(task.id)
        self._bars.add_task(title, total=requests)
        if not self._console.is_terminal:
            # The bars appear at the end only.
            self._console.print(title.strip(), markup=False, highlight=False)

    def request(self, result: RequestResult) -> None:
        self._bars.advance(self._bars.tasks[-1].id)

    def skip(self, store: str, reason: str) -> None:
        self._console.print(
            f"{store} is skipped: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )
