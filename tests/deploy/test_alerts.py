"""Alert rules in Prometheus' own test program: each fires for its fault and only for that, and none for a healthy
server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs the package pyyaml")

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
RUNBOOKS = ROOT / "docs" / "monitoring.md"
RULES: dict[str, Any] = {
    rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
}
STEP = "5m"
END = "8h"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)

ENGINE = 'job="vllm",instance="a:8000",engine="0",model_name="m"'
HEALTHY = {
    'up{job="vllm",instance="a:8000"}': "1x96",
    "kvoffload:off": "0x96",
    "kvoffload:pool_blocks": "1000x96",
    "kvoffload:pool_used_blocks": "500x96",
    "kvoffload:asked_tokens_total": "0+300000x96",
    "kvoffload:host_hit_tokens_total": "0+100000x96",
    "kvoffload:misses_total:never_stored": "0+150x96",
    "kvoffload:misses_total:evicted": "0+50x96",
    "kvoffload:store_blocks_total": "0+3000x96",
    "kvoffload:store_failures_total": "0+5x96",
    "kvoffload:load_failures_total": "0x96",
    "kvoffload:refused_stores_total": "0x96",
    "kvoffload:tenant_lost_retained_blocks_total:disk": "0x96",
    "kvoffload:late_promotions_total": "0x96",
    "kvoffload:tier_hit_tokens_total:disk": "0+50000x96",
    "kvoffload:tier_off:disk": "0x96",
    "kvoffload:tier_paused:read,disk": "0x96",
    "kvoffload:tier_paused:write,disk": "0x96",
    "kvoffload:tier_capacity_bytes:disk": "1e12x96",
    "kvoffload:tier_bad_blocks_total:disk": "0x96",
    "kvoffload:tier_read_failures_total:disk": "0+5x96",
    "kvoffload:tier_write_failures_total:disk": "0x96",
    "kvoffload:tier_lookup_failures_total:disk": "0+5x96",
    "kvoffload:tier_dropped_writes_total:disk": "0+50x96",
    "kvoffload:tier_write_blocks_total:disk": "0+2500x96",
    # A store that bounds itself has no budget.
    "kvoffload:tier_capacity_bytes:redis": "0x96",
}
"""A value every five minutes, as promtool writes series: "0+50x96" grows by 50 each time. The last part of a name with
three parts is the reason or the tier."""
HOSTS_ONLY = {name: values for name, values in HEALTHY.items() if "tier_" not in name}

FAULTS: dict[str, dict[str, str]] = {
    "KvoffloadOff": {"kvoffload:off": "0x93 1x3"},
    "KvoffloadMissing": {'up{job="vllm",instance="b:8000"}': "1x96"},
    "KvoffloadTierOff": {"kvoffload:tier_off:disk": "0x93 1x3"},
    "KvoffloadTierPaused": {"kvoffload:tier_paused:write,disk": "0x93 1x3"},
    "KvoffloadTierMissing": {"kvoffload:tier_capacity_bytes:disk": "0x96"},
    "KvoffloadBadBlocks": {"kvoffload:tier_bad_blocks_total:disk": "0x92 1x4"},
    "KvoffloadTierFailures": {"kvoffload:tier_write_failures_total:disk": "0+25x96"},
    "KvoffloadCopyFailures": {"kvoffload:load_failures_total": "0x93 1x3"},
    "KvoffloadLookupFailures": {"kvoffload:tier_lookup_failures_total:disk": "0+300x96"},
    "KvoffloadLatePromotions": {"kvoffload:late_promotions_total": "0+15x96"},
    "KvoffloadDroppedWrites": {"kvoffload:tier_dropped_writes_total:disk": "0+500x96"},
    "KvoffloadLostRetained": {"kvoffload:tenant_lost_retained_blocks_total:disk": "0x93 1x3"},
    "KvoffloadNoRoom": {"kvoffload:refused_stores_total": "0+5x96"},
    "KvoffloadEvictedTooEarly": {"kvoffload:misses_total:evicted": "0+200x96"},
    "KvoffloadFewHits": {
        "kvoffload:host_hit_tokens_total": "0+500x96",
        "kvoffload:tier_hit_tokens_total:disk": "0+500x96",
    },
}
"""What differs from a healthy server, by the alert that says so. All other series stay as they are."""
BRIEF: dict[str, dict[str, str]] = {
    "a tier that has just been paused": {"kvoffload:tier_paused:read,disk": "0x95 1x1"},
    "a server that starts": {'up{job="vllm",instance="b:8000"}': "_x95 1x1"},
    "an idle server": dict.fromkeys((name for name in HEALTHY if name.endswith("_tokens_total")), "5x96")
    | {"kvoffload:misses_total:never_stored": "5x96", "kvoffload:misses_total:evicted": "5x96"},
}
"""What is no fault."""


def series(values: dict[str, str]) -> list[dict[str, str]]:
    found = []
    for name, each in values.items():
        prefix, _, rest = name.partition(":")
        metric, _, label = rest.partition(":")
        keys = ["reason"] if metric.startswith("misses") else ["tier", "ability"]
        # The tier is the last one.
        labels = ",".join(
            [ENGINE, *(f'{key}="{each}"' for key, each in zip(keys, label.split(",")[::-1], strict=False))]
        )
        labels = labels if label else ENGINE
        found.append({"series": f"{prefix}:{metric}{{{labels}}}" if prefix == "kvoffload" else name, "values": each})
    return found


QUERIES: dict[str, str] = {
    comment: query
    for fenced in re.findall(r"```promql\n(.*?)```", RUNBOOKS.read_text(), re.S)
    for comment, _, query in (each.partition("\n") for each in fenced.strip().split("\n\n"))
}
"""Those of the page, by the comment above each."""


def case(values: dict[str, str], firing: list[str]) -> dict[str, Any]:
    """Returns a test of promtool: exactly the alerts ``firing`` fire at the end, each once."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    query = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": END, "exp_samples": samples}
    return {"interval": STEP, "input_series": series(values), "promql_expr_test": [query]}


