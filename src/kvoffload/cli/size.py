"""``kvoffload size``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvoffload.base import ConfigError
from kvoffload.cli.words import age, counted
from kvoffload.config import parse_bytes
from kvoffload.hostpool import format_bytes
from kvoffload.lab.latency import Speeds
from kvoffload.lab.model import DEFAULT_MODEL, DTYPE_BYTES, ModelShape
from kvoffload.lab.readers import FORMATS, read_trace
from kvoffload.lab.sizing import Prices, Setting, Sizing, milliseconds, what_it_rests_on
from kvoffload.lab.sizing import size as find_size
from kvoffload.lab.trace import Trace, TraceError
from kvoffload.policies import policy_class

if TYPE_CHECKING:
    from rich.table import Table

MAX_PROBLEMS_SHOWN = 5
SPEEDS, PRICES = Speeds(), Prices()


@click.command()
@click.argument("trace", metavar="TRACE")
@click.option("--model", metavar="CONFIG", help="The model's config.json.  [default: as Llama-3.1-8B]")
@click.option("--kv-dtype", metavar="DTYPE", help="Of the KV cache, such as fp8.  [default: the model's]")
@click.option("--policy", default="lru", show_default=True, help="Of RAM and disk.")
@click.option("--ram", metavar="SIZES", help="Such as 64GiB,128GiB.  [default: powers of two where they matter]")
@click.option("--disk", metavar="SIZES", help="Such as none,1TiB.  [default: with --ram none, else as for RAM]")
@click.option(
    "--prefill-speed",
    type=float,
    default=SPEEDS.prefill_tokens_per_s,
    show_default=True,
    metavar="TOK/S",
    help="Of the engine, at short prompts.",
)
@click.option(
    "--host-speed",
    type=float,
    default=SPEEDS.host_bytes_per_s / 1e9,
    show_default=True,
    metavar="GB/S",
    help="From RAM to the device.",
)
@click.option(
    "--disk-speed",
    type=float,
    default=SPEEDS.disk_bytes_per_s / 1e9,
    show_default=True,
    metavar="GB/S",
    help="From disk to RAM.",
)
@click.option("--ttft-p95", type=float, metavar="MS", help="Find the cheapest setting that is as fast as this.")
@click.option(
    "--ram-price", type=float, default=PRICES.ram_per_gib, show_default=True, help="Of a GiB, in any currency."
)
@click.option("--disk-price", type=float, default=PRICES.disk_per_gib, show_default=True, help="Of a GiB.")
@click.option("--format", "trace_format", help=f"Of the trace: {', '.join(FORMATS)}.  [default: as it looks]")
@click.option("--block-tokens", type=int, metavar="N", help="Tokens of a block, where the format leaves that open.")
@click.option("--strict", is_flag=True, help="Stop at the first line that is wrong.")
@click.option("--jobs", type=int, metavar="N", help="Processes.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with everything.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with a plot.")
def size(
    trace: str,
    model: str | None,
    kv_dtype: str | None,
    policy: str,
    ram: str | None,
    disk: str | None,
    prefill_speed: float,
    host_speed: float,
    disk_speed: float,
    ttft_p95: float | None,
    ram_price: float,
    disk_price: float,
    trace_format: str | None,
    block_tokens: int | None,
    strict: bool,
    jobs: int | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Tell how much RAM and disk a trace of requests asks for.

    TRACE is a file, a directory of sessions, or a workload that is made up: synthetic:chat, synthetic:agent or
    synthetic:documents. Tells what share of prompt tokens each setting would serve, and the time to first token,
    without queueing. Exit status 2: the trace cannot be read, or a setting is wrong.
    """
    with _errors():
        if jobs is not None and jobs < 1:
            raise ConfigError(f"jobs={jobs}: must be 1 or more; leave it out for one a core")
        policy_class(policy)
        shape = _model(model, kv_dtype)
        ram_sizes, disk_sizes = _sizes("ram", ram), _sizes("disk", disk)
        speeds = Speeds(
            _positive("prefill-speed", prefill_speed, "tokens a second"),
            _positive("host-speed", host_speed, "GB/s") * 1e9,
            _positive("disk-speed", disk_speed, "GB/s") * 1e9,
        )
        prices = Prices(
            _positive("ram-price", ram_price, "the price of a GiB", zero=True),
            _positive("disk-price", disk_price, "the price of a GiB", zero=True),
        )
        target_s = None if ttft_p95 is None else _positive("ttft-p95", ttft_p95, "milliseconds") / 1000
        with _progress("reading") as on_progress:
            requests = read_trace(
                trace, format=trace_format, strict=strict, block_tokens=block_tokens, on_progress=on_progress
            )
        _tell_problems(requests)
        with _progress("sizing") as on_progress:
            sizing = find_size(
                requests,
                shape,
                policy=policy,
                ram=ram_sizes,
                disk=disk_sizes,
                speeds=speeds,
                prices=prices,
                target_p95_s=target_s,
                processes=jobs,
                on_progress=on_progress,
            )
        if html is not None:
            from kvoffload.lab.size_page import render_page

            _write(html, render_page(requests, shape, speeds, prices, sizing))
    if as_json:
        click.echo(json.dumps(_to_dict(requests, shape, sizing), indent=2))
    else:
        _show(requests, shape, speeds, sizing)


