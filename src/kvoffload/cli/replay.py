"""``kvoffload replay``: compares policies and capacities on a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import click

from kvoffload.abc import ConfigError
from kvoffload.cache.policies import policy_class
from kvoffload.cli import lab
from kvoffload.cli.terminal import console_of, print_json, table_of
from kvoffload.config import HostContents, contents_of
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.model import DEFAULT_MODEL, ModelShape
from kvoffload.lab.replay import NO_CONTRACT, Contract, ReplayConfig, ReplayResult, TierUse, replay_many, why_inclusive
from kvoffload.lab.trace import Trace
from kvoffload.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

MAX_CONFIGS = 1000


@dataclass(frozen=True, slots=True)
class Grid:
    """The configurations to replay, as the user gives them."""

    policies: str
    capacities: str
    device: str | None
    disk: str | None
    store_threshold: int | None
    host_contents: HostContents | None


@click.command(short_help="Compare policies and capacities on a trace.")
@lab.errors("replay")
@lab.gathered(
    "grid",
    Grid,
    click.option(
        "--policy", "policies", default=lab.DEFAULT_POLICY, show_default=True, help="Comma-separated policies."
    ),
    click.option(
        "--capacity",
        "capacities",
        default="1%,5%,20%",
        show_default=True,
        help="Comma-separated capacities of host memory: percentages of the trace's distinct blocks (1%), blocks "
        "(5859), or bytes (64GiB).",
    ),
    click.option("--device", metavar="CAPACITY", help="Capacity of the device's own prefix cache.  [default: none]"),
    click.option("--disk", metavar="CAPACITY", help="Capacity of a disk tier.  [default: none]"),
    click.option(
        "--store-threshold", type=int, metavar="N", help="Store a block once N requests have asked for it, 2 or more."
    ),
    lab.contents_option,
)
@lab.contract_options
@click.option("--model", metavar="CONFIG", help="The model's config.json.  [default: Llama-3.1-8B]")
@lab.speed_options
@lab.trace_options("TRACE")
@lab.jobs_option
@lab.output_options("Print a JSON list with one entry per configuration.", "Write a page with plots.")
def replay(
    source: lab.TraceSource,
    grid: Grid,
    promised: lab.GivenContract,
    model: str | None,
    speeds: lab.GivenSpeeds,
    jobs: int | None,
    output: lab.Output,
) -> None:
    """Replay a trace of requests through the managers that serve an engine, and print what they would have found.

    Every policy is combined with every capacity. No bytes are copied, and a disk is always fast enough. Exit status 2:
    the trace cannot be read, or an option is invalid.
    """
    policies = lab.listed("--policy", grid.policies)
    for policy in policies:
        policy_class(policy)
    shape = DEFAULT_MODEL if model is None else ModelShape.from_config(model)
    requests = lab.requests_in("replay", source)
    given = speeds.for_trace(requests)
    sizes = _Sizes(requests, shape, grid)
    contract = promised.checked(requests, shape)
    configs = sizes.configs(policies, grid.store_threshold, contract)
    # One configuration is compared with the same one without tenants and hints.
    has_contract = len(configs) == 1 and contract.counts_in(requests)
    plain = [replace(config, contract=NO_CONTRACT) for config in configs] if has_contract else []
    with lab.progress("replaying") as on_progress:
        results = replay_many(
            requests, configs + plain, model=shape, speeds=given, processes=jobs, on_progress=on_progress
        )
    results, without = results[: len(configs)], results[len(configs) :]
    if output.as_json:
        known = {"sessions": requests.num_sessions, "tenants": requests.num_tenants}
        about: dict[str, object] = {name: number for name, number in known.items() if number}
        if without:
            about |= {"without_contract": without[0].to_dict()}
        print_json([result.to_dict() | about for result in results])
    else:
        _show(results, sizes)
        if without:
            lab.show_contract(results[0], without[0])
    if output.html is not None:
        from kvoffload.lab.page import replay_page

        output.write(replay_page(requests, sizes.about, shape, given, results))


# Options.


class _Sizes:
    """The capacities of one call in blocks, and how they are shown."""

    def __init__(self, trace: Trace, model: ModelShape, grid: Grid) -> None:
        self._num_distinct = trace.num_distinct
        self._block_bytes = trace.block_tokens * model.bytes_per_token
        self.about = lab.described(trace, model, int(trace.num_distinct * self._block_bytes))
        """The size of the trace, in words."""

        def blocks(option: str, text: str) -> int:
            return parse_capacity(text, trace, model, option)

        self.host = list(
            dict.fromkeys(blocks("--capacity", text) for text in lab.listed("--capacity", grid.capacities))
        )
        self.device = 0 if grid.device is None else blocks("--device", grid.device)
        self.disk = 0 if grid.disk is None else blocks("--disk", grid.disk)
        self.host_contents = contents_of(grid.host_contents, why_inclusive(self.device, model))

    def configs(self, policies: Sequence[str], store_threshold: int | None, contract: Contract) -> list[ReplayConfig]:
        """Returns every policy with every capacity. Raises ConfigError if there are too many."""
        if len(policies) * len(self.host) > MAX_CONFIGS:
            raise ConfigError(
                fault=f"--policy and --capacity: {len(policies) * len(self.host):,} combinations, but at "
                f"most {MAX_CONFIGS:,} are allowed",
                fix="give fewer",
            )
        return [
            ReplayConfig(policy, capacity, self.device, self.disk, store_threshold, self.host_contents, contract)
            for policy in policies
            for capacity in self.host
        ]

    def memory(self, blocks: int) -> str:
        return format_bytes(int(blocks * self._block_bytes))

    def percentage(self, blocks: int) -> str:
        """Returns the percentage of the trace's distinct blocks, with two digits."""
        return f"{float(f'{100 * blocks / self._num_distinct:.2g}'):g}%"


