"""The plots of the reports, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from demo.protocol import RequestResult, Source
from demo.view import COLOURS
from kvoffload.lab.figures import MUTED, STYLE, make_figure, svg

MARKS = {Source.RECOMPUTE: "o", Source.DEVICE: "s", Source.HOST: "D", Source.DISK: "^"}
Points = Sequence[tuple[int, RequestResult]]


def ttft_plot(panels: Mapping[str, Sequence[Points]], names: Mapping[Source, str], what: str, description: str) -> str:
    """Plots the TTFT of requests at their places, coloured by source, on a common logarithmic scale: one panel per
    title. If a panel has two runs of requests, a line connects those at the same place. ``what`` has a place."""
    with matplotlib.rc_context(STYLE):
        figure, axes = make_figure(height=0.9 + 2.0 * len(panels), rows=len(panels))
        for ax, (title, runs) in zip(axes, panels.items(), strict=True):
            ax.set_title(title)
            for source in Source:
                chosen = [(place, r) for points in runs for place, r in points if r.source is source]
                ax.scatter(
                    [place for place, _ in chosen],
                    [r.ttft_ms for _, r in chosen],
                    s=28,
                    color=COLOURS[source],
                    marker=MARKS[source],
                    linewidths=0,
                )
            for (place, one), (_, other) in zip(runs[0], runs[-1], strict=True):
                ax.plot([place] * 2, [one.ttft_ms, other.ttft_ms], color=MUTED, linewidth=0.8, alpha=0.5, zorder=0)
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,.0f} ms"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        shown = [r for runs in panels.values() for points in runs for _, r in points]
        axes[-1].set_ylim(min(r.ttft_ms for r in shown) / 1.6, max(r.ttft_ms for r in shown) * 1.6)
        axes[-1].set_xlabel(what)
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        marks = [
            Line2D([], [], linestyle="", marker=MARKS[s], color=COLOURS[s], markersize=5.5, label=names[s])
            for s in Source
            if any(r.source is s for r in shown)
        ]
        axes[0].legend(
            handles=marks, ncols=len(marks), loc="lower right", bbox_to_anchor=(1.0, 0.97), handletextpad=0.2
        )
        return svg(figure, description)