# Doing.


def _model(config: str | None, kv_dtype: str | None) -> ModelShape:
    if kv_dtype is not None and kv_dtype not in DTYPE_BYTES:
        raise ConfigError(f"kv-dtype={kv_dtype!r}: unknown; write one of {', '.join(DTYPE_BYTES)}, or leave it out")
    if config is None and kv_dtype is not None:
        raise ConfigError(f"kv-dtype={kv_dtype!r} without model: give the model's config.json too, or leave it out")
    if config is None:
        return DEFAULT_MODEL
    return ModelShape.from_config(config, None if kv_dtype is None else DTYPE_BYTES[kv_dtype])


def _sizes(setting: str, text: str | None) -> list[int]:
    """Bytes in "64GiB,128GiB"; "none" is 0, for a disk."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise ConfigError(f"{setting}={text!r}: an entry is empty; write entries with a comma between them")
    return [0 if setting == "disk" and part in ("none", "0") else parse_bytes(setting, part) for part in parts]


def _positive(setting: str, value: float, what: str, zero: bool = False) -> float:
    if not (value > 0 or (zero and value == 0)) or value == float("inf"):
        raise ConfigError(f"{setting}={value:g}: must be more than 0, or left out; write {what}")
    return value


@contextmanager
def _errors() -> Iterator[None]:
    """Exit status 2 and one line."""
    try:
        yield
    except (ConfigError, TraceError) as error:
        _say(str(error), "bold red")
        sys.exit(2)


def _say(text: str, style: str) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"kvoffload size: {text}", style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr, on a terminal only. Yields what takes the share that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=40), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=1.0)
        yield lambda done: bars.update(task, completed=done)


def _tell_problems(trace: Trace) -> None:
    if not trace.num_problems:
        return
    shown = [str(problem) for problem in trace.problems[:MAX_PROBLEMS_SHOWN]]
    if trace.num_problems > len(shown):
        shown.append(f"and {trace.num_problems - len(shown):,} more")
    _say(f"left out {counted(trace.num_problems, 'line')}\n  " + "\n  ".join(shown), "yellow")


def _write(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html={str(file)!r}: {error.strerror}; give a file that can be written") from error


# For people.


def _to_dict(trace: Trace, model: ModelShape, sizing: Sizing) -> dict[str, object]:
    return {
        "trace": trace.name,
        "requests": trace.num_requests,
        "accesses": trace.num_accesses,
        "distinct_blocks": trace.num_distinct,
        "prompt_tokens": int(trace.input_tokens.sum()),
        "problems": trace.num_problems,
        "model": model.name,
        "bytes_per_token": model.bytes_per_token,
        "notes": list(model.notes),
        **sizing.to_dict(),
    }


def _show(trace: Trace, model: ModelShape, speeds: Speeds, sizing: Sizing) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    span = age(float(trace.times[-1] - trace.times[0])) if trace.num_requests else "0 s"
    console.print(
        Text(
            f"{trace.name}: {counted(trace.num_requests, 'request')} in {span}, {int(trace.input_tokens.sum()):,} "
            f"prompt tokens; {counted(trace.num_distinct, 'distinct block')} of "
            f"{counted(trace.block_tokens, 'token')}, {format_bytes(sizing.footprint_bytes)} as {model.name}, which "
            f"takes {format_bytes(round(model.bytes_per_token))} a token.",
            style="dim",
        )
    )
    console.print(Text(f"\n{sizing.answer}\n", style="bold"))
    for warning in sizing.warnings:
        console.print(Text(f"{warning}\n", style="yellow"))
    console.print(_table(sizing))
    console.print(Text(f"\n{what_it_rests_on(speeds, sizing)} {' '.join(model.notes)}".rstrip(), style="dim"))


def _table(sizing: Sizing) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("RAM", "disk", "served", "from\nRAM", "from\ndisk", "TTFT\np50", "TTFT\np95", "price"):
        table.add_column(title, justify="right", no_wrap=True)
    if any(setting.bound_pct for setting in sizing.settings):
        table.add_column("off by\nat most", justify="right", no_wrap=True)
    for setting in sizing.settings:
        table.add_row(*_row(setting, sizing), style="bold green" if setting is sizing.chosen else None)
    return table


def _row(setting: Setting, sizing: Sizing) -> list[str]:
    return [
        "*" if setting is sizing.chosen else "",
        format_bytes(setting.ram_bytes),
        format_bytes(setting.disk_bytes) if setting.disk_bytes else "-",
        f"{setting.served_pct:.1f}%",
        f"{setting.ram_pct:.1f}%",
        f"{setting.disk_pct:.1f}%" if setting.disk_bytes else "-",
        milliseconds(setting.ttft_p50_s),
        milliseconds(setting.ttft_p95_s),
        f"{setting.price:,.0f}",
        *([f"{setting.bound_pct:.1f}"] if any(each.bound_pct for each in sizing.settings) else []),
    ]
