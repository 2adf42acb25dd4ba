"""Renders ``report.html``, which needs no other file."""

from __future__ import annotations

import jinja2

from kvoffload import units
from kvoffload.demo.plots import COLOURS, LABELS, hits_plot, pool_plot, ttft_plot
from kvoffload.demo.protocol import Source
from kvoffload.demo.report import LOGPROB_TOLERANCE, Report, gbps, miss_reasons
from kvoffload.lab.page import environment


def demo_environment() -> jinja2.Environment:
    """Returns what renders the demos' pages."""
    made = environment("kvoffload.demo")
    made.filters |= {
        "ms": units.milliseconds,
        "multiple": units.multiple,
        "speedup": units.speedup,
        "gbps": units.gigabytes_per_second,
    }
    return made


def render_page(report: Report) -> str:
    """Returns the report as one HTML page that includes its plots."""
    requests = report.offload.requests
    return (
        demo_environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            info=report.offload.info,
            sources=list(Source),
            colours=COLOURS,
            labels=LABELS,
            percentage=units.percentage,
            store=gbps(report.offload, "store"),
            load=gbps(report.offload, "load"),
            reasons=miss_reasons(requests),
            tolerance=LOGPROB_TOLERANCE,
            saved_s=report.baseline.summary.wall_s - report.offload.summary.wall_s,
            ttft_svg=ttft_plot(report),
            hits_svg=hits_plot(report),
            pool_svg=pool_plot(report),
            rows=list(zip(report.baseline.requests, report.offload.requests, strict=True)),
            again={request.index: request for request in report.restart.requests},
        )
    )
