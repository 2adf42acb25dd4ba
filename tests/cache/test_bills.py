"""Bills: the room that tenants take over time, and the bytes that are moved for them."""

from __future__ import annotations

from kvoffload.abc import TenantUse
from kvoffload.cache.bills import MovedBytes, TenantCounts
from kvoffload.cache.keys import NAMESPACE_BYTES, make_offload_key
from kvoffload.cache.tenants import TenantConfig, Tenants


def test_a_tenant_is_billed_for_what_it_held_at_the_last_call() -> None:
    counts = TenantCounts("host")
    first = counts.take([TenantUse("a", 10, 0, 0, 4, 0, 100), TenantUse("b", 0, 0, 0)], 100, 1e6)
    assert first["tenant_byte_seconds:a,host"] == 0
    second = counts.take([TenantUse("a", 2, 0, 0, 0, 0, 107), TenantUse("b", 7, 0, 0)], 100, 1e6 + 3)
    assert second["tenant_byte_seconds:a,host"] == 10 * 100 * 3
    assert second["tenant_retained_byte_seconds:a,host"] == 100 * 7
    assert second["tenant_byte_seconds:b,host"] == 0
    third = counts.take([TenantUse("a", 2, 0, 0, 0, 0, 107), TenantUse("b", 7, 0, 0)], 100, 1e6 + 4)
    assert (third["tenant_byte_seconds:a,host"], third["tenant_byte_seconds:b,host"]) == (200, 700)
    assert third["tenant_retained_byte_seconds:a,host"] == 0


def test_what_a_tenant_loses_is_counted_since_the_last_call() -> None:
    counts = TenantCounts("host")

    def take(use: TenantUse) -> list[float]:
        taken = counts.take([use], 100, 0.0)
        return [taken[f"tenant_{name}:a,host"] for name in ("evicted_blocks", "refused_stores", "lost_retained_blocks")]

    assert take(TenantUse("a", 10, 5, 3, 0, 2)) == [5, 3, 2]
    assert take(TenantUse("a", 10, 9, 6, 0, 4)) == [4, 3, 2]


def test_bytes_are_counted_for_the_tenant_that_the_key_names() -> None:
    tenants = Tenants(b"n" * NAMESPACE_BYTES, [TenantConfig("a"), TenantConfig("b")])
    moved = MovedBytes(tenants)

    def keys(name: str | None, num_blocks: int) -> list[bytes]:
        return [make_offload_key(tenants.of(name).namespace + bytes([i]) * 8, 0) for i in range(num_blocks)]

    moved.add("host", [*keys("a", 2), *keys("b", 1), *keys("a", 1)], [10, 20, 30, 40])
    moved.add("disk", [*keys("unknown", 1), *keys(None, 1)], [5, 6])
    assert moved.take() == {
        "tenant_moved_bytes:a,host": 70,
        "tenant_moved_bytes:b,host": 30,
        "tenant_moved_bytes:other,disk": 11,
    }
    assert moved.take() == {}
