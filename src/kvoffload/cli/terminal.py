"""Shared parts of all commands: consoles, messages, JSON, tables and progress bars."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kvoffload.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def json_option(help: str = "Print everything as one JSON object.") -> Decorator:
    """Adds the option ``--json`` to a command, whose argument is then ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def print_json(report: object) -> None:
    click.echo(json.dumps(report, indent=2))


def console_of(stderr: bool = False) -> Console:
    """Returns a console that prints text unchanged, without markup, emoji or highlighting. Characters that the encoding
    of the terminal lacks are escaped."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(command: str, text: str, style: str) -> None:
    """Prints a message of ``command`` to stderr. Files and other servers may have written parts of it."""
    lines = "\n".join(map(printable, text.split("\n")))
    console_of(stderr=True).print(f"kvoffload {command}: {lines}", style=style, soft_wrap=True)


def table_of(*titles: str, gap: int = 1, wrap: bool = False) -> Table:
    """Returns a table with these columns: the first one for names, the others for numbers, which ``wrap`` in a narrow
    terminal or are cut."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i else "left", no_wrap=not (i and wrap))
    return table


@contextmanager
def progress_bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """Shows a bar on stderr if that is a terminal."""
    from rich.progress import Progress

    console = console_of(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar
