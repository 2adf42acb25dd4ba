"""Asks a Prometheus server the queries of the Grafana dashboard, with variables replaced as Grafana replaces them."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvoffload.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str
    is_instant: bool


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard, or a row."""

    kind: str
    title: str
    description: str
    unit: str
    place: tuple[int, int, int, int]
    """x, y, width and height in Grafana's grid of 24 columns."""
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Series:
    """A curve: its name, and its points as (time, value)."""

    name: str
    points: Sequence[tuple[float, float]]


class QueryError(Exception):
    """Prometheus has refused a query, or cannot be reached."""


def load(path: Path = DASHBOARD) -> list[Panel]:
    """Returns the panels and rows of a dashboard."""
    return [
        Panel(
            panel["type"],
            panel["title"],
            panel.get("description", ""),
            panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "none"),
            tuple(panel["gridPos"][each] for each in "xywh"),
            tuple(
                Query(each["expr"], each["legendFormat"], each.get("instant", False))
                for each in panel.get("targets", ())
            ),
        )
        for panel in json.loads(path.read_text())["panels"]
    ]


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


def alert_expressions(path: Path = ALERTS) -> Iterator[tuple[str, str]]:
    """Yields name and expression of every alert."""
    import yaml

    for group in yaml.safe_load(path.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
