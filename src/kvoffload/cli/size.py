"""``kvoffload size``: recommends RAM and disk for a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvoffload.abc import ConfigError
from kvoffload.cache.policies import policy_class
from kvoffload.cli import lab
from kvoffload.cli.terminal import console_of, print_json, table_of
from kvoffload.config import HostContents
from kvoffload.lab.capacity import parse_size
from kvoffload.lab.latency import Origin, Speeds
from kvoffload.lab.model import DEFAULT_MODEL, DTYPE_BYTES, ModelShape
from kvoffload.lab.sizing import DEFAULT_GOAL, Choices, Goal, Sizing, footnote
from kvoffload.lab.sizing import size as find_size
from kvoffload.lab.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Tried:
    """The settings to try, as the user gives them."""

    policy: str
    device: str | None
    ram: str | None
    disk: str | None
    host_contents: HostContents | None

    def __post_init__(self) -> None:
        policy_class(self.policy)

    def for_trace(self, trace: Trace, model: ModelShape) -> Choices:
        def sizes(option: str, text: str | None) -> list[int]:
            return [
                0 if option == "--disk" and part in ("none", "0") else parse_size(part, trace, model, option)
                for part in ([] if text is None else lab.listed(option, text))
            ]

        device = 0 if self.device is None else parse_size(self.device, trace, model, "--device")
        return Choices(self.policy, sizes("--ram", self.ram), sizes("--disk", self.disk), device, self.host_contents)


@dataclass(frozen=True, slots=True)
class GivenModel:
    """Options for the model. Raises ConfigError if they do not go together."""

    model: str | None
    kv_dtype: str | None

    def __post_init__(self) -> None:
        if self.kv_dtype is None:
            return
        if self.kv_dtype not in DTYPE_BYTES:
            fix = f"use one of {', '.join(DTYPE_BYTES)}, or leave it out"
            raise ConfigError("--kv-dtype", self.kv_dtype, "unknown", fix)
        if self.model is None:
            raise ConfigError(f"--kv-dtype={self.kv_dtype!r} without --model: give the model's config.json too")

    @property
    def shape(self) -> ModelShape:
        if self.model is None:
            return DEFAULT_MODEL
        return ModelShape.from_config(self.model, None if self.kv_dtype is None else DTYPE_BYTES[self.kv_dtype])


@dataclass(frozen=True, slots=True)
class GivenGoal:
    """Options for the goal: the time to first token is in milliseconds. Raises ConfigError if one is wrong."""

    ttft_p95: float | None
    ram_price: float
    disk_price: float

    def __post_init__(self) -> None:
        lab.check_positive("--ttft-p95", self.ttft_p95, "milliseconds")
        for option, value in (("--ram-price", self.ram_price), ("--disk-price", self.disk_price)):
            if not 0 <= value < math.inf:
                given = int(value) if value.is_integer() else value
                raise ConfigError(option, given, "must be 0 or more", "give the price per GiB, or leave it out")

    def with_speeds(self, speeds: Speeds) -> Goal:
        """Returns the goal. Raises ConfigError if a time was given and ``speeds`` cannot say it."""
        if self.ttft_p95 is None:
            return Goal(None, self.ram_price, self.disk_price)
        if speeds.prefill_origin is Origin.GUESSED:
            raise ConfigError(
                "--ttft-p95",
                self.ttft_p95,
                "the time to first token depends on how fast your server computes, and this trace does not say it",
                "give --prefill-speed, the tokens of a long prompt per second until its first "
                "token, or take a trace that record_trace of this version has recorded",
            )
        return Goal(self.ttft_p95 / 1000, self.ram_price, self.disk_price)


@click.command()
@lab.errors("size")
@lab.gathered(
    "model",
    GivenModel,
    click.option("--model", metavar="CONFIG", help="The model's config.json.  [default: Llama-3.1-8B]"),
    click.option("--kv-dtype", metavar="DTYPE", help="Dtype of the KV cache, such as fp8.  [default: the model's]"),
)
@lab.gathered(
    "tried",
    Tried,
    click.option("--policy", default=lab.DEFAULT_POLICY, show_default=True, help="Policy of RAM and disk."),
    click.option(
        "--device",
        metavar="SIZE",
        help="The engine's own cache: bytes (53GiB), blocks (5859), or a percentage of the distinct blocks (1%).  "
        "[default: counted as a part of RAM]",
    ),
    click.option(
        "--ram", metavar="SIZES", help="RAM to try, such as 64GiB,128GiB, in the same units.  [default: powers of two]"
    ),
    click.option(
        "--disk",
        metavar="SIZES",
        help="Disk to try, such as none,1TiB.  [default: none if --ram is given, else none and powers of two]",
    ),
    lab.contents_option,
)
@lab.contract_options
@lab.speed_options
@lab.gathered(
    "goal",
    GivenGoal,
    click.option("--ttft-p95", type=float, metavar="MS", help="Find the cheapest setting that is as fast as this."),
    click.option(
        "--ram-price",
        type=float,
        default=DEFAULT_GOAL.ram_per_gib,
        show_default=True,
        help="Price per GiB of RAM, in any currency.",
    ),
    click.option(
        "--disk-price", type=float, default=DEFAULT_GOAL.disk_per_gib, show_default=True, help="Price per GiB of disk."
    ),
)
@lab.trace_options("TRACE")
@lab.jobs_option
@lab.output_options("Print everything as one JSON object.", "Write a page with a plot.")
def size(
    source: lab.TraceSource,
    model: GivenModel,
    tried: Tried,
    promised: lab.GivenContract,
    speeds: lab.GivenSpeeds,
    goal: GivenGoal,
    jobs: int | None,
    output: lab.Output,
) -> None:
    """Find out how much RAM and disk a trace of requests needs.

    Prints the share of prompt tokens that each setting would serve, and the time to first token without queueing. Exit
    status 2: the trace cannot be read, or an option is invalid.
    """
    shape = model.shape
    requests = lab.requests_in("size", source)
    choices = tried.for_trace(requests, shape)
    given = speeds.for_trace(requests)
    wanted = goal.with_speeds(given)
    contract = promised.checked(requests, shape)
    with lab.progress("sizing") as on_progress:
        sizing = find_size(
            requests,
            shape,
            choices,
            contract=contract,
            speeds=given,
            goal=wanted,
            processes=jobs,
            on_progress=on_progress,
        )
    if output.as_json:
        print_json(_to_dict(requests, shape, sizing))
    else:
        _show(requests, shape, given, sizing)
    if output.html is not None:
        from kvoffload.lab.page import size_page

        lead = lab.described(requests, shape, sizing.footprint_bytes)
        output.write(size_page(requests, lead, shape, given, wanted, sizing))


# Output.


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
    console = console_of()
    console.print(lab.described(trace, model, sizing.footprint_bytes), style="dim")
    console.print(f"\n{sizing.answer}\n", style="bold")
    for warning in sizing.warnings:
        console.print(f"{warning}\n", style="yellow")
    console.print(settings_table(sizing))
    if sizing.comparison is not None:
        lab.show_contract(*sizing.comparison)
    console.print(f"\n{footnote(speeds, sizing)} {' '.join(model.notes)}".rstrip(), style="dim")


def settings_table(sizing: Sizing) -> Table:
    titles, *rows = sizing.table()
    # The words of a title are one below the other.
    table = table_of("", *(title.replace(" ", "\n") for title in titles))
    for setting, row in zip(sizing.settings, rows, strict=True):
        is_chosen = setting is sizing.chosen
        table.add_row("*" if is_chosen else "", *row, style="bold green" if is_chosen else None)
    return table
