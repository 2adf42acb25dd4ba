"""``kvoffload usage``: the sums of tenants agree with the metrics of the scheduler half, to the token."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvoffload.abc import RetainRefusal
from kvoffload.cache.tenants import TenantConfig, Tenants
from kvoffload.cli.usage import MAX_ROWS, MAX_TIER_COLUMNS, usage
from kvoffload.connector import observer
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.usage import Bill, TierUsage, Usage, by_tenant, to_json
from tests.connector.rig import TOKENS, FakeRequest, Rig, prompt
from tests.connector.test_tiered_scheduler import TieredRig

BLOCK_BYTES = 64
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
        used.clock.now += 0.5
        meta = used.step(None if found else {request: len(tokens)}, new=None if found else {request.request_id: ids})
        used.report(*meta.stores, *meta.loads)
        if not found:
            # Its first token, with which the measurement of its prefill ends.
            request.tokens = [*request.tokens, 7]
            used.report(*used.step({request: 1}).stores)
        used.half.request_finished(request)
        used.report(*used.step().stores)
        if settle:
            settle()


def usage_of(
    records: list[RequestRecord], tmp_path: Path, *options: str, bills: Sequence[tuple[str, Bill]] = ()
) -> Any:
    """``bills``: each with the server that logs it."""
    log = tmp_path / "log"
    lines = [f"kvoffload: record {json.dumps(record.to_dict())}\n" for record in records]
    lines += [f"kvoffload: usage {json.dumps({'server': of, 'usage': to_json(bill)})}\n" for of, bill in bills]
    log.write_text("".join(lines))
    result = CliRunner().invoke(usage, [str(log), *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.output) if "--json" in options else result.output


@pytest.mark.parametrize("is_tiered", [False, True])
def test_sums_agree_with_the_metrics_to_the_token(
    is_tiered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "MIN_PREFILL_SAMPLE", 1)
    options: dict[str, Any] = {"tenants": TENANTS, "block_bytes": BLOCK_BYTES}
    used = TieredRig(**options) if is_tiered else Rig(options=dict(options))

    def settle() -> None:
        if is_tiered:
            used.manager.executor.drain()
            used.step()

    play(used, 200, settle)
    metrics = used.half.metrics.snapshot()
    bills = [("s", used.half.observer.bill())]
    report = usage_of(list(used.half.records), tmp_path, "--json", bills=bills)
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
        assert each["saved_s"] == pytest.approx(metrics[f"tenant_saved_seconds:{each['tenant']}"])
    assert {each["tenant"] for each in report["tenants"]} == {"a", "b", "other"}
    assert total["saved_s"] == pytest.approx(metrics["saved_seconds"])
    assert total["saved_s"] > 0
    moved = sum(each["tiers"]["host"]["moved_bytes"] for each in report["tenants"])
    assert moved == total["tiers"]["host"]["moved_bytes"]
    assert moved == BLOCK_BYTES * (metrics["store_blocks"] + metrics["load_blocks"])


RECORDS = [
    RequestRecord(
        1.0, "r1", 100, 16, 64, tenant="a", saved_s=1.5, stored_tokens=32, retained_tokens=96, retained_in="host"
    ),
    RequestRecord(2.0, "r2", 50, 0, 0, tenant="b", retain_refused=RetainRefusal.OVER_QUOTA),
]


def test_the_table_has_a_row_per_tenant_and_a_total(tmp_path: Path) -> None:
    shown = usage_of(RECORDS, tmp_path)
    rows = [line.split() for line in shown.splitlines()]
    assert ["a", "1", "100", "16", "64", "20", "1.5", "s"] in rows
    assert ["b", "1", "50", "0", "0", "50", "0.0", "s"] in rows
    assert ["total", "2", "150", "16", "64", "70", "1.5", "s"] in rows
    assert ["a", "32", "96", "1", "0"] in rows
    assert ["b", "0", "0", "0", "1"] in rows
    assert ["total", "32", "96", "1", "1"] in rows
    assert "total" not in usage_of(RECORDS, tmp_path, "--tenant", "a")


def test_records_keep_what_was_stored_and_retained() -> None:
    read = [RequestRecord.from_dict(json.loads(json.dumps(record.to_dict()))) for record in RECORDS]
    assert [record.to_dict() for record in read] == [record.to_dict() for record in RECORDS]
    assert by_tenant(read, {})[0] == Usage.of("a", RECORDS[:1], {})
    assert "saved about 1.5 s" in str(RECORDS[0])
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


GIB_HOURS = 3600.0 * (1 << 30)


def test_the_latest_bill_of_each_server_counts(tmp_path: Path) -> None:
    bills = [
        ("one", {"a": {"host": TierUsage(1 * GIB_HOURS, 0, 1 << 30)}}),
        ("one", {"a": {"host": TierUsage(2 * GIB_HOURS, 1 * GIB_HOURS, 3 << 30)}, "b": {"disk": TierUsage(GIB_HOURS)}}),
        ("two", {"a": {"host": TierUsage(4 * GIB_HOURS, 0, 1 << 30)}}),
    ]
    rows = [line.split() for line in usage_of(RECORDS, tmp_path, bills=bills).splitlines()]
    assert ["a", "host", "6.00", "1.00", "4", "GiB"] in rows
    assert ["b", "disk", "1.00", "0.00", "0", "bytes"] in rows
    assert ["total", "host", "6.00", "1.00", "4", "GiB"] in rows
    assert ["total", "disk", "1.00", "0.00", "0", "bytes"] in rows
    only_b = usage_of(RECORDS, tmp_path, "--tenant", "b", "--json", bills=bills)
    assert set(only_b["total"]["tiers"]) == {"disk"}


def test_engines_of_one_process_have_a_bill_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvoffload")
    moved = 0.0
    for _ in range(2):
        used = Rig(options={"tenants": TENANTS, "block_bytes": BLOCK_BYTES})
        play(used, 10)
        used.half.metrics.snapshot()
        used.half.observer.close()
        moved += sum(tiers["host"].moved_bytes for tiers in used.half.observer.bill().values())
    (tmp_path / "log").write_text("\n".join(map(logging.Formatter().format, caplog.records)))
    report = json.loads(CliRunner().invoke(usage, [str(tmp_path / "log"), "--json"]).output)
    assert report["total"]["tiers"]["host"]["moved_bytes"] == moved > 0


def test_a_log_of_many_tenants_and_tiers_is_shown_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    found = [
        RequestRecord(1.0, f"r{i}", 1 + 16 * i, 0, 0, disk_tokens=1, tier_tokens={f"tier-{i}": 1}, tenant=f"t{i}")
        for i in range(3000)
    ]
    bills: list[tuple[str, Bill]] = [
        (f"s{i}", {f"t{i}-{j}": {f"tier-{i}-{j}": TierUsage(GIB_HOURS)} for j in range(10)}) for i in range(300)
    ]
    shown = usage_of(found, tmp_path, bills=bills)
    assert len(shown.splitlines()) < 6 * MAX_ROWS
    assert "The total includes 5,744 tenants with fewer tokens" in shown
    assert f"Only {MAX_ROWS} rows of tenants and of the total" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert max(map(len, rows)) < 2 * MAX_TIER_COLUMNS
    assert len([row for row in rows if row[:1] == ["total"]]) == 2 + MAX_ROWS
    assert len(usage_of(found, tmp_path, "--json", bills=bills)["tenants"]) == 6000


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(json.dumps(replace(RECORDS[0], tenant="k\xfcche").to_dict()) + "\n")
    result = CliRunner(charset="ascii").invoke(usage, [str(tmp_path / "log")])
    assert result.exit_code == 0
    assert "k\\xfcche" in result.output


@pytest.mark.parametrize("wrong", ["[]", '{"a": 1}', '{"a": {"host": {"byte_seconds": -1}}}', '{"a": {"host": []}}'])
def test_a_malformed_bill_is_skipped_and_named(wrong: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    record = json.dumps(RECORDS[0].to_dict())
    log.write_text(f'kvoffload: record {record}\nkvoffload: usage {{"server": "s", "usage": {wrong}}}\n')
    result = CliRunner().invoke(usage, [str(log)])
    assert result.exit_code == 0
    assert "skipped 1 malformed record" in result.output
