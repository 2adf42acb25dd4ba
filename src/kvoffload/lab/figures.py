"""The common style of all plots, and their conversion to SVG for a page. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

INK, MUTED, GRID = "#1d2733", "#64707d", "#e4e8ec"

STYLE = {
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvoffload",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 2,
}
"""For ``matplotlib.rc_context``."""

WIDTH = 8.6
"""Inches."""


def make_figure(height: float, rows: int) -> tuple[Figure, Sequence[Any]]:
    """Returns a figure of ``height`` inches and its axes, one per row, which share their scales."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax in axes:
        ax.grid(visible=False, axis="x")
        ax.margins(x=0.015)
    return figure, list(axes)


def svg(figure: Figure, description: str) -> str:
    """Returns the figure's ``<svg>`` element, which scales to the page's width."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)
