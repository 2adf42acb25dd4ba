"""``kvoffload replay``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvoffload.abc import ConfigError
from kvoffload.cache.policies import policy_class
from kvoffload.cli.lab import (
    check_page,
    console_of,
    described,
    errors,
    listed,
    number_of_jobs,
    progress,
    requests_in,
    speed_options,
    speeds_of,
    trace_options,
    write_page,
)
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.model import DEFAULT_MODEL, ModelShape
from kvoffload.lab.replay import CLAIRVOYANT, ReplayConfig, ReplayResult, TierUse, replay_many
from kvoffload.lab.trace import Trace
from kvoffload.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_CONFIGS = 1000


@click.command(short_help="Tell what policies and capacities would find in a trace.")
@click.argument("trace", metavar="TRACE")
@click.option("--policy", "policies", default="lru", show_default=True, help="Policies, with commas between them.")
@click.option(
    "--capacity",
    "capacities",
    default="1%,5%,20%",
    show_default=True,
    help="Of host memory, with commas between them: a share of the trace's distinct blocks (1%), blocks (5859), or "
    "bytes (64GiB).",
)
@click.option("--device", metavar="CAPACITY", help="A device prefix cache in front of the host.")
@click.option("--disk", metavar="CAPACITY", help="A disk behind the host.")
@click.option(
    "--store-threshold", type=int, metavar="N", help="Store a block once N requests have asked for it, 2 or more."
)
@click.option("--model", metavar="CONFIG", help="The model's config.json.  [default: as Llama-3.1-8B]")
@speed_options
@trace_options
@click.option(
    "--bound",
    is_flag=True,
    help="Also what a policy would find that knows the rest of the trace; without --device and --disk.",
)
@click.option("--jobs", type=int, metavar="N", help="Processes.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with an entry a configuration.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots.")
def replay(
    trace: str,
    policies: str,
    capacities: str,
    device: str | None,
    disk: str | None,
    store_threshold: int | None,
    model: str | None,
    prefill_speed: float,
    host_speed: float,
    disk_speed: float,
    trace_format: str | None,
    block_tokens: int | None,
    strict: bool,
    bound: bool,
    jobs: int | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Replay a trace of requests through the managers that serve an engine, and tell what they would have found.

    TRACE is a file, a directory of sessions, or a workload that is made up: synthetic:chat, synthetic:agent or
    synthetic:documents. Every policy is tried with every capacity. No bytes move; a disk always keeps up. Exit status
    2: the trace cannot be read, or a setting is wrong.
    """
    with errors("replay"):
        check_page(html)
        processes = number_of_jobs(jobs)
        names = _policies(policies, bound)
        shape = DEFAULT_MODEL if model is None else ModelShape.from_config(model)
        speeds = speeds_of(prefill_speed, host_speed, disk_speed)
        requests = requests_in("replay", trace, trace_format, block_tokens, strict)
        configs = _configs(requests, shape, names, capacities, device, disk, store_threshold)
        with progress("replaying") as on_progress:
            results = replay_many(
                requests, configs, model=shape, speeds=speeds, processes=processes, on_progress=on_progress
            )
        if html is not None:
            from kvoffload.lab.page import render_page

            write_page(html, render_page(requests, shape, speeds, results))
        if as_json:
            click.echo(json.dumps([result.to_dict() for result in results], indent=2))
        else:
            _show(requests, shape, results)


# Doing.


def _policies(text: str, bound: bool) -> list[str]:
    names = listed("policy", text)
    for name in names:
        if name != CLAIRVOYANT:
            policy_class(name)
    return [*names, *([CLAIRVOYANT] if bound and CLAIRVOYANT not in names else [])]


def _configs(
    trace: Trace,
    model: ModelShape,
    policies: Sequence[str],
    capacities: str,
    device: str | None,
    disk: str | None,
    store_threshold: int | None,
) -> list[ReplayConfig]:
    blocks = [parse_capacity(text, trace, model, "capacity") for text in listed("capacity", capacities)]
    device_blocks = 0 if device is None else parse_capacity(device, trace, model, "device")
    disk_blocks = 0 if disk is None else parse_capacity(disk, trace, model, "disk")
    if len(policies) * len(blocks) > MAX_CONFIGS:
        raise ConfigError(
            f"capacity={capacities!r}: {len(policies) * len(blocks):,} configurations; at most {MAX_CONFIGS:,} at a "
            "time, so try fewer"
        )
    return [
        ReplayConfig(policy, capacity, device_blocks, disk_blocks, store_threshold)
        for policy in policies
        for capacity in dict.fromkeys(blocks)
    ]


# For people.


