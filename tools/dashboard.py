"""Runs every query of the Grafana dashboard on a Prometheus server, and draws the panels into one picture.

``python tools/dashboard.py http://localhost:9090 --out dashboard.png``: it prints which panels have no data, and fails
if a query is refused. It needs no Grafana: variables are replaced as Grafana replaces them, and panels stand where the
dashboard has them, but matplotlib draws them. With ``--alerts`` it runs the expressions of the alert rules too.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvoffload.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
POINTS = 240
"""Points per curve."""
DEADLINE_S = 30.0
ROW_INCHES = 0.42
WIDTH_INCHES = 16.0
COLORS = ("#3274d9", "#56a64b", "#e0752d", "#a352cc", "#e02f44", "#37872d", "#f2cc0c", "#5794f2", "#8f3bb8", "#705da0")
STATES = {"green": "#56a64b", "orange": "#ff9830", "red": "#e02f44"}
GREY = "#6b6b6b"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str
    is_instant: bool


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard. ``place`` is x, y, width and height in Grafana's grid of 24 columns."""

    kind: str
    title: str
    description: str
    unit: str
    place: tuple[int, int, int, int]
    queries: tuple[Query, ...]
    custom: Mapping[str, Any]
    defaults: Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """A curve: its name, and its points as (time, value)."""

    name: str
    points: Sequence[tuple[float, float]]


class QueryError(Exception):
    """Prometheus has refused a query, or cannot be reached."""


def load(path: Path = DASHBOARD) -> list[Panel]:
    """Returns the panels and rows of a dashboard."""
    return [_panel(panel) for panel in json.loads(path.read_text())["panels"]]


def _panel(panel: Mapping[str, Any]) -> Panel:
    place, defaults = panel["gridPos"], panel.get("fieldConfig", {}).get("defaults", {})
    targets = panel.get("targets", ())
    return Panel(
        panel["type"],
        panel["title"],
        panel.get("description", ""),
        defaults.get("unit", "none"),
        (place["x"], place["y"], place["w"], place["h"]),
        tuple(Query(each["expr"], each["legendFormat"], each.get("instant", False)) for each in targets),
        defaults.get("custom", {}),
        defaults,
    )


