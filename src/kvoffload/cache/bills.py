"""What tenants are billed for: the room that their blocks take over time, and the bytes that are moved for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvoffload.abc import OffloadKey, TenantUse
from kvoffload.cache.keys import NAMESPACE_BYTES
from kvoffload.cache.tenants import Tenants


class TenantCounts:
    """What the tenants hold of one tier, and have lost and used since that was last taken, by names of METRICS."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._uses: dict[str, TenantUse] = {}
        """What each tenant held when that was last taken."""
        self._taken_at = 0.0

    def take(self, uses: Sequence[TenantUse], block_bytes: int, now: float) -> dict[str, float]:
        """``now`` is in seconds. Between two calls a tenant is billed for the blocks that it held at the first one."""
        counts: dict[str, float] = {}
        seconds, self._taken_at = now - self._taken_at, now
        for use in uses:
            label = f"{use.name},{self._tier}"
            before = self._uses.get(use.name, TenantUse(use.name, 0, 0, 0))
            self._uses[use.name] = use
            counts[f"tenant_blocks:{label}"] = use.num_blocks
            counts[f"tenant_evicted_blocks:{label}"] = use.num_evicted - before.num_evicted
            counts[f"tenant_refused_stores:{label}"] = use.num_refused - before.num_refused
            counts[f"tenant_retained_blocks:{label}"] = use.num_retained
            counts[f"tenant_lost_retained_blocks:{label}"] = use.num_retained_lost - before.num_retained_lost
            counts[f"tenant_byte_seconds:{label}"] = before.num_blocks * block_bytes * seconds
            counts[f"tenant_retained_byte_seconds:{label}"] = (
                use.retained_block_s - before.retained_block_s
            ) * block_bytes
        return counts


class MovedBytes:
    """The bytes that were moved for each of ``tenants`` since that was last taken, by names of METRICS: between device
    and host memory, in blocks of ``block_bytes`` on all ranks, and from and to lower tiers. Some tenants are
    configured."""

    def __init__(self, tenants: Tenants, block_bytes: int = 0) -> None:
        self.block_bytes = block_bytes
        self._tenants = tenants
        self._moved: Counter[str] = Counter()
        """Bytes by "TENANT,TIER"."""

    def add(self, tier: str, keys: Iterable[OffloadKey], nbytes: Iterable[int]) -> None:
        """Adds blocks, each of so many bytes."""
        by_namespace: Counter[bytes] = Counter()
        for key, size in zip(keys, nbytes, strict=False):
            by_namespace[key[:NAMESPACE_BYTES]] += size
        for namespace, total in by_namespace.items():
            self._moved[f"{self._tenants.label_of(namespace)},{tier}"] += total

    def take(self) -> dict[str, float]:
        moved, self._moved = self._moved, Counter()
        return {f"tenant_moved_bytes:{label}": nbytes for label, nbytes in moved.items()}
