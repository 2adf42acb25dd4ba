"""Shared parts of ``replay`` and ``size``: options, reading of traces, progress bars, errors, pages."""

from __future__ import annotations

import errno
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvoffload.abc import ConfigError
from kvoffload.cli import EXTRA
from kvoffload.lab.latency import Origin, Speeds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.readers import FORMATS, read_trace
from kvoffload.lab.trace import Trace, TraceError
from kvoffload.units import age, counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

MAX_PROBLEMS_SHOWN = 5
SPEEDS = Speeds()
DEFAULT_POLICY = "auto"
"""As in a server."""
OPTIONS = {
    "block_tokens": "--block-tokens",
    "capacity_blocks": "--capacity",
    "device_blocks": "--device",
    "disk": "--disk",
    "disk_blocks": "--disk",
    "format": "--format",
    "jobs": "--jobs",
    "model": "--model",
    "policy": "--policy",
    "ram": "--ram",
    "store_threshold": "--store-threshold",
    "trace": "TRACE",
}
"""The option that a user typed, by the Python setting that an error of the library names."""
_SETTING = re.compile(rf"\b({'|'.join(OPTIONS)})(?==)")

Command = TypeVar("Command", bound=Callable[..., None])


def trace_options(command: Command) -> Command:
    """Adds the options for reading a trace."""
    for option in (
        click.option("--strict", is_flag=True, help="Stop at the first invalid line."),
        click.option(
            "--block-tokens", type=int, metavar="N", help="Tokens per block, if the format does not define it."
        ),
        click.option(
            "--format", "trace_format", help=f"Format of the trace: {', '.join(FORMATS)}.  [default: detected]"
        ),
    ):
        command = option(command)
    return command


PREFILL_DEFAULT = f"as measured by the server that recorded the trace, else {SPEEDS.prefill_tokens_per_s:.0f}"


def speed_options(command: Command) -> Command:
    """Adds the options for estimates of TTFT, which ``speeds_of`` takes."""
    for name, value, metavar, text in (
        ("--disk-speed", SPEEDS.disk_bytes_per_s / 1e9, "GB/S", "Speed of loads from disk to RAM."),
        ("--host-speed", SPEEDS.host_bytes_per_s / 1e9, "GB/S", "Speed of loads from RAM to the device."),
        ("--prefill-speed", None, "TOK/S", f"Prefill speed for short prompts.  [default: {PREFILL_DEFAULT}]"),
    ):
        shown = value is not None
        command = click.option(name, type=float, default=value, show_default=shown, metavar=metavar, help=text)(command)
    return command


def speeds_of(prefill_speed: float | None, host_speed: float, disk_speed: float) -> Speeds:
    """Returns the speeds in bytes per second. Raises ConfigError if one is not positive."""
    speeds = replace(
        SPEEDS,
        host_bytes_per_s=positive("--host-speed", host_speed, "GB/s") * 1e9,
        disk_bytes_per_s=positive("--disk-speed", disk_speed, "GB/s") * 1e9,
    )
    if prefill_speed is None:
        return speeds
    given = positive("--prefill-speed", prefill_speed, "tokens per second")
    return replace(speeds, prefill_tokens_per_s=given, prefill_origin=Origin.GIVEN)


def measured(speeds: Speeds, trace: Trace) -> Speeds:
    """Returns ``speeds`` with the prefill speed that the server measured which recorded ``trace``, if it did and none
    was given."""
    speed = trace.prefill_tokens_per_s
    if speed is None or speeds.prefill_origin is Origin.GIVEN:
        return speeds
    return replace(speeds, prefill_tokens_per_s=speed, prefill_origin=Origin.MEASURED)


def positive(option: str, value: float, unit: str) -> float:
    """Returns ``value``. Raises ConfigError unless it is a positive number."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{option}={value:g}: must be more than 0; give {unit}, or leave it out")
    return value


def number_of_jobs(jobs: int | None) -> int | None:
    """Returns ``jobs``. Raises ConfigError if it is less than 1."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs={jobs}: must be 1 or more; leave it out for one process per core")
    return jobs


