"""What the commands of the lab share: the trace they read, bars, errors."""

from __future__ import annotations

import errno
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvoffload.abc import ConfigError
from kvoffload.cli import EXTRA
from kvoffload.lab.latency import Speeds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.readers import FORMATS, read_trace
from kvoffload.lab.trace import Trace, TraceError
from kvoffload.units import age, counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

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
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        say(command, f"output: {error.strerror}; make room, or write it elsewhere", "bold red")
        sys.exit(2)


def console_of(stderr: bool = False) -> Console:
    """Prints words as they are: no colours that nobody asked for, no pictures for ":x:"."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(command: str, text: str, style: str) -> None:
    console_of(stderr=True).print(f"kvoffload {command}: {text}", style=style, soft_wrap=True)


def requests_in(command: str, source: str, trace_format: str | None, block_tokens: int | None, strict: bool) -> Trace:
    """The trace, read with a bar; tells what of it was left out. Raises TraceError, also if it has no block."""
    with progress("reading") as on_progress:
        trace = read_trace(
            source, format=trace_format, strict=strict, block_tokens=block_tokens, on_progress=on_progress
        )
    _tell_problems(command, trace)
    if not trace.num_distinct:
        raise TraceError(
            f"{source}: no request in it has a block of {trace.block_tokens:,} tokens, so there is nothing to keep; "
            "give a trace of longer prompts, or smaller blocks"
        )
    return trace


def described(trace: Trace, model: ModelShape, footprint_bytes: int) -> str:
    """How much the trace asks for."""
    return (
        f"{trace.name}: {counted(trace.num_requests, 'request')} in {age(float(trace.times[-1] - trace.times[0]))}, "
        f"{int(trace.input_tokens.sum()):,} prompt tokens, {trace.num_accesses:,} block accesses; "
        f"{counted(trace.num_distinct, 'distinct block')} of {counted(trace.block_tokens, 'token')}, "
        f"{format_bytes(footprint_bytes)} as {model.name}, which takes {format_bytes(round(model.bytes_per_token))} a "
        "token."
    )


def _tell_problems(command: str, trace: Trace) -> None:
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
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = console_of(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=40), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=1.0)
        yield lambda done: bars.update(task, completed=done)


def check_page(file: Path | None) -> None:
    """Before the work is done: whether the page can be made and written. Raises ConfigError, and ModuleNotFoundError
    where the extra is not installed."""
    if file is None:
        return
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"html={str(file)!r}: cannot be written there; give a file in a directory of yours")
    for name in EXTRA:
        importlib.import_module(name)


def write_page(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html={str(file)!r}: {error.strerror}; give a file that can be written") from error
