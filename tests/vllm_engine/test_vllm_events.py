"""Events and metrics of tiers in vLLM's form, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvoffload.abc import BlockDescription, KVGroup, MissReason, OffloadingEvent, OffloadKey
from kvoffload.cache.keys import NAMESPACE_BYTES, make_offload_key
from kvoffload.connector.parts import Parts
from kvoffload.observe.metrics import METRICS
from tests.lazy import lazily

events, metrics_module = lazily("kvoffload.vllm.events"), lazily("kvoffload.vllm.metrics")
kv_events = lazily("vllm.distributed.kv_events")

pytestmark = pytest.mark.vllm

TOKENS = 4


@dataclass(eq=False)
class FakeRequest:
    """What events need of a request."""

    all_token_ids: list[int]
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: str | None = None
    prompt_embeds: Any = None


def block_hash(i: int) -> bytes:
    return bytes([i]) * 32


def key(i: int, part: int = 0) -> OffloadKey:
    return make_offload_key(bytes(NAMESPACE_BYTES) + block_hash(i), part)


def translator(lookahead: int = 0, num_parts: int = 1, **options: Any) -> Any:
    spec = lazily("vllm.v1.kv_cache_interface").FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=1, dtype=lazily("torch").float32
    )
    groups = [SimpleNamespace(group=KVGroup(TOKENS, lookahead=lookahead), spec=spec)]
    layout: Any = SimpleNamespace(groups=groups, parts=Parts((num_parts,)))
    return events.EventTranslator(layout, **options)


def in_host(*numbers: int, removed: bool = False) -> OffloadingEvent:
    """An event of blocks of one chain, whose tokens are 0, 1, 2, ..."""
    request: Any = FakeRequest(list(range(100)))
    blocks: list[BlockDescription | None] = [
        BlockDescription(request, i * TOKENS, (i + 1) * TOKENS, block_hash(i), block_hash(i - 1) if i else None)
        for i in numbers
    ]
    return OffloadingEvent(list(map(key, numbers)), "CPU", removed, None if removed else blocks)


def in_tier(*numbers: int, tier: str = "disk", removed: bool = False, is_shared: bool = False) -> OffloadingEvent:
    return OffloadingEvent(list(map(key, numbers)), "STORAGE", removed, tier=tier, is_shared=is_shared)


def test_a_block_of_a_tier_has_the_contents_that_it_had_in_host_memory() -> None:
    made = translator()
    (host,) = made.translate([in_host(0, 1)], True)
    (tier,) = made.translate([in_tier(0, 1)], True)
    assert isinstance(host, kv_events.BlockStored)
    assert (host.medium, host.locality, host.ownership) == ("CPU", None, None)
    assert isinstance(tier, kv_events.BlockStored)
    assert (tier.medium, tier.locality, tier.ownership) == ("STORAGE", "LOCAL", "disk")
    for event in (host, tier):
        assert event.token_ids == list(range(2 * TOKENS))
        assert (event.block_size, len(event.block_hashes), event.parent_block_hash) == (TOKENS, 2, None)
    assert tier.block_hashes == host.block_hashes


def test_events_distinguish_tiers() -> None:
    made = translator()
    batch = [in_host(0), in_tier(0), in_tier(0, tier="mooncake", is_shared=True), in_tier(0, removed=True)]
    _, disk, store, removed = made.translate(batch, True)
    assert (disk.ownership, disk.locality) == ("disk", "LOCAL")
    assert (store.ownership, store.locality) == ("mooncake", "REMOTE")
    assert isinstance(removed, kv_events.BlockRemoved)
    assert (removed.medium, removed.ownership, removed.locality) == ("STORAGE", "disk", "LOCAL")


def test_a_block_in_parts_is_announced_once() -> None:
    made = translator(num_parts=3)
    blocks = in_host(0, 1).blocks or []
    parts = [(i, part) for i in (0, 1) for part in range(3)]
    stored = OffloadingEvent([key(i, part) for i, part in parts], "CPU", False, [blocks[i] for i, _ in parts])
    (whole,) = made.translate([stored], True)
    assert isinstance(whole, kv_events.BlockStored)
    assert (len(whole.block_hashes), whole.token_ids, whole.group_idx) == (2, list(range(2 * TOKENS)), 0)
    first, last = ([key(1, part)] for part in (0, 2))
    assert list(made.translate([OffloadingEvent(first, "CPU", True)], True)) == []
    (removed,) = made.translate([OffloadingEvent(last, "CPU", True)], True)
    assert isinstance(removed, kv_events.BlockRemoved)
    assert removed.block_hashes == whole.block_hashes[1:]


def test_a_gap_of_a_chain_begins_a_new_event_with_its_parent() -> None:
    first, second = translator().translate([in_host(0, 1, 3)], False)
    assert (len(first.block_hashes), len(second.block_hashes)) == (2, 1)
    assert second.token_ids == list(range(3 * TOKENS, 4 * TOKENS))
    assert second.parent_block_hash is not None
    assert second.parent_block_hash not in first.block_hashes


def test_a_block_whose_contents_are_not_known_is_named_by_its_hash() -> None:
    made = translator()
    (known,) = made.translate([in_host(5)], True)
    (event,) = translator().translate([in_tier(5)], True)
    assert event.block_hashes == known.block_hashes
    assert (event.token_ids, event.block_size, event.parent_block_hash) == ([], 0, None)


def test_contents_are_kept_until_the_block_has_left_host_memory() -> None:
    made = translator()
    *_, last = made.translate([in_host(0), in_host(0, removed=True), in_tier(0)], True)
    assert last.token_ids, "a tier's event of the same step comes after those of host memory"
    (event,) = made.translate([in_tier(0)], True)
    assert event.token_ids == []
    list(made.translate([in_host(0), in_host(0, removed=True), in_host(0)], True))
    (event,) = made.translate([in_tier(0)], True)
    assert event.token_ids, "it has come back"


def test_contents_are_bounded_and_not_kept_without_tiers() -> None:
    made = translator(max_contents=2)
    list(made.translate([in_host(0, 1, 2)], True))
    known, unknown = made.translate([in_tier(0, 1, 2)], True)
    assert (len(known.block_hashes), len(unknown.block_hashes)) == (2, 1)
    assert unknown.token_ids == []
    list(made.translate([in_host(3)], False))
    (event,) = made.translate([in_tier(3)], False)
    assert event.token_ids == []


def test_blocks_of_draft_groups_are_left_out() -> None:
    assert list(translator(lookahead=1).translate([in_host(0), in_tier(0)], True)) == []


# Metrics.


def prom_metrics(options: dict[str, Any]) -> tuple[Any, CollectorRegistry]:
    registry = CollectorRegistry()

    def kind(of: type) -> Any:
        return lambda multiprocess_mode="", **given: of(**given, registry=registry)

    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=options))
    types: Any = {Gauge: kind(Gauge), Counter: kind(Counter), Histogram: kind(Histogram)}
    return metrics_module.KVOffloadPromMetrics(config, types, ["engine"], {0: ["0"]}), registry


def tiers_of(registry: CollectorRegistry, name: str) -> set[str]:
    return {
        sample.labels["tier"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name in (f"kvoffload:{name}", f"kvoffload:{name}_total")
    }


def test_every_series_of_every_tier_exists_from_the_start() -> None:
    tiers = [{"kind": "disk", "dir": f"/var/cache/kvoffload/{i}", "bytes": "1GiB"} for i in range(2)]
    metrics, registry = prom_metrics({"host_bytes": "1MiB", "tiers": tiers})
    labelled = [name for name, spec in METRICS.items() if spec.label == "tier"]
    assert labelled
    for name in labelled:
        assert tiers_of(registry, name) == {"disk", "disk-2"}
    metrics.observe({"tier_read_bytes:disk-2": 5.0, "tier_off:disk": 1.0, "misses:corrupt": 2.0})
    labels = {"engine": "0", "tier": "disk-2"}
    assert registry.get_sample_value("kvoffload:tier_read_bytes_total", labels) == 5
    assert registry.get_sample_value("kvoffload:tier_off", {"engine": "0", "tier": "disk"}) == 1
    labels = {"engine": "0", "reason": MissReason.CORRUPT}
    assert registry.get_sample_value("kvoffload:misses_total", labels) == 2


def test_the_name_of_a_tier_and_of_a_rule_may_have_a_comma() -> None:
    metrics, registry = prom_metrics({"host_bytes": "1MiB", "tenants": {"a": {}}})
    metrics.observe({"policy_rule:slow, old": 1.0, "tenant_blocks:a,rack 2, nvme": 5.0})
    labels = {"engine": "0", "rule": "slow, old"}
    assert registry.get_sample_value("kvoffload:policy_rule", labels) == 1
    labels = {"engine": "0", "tenant": "a", "tier": "rack 2, nvme"}
    assert registry.get_sample_value("kvoffload:tenant_blocks", labels) == 5


def test_a_configuration_without_tiers_has_no_such_series() -> None:
    for options in ({"host_bytes": "1MiB"}, {"host_bytes": "wrong"}):
        _, registry = prom_metrics(options)
        assert tiers_of(registry, "tier_off") == set()


def test_the_log_line_names_each_tier() -> None:
    data = {"tier_read_bytes:disk": 2e6, "tier_read_bytes:shared_dir": 3e6}
    data |= {"tier_hit_tokens:shared_dir": 64.0, "tier_off:disk": 1.0, "tier_off:shared_dir": 0.0}
    shown = metrics_module.KVOffloadStats(data=data).reduce()
    assert (shown["disk read MB"], shown["shared_dir read MB"]) == (2.0, 3.0)
    assert (shown["shared_dir hit tokens"], shown["disk off"]) == (64, 1)
    assert "shared_dir off" not in shown
