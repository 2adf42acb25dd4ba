"""Records of requests: read and written without loss, checked when read, and summarized so that all adds up."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvoffload.abc import MissReason
from kvoffload.observe.metrics import Metrics, merge
from kvoffload.observe.records import MAX_PERIODS, Period, ReasonSummary, RequestRecord, by_reason, over_time

# Records.

HIT = RequestRecord(1.5, "r1", 100, 16, 64)
FROM_DISK = RequestRecord(1.5, "r1", 100, 16, 0, disk_tokens=64, tier_tokens={"disk": 64})
FROM_TIERS = RequestRecord(1.5, "r1", 100, 16, 0, disk_tokens=64, tier_tokens={"disk": 16, "shared_dir": 48})
MISSED = RequestRecord(2.5, "r2", 100, 16, 0, "ab" * 36, MissReason.EVICTED, 12.34)
REFUSED = RequestRecord(
    2.5, "r3", 100, 0, 0, "ab", MissReason.NOT_ADMITTED, policy={"rule": "2q", "scores": {"lru": 1.5, "2q": 3.0}}
)


def test_a_record_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(MISSED.to_dict())) == {
        "time": 2.5,
        "req_id": "r2",
        "tokens_asked": 100,
        "device_tokens": 16,
        "host_tokens": 0,
        "missed_key": "ab" * 36,
        "reason": "evicted",
        "age_s": 12.34,
        "disk_tokens": 0,
        "policy": None,
        "tier_tokens": {},
        "missed_in": None,
        "tenant": None,
        "engine": None,
        "saved_s": None,
        "stored_tokens": 0,
        "retained_tokens": 0,
        "retained_in": None,
        "retain_refused": None,
    }
    assert RequestRecord(**HIT.to_dict()) == HIT


def test_a_record_can_be_read_from_json() -> None:
    for record in (HIT, MISSED, FROM_DISK, FROM_TIERS, REFUSED, replace(HIT, engine="vLLM")):
        data = json.loads(json.dumps(record.to_dict()))
        assert RequestRecord.from_dict(data) == record
        assert RequestRecord.from_dict({**data, "field_of_a_newer_version": [1]}) == record
    needed = ("time", "req_id", "tokens_asked", "device_tokens", "host_tokens")
    data = {name: HIT.to_dict()[name] for name in needed}
    assert RequestRecord.from_dict(data | {"disk_tokens": 0}) == replace(HIT, disk_tokens=0)
    for name in needed:
        with pytest.raises(ValueError, match=f"^{name} is missing"):
            RequestRecord.from_dict({field: value for field, value in data.items() if field != name})


IMPOSSIBLE: dict[str, list[Any]] = {
    "policy": [
        *("2q", {"rule": "2q"}, {"rule": "2q", "scores": {"lru": 1.0}}, {"rule": ["2q"], "scores": {"2q": 1.0}}),
        *({"rule": "2q", "scores": {"2q": True}}, {"rule": "2q", "scores": {f"{n}q": 1.0 for n in range(100)}}),
    ],
    "time": ["1.5", math.nan, math.inf, -1, 10**400, True],
    "req_id": [7, "x" * 5000],
    "tokens_asked": [100.0, -1, 10**400, True, 17],
    "device_tokens": [None],
    "host_tokens": ["64"],
    "disk_tokens": ["64"],
    "tier_tokens": [64, {"disk": 64}, {"disk": "64"}, {str(n): 0 for n in range(100)}, {"x" * 5000: 0}],
    "missed_key": [1],
    "missed_in": [1],
    "reason": ["bad luck", ["evicted"], "\x1b[2J\u202e"],
    "age_s": ["old", -0.5],
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_an_impossible_field_is_named(field: str) -> None:
    for value in IMPOSSIBLE[field]:
        with pytest.raises(ValueError, match=f"^{field}=") as caught:
            RequestRecord.from_dict({**HIT.to_dict(), field: value})
        assert len(str(caught.value)) < 200
        assert str(caught.value).isascii()
        assert str(caught.value).isprintable()


# Summaries.


def missed(at: float, reason: MissReason | None, asked: int = 100, age: float | None = None) -> RequestRecord:
    return RequestRecord(at, f"r{at}", asked, 10, 20, None if reason is None else "ab", reason, age)


def test_reasons_are_ordered_by_missing_tokens() -> None:
    records = [
        missed(1, MissReason.NEVER_STORED, asked=50),
        missed(2, MissReason.EVICTED, age=10.0),
        missed(3, None, asked=10_000),
        missed(4, MissReason.NEVER_STORED, asked=50),
        missed(5, MissReason.EVICTED, age=30.0),
        missed(6, MissReason.EVICTED, age=40.0),
    ]
    assert by_reason(records) == [
        ReasonSummary(MissReason.EVICTED, 3, 210, 30.0),
        ReasonSummary(MissReason.NEVER_STORED, 2, 40, None),
        ReasonSummary(None, 1, 9970, None),
    ]
    assert by_reason([]) == []


def test_periods_begin_at_multiples_of_their_length_and_empty_ones_are_kept() -> None:
    records = [missed(61.0, None), missed(200.0, MissReason.RESET), missed(119.9, MissReason.RESET)]
    assert over_time(records, 60) == [
        Period(60, 60, 2, 200, 20, 40, {MissReason.RESET: 1}),
        Period(120, 60, 0, 0, 0, 0, {}),
        Period(180, 60, 1, 100, 10, 20, {MissReason.RESET: 1}),
    ]
    assert over_time([]) == []


@pytest.mark.parametrize("span", [0.0, 0.5, 11.0, 60.0, 3599.0, 86_400.0, 3e6, 1e8])
def test_there_are_about_twelve_periods_by_default(span: float) -> None:
    start = 1.7e9
    periods = over_time([missed(start, None), missed(start + span, None)])
    assert 1 <= len(periods) <= 14
    assert span < 12 or len(periods) >= 5
    assert periods[0].start <= start < periods[0].start + periods[0].length_s
    assert periods[-1].start <= start + span < periods[-1].start + periods[-1].length_s


def test_the_number_of_periods_is_bounded() -> None:
    records = [missed(0.0, None), missed(float(MAX_PERIODS), None)]
    with pytest.raises(ValueError, match="1,001 periods of 1 s"):
        over_time(records, 1)
    assert len(over_time(records[:1] + [missed(MAX_PERIODS - 1.0, None)], 1)) == MAX_PERIODS


def test_periods_and_reasons_add_up_to_the_records() -> None:
    rng = random.Random(0)
    records = [missed(rng.uniform(1e9, 1e9 + 5000), rng.choice([None, *MissReason])) for _ in range(500)]
    periods, reasons = over_time(records), by_reason(records)
    total = Period.of(records, 0.0, 0.0)
    for name in ("requests", "tokens_asked", "device_tokens", "host_tokens"):
        assert sum(getattr(period, name) for period in periods) == getattr(total, name)
    counts: Counter[MissReason] = Counter()
    for period in periods:
        counts.update(period.misses)
    assert counts == total.misses == {each.reason: each.requests for each in reasons if each.reason is not None}
    assert sum(each.requests for each in reasons) == 500
    assert sum(each.tokens_missing for each in reasons) == sum(record.tokens_missing for record in records)


# Metrics: totals, changes since the last report, and merging the changes of several processes.


def test_counters_add_up_by_label_and_gauges_are_replaced() -> None:
    metrics = Metrics()
    assert metrics.snapshot() == metrics.take() == {}
    metrics.add("store_blocks")
    before = metrics.snapshot()
    metrics.add("store_blocks", 4)
    metrics.add("misses", label="evicted")
    metrics.add("misses", 2, label="reset")
    metrics.set("pool_used_blocks", 7)
    metrics.set("pool_used_blocks", 3)
    assert metrics.snapshot() == {"store_blocks": 5, "misses:evicted": 1, "misses:reset": 2, "pool_used_blocks": 3}
    assert before == {"store_blocks": 1}, "a snapshot does not change later"


def test_take_returns_increases_of_counters_and_new_values_of_gauges() -> None:
    metrics = Metrics()
    metrics.add("store_blocks", 5)
    metrics.add("misses", label="evicted")
    metrics.set("off", 0)
    assert metrics.take() == {"store_blocks": 5, "misses:evicted": 1, "off": 0}
    metrics.add("store_blocks", 2)
    metrics.add("load_blocks", 1)
    assert metrics.take() == {"store_blocks": 2, "load_blocks": 1}
    for _ in range(2):
        metrics.set("off", 1)
    assert metrics.take() == {"off": 1}
    metrics.set("off", 1)
    assert metrics.take() == {}, "nothing changed"
    assert metrics.snapshot()["store_blocks"] == 7, "take keeps the totals"


def test_merged_changes_equal_the_totals() -> None:
    metrics = Metrics()
    seen: dict[str, float] = {}
    for n in range(1, 4):
        metrics.add("load_bytes", n)
        metrics.add("misses", label="reset")
        metrics.set("pool_used_blocks", 10 * n)
        merge(seen, metrics.take())
        merge(seen, {})
    assert seen == metrics.snapshot() == {"load_bytes": 6, "misses:reset": 3, "pool_used_blocks": 30}


def test_an_unknown_name_or_a_wrong_label_is_an_error() -> None:
    metrics = Metrics()
    for name in ("", "nonsense", "misses:evicted", "Off"):
        with pytest.raises(KeyError):
            metrics.add(name)
        with pytest.raises(KeyError):
            metrics.set(name, 1)
    with pytest.raises(KeyError):
        merge({}, {"nonsense": 1})
    with pytest.raises(ValueError, match="misses takes a reason"):
        metrics.add("misses")
    with pytest.raises(ValueError, match="store_blocks takes no label"):
        metrics.add("store_blocks", label="evicted")
    with pytest.raises(ValueError, match="store_blocks is not a gauge"):
        metrics.set("store_blocks", 5)
    assert metrics.snapshot() == {}


def test_counts_of_a_tier_are_taken_in_under_its_label() -> None:
    metrics = Metrics()
    metrics.take_in({"tier_read_bytes:disk": 5, "tier_off:disk": 1})
    metrics.take_in({"tier_read_bytes:disk-2": 2, "tier_read_bytes:disk": 1, "tier_off:disk": 0})
    assert metrics.snapshot() == {"tier_read_bytes:disk": 6, "tier_read_bytes:disk-2": 2, "tier_off:disk": 0}
    with pytest.raises(ValueError, match="takes a tier"):
        metrics.take_in({"tier_read_bytes": 1})
