"""The plots of the reports, as SVG text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from demo.protocol import RequestResult, Source
from demo.report import Report
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
        sources = [source for source in Source if any(r.source is source for r in shown)]
        marks = [
            Line2D([], [], linestyle="", marker=MARKS[s], color=COLOURS[s], markersize=5.5, label=names[s])
            for s in sources
        ]
        axes[0].legend(
            handles=marks, ncols=len(marks), loc="lower right", bbox_to_anchor=(1.0, 0.97), handletextpad=0.2
        )
        return svg(figure, description)


def hits_plot(report: Report) -> str:
    """Plots the cumulative prompt tokens, stacked by source: disk, host, device, computed."""
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = make_figure(height=3.1, rows=1)
        requests = report.offload.requests + report.restart.requests
        found = [_running(r.disk_tokens for r in requests), _running(r.host_tokens for r in requests)]
        found.append(_running(r.device_tokens for r in requests))
        asked = _running(r.prompt_tokens for r in requests)
        computed = [total - sum(parts) for total, *parts in zip(asked, *found, strict=True)]
        order = (Source.DISK, Source.HOST, Source.DEVICE, Source.RECOMPUTE)
        colors = [COLOURS[source] for source in order]
        layers = ax.stackplot(range(len(requests)), *found, computed, colors=colors, linewidth=0)
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
            place = {"xytext": (2, 4), "textcoords": "offset points"}
            ax.annotate(f"budget: {blocks:,} blocks", (0, blocks), color=MUTED, **place)
            ax.set_ylim(0, blocks * 1.18)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        ax.set_xlabel("request")
        return svg(figure, "Blocks of the host pool in use")


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


def _mark_restart(ax: Any, report: Report) -> None:
    at = len(report.offload.requests) - 0.5
    ax.axvline(at, color=MUTED, linewidth=1.2, linestyle=(0, (1, 2)))
    place = {"xycoords": ("data", "axes fraction"), "xytext": (-4, -12), "textcoords": "offset points"}
    ax.annotate("restart", (at, 1.0), ha="right", color=MUTED, **place)


def _share(requests: Sequence[RequestResult]) -> float:
    return sum(r.disk_tokens for r in requests) / max(1, sum(r.prompt_tokens for r in requests))


def _running(amounts: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for amount in amounts:
        total += amount
        sums.append(total)
    return sums