# Output.


def _show(results: Sequence[ReplayResult], sizes: _Sizes) -> None:
    console = console_of()
    console.print(sizes.about, style="dim")
    for name, blocks in (("Device cache", sizes.device), ("Disk", sizes.disk)):
        if blocks:
            share = sizes.percentage(blocks)
            console.print(f"{name}: {sizes.memory(blocks)}, {counted(blocks, 'block')}, {share} of the distinct blocks")
    if sizes.host_contents is HostContents.EXCLUSIVE:
        console.print("Host memory does not repeat what the device cache holds")
    capacities = sorted({result.capacity_blocks for result in results})
    if len(capacities) == 1:
        console.print()
        console.print(_comparison(results, [(each.title, capacities[0], each) for each in OF_ONE_CAPACITY]))
    else:
        columns = max(1, (console.width - _name_width(results) - 2) // COLUMN_WIDTH)
        for measure in MEASURES:
            console.print(f"\n{measure.title}", style="bold")
            for start in range(0, len(capacities), columns):
                shown = capacities[start : start + columns]
                heads = [f"{sizes.percentage(blocks)}\n{blocks:,}\n{sizes.memory(blocks)}" for blocks in shown]
                console.print(_comparison(results, [(*each, measure) for each in zip(heads, shown, strict=True)]))
    if len(results) == 1:
        console.print()
        console.print(tier_table(results[0].tiers))
        console.print(f"\n{_misses(results[0])}")
    else:
        mark = "* marks the best of a column. " if len({result.policy for result in results}) > 1 else ""
        console.print(f"\n{mark}--json prints all results; --html FILE plots them.", style="dim")


COLUMN_WIDTH = 13
LONGEST_NAME = 32
"""A longer name is wrapped, so that the numbers have room."""


class Measure(NamedTuple):
    """A compared measure. ``best``: the better of several values."""

    title: str
    value: Callable[[ReplayResult], float]
    digits: int
    best: Callable[..., float]


MEASURES = (
    Measure("Prefix-hit tokens, % of all prompt tokens", lambda result: result.prefix_hit_tokens_pct, 2, max),
    Measure("Saved prefill FLOPs, %", lambda result: result.saved_flops_pct, 2, max),
    Measure("Blocks written to host memory, per block access", lambda result: result.writes_per_access, 3, min),
)
OF_ONE_CAPACITY = (
    MEASURES[0]._replace(title="hit\ntokens, %"),
    MEASURES[1]._replace(title="saved\nFLOPs, %"),
    MEASURES[2]._replace(title="writes/\naccess"),
    Measure("TTFT p50,\nest., s", lambda result: result.ttft_p50_s, 2, min),
    Measure("TTFT p95,\nest., s", lambda result: result.ttft_p95_s, 2, min),
)


def _name_width(results: Sequence[ReplayResult]) -> int:
    """Returns the width of the column of policies, including its head."""
    return min(LONGEST_NAME, max(len(name) for name in ["policy", *(result.policy for result in results)]))


def _comparison(results: Sequence[ReplayResult], columns: Sequence[tuple[str, int, Measure]]) -> Table:
    """Returns a table of policies by ``columns``: the head of each, the capacity in blocks, and what is compared. The
    best of each column is marked."""
    from rich.text import Text

    table = table_of()
    table.add_column("policy", overflow="fold", max_width=_name_width(results))
    cells: dict[str, list[Text]] = {result.policy: [] for result in results}
    for head, capacity, measure in columns:
        table.add_column(head, justify="right", no_wrap=True)
        values = {
            each.policy: round(measure.value(each), measure.digits)
            for each in results
            if each.capacity_blocks == capacity
        }
        top = measure.best(values.values())
        for policy, value in values.items():
            text = f"{value:.{measure.digits}f}"
            is_best = value == top and len(cells) > 1
            cells[policy].append(Text(f"{text}*", "bold green") if is_best else Text(f"{text} "))
    for policy, row in cells.items():
        table.add_row(policy, *row)
    return table


def tier_table(tiers: Sequence[TierUse]) -> Table:
    shares = "hit\ntokens, %", "saved\nFLOPs, %"
    table = table_of("tier", "blocks", *shares, "written", "read", "write\namplifi-\ncation", "evicted")
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
    """Returns a sentence such as "90 of 100 requests missed a block: 80 never stored, 10 evicted."."""
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in result.misses.items())
    missed = sum(result.misses.values())
    return f"{missed:,} of {counted(result.requests, 'request')} missed a block{': ' if reasons else ''}{reasons}."
