"""Shared parts of ``replay`` and ``size``: options, reading of traces, progress bars, errors, pages."""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvoffload.abc import NOT_SET, ConfigError
from kvoffload.cache.tenants import load_tenants
from kvoffload.cli import EXTRA
from kvoffload.cli.terminal import Decorator, console_of, json_option, progress_bar, say, table_of
from kvoffload.config import HostContents
from kvoffload.doctor.source import read_json
from kvoffload.lab.latency import DEFAULT_SPEEDS, Origin, Speeds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.readers import FORMATS, read_trace
from kvoffload.lab.replay import Contract, ReplayResult
from kvoffload.lab.trace import Trace, TraceError
from kvoffload.printable import printable
from kvoffload.units import age, counted, format_bytes

MAX_PROBLEMS_SHOWN = 5
LONGEST_S = 366 * 86_400.0
"""No trace is longer: its times have another unit than its format says."""
DEFAULT_POLICY = "auto"
"""As in a server."""
_NAMES = "block_tokens capacity_blocks device device_blocks disk disk_blocks format host_contents jobs model policy ram"
OPTIONS = {
    **{name: f"--{name.removesuffix('_blocks').replace('_', '-')}" for name in (*_NAMES.split(), "store_threshold")},
    "trace": "TRACE",
}
"""The option that a user typed, by the Python setting that an error of the library names."""


contents_option = click.option(
    "--host-contents",
    type=click.Choice([each.value for each in HostContents]),
    callback=lambda context, option, value: value and HostContents(value),
    help="Whether host memory repeats what the device holds, or does not.  [default: as in a server]",
)