def listed(option: str, text: str) -> list[str]:
    """Returns the entries between commas, without duplicates. Raises ConfigError if one is empty."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in parts:
        raise ConfigError(f"{option}={text!r}: an entry is empty; separate entries with single commas")
    return parts


@contextmanager
def errors(command: str) -> Iterator[None]:
    """Turns errors into one line, which names options as they are typed, and exit status 2."""
    try:
        yield
    except (ConfigError, TraceError) as error:
        text = str(error)
        say(command, _SETTING.sub(lambda found: OPTIONS[found[1]], text) if _SETTING.match(text) else text, "bold red")
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        say(command, f"cannot write the output: {error.strerror}; free some space, or write it elsewhere", "bold red")
        sys.exit(2)


def console_of(stderr: bool = False) -> Console:
    """Returns a console that prints text unchanged, without markup, emoji or highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def say(command: str, text: str, style: str) -> None:
    console_of(stderr=True).print(f"kvoffload {command}: {text}", style=style, soft_wrap=True)


def requests_in(command: str, source: str, trace_format: str | None, block_tokens: int | None, strict: bool) -> Trace:
    """Reads the trace with a progress bar, and warns about skipped lines. Raises TraceError, also if it has no
    block."""
    with progress("reading") as on_progress:
        trace = read_trace(
            source, format=trace_format, strict=strict, block_tokens=block_tokens, on_progress=on_progress
        )
    _warn_of_problems(command, trace)
    if not trace.num_distinct:
        raise TraceError(
            f"{source}: no request has a block of {trace.block_tokens:,} tokens, so there is nothing to keep; "
            "use a trace with longer prompts, or smaller blocks"
        )
    return trace


def described(trace: Trace, model: ModelShape, footprint_bytes: int) -> str:
    """Returns a sentence about the size of the trace."""
    return (
        f"{trace.name}: {counted(trace.num_requests, 'request')}{sources(trace)} in "
        f"{age(float(trace.times[-1] - trace.times[0]))}, "
        f"{int(trace.input_tokens.sum()):,} prompt tokens, {trace.num_accesses:,} block accesses; "
        f"{counted(trace.num_distinct, 'distinct block')} of {counted(trace.block_tokens, 'token')}, "
        f"{format_bytes(footprint_bytes)} of KV for {model.name} ({format_bytes(round(model.bytes_per_token))} per "
        "token)."
    )


def sources(trace: Trace) -> str:
    """Returns words such as " of 60 sessions, 2 tenants", or nothing if the trace knows neither."""
    known = {"session": trace.num_sessions, "tenant": trace.num_tenants}
    found = [counted(number, noun) for noun, number in known.items() if number]
    return f" of {', '.join(found)}" if found else ""


def _warn_of_problems(command: str, trace: Trace) -> None:
    """Prints how many lines of the trace were skipped, and the first of them."""
    if not trace.num_problems:
        return
    shown = [str(problem) for problem in trace.problems[:MAX_PROBLEMS_SHOWN]]
    if trace.num_problems > len(shown):
        shown.append(f"and {trace.num_problems - len(shown):,} more")
    say(command, f"skipped {counted(trace.num_problems, 'line')}\n  " + "\n  ".join(shown), "yellow")


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Shows a bar on stderr if it is a terminal. Yields a callback that takes the share that is done."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = console_of(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=40), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=1.0)
        yield lambda done: bars.update(task, completed=done)


def check_page(file: Path | None) -> None:
    """Checks, before any work, that the page can be written. Raises ConfigError, or ModuleNotFoundError if the extra is
    not installed."""
    if file is None:
        return
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"--html={str(file)!r}: cannot be written; give a file in a directory that you may write to")
    for name in EXTRA:
        importlib.import_module(name)


def write_page(file: Path, page: str, stderr: bool) -> None:
    """Writes the page and prints where it is. Raises ConfigError."""
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html={str(file)!r}: {error.strerror}; give a file that can be written") from error
    console_of(stderr).print(f"\nPage: {file}", soft_wrap=True)
