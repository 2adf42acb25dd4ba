"""Renders the pages of ``kvoffload replay`` and ``kvoffload size``: HTML files that need no other file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jinja2

from kvoffload.config import HostContents
from kvoffload.lab.figures import DARK, LIGHT
from kvoffload.lab.latency import Speeds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.plots import MAX_BARS, curve_plot, misses_plot, sizing_plot, tiers_plot
from kvoffload.lab.replay import ReplayResult
from kvoffload.lab.sizing import Goal, Sizing, footnote
from kvoffload.lab.trace import Trace
from kvoffload.units import counted, format_bytes


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: a plot, or a table, with words about it."""

    title: str
    note: str = ""
    svg: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    chosen: int | None = None
    """The row to highlight."""
    foot: str = ""


def environment(package: str) -> jinja2.Environment:
    """Returns what renders the templates of ``package``, in the frame and style that all pages have."""
    packages = dict.fromkeys((package, "kvoffload.lab"))
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, "templates") for name in packages]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.globals |= {"version": metadata.version("kvoffload"), "palettes": {"light": LIGHT, "dark": DARK}}
    return made


def _render(trace: Trace, lead: str, failed: bool = False, **more: Any) -> str:
    template = environment("kvoffload.lab").get_template("page.html.j2")
    # The title has the name already.
    return template.render(
        trace=trace, failed=failed, lead=lead.removeprefix(f"{trace.name}: "), counted=counted, **more
    )


def replay_page(trace: Trace, lead: str, model: ModelShape, speeds: Speeds, results: Sequence[ReplayResult]) -> str:
    """Returns the page about ``results``, at least one, of replays of ``trace``, which ``lead`` describes."""
    ordered = sorted(results, key=lambda result: result.capacity_blocks)
    best = max(ordered, key=lambda result: result.prefix_hit_tokens)

    def memory(blocks: int) -> str:
        return format_bytes(int(blocks * trace.block_tokens * model.bytes_per_token))

    def curve(title: str, note: str, value: Callable[[ReplayResult], float], unit: str) -> Section:
        return Section(title, note, curve_plot(ordered, value, unit, memory, title))

    sections = []
    # A curve has more than one point. The bars and the table have the figures of a single capacity.
    if len({result.capacity_blocks for result in results}) > 1:
        hits = "Percent of all prompt tokens: those in the longest run of leading blocks that some tier held."
        sections.append(curve("Prefix-hit tokens", hits, lambda each: each.prefix_hit_tokens_pct, "%"))
        sections.append(curve("Writes", "Blocks written per block access.", lambda each: each.writes_per_access, ""))
    if len(ordered) <= MAX_BARS:
        reasons = "By the reason of their first missing block. No cache can find a block that was never stored."
        sections.append(Section("Where the prompt tokens came from", "One bar per replay.", tiers_plot(ordered)))
        sections.append(Section("Why requests missed", reasons, misses_plot(ordered)))
    rows = [
        (
            each.policy,
            f"{each.capacity_blocks:,}",
            memory(each.capacity_blocks),
            f"{each.prefix_hit_tokens_pct:.2f}",
            f"{each.saved_flops_pct:.2f}",
            f"{each.writes_per_access:.3f}",
            format_bytes(next(tier.written_bytes for tier in each.tiers if tier.name == "host")),
            f"{each.evicted_blocks:,}",
            f"{each.ttft_p50_s:.2f}",
            f"{each.ttft_p95_s:.2f}",
        )
        for each in ordered
    ]
    found = "policy", "blocks", "memory", "hit tokens, %", "saved FLOPs, %"
    columns = (*found, "writes per access", "written", "evicted", "TTFT p50, s", "TTFT p95, s")
    best_size = f"{best.capacity_blocks:,} blocks ({memory(best.capacity_blocks)})"
    is_exclusive = best.host_contents is HostContents.EXCLUSIVE
    return _render(
        trace,
        lead,
        title=f"Replay of {trace.name}",
        verdict=f"Best result: {best.policy} with {best_size} found {best.prefix_hit_tokens_pct:.1f}% of the prompt "
        f"tokens, which saves {best.saved_flops_pct:.1f}% of the prefill FLOPs.",
        notes=["Host memory does not repeat what the device cache holds."] if is_exclusive else [],
        sections=[*sections, Section("All numbers", "", "", columns, rows, ordered.index(best), str(speeds))],
    )


def size_page(trace: Trace, lead: str, model: ModelShape, speeds: Speeds, goal: Goal, sizing: Sizing) -> str:
    """Returns the page about ``sizing``, of ``trace``, which ``lead`` describes."""
    alone = ", with LRU and without the tenants' shares and the hints" if sizing.comparison else ""
    columns, *rows = sizing.table()
    chosen = None if sizing.chosen is None else sizing.settings.index(sizing.chosen)
    price = f"Price: {goal.ram_per_gib:g} per GiB of RAM, {goal.disk_per_gib:g} per GiB of disk."
    foot = footnote(speeds, sizing).replace(" * marks ", " Highlighted: ")
    return _render(
        trace,
        lead,
        title=f"RAM and disk for {trace.name}",
        failed=sizing.chosen is None,
        verdict=sizing.answer,
        notes=sizing.warnings,
        sections=[
            Section(
                "Prompt tokens served by capacity",
                f"The share that a single cache of this size would serve{alone}. With RAM and a disk, the larger of "
                "the two decides how much is served, and RAM how much of it comes without a disk read.",
                sizing_plot(sizing),
            ),
            Section("Settings", "", "", columns, rows, chosen, " ".join((foot, price, *model.notes))),
        ],
    )
