"""The plots of the page, as SVG text."""

from __future__ import annotations

import matplotlib
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvoffload.demo.plots import COLOURS, MARKS
from kvoffload.demo.protocol import RequestResult, Source
from kvoffload.demo.shared.result import SharedReport
from kvoffload.lab.figures import MUTED, STYLE, make_figure, svg

LABELS = {
    Source.RECOMPUTE: "recomputed",
    Source.DEVICE: "device hit",
    Source.HOST: "host hit",
    Source.DISK: "from the store",
}
BAR_WIDTH = 0.26


def ttft_plot(report: SharedReport) -> str:
    """Plots the TTFT of every prompt at the second servers: with what the store has, and computed."""
    results = report.results
    with matplotlib.rc_context(STYLE):
        figure, axes = make_figure(height=1.0 + 2.2 * len(results), rows=len(results))
        times = []
        for ax, store in zip(axes, results, strict=True):
            ax.set_title(store.name)
            for requests in (store.computed, store.shared):
                times += [request.ttft_ms for request in requests]
                for source in Source:
                    chosen = [(i, r) for i, r in enumerate(requests) if r.source is source]
                    ax.scatter(
                        [i for i, _ in chosen],
                        [r.ttft_ms for _, r in chosen],
                        s=30,
                        color=COLOURS[source],
                        marker=MARKS[source],
                        linewidths=0,
                        label=LABELS[source] if chosen else None,
                    )
            for i, (slow, fast) in enumerate(zip(store.computed, store.shared, strict=True)):
                ax.plot([i, i], [slow.ttft_ms, fast.ttft_ms], color=MUTED, linewidth=0.8, alpha=0.5, zorder=0)
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,.0f} ms"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        axes[-1].set_ylim(min(times) / 1.6, max(times) * 1.6)
        axes[-1].set_xlabel("prompt")
        axes[0].legend(ncols=len(Source), loc="lower right", bbox_to_anchor=(1.0, 0.97), handletextpad=0.2)
        return svg(figure, "Time to first token of each prompt at the second server: computed, and from the store")


def faults_plot(report: SharedReport) -> str:
    """Plots the tokens found in the store before, during and after each fault, as a share of the prompts."""
    names = list(dict.fromkeys(result.store for result in report.faults))
    # The panels have one axis.
    places = {fault: i for i, fault in enumerate(dict.fromkeys(result.fault for result in report.faults))}
    with matplotlib.rc_context(STYLE):
        figure, axes = make_figure(height=1.2 + 2.0 * len(names), rows=len(names))
        for ax, name in zip(axes, names, strict=True):
            ax.set_title(f"{name}: share of the prompts that came from the store")
            results = sorted(
                (result for result in report.faults if result.store == name), key=lambda result: places[result.fault]
            )
            for shift, (label, alpha) in enumerate((("before", 0.45), ("during", 1.0), ("after", 0.7))):
                colour = COLOURS[Source.RECOMPUTE if label == "during" else Source.DISK]
                ax.bar(
                    [places[result.fault] + (shift - 1) * BAR_WIDTH for result in results],
                    [_share(getattr(result, label)) for result in results],
                    width=BAR_WIDTH * 0.9,
                    color=colour,
                    alpha=alpha,
                    label=label,
                )
            ax.set_xticks(range(len(places)), [fault.replace(" ", "\n", 1) for fault in places])
            ax.set_ylim(0, 1.08)
            ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f}%"))
            ax.tick_params(labelbottom=True)
        axes[0].legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.97))
        return svg(figure, "Tokens found in the store before, during and after each fault")


def _share(requests: list[RequestResult]) -> float:
    return sum(r.disk_tokens for r in requests) / max(1, sum(r.prompt_tokens for r in requests))
