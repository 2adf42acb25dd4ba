"""The plots of the pages about replays and sizing, as SVG text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvoffload.abc import MissReason
from kvoffload.lab.figures import BLUE, GREEN, GREY, GRID, INK, MUTED, ORANGE, PURPLE, SOFT, STYLE, make_figure, svg
from kvoffload.lab.replay import ReplayResult
from kvoffload.lab.sizing import Sizing
from kvoffload.units import format_bytes

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, "#b58a00", "#c2457f", GREY, "#6fb3e0", "#9a6545", "#9aa51f")
MARKS = "osD^vPX*<>"
"""Marks make the lines distinguishable without colour."""
TIERS = {"device": BLUE, "host": GREEN, "disk": PURPLE, "computed": GRID}
REASONS = {
    MissReason.NEVER_STORED: SOFT,
    MissReason.EVICTED: ORANGE,
    MissReason.NOT_ADMITTED: "#b58a00",
    MissReason.NOT_IN_TIME: PURPLE,
}
OTHER_REASON, NO_MISS = GREY, GREEN
DASHED: dict[str, Any] = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (4, 3))}
BESIDE: dict[str, Any] = {"textcoords": "offset points"}
MAX_TICKS = 12
CURVE_POINTS = 400
MAX_BARS = 48
"""Bar charts with more bars would be unreadable and are left out."""
LEAST_LABELLED = 4.0
"""In percent: shorter pieces of a bar have no room for a number."""


def curve_plot(
    results: Sequence[ReplayResult],
    value: Callable[[ReplayResult], float],
    unit: str,
    size_of: Callable[[int], str],
    description: str,
) -> str:
    """Plots ``value`` over capacity on a logarithmic scale, one line per policy. ``size_of`` formats the memory of a
    number of blocks."""
    capacities = sorted({result.capacity_blocks for result in results})
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = make_figure(height=3.8, rows=1)
        for i, policy in enumerate(dict.fromkeys(result.policy for result in results)):
            points = sorted((each.capacity_blocks, value(each)) for each in results if each.policy == policy)
            # After ten policies, the pairs of colour and mark differ.
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[(i + i // len(COLOURS)) % len(MARKS)]}
            ax.plot(*zip(*points, strict=True), label=policy, markersize=5, **look)
        _scale(ax, capacities, lambda blocks: f"{blocks:,}\n{size_of(blocks)}", unit)
        ax.set_ylim(0, 1.05 * max(map(value, results)) or 1.0)
        ax.margins(x=0.03)
        ax.set_xlabel("blocks of host memory")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return svg(figure, description)


def sizing_plot(sizing: Sizing) -> str:
    """Plots the served prompt tokens by capacity in bytes, and marks the sizes that were tried and the best setting."""
    size_of = sizing.block_bytes
    most = len(sizing.lru_pct) - 1
    blocks = np.unique(np.geomspace(1, max(1, most), CURVE_POINTS).round().astype(np.int64)).clip(max=most)
    tried, ceiling = _share_by_size(sizing), sizing.ceiling.served_pct
    low, high = min(*tried, size_of * most) / 4, max(*tried, size_of * most) * 1.6
    is_lru = sizing.curve.policy == "lru"
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = make_figure(height=4.0, rows=1)
        ax.plot(blocks * size_of, sizing.lru_pct[blocks], label="lru", **({"color": BLUE} if is_lru else DASHED))
        if not is_lru:
            sizes = np.array(sizing.curve.capacities) * size_of
            ax.plot(sizes, sizing.curve.hit_pct, color=BLUE, marker="o", markersize=4, label=sizing.policy)
            ax.legend(loc="lower right")
        ax.axhline(ceiling, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)))
        words = f"no evictions: {ceiling:.1f}%"
        ax.annotate(words, (0.0, ceiling), (4, 4), ("axes fraction", "data"), **BESIDE, color=MUTED)
        ax.scatter(list(tried), list(tried.values()), s=34, color=BLUE, zorder=3, linewidths=0)
        above, below = sizing.choices.caches(sizing.best.ram_bytes, sizing.best.disk_bytes)
        above_name = "RAM" if above == sizing.best.ram_bytes else "device and RAM"
        for name, amount, colour, marker in ((above_name, above, GREEN, "D"), ("disk", below, PURPLE, "^")):
            if amount:
                ax.axvline(amount, color=colour, linewidth=1.2, alpha=0.5)
                ax.scatter([amount], [tried[amount]], s=80, color=colour, marker=marker, zorder=4)
                words = f"{format_bytes(amount)} {name}"
                ax.annotate(words, (amount, tried[amount]), (8, -14), **BESIDE, color=INK, weight="bold")
        _scale(ax, [1 << bit for bit in range(63) if low <= 1 << bit <= high], format_bytes, "%")
        ax.set_xlim(low, high)
        ax.set_ylim(0, max(1.15 * ceiling, 1.0))
        ax.set_xlabel("capacity of RAM or disk")
        ax.tick_params(axis="x", pad=8)
        return svg(figure, "Prompt tokens served by the capacity of the cache")


def _share_by_size(sizing: Sizing) -> dict[int, float]:
    """Returns the percentage that each size that was tried serves alone. RAM and device count as one cache."""
    by_blocks = dict(zip(sizing.curve.capacities, sizing.curve.hit_pct.tolist(), strict=True))
    tried = {amount for each in sizing.settings for amount in sizing.choices.caches(each.ram_bytes, each.disk_bytes)}
    sizes = sorted(tried - {0})
    return {amount: by_blocks[min(amount // sizing.block_bytes, sizing.curve.capacities[-1])] for amount in sizes}


def _scale(ax: Any, capacities: Sequence[int], label: Callable[[int], str], unit: str) -> None:
    """Makes the scale of capacities logarithmic, with a label at those of them that do not overlap."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(_spaced(capacities)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda capacity, _: label(round(capacity))))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda amount, _: f"{amount:g}{unit}"))


