"""The plots of the demo's report, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvoffload.demo.protocol import RequestResult, Source
from kvoffload.demo.report import Report
from kvoffload.lab.figures import BLUE, GREEN, MUTED, ORANGE, PURPLE, STYLE, make_figure, svg

COLOURS = {Source.RECOMPUTE: ORANGE, Source.DEVICE: BLUE, Source.HOST: GREEN, Source.DISK: PURPLE}
MARKS = {Source.RECOMPUTE: "o", Source.DEVICE: "s", Source.HOST: "D", Source.DISK: "^"}
LABELS = {
    Source.RECOMPUTE: "recomputed",
    Source.DEVICE: "device hit",
    Source.HOST: "host hit",
    Source.DISK: "disk hit",
}


def ttft_plot(report: Report) -> str:
    """Plots the TTFT of every request of the first three acts, coloured by source, on a common logarithmic scale."""
    shown = (
        ("without kvoffload", report.baseline),
        ("with kvoffload", report.offload),
        ("after a restart: each document's last question again", report.restart),
    )
    with matplotlib.rc_context(STYLE):
        figure, axes = make_figure(height=6.9, rows=len(shown))
        for ax, (title, act) in zip(axes, shown, strict=True):
            ax.set_title(title)
            for source in Source:
                chosen = [r for r in act.requests if r.source is source]
                ax.scatter(
                    [r.index for r in chosen],
                    [r.ttft_ms for r in chosen],
                    s=26,
                    color=COLOURS[source],
                    marker=MARKS[source],
                    linewidths=0,
                    label=LABELS[source],
                )
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,.0f} ms"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        times = [r.ttft_ms for _, act in shown for r in act.requests]
        axes[-1].set_ylim(min(times) / 1.6, max(times) * 1.6)
        axes[-1].set_xlabel("request")
        axes[0].legend(
            handles=_legend(), ncols=len(Source), loc="lower right", bbox_to_anchor=(1.0, 0.97), handletextpad=0.2
        )
        return svg(figure, "Time to first token by request: without kvoffload, with it, and after a restart")


def hits_plot(report: Report) -> str:
    """Plots the cumulative prompt tokens, stacked by source: disk, host, device, computed."""
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = make_figure(height=3.1, rows=1)
        requests = report.offload.requests + report.restart.requests
        found = [_running(requests, f"{source}_tokens") for source in (Source.DISK, Source.HOST, Source.DEVICE)]
        asked = _running(requests, "prompt_tokens")
        computed = [total - sum(parts) for total, *parts in zip(asked, *found, strict=True)]
        layers = ax.stackplot(
            range(len(requests)),
            *found,
            computed,
            colors=[COLOURS[s] for s in (Source.DISK, Source.HOST, Source.DEVICE, Source.RECOMPUTE)],
            linewidth=0,
        )
        _mark_restart(ax, report)
        for layer in layers:
            layer.set_alpha(0.88)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1000:,.0f}k"))
        ax.set_xlabel("request")
        ax.set_ylim(0, asked[-1] * 1.05)
        labels = ("disk hit", "host hit", "device hit", "computed")
        ax.legend(layers[::-1], labels[::-1], ncols=len(labels), loc="lower right", bbox_to_anchor=(1.0, 1.0))
        return svg(figure, "Cumulative prompt tokens by source, with kvoffload and after a restart")


def pool_plot(report: Report) -> str:
    """Plots the blocks of the host pool in use after each request; a restart empties the pool."""
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = make_figure(height=2.7, rows=1)
        start = 0
        for act in (report.offload, report.restart):
            used = [r.pool_used for r in act.requests]
            x = range(start, start := start + len(used))
            ax.fill_between(x, used, color=COLOURS[Source.HOST], alpha=0.18, linewidth=0)
            ax.plot(x, used, color=COLOURS[Source.HOST])
        _mark_restart(ax, report)
        blocks = report.offload.requests[0].pool_blocks
        if blocks:
            ax.axhline(blocks, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
            ax.annotate(
                f"budget: {blocks:,} blocks",
                (0, blocks),
                xytext=(2, 4),
                textcoords="offset points",
                color=MUTED,
            )
            ax.set_ylim(0, blocks * 1.18)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        ax.set_xlabel("request")
        return svg(figure, "Blocks of the host pool in use")


def _mark_restart(ax: Any, report: Report) -> None:
    at = len(report.offload.requests) - 0.5
    ax.axvline(at, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)))
    ax.annotate(
        "restart",
        (at, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -12),
        textcoords="offset points",
        ha="right",
        color=MUTED,
    )


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], linestyle="", marker=MARKS[s], color=COLOURS[s], markersize=5.5, label=LABELS[s]) for s in Source
    ]


def _running(requests: Sequence[RequestResult], name: str) -> list[int]:
    total, sums = 0, []
    for request in requests:
        total += getattr(request, name)
        sums.append(total)
    return sums
