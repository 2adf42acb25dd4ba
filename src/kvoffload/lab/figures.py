"""The common style of all plots, and their conversion to SVG for a page. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

LIGHT = {
    "ink": "#1d2733",
    "muted": "#64707d",
    "line": "#e4e8ec",
    "soft": "#b9c2cb",
    "paper": "#ffffff",
    "back": "#f5f7f9",
    "shade": "#1d27334d",
    "good": "#17795b",
    "bad": "#b3261e",
    "warning": "#9a4a12",
}
DARK = {
    "ink": "#e3e8ed",
    "muted": "#9aa6b2",
    "line": "#2f3842",
    "soft": "#55616d",
    "paper": "#181e25",
    "back": "#10151a",
    "shade": "#e3e8ed4d",
    "good": "#4cc19a",
    "bad": "#f28b82",
    "warning": "#e0a06a",
}
"""Colours of a page, by name: the page chooses by the reader's preference."""
PLOTTED = ("ink", "muted", "line", "soft")
"""Plots use these too, and change with the page."""
INK, MUTED, GRID, SOFT = (LIGHT[name] for name in PLOTTED)

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f6fb5", "#d9622b", "#1f9e77", "#8a5fb5", "#6b7a89"
"""The same on light and dark pages, and distinguishable with every kind of colour vision."""

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
    """Returns the figure's ``<svg>`` element, which scales to the page's width and has the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text, count=1)
    for name in PLOTTED:
        text = text.replace(LIGHT[name], f"var(--{name})")
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)
