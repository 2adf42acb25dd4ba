"""Metrics: totals, changes since the last report, and merging the changes of several processes."""

from __future__ import annotations

import pytest

from kvoffload.observe.metrics import METRICS, Metrics, merge


def test_counters_add_up_and_gauges_are_replaced() -> None:
    metrics = Metrics()
    metrics.add("store_blocks")
    metrics.add("store_blocks", 4)
    metrics.set("pool_used_blocks", 7)
    metrics.set("pool_used_blocks", 3)
    assert metrics.snapshot() == {"store_blocks": 5, "pool_used_blocks": 3}


def test_each_label_has_its_own_count() -> None:
    metrics = Metrics()
    metrics.add("misses", label="evicted")
    metrics.add("misses", 2, label="reset")
    assert metrics.snapshot() == {"misses:evicted": 1, "misses:reset": 2}


def test_there_are_no_totals_at_the_start() -> None:
    assert Metrics().snapshot() == {}
    assert Metrics().take() == {}


def test_take_returns_increases_of_counters_and_new_values_of_gauges() -> None:
    metrics = Metrics()
    metrics.add("store_blocks", 5)
    metrics.add("misses", label="evicted")
    metrics.set("off", 0)
    assert metrics.take() == {"store_blocks": 5, "misses:evicted": 1, "off": 0}
    metrics.add("store_blocks", 2)
    metrics.add("load_blocks", 1)
    assert metrics.take() == {"store_blocks": 2, "load_blocks": 1}
    metrics.set("off", 1)
    assert metrics.take() == {"off": 1}
    metrics.set("off", 1)
    assert metrics.take() == {}, "nothing changed"
    assert metrics.snapshot()["store_blocks"] == 7, "take keeps the totals"


def test_counts_kept_elsewhere_are_read_on_demand() -> None:
    def read() -> None:
        metrics.add("store_blocks")

    metrics = Metrics(read)
    assert metrics.take() == {"store_blocks": 1}
    assert metrics.take() == {"store_blocks": 1}
    assert metrics.snapshot() == {"store_blocks": 3}


def test_a_snapshot_does_not_change_later() -> None:
    metrics = Metrics()
    metrics.add("store_blocks")
    before = metrics.snapshot()
    metrics.add("store_blocks")
    assert before == {"store_blocks": 1}


def test_merged_changes_equal_the_totals() -> None:
    metrics = Metrics()
    seen: dict[str, float] = {}
    for n in range(1, 4):
        metrics.add("load_bytes", n)
        metrics.add("misses", label="reset")
        metrics.set("pool_used_blocks", 10 * n)
        merge(seen, metrics.take())
    assert seen == metrics.snapshot() == {"load_bytes": 6, "misses:reset": 3, "pool_used_blocks": 30}


def test_merging_no_changes_has_no_effect() -> None:
    seen = {"load_bytes": 3.0, "off": 1.0}
    merge(seen, {})
    assert seen == {"load_bytes": 3, "off": 1}


@pytest.mark.parametrize("name", ["", "nonsense", "misses:evicted", "Off"])
def test_an_unknown_metric_is_an_error(name: str) -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.add(name)
    with pytest.raises(KeyError):
        metrics.set(name, 1)
    if ":" not in name:
        with pytest.raises(KeyError):
            merge({}, {name: 1})


def test_a_missing_or_superfluous_label_is_an_error() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="misses takes a reason"):
        metrics.add("misses")
    with pytest.raises(ValueError, match="store_blocks takes no label"):
        metrics.add("store_blocks", label="evicted")
    assert metrics.snapshot() == {}


def test_only_gauges_can_be_set() -> None:
    with pytest.raises(ValueError, match="store_blocks is not a gauge"):
        Metrics().set("store_blocks", 5)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_described(name: str) -> None:
    spec = METRICS[name]
    assert spec.kind in ("counter", "gauge")
    assert spec.help
    assert name.isidentifier()
    assert name.islower()


def test_counts_of_a_tier_are_taken_in_under_its_label() -> None:
    metrics = Metrics()
    metrics.take_in({"tier_read_bytes:disk": 5, "tier_off:disk": 1})
    metrics.take_in({"tier_read_bytes:disk-2": 2, "tier_read_bytes:disk": 1, "tier_off:disk": 0})
    assert metrics.snapshot() == {
        "tier_read_bytes:disk": 6,
        "tier_read_bytes:disk-2": 2,
        "tier_off:disk": 0,
    }
    with pytest.raises(ValueError, match="takes a tier"):
        metrics.take_in({"tier_read_bytes": 1})
