"""Asks a Prometheus server the queries of the Grafana dashboard, with variables replaced as Grafana replaces them."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvoffload.json"
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


SHOWN_S, STEP_S = 60.0, 1.0
"""The time that the dashboard shows, and the time between two points of a curve."""
VARIABLES = dict.fromkeys(("model_name", "instance", "engine", "tier"), ".*") | {
    "__range": f"{SHOWN_S:.0f}s",
    "__rate_interval": f"{SHOWN_S:.0f}s",
}
"""The values of its variables: All, where something may be chosen."""


def substitute(expr: str) -> str:
    """Returns ``expr`` with the values of its variables. Raises KeyError for a variable that is unknown."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: VARIABLES[match[1]], expr)


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


def ask(prometheus: Prometheus, query: Query) -> list[str]:
    """Returns the names of the curves of a query that have a number. Raises QueryError."""
    expr, now = substitute(query.expr), time.time()
    found = prometheus.instant(expr, now) if query.is_instant else prometheus.range(expr, now - SHOWN_S, now, STEP_S)
    return [
        re.sub(r"{{(\w+)}}", lambda match, labels=labels: labels.get(match[1], ""), query.legend)  # type: ignore[misc]
        for labels, points in found
        if any(math.isfinite(float(value)) for _, value in points)
    ]