def gathered(name: str, kind: Callable[..., object], *options: Decorator) -> Decorator:
    """Adds ``options`` to a command, whose argument ``name`` is then ``kind`` of their values."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {each: values.pop(each) for each in inspect.signature(kind).parameters}
            command(**values, **{name: kind(**given)})

        decorated: Callable[..., None] = run
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


@dataclass(frozen=True, slots=True)
class TraceSource:
    """The trace to read, and how."""

    trace: str
    trace_format: str | None
    block_tokens: int | None
    skip_bad_lines: bool


def trace_options(metavar: str) -> Decorator:
    """Adds the argument ``metavar``, a trace, and the options for reading it."""
    formats = f"Format of the trace: {', '.join(FORMATS)}.  [default: detected]"
    blocks = "Tokens per block, if the format does not define it."
    return gathered(
        "source",
        TraceSource,
        click.argument("trace", metavar=metavar),
        click.option("--format", "trace_format", help=formats),
        click.option("--block-tokens", type=int, metavar="N", help=blocks),
        click.option("--skip-bad-lines", is_flag=True, help="Go on even if more than 1% of the lines cannot be used."),
    )


@dataclass(frozen=True, slots=True)
class GivenSpeeds:
    """Options for estimates of TTFT. Raises ConfigError if one is not positive."""

    prefill_speed: float | None
    """In tokens per second."""
    host_speed: float
    """In GB/s, as ``disk_speed``."""
    disk_speed: float

    def __post_init__(self) -> None:
        check_positive("--prefill-speed", self.prefill_speed, "tokens per second")
        check_positive("--host-speed", self.host_speed, "GB/s")
        check_positive("--disk-speed", self.disk_speed, "GB/s")

    def for_trace(self, trace: Trace) -> Speeds:
        """Returns the speeds in bytes per second. If no prefill speed was given, it is what the server measured that
        recorded ``trace``, if it did."""
        host, disk = self.host_speed * 1e9, self.disk_speed * 1e9
        if self.prefill_speed is not None:
            return Speeds(self.prefill_speed, host, disk, Origin.GIVEN)
        if trace.prefill_tokens_per_s is not None:
            return Speeds(trace.prefill_tokens_per_s, host, disk, Origin.MEASURED)
        return Speeds(host_bytes_per_s=host, disk_bytes_per_s=disk)


def _speed(name: str, default: float | None, metavar: str, text: str) -> Decorator:
    shown = default is not None
    return click.option(name, type=float, default=default, show_default=shown, metavar=metavar, help=text)


PREFILL_DEFAULT = f"as measured by the server that recorded the trace, else {DEFAULT_SPEEDS.prefill_tokens_per_s:.0f}"
speed_options = gathered(
    "speeds",
    GivenSpeeds,
    _speed("--prefill-speed", None, "TOK/S", f"Prefill speed for short prompts.  [default: {PREFILL_DEFAULT}]"),
    _speed("--host-speed", DEFAULT_SPEEDS.host_bytes_per_s / 1e9, "GB/S", "Speed of loads from RAM to the device."),
    _speed("--disk-speed", DEFAULT_SPEEDS.disk_bytes_per_s / 1e9, "GB/S", "Speed of loads from disk to RAM."),
)


@dataclass(frozen=True, slots=True)
class GivenContract:
    """Options for what tenants were promised, and for what clients knew."""

    tenants: str | None
    no_hints: bool

    def checked(self, trace: Trace, model: ModelShape) -> Contract:
        """Returns the contract in a replay of ``trace``. Raises ConfigError if ``--tenants`` is wrong."""
        uses_hints = trace.has_hints and not self.no_hints
        if self.tenants is None:
            return Contract(uses_hints=uses_hints)
        if not trace.num_tenants:
            raise ConfigError("--tenants", NOT_SET, "no request of this trace names its tenant", "leave the option out")
        entries = read_json("--tenants", self.tenants, """--tenants '{"a": {"quota": {"host": "8GiB"}}}'""")
        return Contract(load_tenants(entries), max(1, int(trace.block_tokens * model.bytes_per_token)), uses_hints)


contract_options = gathered(
    "promised",
    GivenContract,
    click.option(
        "--tenants",
        metavar="JSON",
        help="The option tenants of a server, as JSON or the name of a file, with shares of host and disk.",
    ),
    click.option("--no-hints", is_flag=True, help="Leave out what the clients of the trace knew and had retained."),
)


def show_contract(result: ReplayResult, without: ReplayResult) -> None:
    """Shows what each tenant finds with tenants' shares and hints, and without."""
    console = console_of()
    table = table_of("tenant", "requests", "asked", "found, %", "without shares\nand hints, %", "difference,\npoints")

    def add(name: str, requests: int, asked: int, found: float, before: float, style: str | None = None) -> None:
        percentages = f"{found:.2f}", f"{before:.2f}", f"{found - before:+.2f}"
        table.add_row(name, f"{requests:,}", f"{asked:,}", *percentages, style=style)

    for tenant, before in zip(result.tenants, without.tenants, strict=True):
        add(printable(tenant.name), tenant.requests, tenant.tokens_asked, tenant.found_pct, before.found_pct)
    percentages = result.prefix_hit_tokens_pct, without.prefix_hit_tokens_pct
    add("all", result.requests, result.prompt_tokens, *percentages, style="bold")
    console.print("\nWhat the contract brings and costs", style="bold")
    console.print(table)


@dataclass(frozen=True, slots=True)
class Output:
    """The form of the output, and the page to write if one is wanted."""

    as_json: bool
    html: Path | None

    def __post_init__(self) -> None:
        """Checks, before any work, that the page can be written. Raises ConfigError, or ModuleNotFoundError if the
        extra is not installed."""
        if self.html is None:
            return
        if self.html.is_dir() or not os.access(self.html.parent, os.W_OK):
            raise ConfigError(
                "--html", str(self.html), "cannot be written", "give a file in a directory that you may write to"
            )
        for name in EXTRA:
            importlib.import_module(name)

    def write(self, page: str) -> None:
        """Writes the page, and prints where it is. Raises ConfigError."""
        assert self.html is not None
        try:
            self.html.write_text(page, encoding="utf-8")
        except OSError as error:
            wrong = f"--html={str(self.html)!r}: {error.strerror}"
            raise ConfigError(fault=wrong, fix="give a file that can be written") from error
        console_of(stderr=self.as_json).print(f"\nPage: {self.html}", soft_wrap=True)


