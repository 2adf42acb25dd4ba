"""The Grafana dashboard asks only for metrics that kvoffload exports, and a real Prometheus answers every query.

That a server's metrics page has exactly the names and kinds of METRICS is tested with real vLLM.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from demo.process import free_ports
from kvoffload.abc import Ability, MissReason
from kvoffload.observe.metrics import METRICS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FILE = DEPLOY / "grafana" / "dashboards" / "kvoffload.json"
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


def load(path: Path = FILE) -> list[Panel]:
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
CHOSEN = dict.fromkeys(("model_name", "instance", "engine", "tier"), ".*") | {
    "__range": f"{SHOWN_S:.0f}s",
    "__rate_interval": f"{SHOWN_S:.0f}s",
}
"""The values of its variables: All, where something may be chosen."""


def substitute(expr: str) -> str:
    """Returns ``expr`` with the values of its variables. Raises KeyError for a variable that is unknown."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: CHOSEN[match[1]], expr)


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


ALERTS = (DEPLOY / "prometheus" / "alerts.yml").read_text()

DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in load() if panel.kind != "row"]
EXPRESSIONS = [query.expr for panel in PANELS for query in panel.queries]
VARIABLES: dict[str, Any] = {each["name"]: each for each in DASHBOARD["templating"]["list"]}

NOT_SHOWN = {
    "load_blocks": "load_bytes is shown",
    "policy_score": "policy_rule is shown",
    "promoted_blocks": "tier_read_bytes is shown",
    "tier_blocks": "tier_used_bytes is shown",
}
"""Metrics that stand on no panel and in no alert, and why."""
LABELS = {"model_name", "engine", "instance", "job"}
"""Labels of every series: those of vLLM, and those that Prometheus adds."""

NAME = re.compile(r"kvoffload:(\w+)(?:\{([^}]*)\})?")


def faults(text: str) -> list[str]:
    """Names of metrics in queries that kvoffload does not export, and labels they do not have."""
    found = []
    for written, selectors in NAME.findall(text):
        name = written.removesuffix("_total")
        spec = METRICS.get(name)
        if spec is None or (spec.kind == "counter") != written.endswith("_total"):
            found.append(written)
            continue
        known = LABELS | set(spec.labels)
        found += [f"{written}{{{label}}}" for label in re.findall(r"(\w+)(?:=|!=)", selectors) if label not in known]
    return found


def shown(text: str) -> set[str]:
    return {name.removesuffix("_total") for name, _ in NAME.findall(text)}


def test_queries_name_only_metrics_that_are_exported() -> None:
    assert faults("\n".join(EXPRESSIONS)) == []
    assert faults(ALERTS) == []
    assert (
        faults("\n".join(variable["query"]["query"] for variable in VARIABLES.values() if variable["type"] == "query"))
        == []
    )


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rate(kvoffload:nothing_total[5m])", "nothing_total"),
        ("kvoffload:host_hit_tokens", "host_hit_tokens"),
        ("kvoffload:off_total", "off_total"),
        ('kvoffload:pool_blocks{tier="disk"}', "pool_blocks{tier}"),
    ],
)
def test_a_wrong_metric_is_found(query: str, fault: str) -> None:
    """Negative control."""
    assert faults(query) == [fault]


def test_every_metric_is_shown_somewhere() -> None:
    seen = shown("\n".join(EXPRESSIONS) + ALERTS)
    assert METRICS.keys() - seen == NOT_SHOWN.keys()
    # Negative control: a metric that only one panel shows is missed without that panel.
    without = [expr for expr in EXPRESSIONS if "wait_seconds" not in expr]
    assert METRICS.keys() - shown("\n".join(without) + ALERTS) == NOT_SHOWN.keys() | {"wait_seconds"}