def variables(last_s: float, step_s: float, scrape_s: float, chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of the variables of a dashboard that shows ``last_s`` seconds, with All where nothing is
    chosen."""
    everything = dict.fromkeys(("model_name", "instance", "engine", "tier"), ".*")
    rate_s = max(4 * scrape_s, step_s + scrape_s)
    return {**everything, **chosen, "__range": f"{math.ceil(last_s)}s", "__rate_interval": f"{math.ceil(rate_s)}s"}


def substitute(expr: str, values: Mapping[str, str]) -> str:
    """Returns ``expr`` with the values of its variables. Raises KeyError for a variable that is unknown."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values[match[1]], expr)


class Prometheus:
    """The HTTP API of a Prometheus server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def range(self, expr: str, start: float, end: float, step: float) -> list[tuple[dict[str, str], list[Any]]]:
        """Returns labels and points of every curve. Raises QueryError."""
        result = self._get("query_range", query=expr, start=str(start), end=str(end), step=str(step))
        return [(each["metric"], each["values"]) for each in result["result"]]

    def instant(self, expr: str, at: float) -> list[tuple[dict[str, str], list[Any]]]:
        """Returns labels and the one point of every result. Raises QueryError."""
        result = self._get("query", query=expr, time=str(at))
        if result["resultType"] == "scalar":
            return [({}, [result["result"]])]
        return [(each["metric"], [each["value"]]) for each in result["result"]]

    def _get(self, endpoint: str, **arguments: str) -> Any:
        body = urllib.parse.urlencode(arguments).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{endpoint}", body, timeout=DEADLINE_S) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise QueryError(f"{error.read().decode(errors='replace')}: {arguments['query']}") from error
        except OSError as error:
            raise QueryError(f"{self.url} cannot be reached: {error}") from error


def ask(
    prometheus: Prometheus, panel: Panel, values: Mapping[str, str], end: float, last_s: float, step_s: float
) -> list[Series]:
    """Returns the curves of a panel. Raises QueryError."""
    found = []
    for query in panel.queries:
        expr = substitute(query.expr, values)
        if query.is_instant:
            result = prometheus.instant(expr, end)
        else:
            result = prometheus.range(expr, end - last_s, end, step_s)
        for labels, values_at in result:
            points = [(float(at), float(value)) for at, value in values_at]
            name = re.sub(r"{{(\w+)}}", lambda match, labels=labels: labels.get(match[1], ""), query.legend)  # type: ignore[misc]
            if any(math.isfinite(value) for _, value in points):
                found.append(Series(name, points))
    return found


# Drawing.


def short(value: float, unit: str) -> str:
    """Returns ``value`` in its unit, as a panel shows it."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    base, names = (1024.0, " KMGTP") if unit == "bytes" else (1000.0, " kMGTP")
    index = 0
    while abs(value) >= base and index < len(names) - 1:
        value /= base
        index += 1
    prefix = names[index].strip()
    end = {
        "bytes": f"{prefix}iB" if prefix else "B",
        "Bps": f"{prefix}B/s",
        "reqps": f"{prefix}/s",
        "cps": f"{prefix}/s",
    }
    return f"{value:.3g} {end.get(unit, prefix)}".rstrip()


def draw(results: Sequence[tuple[Panel, list[Series]]], span: tuple[float, float], path: Path) -> None:
    """Draws the panels into a PNG file. ``span`` is the time from and to which curves are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    bottom = max(panel.place[1] + panel.place[3] for panel, _ in results)
    figure = plt.figure(figsize=(WIDTH_INCHES, ROW_INCHES * bottom), facecolor="#f4f5f5")
    for panel, series in results:
        x, y, width, height = panel.place
        # Inches that are left free: left, bottom, right, top.
        free = (0.1, 0.0, 0.0, 0.0) if panel.kind == "row" else (0.62, 0.62, 0.16, 0.34)
        if panel.kind in ("stat", "bargauge"):
            free = (1.7 if panel.kind == "bargauge" else 0.1, 0.3, 0.5, 0.34)
        if panel.kind == "state-timeline":
            free = (2.9, 0.62, 0.16, 0.34)
        inch_x, inch_y = WIDTH_INCHES / 24, ROW_INCHES
        box = (
            (x * inch_x + free[0]) / WIDTH_INCHES,
            ((bottom - y - height) * inch_y + free[1]) / (ROW_INCHES * bottom),
            (width * inch_x - free[0] - free[2]) / WIDTH_INCHES,
            (height * inch_y - free[1] - free[3]) / (ROW_INCHES * bottom),
        )
        if panel.kind == "row":
            figure.text(0.006, 1 - (y + 0.7) / bottom, panel.title, fontsize=12, fontweight="bold")
            continue
        figure.text(x / 24 + 0.006, 1 - (y + 0.55) / bottom, panel.title, fontsize=9, color="#222222")
        axes = figure.add_axes(box)
        if not series:
            axes.axis("off")
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color=GREY)
        else:
            DRAWERS[panel.kind](axes, panel, series, span)
    figure.savefig(path, dpi=72, facecolor=figure.get_facecolor())
    plt.close(figure)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128)
    small.save(path, optimize=True)


def _draw_stat(axes: Any, panel: Panel, series: list[Series], span: tuple[float, float]) -> None:
    value = series[0].points[-1][1]
    text, color = _mapped(panel, value) or (short(value, panel.unit), COLORS[0])
    axes.axis("off")
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=24, color=color)


def _mapped(panel: Panel, value: float) -> tuple[str, str] | None:
    """Returns the text and the color that the panel shows for ``value``, if it has any."""
    for mapping in panel.defaults.get("mappings", ()):
        option = mapping["options"].get(f"{value:g}")
        if option is not None:
            return option["text"], STATES[option["color"]]
    return None


def _draw_timeseries(axes: Any, panel: Panel, series: list[Series], span: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter

    _style(axes, span)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value, panel.unit)))
    colors = [_color(each.name) for each in series]
    if panel.custom.get("stacking", {}).get("mode") == "normal":
        times = sorted({at for each in series for at, _ in each.points})
        heights = [_heights(each, times) for each in series]
        names = [each.name for each in series]
        if panel.custom.get("drawStyle") == "bars":
            base = [0.0] * len(times)
            width = _step(times, span)
            for name, height, color in zip(names, heights, colors, strict=True):
                axes.bar(times, height, width, base, color=color, label=name, linewidth=0)
                base = [low + more for low, more in zip(base, height, strict=True)]
        else:
            axes.stackplot(times, heights, labels=names, colors=colors, alpha=0.75, linewidth=0)
    else:
        for each, color in zip(series, colors, strict=True):
            style = "--" if each.name.startswith("budget") else "-"
            axes.plot(*zip(*each.points, strict=True), style, color=color, label=each.name, linewidth=1.3)
    low, high = axes.get_ylim()
    axes.set_ylim(panel.defaults.get("min", low), panel.defaults.get("max", high if high > 0 else 1))
    _legend(axes)


_colors: dict[str, str] = {}
"""The color of each curve by its name, the same in all panels."""


def _color(name: str) -> str:
    return _colors.setdefault(name, COLORS[len(_colors) % len(COLORS)])


def _step(times: Sequence[float], span: tuple[float, float]) -> float:
    """Returns the time between two points."""
    return min((b - a for a, b in pairwise(times)), default=span[1] - span[0])


def _heights(series: Series, times: Sequence[float]) -> list[float]:
    """Returns the values at ``times``, 0 where there is none."""
    known = {at: value for at, value in series.points if math.isfinite(value)}
    return [known.get(at, 0.0) for at in times]


def _draw_bars(axes: Any, panel: Panel, series: list[Series], span: tuple[float, float]) -> None:
    values = [each.points[-1][1] for each in series]
    axes.barh([each.name for each in series], values, color=COLORS[0], height=0.6)
    for i, value in enumerate(values):
        axes.text(value, i, f" {short(value, panel.unit)}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_facecolor("none")
    axes.tick_params(labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_states(axes: Any, panel: Panel, series: list[Series], span: tuple[float, float]) -> None:
    _style(axes, span)
    for row, each in enumerate(series):
        colors = [(_mapped(panel, value) or ("", GREY))[1] for _, value in each.points]
        step = 1.05 * _step([at for at, _ in each.points], span)
        spans = [(at, step) for at, _ in each.points]
        axes.broken_barh(spans, (row - 0.35, 0.7), facecolors=colors, linewidth=0)
    axes.set_yticks(range(len(series)), [each.name for each in series], fontsize=8)
    axes.set_ylim(len(series) - 0.4, -0.6)
    names = {
        option["text"]: STATES[option["color"]] for m in panel.defaults["mappings"] for option in m["options"].values()
    }
    for text, color in names.items():
        axes.plot([], [], "s", color=color, label=text)
    _legend(axes)


DRAWERS = {
    "stat": _draw_stat,
    "timeseries": _draw_timeseries,
    "bargauge": _draw_bars,
    "state-timeline": _draw_states,
}
"""How each kind of panel is drawn."""


def _style(axes: Any, span: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor("white")
    axes.set_xlim(*span)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: time.strftime("%H:%M:%S", time.gmtime(at))))
    axes.tick_params(labelsize=7, length=2)
    for side in axes.spines.values():
        side.set_color("#cccccc")


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if any(labels):
        axes.legend(
            handles, labels, loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncols=6, fontsize=7, frameon=False,
            columnspacing=1.0, handlelength=1.2,
        )  # fmt: skip


# The command.


def alert_expressions(path: Path = ALERTS) -> Iterator[tuple[str, str]]:
    """Yields name and expression of every alert."""
    import yaml

    for group in yaml.safe_load(path.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def seconds(text: str) -> float:
    """Returns the seconds in a text such as "15s" or "10m"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number and s, m, h or d, such as 10m")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="the Prometheus server, such as http://localhost:9090")
    parser.add_argument("--out", type=Path, help="PNG file to draw")
    parser.add_argument("--last", type=seconds, default=seconds("1h"), help="how much time is shown (1h)")
    parser.add_argument("--scrape", type=seconds, default=seconds("15s"), help="Prometheus' scrape interval (15s)")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="value of a variable")
    parser.add_argument("--alerts", action="store_true", help="run the alert rules too (needs pyyaml)")
    options = parser.parse_args(arguments)
    prometheus, end, step = Prometheus(options.url), time.time(), max(options.last / POINTS, options.scrape)
    values = variables(options.last, step, options.scrape, dict(each.split("=", 1) for each in options.var))
    results, refused = [], 0
    for panel in load():
        try:
            series = ask(prometheus, panel, values, end, options.last, step)
        except QueryError as error:
            print(f"REFUSED  {panel.title}: {error}")
            series, refused = [], refused + 1
        if panel.kind != "row":
            print(f"{len(series):3d} series  {panel.title}")
        results.append((panel, series))
    for name, expr in alert_expressions() if options.alerts else ():
        try:
            print(f"{len(prometheus.instant(expr, end)):3d} results  alert {name}")
        except QueryError as error:
            print(f"REFUSED  alert {name}: {error}")
            refused += 1
    if options.out is not None:
        draw(results, (end - options.last, end), options.out)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
