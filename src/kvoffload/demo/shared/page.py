"""Renders ``shared.html``, which needs no other file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload import units
from kvoffload.demo.page import demo_environment
from kvoffload.demo.report import LOGPROB_TOLERANCE
from kvoffload.demo.shared.plots import faults_plot, ttft_plot
from kvoffload.demo.shared.result import (
    LOAD_DEADLINE_S,
    WAIT_LIMIT_S,
    SharedReport,
    hit_tokens,
    speedup,
    tokens_asked,
)


def render_page(report: SharedReport) -> str:
    """Returns the report as one HTML page that includes its plots."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for result in report.faults:
        rows.setdefault(result.store, []).append(report.fault_row(result))
    served = [
        requests for store in report.results for requests in (store.first, store.shared, store.computed, store.back)
    ]
    return (
        demo_environment()
        .get_template("shared.html.j2")
        .render(
            report=report,
            worst=max((report.compare(requests).max_logprob_diff for requests in served), default=0.0),
            tolerance=LOGPROB_TOLERANCE,
            percentage=units.percentage,
            hit_tokens=hit_tokens,
            tokens_asked=tokens_asked,
            ratio=speedup,
            rows=rows,
            fault_documents=len(report.faults[0].before) if report.faults else 0,
            load_deadline_s=LOAD_DEADLINE_S,
            wait_limit_s=WAIT_LIMIT_S,
            ttft_svg=ttft_plot(report) if report.results else "",
            faults_svg=faults_plot(report) if report.faults else "",
        )
    )