def test_panels_are_described_and_do_not_overlap() -> None:
    taken: dict[str, set[tuple[int, int]]] = {}
    for panel in PANELS:
        assert panel.unit
        assert re.fullmatch(r"[A-Z][^.]*(\.md[^.]*)?\.", panel.description), f"{panel.title}: write one sentence"
        x, y, width, height = panel.place
        taken[panel.title] = {(x + i, y + j) for i in range(width) for j in range(height)}
        assert max(column for column, _ in taken[panel.title]) < 24
    assert len(taken) == len(PANELS)
    assert [pair for pair in combinations(taken, 2) if taken[pair[0]] & taken[pair[1]]] == []
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_query_can_be_narrowed() -> None:
    """To a model, a server, an engine and, if it has one, a tier. The share that was computed has all tiers."""
    for expr in EXPRESSIONS:
        for name, selectors in NAME.findall(expr):
            wanted = ["model_name", "instance", "engine"]
            if name.startswith("tier_") and "1 - (" not in expr:
                wanted.append("tier")
            assert all(f'{label}=~"${label}"' in selectors for label in wanted), expr
    assert list(VARIABLES) == ["datasource", "model_name", "instance", "engine", "tier"]


# With a real Prometheus.

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)


class Growing:
    """The metrics page of a server with two tiers. All counters grow with each scrape."""

    scrapes = 0

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self.scrapes += 1
        values = {
            "tier": ["disk", "redis"],
            "ability,tier": [f"{ability},{tier}" for ability in Ability for tier in ("disk", "redis")],
            "reason": list(map(str, MissReason)),
            "rule": ["lru", "lirs"],
            "option": ["drop"],
            "answer": ["host", "over_quota"],
            "result": ["sent", "complete"],
        }
        values |= {"tenant": ["search", "other"], "tenant,tier": ["search,host", "other,host"]}
        for name, spec in METRICS.items():
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = kind(f"kvoffload:{name}", spec.help, labels=["model_name", "engine", *spec.labels])
            for value in values[spec.label] if spec.label else [None]:
                amount = 10.0 * self.scrapes if spec.kind == "counter" else 1.0
                family.add_metric(["model", "0", *(value.split(",") if value else [])], amount)
            yield family


def eventually(condition: Any) -> bool:
    deadline = time.monotonic() + 60
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(held)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real Prometheus that has scraped a server several times."""
    client = pytest.importorskip("prometheus_client", reason="needs the package prometheus-client")
    registry, folder = client.CollectorRegistry(auto_describe=False), tmp_path_factory.mktemp("prometheus")
    registry.register(Growing())

    class Page(BaseHTTPRequestHandler):
        """Sends the text format, as vLLM does."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(client.generate_latest(registry))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    exporter = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=exporter.serve_forever).start()
    target = f"127.0.0.1:{exporter.server_port}"
    job = {"job_name": "vllm", "static_configs": [{"targets": [target]}]}
    # JSON is YAML too.
    (folder / "prometheus.yml").write_text(
        json.dumps({"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": [job]})
    )
    (port,) = free_ports(1)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")

    def has_scraped() -> bool:
        with contextlib.suppress(QueryError):
            counted = server.instant("count_over_time(kvoffload:off[1m])", time.time())
            return bool(counted) and float(counted[0][1][0][1]) >= 3
        return False

    try:
        assert eventually(has_scraped), (folder / "log").read_text()
        yield server
    finally:
        exporter.shutdown()
        exporter.server_close()
        process.kill()
        process.wait()


@needs_prometheus
@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_query_has_an_answer(prometheus: Any, panel: Any) -> None:
    for query in panel.queries:
        curves = ask(prometheus, query)
        assert curves, query.expr
        assert all("{{" not in curve for curve in curves)


@needs_prometheus
def test_a_query_that_is_wrong_is_noticed(prometheus: Any) -> None:
    """Negative controls: a mistake in the language, a metric that does not exist, a variable that is unknown."""
    for expr, error in (("sum(", QueryError), ("$nothing", KeyError)):
        with pytest.raises(error):
            ask(prometheus, Query(expr, "", False))
    assert ask(prometheus, Query("kvoffload:nothing", "", False)) == []


@needs_prometheus
def test_alert_rules_can_be_evaluated(prometheus: Any) -> None:
    yaml = pytest.importorskip("yaml", reason="needs the package pyyaml")
    rules = [rule for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]
    firing = {rule["alert"] for rule in rules if prometheus.instant(rule["expr"], time.time())}
    assert {"KvoffloadOff", "KvoffloadTierOff", "KvoffloadTierPaused"} <= firing
    assert "KvoffloadMissing" not in firing