def promtool(path: Path, *cases: dict[str, Any]) -> tuple[int, str]:
    # JSON is YAML too.
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": STEP, "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    assert set(FAULTS) == set(RULES)


@needs_promtool
def test_each_alert_fires_for_its_fault_only(tmp_path: Path) -> None:
    code, output = promtool(tmp_path / "rules.yml", *(case(HEALTHY | fault, [name]) for name, fault in FAULTS.items()))
    assert code == 0, output


@needs_promtool
def test_no_alert_fires_for_a_healthy_server(tmp_path: Path) -> None:
    healthy = [HEALTHY, HOSTS_ONLY, *(HEALTHY | change for change in BRIEF.values())]
    code, output = promtool(tmp_path / "rules.yml", *(case(values, []) for values in healthy))
    assert code == 0, output


@needs_promtool
def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    """Negative controls: an alert that is expected and does not fire, and one that fires and is not expected."""
    for values, firing in ((HEALTHY, ["KvoffloadOff"]), (HEALTHY | FAULTS["KvoffloadOff"], [])):
        code, output = promtool(tmp_path / "rules.yml", case(values, firing))
        assert code != 0, output


def answered(values: dict[str, str], query: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a test of promtool: ``query`` has these answers at the end."""
    test = {"expr": query, "eval_time": END, "exp_samples": samples}
    return {"interval": STEP, "input_series": series(values), "promql_expr_test": [test]}


@needs_promtool
@pytest.mark.parametrize("values", [HEALTHY, HOSTS_ONLY], ids=["tiers", "hosts only"])
def test_each_query_of_the_page_can_be_pasted(tmp_path: Path, values: dict[str, str]) -> None:
    loaded = 0.5 if values is HEALTHY else 1 / 3
    labels = f"{{{ENGINE}}}"
    expected = [
        [{"labels": "{}", "value": loaded}],
        [{"labels": '{reason="never_stored"}', "value": 1800}, {"labels": '{reason="evicted"}', "value": 600}],
        [{"labels": labels, "value": 0.5}],
        [],
    ]
    assert all(comment.startswith("# ") for comment in QUERIES)
    cases = [answered(values, query, each) for query, each in zip(QUERIES.values(), expected, strict=True)]
    code, output = promtool(tmp_path / "rules.yml", *cases)
    assert code == 0, output


def anchors(text: str) -> set[str]:
    return {line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")}


def test_every_alert_has_a_runbook() -> None:
    for name, rule in RULES.items():
        page, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert section == name.lower()
        assert section in anchors((ROOT / page).read_text()), f"{page} has no section {name}"
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@needs_promtool
def test_the_example_configuration_is_valid() -> None:
    path = ALERTS.with_name("prometheus.yml")
    done = subprocess.run(["promtool", "check", "config", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    config = yaml.safe_load(path.read_text())
    assert config["rule_files"] == [ALERTS.name]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["vllm"]
    assert 'job="vllm"' in RULES["KvoffloadMissing"]["expr"]