def output_options(json_help: str, html_help: str) -> Decorator:
    return gathered(
        "output",
        Output,
        json_option(json_help),
        click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help=html_help),
    )


jobs_option = click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Number of processes.  [default: one per core]"
)


def check_positive(option: str, value: float | None, unit: str) -> None:
    """Raises ConfigError unless ``value`` is a positive number, or not given."""
    if value is not None and not 0 < value < math.inf:
        given = int(value) if value.is_integer() else value
        raise ConfigError(option, given, "must be more than 0", f"give {unit}, or leave it out")


def listed(option: str, text: str) -> list[str]:
    """Returns the entries between commas, without duplicates. Raises ConfigError if one is empty."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in parts:
        raise ConfigError(option, text, "an entry is empty", "separate entries with single commas")
    return parts


@contextmanager
def errors(command: str) -> Iterator[None]:
    """Turns errors into one line, which names options as they are typed, and exit status 2."""
    try:
        yield
    except (ConfigError, TraceError) as error:
        if isinstance(error, ConfigError):
            error.setting = OPTIONS.get(error.setting, error.setting)
        say(command, str(error), "bold red")
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        say(command, f"cannot write the output: {error.strerror}; free some space, or write it elsewhere", "bold red")
        sys.exit(2)


def requests_in(command: str, source: TraceSource) -> Trace:
    """Reads the trace with a progress bar, and warns about skipped lines. Raises TraceError, also if it has no
    block."""
    with progress("reading") as on_progress:
        trace = read_trace(
            source.trace,
            format=source.trace_format,
            skip_bad_lines=source.skip_bad_lines,
            block_tokens=source.block_tokens,
            on_progress=on_progress,
        )
    _warn_of_problems(command, trace)
    if not trace.num_distinct:
        raise TraceError(
            f"{source.trace}: no request has a block of {trace.block_tokens:,} tokens, so there is nothing to keep; "
            "use a trace with longer prompts, or smaller blocks"
        )
    return trace


def described(trace: Trace, model: ModelShape, footprint_bytes: int) -> str:
    """Returns a sentence about the size of the trace. Others may have named it and the model."""
    return printable(
        f"{trace.name}: {counted(trace.num_requests, 'request')}{sources(trace)} in "
        f"{age(float(trace.times[-1] - trace.times[0]))}, {int(trace.input_tokens.sum()):,} prompt tokens, "
        f"{trace.num_accesses:,} block accesses; {counted(trace.num_distinct, 'distinct block')} of "
        f"{counted(trace.block_tokens, 'token')}, {format_bytes(footprint_bytes)} of KV for {model.name} "
        f"({format_bytes(round(model.bytes_per_token))} per token)."
    )


def sources(trace: Trace) -> str:
    """Returns words such as " of 60 sessions, 2 tenants", or nothing if the trace knows neither."""
    known = {"session": trace.num_sessions, "tenant": trace.num_tenants}
    found = [counted(number, noun) for noun, number in known.items() if number]
    return f" of {', '.join(found)}" if found else ""


def _warn_of_problems(command: str, trace: Trace) -> None:
    """Prints how many lines of the trace were skipped, and the first of them, and if its times have another unit."""
    span_s = float(trace.times[-1] - trace.times[0])
    if span_s > LONGEST_S:
        text = f"the requests span {age(span_s)}: are the times in another unit than those of {trace.info['format']}?"
        say(command, text, "yellow")
    if not trace.num_problems:
        return
    shown = [str(problem) for problem in trace.problems[:MAX_PROBLEMS_SHOWN]]
    if trace.num_problems > len(shown):
        shown.append(f"and {trace.num_problems - len(shown):,} more")
    say(command, f"skipped {counted(trace.num_problems, 'line')}\n  " + "\n  ".join(shown), "yellow")


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Shows a bar on stderr if it is a terminal. Yields a callback that takes the share that is done."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=40), TaskProgressColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bars:
        task = bars.add_task(what, total=1.0)
        yield lambda done: bars.update(task, completed=done)
