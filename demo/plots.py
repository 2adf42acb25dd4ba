"""The plots of the reports, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from demo.protocol import RequestResult, Source
from demo.shared_report import FaultResult
from demo.view import COLOURS
from kvoffload.lab.figures import MUTED, STYLE, make_figure, svg

MARKS = {Source.RECOMPUTE: "o", Source.DEVICE: "s", Source.HOST: "D", Source.DISK: "^"}
BAR_WIDTH = 0.26
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
        marks = [
            Line2D([], [], linestyle="", marker=MARKS[s], color=COLOURS[s], markersize=5.5, label=names[s])
            for s in Source
            if any(r.source is s for r in shown)
        ]
        axes[0].legend(
            handles=marks, ncols=len(marks), loc="lower right", bbox_to_anchor=(1.0, 0.97), handletextpad=0.2
        )
        return svg(figure, description)


def faults_plot(faults: Sequence[FaultResult]) -> str:
    """Plots the tokens found in the store before, during and after each fault, as a share of the prompts."""
    names = list(dict.fromkeys(result.store for result in faults))
    # The panels have one axis.
    places = {fault: i for i, fault in enumerate(dict.fromkeys(result.fault for result in faults))}
    with matplotlib.rc_context(STYLE):
        figure, axes = make_figure(height=1.2 + 2.0 * len(names), rows=len(names))
        for ax, name in zip(axes, names, strict=True):
            ax.set_title(f"{name}: share of the prompts that came from the store")
            results = sorted((each for each in faults if each.store == name), key=lambda each: places[each.fault])
            for shift, (label, alpha) in enumerate((("before", 0.45), ("during", 1.0), ("after", 0.7))):
                ax.bar(
                    [places[result.fault] + (shift - 1) * BAR_WIDTH for result in results],
                    [_share(getattr(result, label)) for result in results],
                    width=BAR_WIDTH * 0.9,
                    color=COLOURS[Source.RECOMPUTE if label == "during" else Source.DISK],
                    alpha=alpha,
                    label=label,
                )
            ax.set_xticks(range(len(places)), [fault.replace(" ", "\n", 1) for fault in places])
            ax.set_ylim(0, 1.08)
            ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f}%"))
            ax.tick_params(labelbottom=True)
        axes[0].legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.97))
        return svg(figure, "Tokens found in the store before, during and after each fault")


def _share(requests: Sequence[RequestResult]) -> float:
    return sum(r.disk_tokens for r in requests) / max(1, sum(r.prompt_tokens for r in requests))
