"""Renders the report of sizing: one HTML page that needs no other file."""

from __future__ import annotations

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvoffload.lab.figures import BLUE, GREEN, INK, MUTED, PURPLE, STYLE, make_figure, svg
from kvoffload.lab.latency import Speeds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.page import render
from kvoffload.lab.sizing import Prices, Sizing, footnote, milliseconds
from kvoffload.lab.trace import Trace
from kvoffload.units import format_bytes

CURVE, RAM, DISK = BLUE, GREEN, PURPLE
CURVE_POINTS = 400
MAX_TICKS = 12


def render_page(trace: Trace, model: ModelShape, speeds: Speeds, prices: Prices, sizing: Sizing) -> str:
    return render(
        "size.html.j2",
        trace,
        model,
        sizing.footprint_bytes,
        prices=prices,
        sizing=sizing,
        footnote=footnote(speeds, sizing),
        sampled=any(setting.bound_pct for setting in sizing.settings),
        milliseconds=milliseconds,
        curve_svg=curve_plot(sizing),
    )


def curve_plot(sizing: Sizing) -> str:
    """Plots the served prompt tokens by capacity in bytes, and marks the sizes that were tried and the best setting."""
    size_of = sizing.block_bytes
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = make_figure(height=4.0, rows=1)
        blocks = _spread(len(sizing.lru_pct) - 1)
        lru = sizing.curve.policy == "lru"
        look = {"color": CURVE} if lru else {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (4, 3))}
        ax.plot(blocks * size_of, sizing.lru_pct[blocks], label="lru", **look)
        if not lru:
            ax.errorbar(
                np.array(sizing.curve.capacities) * size_of,
                sizing.curve.hit_pct,
                sizing.curve.bound_pct,
                color=CURVE,
                marker="o",
                markersize=4,
                capsize=2,
                label=sizing.policy,
            )
        ceiling = sizing.ceiling.served_pct
        ax.axhline(ceiling, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)))
        ax.annotate(
            f"no evictions: {ceiling:.1f}%",
            (0.0, ceiling),
            xycoords=("axes fraction", "data"),
            xytext=(4, 4),
            textcoords="offset points",
            color=MUTED,
        )
        tried = _share_by_size(sizing)
        ax.scatter(list(tried), list(tried.values()), s=34, color=CURVE, zorder=3, linewidths=0)
        best = sizing.best
        above, below = sizing.choices.caches(best.ram_bytes, best.disk_bytes)
        above_name = "RAM" if above == best.ram_bytes else "device and RAM"
        for name, amount, colour, marker in ((above_name, above, RAM, "D"), ("disk", below, DISK, "^")):
            if amount:
                ax.axvline(amount, color=colour, linewidth=1.2, alpha=0.5)
                ax.scatter([amount], [tried[amount]], s=80, color=colour, marker=marker, zorder=4)
                ax.annotate(
                    f"{format_bytes(amount)} {name}",
                    (amount, tried[amount]),
                    xytext=(8, -14),
                    textcoords="offset points",
                    color=INK,
                    weight="bold",
                )
        low, high = min([*tried, size_of * int(blocks[-1])]), max([*tried, size_of * int(blocks[-1])])
        ax.set_xscale("log", base=2)
        ax.set_xlim(low / 4, high * 1.6)
        ax.xaxis.set_major_locator(FixedLocator(_powers(low / 4, high * 1.6)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda amount, _: format_bytes(round(amount))))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}%"))
        ax.tick_params(axis="x", pad=8)
        ax.set_ylim(0, max(1.15 * ceiling, 1.0))
        ax.set_xlabel("capacity of RAM or disk")
        if not lru:
            ax.legend(loc="lower right")
        return svg(figure, "Prompt tokens served by the capacity of the cache")


def _share_by_size(sizing: Sizing) -> dict[int, float]:
    """Returns the percentage that each size that was tried serves alone. RAM and device count as one cache."""
    by_blocks = dict(zip(sizing.curve.capacities, sizing.curve.hit_pct.tolist(), strict=True))
    tried = {amount for each in sizing.settings for amount in sizing.choices.caches(each.ram_bytes, each.disk_bytes)}
    sizes = sorted(tried - {0})
    return {amount: by_blocks[min(amount // sizing.block_bytes, sizing.curve.capacities[-1])] for amount in sizes}


def _spread(most: int) -> npt.NDArray[np.int64]:
    """Returns whole numbers from 1 to ``most``, evenly spaced on a logarithmic scale."""
    return np.unique(np.geomspace(1, max(1, most), CURVE_POINTS).round().astype(np.int64)).clip(max=max(most, 0))


def _powers(low: float, high: float) -> list[int]:
    """Returns powers of two between ``low`` and ``high``, at most MAX_TICKS."""
    powers = [1 << bit for bit in range(63) if low <= 1 << bit <= high]
    return powers[:: -(-len(powers) // MAX_TICKS) or 1]
