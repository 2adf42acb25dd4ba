"""``kvoffload usage``: the sums of tenants agree with the metrics of the scheduler half, to the token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvoffload.abc import RetainRefusal
from kvoffload.cache.tenants import TenantConfig, Tenants
from kvoffload.cli.usage import usage
from kvoffload.observe.records import RequestRecord, Usage, by_tenant
from tests.connector.rig import TOKENS, FakeRequest, Rig, prompt
from tests.connector.test_tiered_scheduler import TieredRig

TENANTS = Tenants(b"", [TenantConfig("a"), TenantConfig("b")])


def play(used: Rig, num_requests: int, settle: Any = None) -> None:
    """Serves random requests of tenants, some of which find something on the device."""
    rng = random.Random(5)
    for i in range(num_requests):
        tokens = prompt(rng.randrange(TOKENS, 9 * TOKENS), start=1000 * rng.randrange(6))
        tenant = rng.choice(["a", "b", "another"])
        request = FakeRequest(f"r{i}", tokens, {"kvoffload": {"tenant": tenant, "retain_s": 1}})
        computed = rng.choice([0, 0, TOKENS])
        while True:
            found, _ = used.look_up(request, computed)
            if found is not None:
                break
            settle()
        ids = used.new_blocks(-(-len(tokens) // TOKENS))
        used.allocate(request, ids, found)
        meta = used.step(None if found else {request: len(tokens)}, new=None if found else {request.request_id: ids})
        used.report(*meta.stores, *meta.loads)
        used.half.request_finished(request)
        used.report(*used.step().stores)
        if settle:
            settle()


def usage_of(records: list[RequestRecord], tmp_path: Path, *options: str) -> Any:
    log = tmp_path / "log"
    log.write_text("".join(f"kvoffload: record {json.dumps(record.to_dict())}\n" for record in records))
    result = CliRunner().invoke(usage, [str(log), *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.output) if "--json" in options else result.output


@pytest.mark.parametrize("is_tiered", [False, True])
def test_sums_agree_with_the_metrics_to_the_token(is_tiered: bool, tmp_path: Path) -> None:
    used = TieredRig(tenants=TENANTS) if is_tiered else Rig(options={"tenants": TENANTS})

    def settle() -> None:
        if is_tiered:
            used.manager.executor.drain()
            used.step()

    play(used, 200, settle)
    report, metrics = usage_of(list(used.half.records), tmp_path, "--json"), used.half.metrics.snapshot()
    total = report["total"]
    assert total["requests"] == 200
    assert total["tokens_asked"] == metrics["asked_tokens"]
    assert total["device_tokens"] == metrics["device_hit_tokens"]
    assert total["host_tokens"] == metrics["host_hit_tokens"]
    assert total["stored_tokens"] == TOKENS * metrics["store_blocks"]
    assert total["tier_tokens"] == {
        name.partition(":")[2]: count for name, count in metrics.items() if name.startswith("tier_hit_tokens:")
    }
    refusals = {name: count for name, count in metrics.items() if name.startswith("retentions:")}
    assert total["retentions_refused"] == sum(refusals.values()) == 200
    assert bool(total["tier_tokens"]) == is_tiered
    for each in report["tenants"]:
        asked, hit = (metrics[f"tenant_{what}_tokens:{each['tenant']}"] for what in ("asked", "hit"))
        assert each["tokens_asked"] == asked
        assert each["host_tokens"] + sum(each["tier_tokens"].values()) == hit
        found = each["device_tokens"] + each["host_tokens"] + sum(each["tier_tokens"].values())
        assert each["tokens_computed"] == asked - found
    assert {each["tenant"] for each in report["tenants"]} == {"a", "b", "other"}


RECORDS = [
    RequestRecord(1.0, "r1", 100, 16, 64, tenant="a", stored_tokens=32, retained_tokens=96, retained_in="host"),
    RequestRecord(2.0, "r2", 50, 0, 0, tenant="b", retain_refused=RetainRefusal.OVER_QUOTA),
]


def test_the_table_has_a_row_per_tenant_and_a_total(tmp_path: Path) -> None:
    shown = usage_of(RECORDS, tmp_path)
    rows = [line.split() for line in shown.splitlines()]
    assert ["a", "1", "100", "16", "64", "20", "32", "96", "0"] in rows
    assert ["b", "1", "50", "0", "0", "50", "0", "0", "1"] in rows
    assert ["total", "2", "150", "16", "64", "70", "32", "96", "1"] in rows
    assert "total" not in usage_of(RECORDS, tmp_path, "--tenant", "a")


def test_records_keep_what_was_stored_and_retained() -> None:
    read = [RequestRecord.from_dict(json.loads(json.dumps(record.to_dict()))) for record in RECORDS]
    assert [record.to_dict() for record in read] == [record.to_dict() for record in RECORDS]
    assert by_tenant(read)[0] == Usage.of("a", RECORDS[:1])
    assert "96 retained in host" in str(RECORDS[0])
    assert "not retained: over_quota" in str(RECORDS[1])
    with pytest.raises(ValueError, match="retain_refused"):
        RequestRecord.from_dict({**RECORDS[0].to_dict(), "retain_refused": "nonsense"})


def test_a_log_line_at_the_end_of_a_request_replaces_the_first_one(tmp_path: Path) -> None:
    first = RequestRecord(1.0, "r1", 100, 16, 64, tenant="a")
    total = usage_of([first, RECORDS[0]], tmp_path, "--json")["total"]
    assert (total["requests"], total["stored_tokens"]) == (1, 32)


def test_a_log_without_records_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("nothing\n")
    assert CliRunner().invoke(usage, [str(tmp_path / "log")]).exit_code == 2
