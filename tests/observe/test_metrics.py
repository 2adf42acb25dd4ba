"""Metrics: totals, changes since the last report, and merging the changes of several processes."""

from __future__ import annotations

import pytest

from kvoffload.observe.metrics import Metrics, merge


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
