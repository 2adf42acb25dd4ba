"""The Grafana dashboard asks only for metrics that kvoffload exports, and a real Prometheus answers every query.

That a server's metrics page has exactly the names and kinds of METRICS is tested with real vLLM.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from demo.process import free_ports
from kvoffload.abc import Ability, MissReason
from kvoffload.observe.metrics import METRICS

from . import queries as dashboard

ROOT = Path(__file__).resolve().parents[2]
ALERTS = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
DEADLINE_S = 60

DASHBOARD: dict[str, Any] = json.loads(dashboard.DASHBOARD.read_text())
PANELS = [panel for panel in dashboard.load() if panel.kind != "row"]
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
    deadline = time.monotonic() + DEADLINE_S
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
    server = dashboard.Prometheus(f"http://127.0.0.1:{port}")

    def has_scraped() -> bool:
        with contextlib.suppress(dashboard.QueryError):
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
        curves = dashboard.ask(prometheus, query)
        assert curves, query.expr
        assert all("{{" not in curve for curve in curves)


@needs_prometheus
def test_a_query_that_is_wrong_is_noticed(prometheus: Any) -> None:
    """Negative controls: a mistake in the language, a metric that does not exist, a variable that is unknown."""
    for expr, error in (("sum(", dashboard.QueryError), ("$nothing", KeyError)):
        with pytest.raises(error):
            dashboard.ask(prometheus, dashboard.Query(expr, "", False))
    assert dashboard.ask(prometheus, dashboard.Query("kvoffload:nothing", "", False)) == []


@needs_prometheus
def test_alert_rules_can_be_evaluated(prometheus: Any) -> None:
    yaml = pytest.importorskip("yaml", reason="needs the package pyyaml")
    rules = [rule for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]
    firing = {rule["alert"] for rule in rules if prometheus.instant(rule["expr"], time.time())}
    assert {"KvoffloadOff", "KvoffloadTierOff", "KvoffloadTierPaused"} <= firing
    assert "KvoffloadMissing" not in firing
