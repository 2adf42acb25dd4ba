"""The plots of the comparison, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.peers.measure import Result, median, percentile
from benchmarks.peers.summary import MIB, OURS, REFERENCE, pool_bytes
from kvoffload.lab.figures import BLUE, GREEN, INK, MUTED, SOFT, STYLE, WIDTH, svg

FIRST, AGAIN, OURS_AGAIN, OTHER = SOFT, BLUE, GREEN, "#8fb3da"
BAR = 0.38


def ttft_plot(results: Sequence[Result]) -> str:
    """Plots the median time to the first token by system and size: first sight, again, and a device hit as a line."""
    shown = [result for result in results if result.times and all(times.again for times in result.times.values())]
    sizes = sorted({size for result in shown for size in result.times})
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(len(sizes), 0.75 + 0.56 * len(shown))
        for ax, size in zip(panels, sizes, strict=True):
            ax.set_title(f"Prompts of {size:,} tokens: milliseconds to the first token")
            top = max(1e3 * max(r.times[size].first) for r in shown if size in r.times)
            for y, result in enumerate(shown):
                times = result.times.get(size)
                if times is None:
                    continue
                _bar(ax, y - BAR / 2, times.first, FIRST, top)
                if result.name != REFERENCE:
                    _bar(ax, y + BAR / 2, times.again, _colour(result), top)
                elif times.device:
                    hit = 1e3 * median(times.device)
                    ax.axvline(hit, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
                    ax.annotate(
                        f"device hit: {hit:,.0f}",
                        (hit, y + BAR / 2),
                        xytext=(5, 0),
                        textcoords="offset points",
                        va="center",
                        color=MUTED,
                    )
            _names(ax, shown)
            ax.set_xlim(0, top * 1.12)
        _legend(figure)
        return svg(figure, "Time to the first token of each system, when prompts are first seen and again")


def mixed_plot(results: Sequence[Result]) -> str:
    """Plots the prompt tokens per second of the mixed load by system: the median round, and the least and the most."""
    shown = [result for result in results if result.mixed]
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = _panels(1, 0.6 + 0.36 * len(shown))
        ax.set_title("Mixed load: prompt tokens per second")
        rates = [[mixed.prompt_tokens / mixed.wall_s for mixed in result.mixed] for result in shown]
        top = max(map(max, rates))
        for y, (result, found) in enumerate(zip(shown, rates, strict=True)):
            middle = median(found)
            ax.barh(y, middle, height=2 * BAR, color=_colour(result, OTHER))
            ax.plot([min(found), max(found)], [y, y], color=INK, linewidth=1.4)
            _label(ax, max(found), y, f"{middle:,.0f}")
        _names(ax, shown)
        ax.set_xlim(0, top * 1.12)
        return svg(figure, "Prompt tokens per second of each system under the mixed load")


def memory_plot(results: Sequence[Result]) -> str:
    """Plots the resident memory by system with all blocks: what holds blocks, and what is beside it."""
    reference = next((result for result in results if result.name == REFERENCE), None)
    shown = [result for result in results if result.name != REFERENCE and result.memory_end]
    if reference is None or not shown:
        return ""
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = _panels(1, 0.6 + 0.36 * len(shown))
        ax.set_title("Resident memory beyond recompute's, MiB: the pool (light) and beside it")
        for y, result in enumerate(shown):
            pool = pool_bytes(result, reference) / MIB
            whole = (result.memory_end - reference.memory_end) / MIB
            ax.barh(y, pool, height=2 * BAR, color=FIRST)
            ax.barh(y, whole - pool, left=pool, height=2 * BAR, color=_colour(result))
            _label(ax, max(whole, pool), y, f"{whole - pool:+,.0f}")
        _names(ax, shown)
        ax.margins(x=0.12)
        return svg(figure, "Resident memory of each system")


def _panels(count: int, height: float) -> tuple[Figure, list[Any]]:
    """Returns a figure with ``count`` axes below each other, ``height`` inches each."""
    figure = Figure(figsize=(WIDTH, count * height), layout="constrained")
    panels = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    for ax in panels:
        ax.grid(visible=False, axis="y")
    return figure, panels


def _colour(result: Result, other: str = AGAIN) -> str:
    if result.name == REFERENCE:
        return FIRST
    return OURS_AGAIN if result.name == OURS else other


def _bar(ax: Any, y: float, seconds: Sequence[float], colour: str, top: float) -> None:
    low, middle, high = (1e3 * percentile(seconds, percent) for percent in (25, 50, 75))
    ax.barh(y, middle, height=BAR * 0.92, color=colour)
    ax.plot([low, high], [y, y], color=INK, linewidth=1.4)
    _label(ax, max(middle, high), y, f"{middle:,.0f}")


def _label(ax: Any, x: float, y: float, label: str) -> None:
    ax.annotate(label, (x, y), xytext=(5, 0), textcoords="offset points", va="center", color=INK)


def _names(ax: Any, results: Sequence[Result]) -> None:
    ax.set_yticks(range(len(results)), [result.title.replace(", ", ",\n", 1) for result in results])
    ax.tick_params(axis="y", labelcolor=INK)
    ax.invert_yaxis()


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=FIRST, label="first sight"),
        Patch(color=OURS_AGAIN, label="again, kvoffload"),
        Patch(color=AGAIN, label="again, others"),
    ]
    figure.legend(handles=handles, ncols=3, loc="outside upper right")