def _show(trace: Trace, model: ModelShape, results: Sequence[ReplayResult]) -> None:
    from rich.text import Text

    console = console_of()
    footprint = int(trace.num_distinct * trace.block_tokens * model.bytes_per_token)
    console.print(Text(described(trace, model, footprint), style="dim"))
    for name, blocks in (("Device cache", results[0].device_blocks), ("Disk", results[0].disk_blocks)):
        if blocks:
            console.print(f"{name}: {counted(blocks, 'block')}, {_share(blocks, trace)} of the distinct ones")
    capacities = sorted({result.capacity_blocks for result in results})
    if len(capacities) == 1:
        console.print()
        console.print(_policy_table(results))
    else:
        columns = max(1, (console.width - _name_width(results) - 2) // COLUMN_WIDTH)
        for title, value, digits, best in MEASURES:
            console.print(Text(f"\n{title}", style="bold"))
            for start in range(0, len(capacities), columns):
                shown = capacities[start : start + columns]
                console.print(_grid(trace, model, results, shown, value, digits, best))
    if len(results) == 1:
        console.print()
        console.print(_tier_table(results[0].tiers))
        console.print(Text(f"\n{_misses(results[0])}"))
    else:
        mark = "* best of its column. " if len(_rows(results)) > 1 else ""
        console.print(Text(f"\n{mark}--json has the rest; --html FILE plots it.", style="dim"))


COLUMN_WIDTH = 13
LONGEST_NAME = 32
"""A longer one takes several lines, so that the numbers have room."""
MEASURES: tuple[tuple[str, Callable[[ReplayResult], float], int, Callable[..., float]], ...] = (
    ("Prefix-hit tokens, % of all prompt tokens", lambda result: result.prefix_hit_tokens_pct, 2, max),
    ("Saved prefill FLOPs, %", lambda result: result.saved_flops_pct, 2, max),
    ("Blocks written to host memory, per block access", lambda result: result.writes_per_access, 3, min),
)


def _share(blocks: int, trace: Trace) -> str:
    """Of the trace's distinct blocks, with two digits."""
    return f"{float(f'{100 * blocks / trace.num_distinct:.2g}'):g}%"


def _name(policy: str) -> str:
    return "bound (knows the rest)" if policy == CLAIRVOYANT else policy


def _name_width(results: Sequence[ReplayResult]) -> int:
    """Of the column, whose head is a name like any other."""
    return min(LONGEST_NAME, max(len(name) for name in ["policy", *(_name(result.policy) for result in results)]))


def _rows(results: Sequence[ReplayResult]) -> list[str]:
    """Policies, the bound last."""
    return sorted(dict.fromkeys(result.policy for result in results), key=lambda policy: policy == CLAIRVOYANT)


def _grid(
    trace: Trace,
    model: ModelShape,
    results: Sequence[ReplayResult],
    capacities: Sequence[int],
    value: Callable[[ReplayResult], float],
    digits: int,
    best: Callable[..., float],
) -> Table:
    """Policies by capacities; the best of each column is marked, and the bound is no competitor."""
    values = {(result.policy, result.capacity_blocks): round(value(result), digits) for result in results}
    tops = {
        capacity: best(
            (number for (policy, at), number in values.items() if at == capacity and policy != CLAIRVOYANT), default=0.0
        )
        for capacity in capacities
    }
    table = _table()
    width = _name_width(results)
    table.add_column("policy", overflow="fold", min_width=width, max_width=width)
    for capacity in capacities:
        size = format_bytes(int(capacity * trace.block_tokens * model.bytes_per_token))
        table.add_column(f"{_share(capacity, trace)}\n{capacity:,}\n{size}", justify="right", no_wrap=True)
    policies = _rows(results)
    for policy in policies:
        cells = [
            _cell(values[policy, capacity], digits, tops[capacity], policy, len(policies)) for capacity in capacities
        ]
        table.add_row(_name(policy), *cells, style="dim" if policy == CLAIRVOYANT else None)
    return table


def _cell(number: float, digits: int, top: float, policy: str, rivals: int) -> Text:
    from rich.text import Text

    is_best = number == top and policy != CLAIRVOYANT and rivals > 1
    return Text(f"{number:.{digits}f}*", "bold green") if is_best else Text(f"{number:.{digits}f} ")


def _policy_table(results: Sequence[ReplayResult]) -> Table:
    """Of one capacity: policies by measures."""
    rivals = [result for result in results if result.policy != CLAIRVOYANT] or results
    measures: tuple[tuple[str, Callable[[ReplayResult], float], int, Callable[..., float]], ...] = (
        ("hit\ntokens, %", lambda result: result.prefix_hit_tokens_pct, 2, max),
        ("saved\nFLOPs, %", lambda result: result.saved_flops_pct, 2, max),
        ("writes/\naccess", lambda result: result.writes_per_access, 3, min),
        ("TTFT p50,\nest., s", lambda result: result.ttft_p50_s, 2, min),
        ("TTFT p95,\nest., s", lambda result: result.ttft_p95_s, 2, min),
    )
    table = _table()
    table.add_column("policy", overflow="fold", max_width=_name_width(results))
    for title, *_ in measures:
        table.add_column(title, justify="right", no_wrap=True)
    tops = [best(round(value(result), digits) for result in rivals) for _, value, digits, best in measures]
    for policy in _rows(results):
        result = next(each for each in results if each.policy == policy)
        cells = [
            _cell(round(value(result), digits), digits, top, policy, len(rivals))
            for (_, value, digits, _), top in zip(measures, tops, strict=True)
        ]
        table.add_row(_name(policy), *cells, style="dim" if policy == CLAIRVOYANT else None)
    return table


def _tier_table(tiers: Sequence[TierUse]) -> Table:
    table = _table()
    table.add_column("tier", no_wrap=True)
    for title in (
        "blocks",
        "hit\ntokens, %",
        "saved\nFLOPs, %",
        "written",
        "read",
        "write\namplifi-\ncation",
        "evicted",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for tier in tiers:
        copied = (
            ["", "", ""]
            if tier.name == "device"
            else [format_bytes(tier.written_bytes), format_bytes(tier.read_bytes), f"{tier.write_amplification:.2f}"]
        )
        table.add_row(
            tier.name,
            f"{tier.capacity_blocks:,}",
            f"{tier.hit_tokens_pct:.2f}",
            f"{tier.saved_flops_pct:.2f}",
            *copied,
            f"{tier.evicted_blocks:,}",
        )
    return table


def _misses(result: ReplayResult) -> str:
    """Such as "Of 100 requests 90 missed a block: 80 never stored, 10 evicted."."""
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in result.misses.items())
    missed = sum(result.misses.values())
    return f"Of {counted(result.requests, 'request')} {missed:,} missed a block{': ' if reasons else ''}{reasons}."


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
