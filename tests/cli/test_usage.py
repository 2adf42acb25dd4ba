"""``kvoffload usage``: the sums of tenants agree with the metrics of the scheduler half, to the token."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvoffload.abc import RetainRefusal
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import TenantConfig, Tenants
from kvoffload.cli.usage import usage
from kvoffload.connector import observer
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.server import RecordServer
from kvoffload.observe.usage import Bill, TierUsage, bill_of
from tests.connector.rig import TOKENS, FakeRequest, Rig, prompt
from tests.connector.test_tiered_scheduler import TieredRig

BLOCK_BYTES = 64
TENANTS = Tenants(b"", [TenantConfig("a"), TenantConfig("b")])


def play(used: Rig, num_requests: int, settle: Any = None, retain_s: int | None = 1) -> None:
    """Serves random requests of tenants, some of which find something on the device."""
    retain = {} if retain_s is None else {"retain_s": retain_s}
    rng = random.Random(5)
    for i in range(num_requests):
        tokens = prompt(rng.randrange(TOKENS, 9 * TOKENS), start=1000 * rng.randrange(6))
        tenant = rng.choice(["a", "b", "another"])
        request = FakeRequest(f"r{i}", tokens, {"kvoffload": {"tenant": tenant, **retain}})
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
        while meta.loads:
            # It may come in pieces.
            meta = used.step()
            used.report(*meta.stores, *meta.loads)
        if not found:
            # Its first token, with which the measurement of its prefill ends.
            request.tokens = [*request.tokens, 7]
            used.report(*used.step({request: 1}).stores)
        used.half.request_finished(request)
        used.report(*used.step().stores)
        if settle:
            settle()


Show = Callable[..., Any]


def totals_of(bill: Bill) -> list[tuple[str, float]]:
    return [
        (f"tenant_{name}:{tenant},{tier}", total)
        for tenant, tiers in bill.items()
        for tier, used in tiers.items()
        for name, total in asdict(used).items()
    ]


@pytest.fixture
def usage_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Show]:
    """Runs the command beside a server in this process that has the given records and bill, or one per bill."""
    with contextlib.ExitStack() as servers:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

        def run(records: Sequence[RequestRecord], *options: str, bills: Sequence[Bill] = ({},)) -> Any:
            for i, bill in enumerate(bills):
                served = records if i == 0 else []
                server = RecordServer(partial(list, served), f"s{i}", partial(totals_of, bill))
                servers.callback(server.close)
            result = CliRunner().invoke(usage, ["--pid", str(os.getpid()), *options])
            servers.close()
            assert result.exit_code == 0, result.output
            return json.loads(result.output) if "--json" in options else result.output

        yield run


def exclusive_rig(options: dict[str, Any]) -> Rig:
    """Host memory does not repeat the device, of which a few blocks are handed out in turn."""
    manager = PolicyOffloadingManager(HostBackend(TOKENS, 64), LRUPolicy(64), must_store=True, device_blocks=20)

    class SmallDevice(Rig):
        def new_blocks(self, n: int) -> list[int]:
            return [1 + i % 20 for i in super().new_blocks(n)]

    engine = {"keeps_blocks": True, "device_blocks": 20}
    return SmallDevice(manager=manager, options={"misses": manager.history.misses, **options, **engine})


@pytest.mark.parametrize("kind", ["plain", "tiered", "exclusive"])
def test_sums_agree_with_the_metrics_to_the_token(kind: str, usage_of: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "MIN_PREFILL_SAMPLE", 1)
    options: dict[str, Any] = {"tenants": TENANTS, "slot_bytes": [BLOCK_BYTES]}
    is_tiered, is_exclusive = kind == "tiered", kind == "exclusive"
    used = TieredRig(**options) if is_tiered else exclusive_rig(options) if is_exclusive else Rig(options=dict(options))

    def settle() -> None:
        if is_tiered:
            used.manager.executor.drain()
        # What the engine has forgotten on the device is stored for a request that waits for it.
        used.report(*used.step().stores)

    play(used, 200, settle, None if is_exclusive else 1)
    metrics = used.half.metrics.snapshot()
    report = usage_of(list(used.half.records), "--json", bills=[bill_of(metrics)])
    total = report["total"]
    assert total["requests"] == 200
    assert total["tokens_asked"] == metrics["asked_tokens"]
    assert total["device_tokens"] == metrics["device_hit_tokens"]
    assert total["host_tokens"] == metrics["host_hit_tokens"]
    assert total["stored_tokens"] == TOKENS * metrics["store_blocks"] > 0
    assert total["tier_tokens"] == {
        name.partition(":")[2]: count for name, count in metrics.items() if name.startswith("tier_hit_tokens:")
    }
    refusals = {name: count for name, count in metrics.items() if name.startswith("retentions:")}
    assert total["retentions_refused"] == sum(refusals.values()) == (0 if is_exclusive else 200)
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


def test_the_table_has_a_row_per_tenant_and_a_total(usage_of: Show) -> None:
    shown = usage_of(RECORDS)
    rows = [line.split() for line in shown.splitlines()]
    assert ["a", "1", "100", "16", "64", "20", "1.5", "s"] in rows
    assert ["b", "1", "50", "0", "0", "50", "0.0", "s"] in rows
    assert ["total", "2", "150", "16", "64", "70", "1.5", "s"] in rows
    assert ["a", "32", "96", "1", "0"] in rows
    assert ["b", "0", "0", "0", "1"] in rows
    assert ["total", "32", "96", "1", "1"] in rows
    assert "total" not in usage_of(RECORDS, "--tenant", "a")


GIB_HOURS = 3600.0 * (1 << 30)


def test_bills_of_several_servers_are_added_up(usage_of: Show) -> None:
    bills = [
        {"a": {"host": TierUsage(2 * GIB_HOURS, 1 * GIB_HOURS, 3 << 30)}, "b": {"disk": TierUsage(GIB_HOURS)}},
        {"a": {"host": TierUsage(4 * GIB_HOURS, 0, 1 << 30)}},
    ]
    rows = [line.split() for line in usage_of(RECORDS, bills=bills).splitlines()]
    assert ["a", "host", "6.00", "1.00", "4", "GiB"] in rows
    assert ["b", "disk", "1.00", "0.00", "0", "bytes"] in rows
    assert ["total", "host", "6.00", "1.00", "4", "GiB"] in rows
    assert ["total", "disk", "1.00", "0.00", "0", "bytes"] in rows
    only_b = usage_of(RECORDS, "--tenant", "b", "--json", bills=bills)
    assert set(only_b["total"]["tiers"]) == {"disk"}
