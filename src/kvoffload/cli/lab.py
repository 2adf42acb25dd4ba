"""What the commands of the lab share: the trace they read, bars, errors."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from kvoffload.base import ConfigError
from kvoffload.cli.words import counted
from kvoffload.lab.latency import Speeds
from kvoffload.lab.readers import FORMATS
from kvoffload.lab.trace import Trace, TraceError

MAX_PROBLEMS_SHOWN = 5
SPEEDS = Speeds()

Command = TypeVar("Command", bound=Callable[..., None])


def trace_options(command: Command) -> Command:
    """How the trace is read."""
    for option in (
        click.option("--strict", is_flag=True, help="Stop at the first line that is wrong."),
        click.option(
            "--block-tokens", type=int, metavar="N", help="Tokens of a block, where the format leaves it open."
        ),
        click.option("--format", "trace_format", help=f"Of the trace: {', '.join(FORMATS)}.  [default: as it looks]"),
    ):
        command = option(command)
    return command


def speed_options(command: Command) -> Command:
    """What estimates of TTFT rest on: tokens a second and GB a second, as ``speeds_of`` takes them."""
    for name, value, metavar, text in (
        ("--disk-speed", SPEEDS.disk_bytes_per_s / 1e9, "GB/S", "From disk to RAM."),
        ("--host-speed", SPEEDS.host_bytes_per_s / 1e9, "GB/S", "From RAM to the device."),
        ("--prefill-speed", SPEEDS.prefill_tokens_per_s, "TOK/S", "Of the engine, at short prompts."),
    ):
        command = click.option(name, type=float, default=value, show_default=True, metavar=metavar, help=text)(command)
    return command


def speeds_of(prefill_speed: float, host_speed: float, disk_speed: float) -> Speeds:
    """Raises ConfigError for what is no speed."""
    return Speeds(
        positive("prefill-speed", prefill_speed, "tokens a second"),
        positive("host-speed", host_speed, "GB/s") * 1e9,
        positive("disk-speed", disk_speed, "GB/s") * 1e9,
    )


def positive(setting: str, value: float, what: str) -> float:
    """``value``, if it is a positive number. Raises ConfigError."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{setting}={value:g}: must be more than 0; write {what}, or leave it out")
    return value


def number_of_jobs(jobs: int | None) -> int | None:
    """``jobs``, if it can be. Raises ConfigError."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs={jobs}: must be 1 or more; leave it out for one a core")
    return jobs


def listed(setting: str, text: str) -> list[str]:
    """What commas part, each once. Raises ConfigError for an empty entry."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in parts:
        raise ConfigError(f"{setting}={text!r}: an entry is empty; write entries with a comma between them")
    return parts


@contextmanager
def errors(command: str) -> Iterator[None]:
    """Exit status 2 and one line."""
    try:
        yield
    except (ConfigError, TraceError) as error:
        say(command, str(error), "bold red")
        sys.exit(2)


def say(command: str, text: str, style: str) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"kvoffload {command}: {text}", style=style, markup=False, highlight=False, soft_wrap=True)


def tell_problems(command: str, trace: Trace) -> None:
    """The lines of the trace that were left out: how many, and the first of them."""
    if not trace.num_problems:
        return
    shown = [str(problem) for problem in trace.problems[:MAX_PROBLEMS_SHOWN]]
    if trace.num_problems > len(shown):
        shown.append(f"and {trace.num_problems - len(shown):,} more")
    say(command, f"left out {counted(trace.num_problems, 'line')}\n  " + "\n  ".join(shown), "yellow")


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr, on a terminal only. Yields what takes the share that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=40), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=1.0)
        yield lambda done: bars.update(task, completed=done)


def check_page(file: Path | None) -> None:
    """Before the work is done: whether the page can be written. Raises ConfigError."""
    if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
        raise ConfigError(f"html={str(file)!r}: cannot be written there; give a file in a directory of yours")


def write_page(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html={str(file)!r}: {error.strerror}; give a file that can be written") from error
