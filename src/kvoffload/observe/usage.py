"""Usage: what the requests of each tenant found, stored and had retained, and what its blocks took of each tier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TypeAlias

from kvoffload.observe.records import RequestRecord, found_by


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What the blocks of a tenant took of one tier."""

    byte_seconds: float = 0.0
    """Bytes times the seconds for which they were held."""
    retained_byte_seconds: float = 0.0
    """The same for blocks that were charged to its retention quota."""
    moved_bytes: float = 0.0
    """Between device and host memory, or read from the tier and written to it."""


Bill: TypeAlias = Mapping[str, Mapping[str, TierUsage]]
"""By tenant and tier, since the start of a server."""


def bill_of(totals: Mapping[str, float]) -> Bill:
    """Returns the bill in ``totals``, metrics by names such as "tenant_moved_bytes:TENANT,TIER"."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    known = {f"tenant_{each.name}": each.name for each in fields(TierUsage)}
    for labelled, total in totals.items():
        name, _, label = labelled.partition(":")
        if name in known:
            tenant, _, tier = label.partition(",")
            found.setdefault(tenant, {}).setdefault(tier, {})[known[name]] = total
    return {tenant: {tier: TierUsage(**each) for tier, each in tiers.items()} for tenant, tiers in found.items()}


@dataclass(frozen=True, slots=True)
class Usage:
    """What the requests of one tenant asked for and found, in prompt tokens, and what they stored and had retained;
    ``tenant`` None: requests without one, or the total."""

    tenant: str | None
    requests: int
    tokens_asked: int
    device_tokens: int
    host_tokens: int
    tier_tokens: Mapping[str, int]
    tokens_computed: int
    saved_s: float
    """How long the engine would have computed what was loaded from host memory and tiers, where it knew its speed."""
    stored_tokens: int
    retained_tokens: int
    retentions: int
    """Requests whose blocks were retained."""
    retentions_refused: int
    tiers: Mapping[str, TierUsage]
    """What its blocks took of each tier."""

    @classmethod
    def of(cls, tenant: str | None, records: Sequence[RequestRecord], tiers: Mapping[str, TierUsage]) -> Usage:
        return cls(
            tenant,
            tokens_computed=sum(record.tokens_missing for record in records),
            saved_s=math.fsum(record.saved_s or 0.0 for record in records),
            stored_tokens=sum(record.stored_tokens for record in records),
            retained_tokens=sum(record.retained_tokens for record in records),
            retentions=sum(record.retained_in is not None for record in records),
            retentions_refused=sum(record.retain_refused is not None for record in records),
            tiers=tiers,
            **found_by(records),
        )


def by_tenant(records: Iterable[RequestRecord], bill: Bill) -> list[Usage]:
    """Returns the usage of each tenant, the one that asked for the most tokens first."""
    groups: dict[str | None, list[RequestRecord]] = {tenant: [] for tenant in bill}
    for record in records:
        groups.setdefault(record.tenant, []).append(record)
    usages = [Usage.of(tenant, group, bill.get(tenant or "", {})) for tenant, group in groups.items()]
    return sorted(usages, key=lambda each: -each.tokens_asked)


def total_of(records: Sequence[RequestRecord], bill: Bill) -> Usage:
    """Returns the usage of all tenants together."""
    taken = [(tier, usage) for tiers in bill.values() for tier, usage in tiers.items()]
    return Usage.of(None, records, {tier: _sum(used for of, used in taken if of == tier) for tier, _ in taken})


def _sum(usages: Iterable[TierUsage]) -> TierUsage:
    return TierUsage(*map(sum, zip(*map(astuple, usages), strict=True)))