def _spaced(capacities: Sequence[int]) -> list[int]:
    """Returns those of the ascending ``capacities`` whose labels do not overlap."""
    least = (capacities[-1] / capacities[0]) ** (1 / MAX_TICKS)
    chosen = [capacities[0]]
    for capacity in capacities[1:]:
        if capacity >= chosen[-1] * least:
            chosen.append(capacity)
    return chosen


def tiers_plot(results: Sequence[ReplayResult]) -> str:
    """Plots which tier served the prompt tokens, per configuration."""
    shares = [{tier.name: tier.hit_tokens_pct for tier in result.tiers} for result in results]
    present = [name for name in TIERS if any(name in share for share in shares)]
    rows = [{**share, "computed": 100 - sum(share.values())} for share in shares]
    colours = {name: TIERS[name] for name in [*present, "computed"]}
    return _bars(results, rows, colours, "% of prompt tokens", "Prompt tokens by the tier that had them")


def misses_plot(results: Sequence[ReplayResult]) -> str:
    """Plots the requests by the reason of their first missing block, per configuration."""
    present = dict.fromkeys(reason for result in results for reason in result.misses)
    rows = []
    for result in results:
        row = {_words(reason): 100 * count / result.requests for reason, count in result.misses.items()}
        rows.append({**row, "no miss": 100 - sum(row.values())})
    colours = {_words(reason): REASONS.get(reason, OTHER_REASON) for reason in present}
    return _bars(
        results, rows, {**colours, "no miss": NO_MISS}, "% of requests", "Requests by the reason of their first miss"
    )


def _words(reason: MissReason) -> str:
    return reason.replace("_", " ")


def _bars(
    results: Sequence[ReplayResult],
    rows: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    label: str,
    description: str,
) -> str:
    """Plots one stacked bar per configuration, with pieces of ``rows[i][name]`` percent in ``colours[name]``."""
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = make_figure(height=0.9 + 0.27 * len(rows), rows=1)
        ax.grid(visible=False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        places = list(range(len(rows)))
        starts = [0.0] * len(rows)
        for name, colour in colours.items():
            pieces = [row.get(name, 0.0) for row in rows]
            ax.barh(places, pieces, left=starts, height=0.72, color=colour, label=name)
            for place, start, piece in zip(places, starts, pieces, strict=True):
                if piece >= LEAST_LABELLED:
                    ink = INK if colour in (GRID, SOFT) else "white"
                    where = start + piece / 2, place
                    ax.text(*where, f"{piece:.1f}", ha="center", va="center", fontsize=8.5, color=ink)
            starts = [start + piece for start, piece in zip(starts, pieces, strict=True)]
        ax.set_yticks(places, [f"{result.policy}, {result.capacity_blocks:,}" for result in results])
        ax.tick_params(axis="y", labelcolor=INK)
        ax.invert_yaxis()
        ax.set_xlim(0, 100)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlabel(label)
        ax.legend(ncols=len(colours), loc="lower left", bbox_to_anchor=(0.0, 1.0), handlelength=1.0, handleheight=1.0)
        return svg(figure, description)
