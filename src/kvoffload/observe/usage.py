"""Usage: what the requests of each tenant found, stored and had retained, and what its blocks took of each tier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from kvoffload.observe.records import RequestRecord, sum_by_tier

MAX_ENTRIES = 4096
"""Pairs of a tenant and a tier in the bill of one server."""
ENTRIES_PER_PART = 64
"""So few that a part of a bill fits into one line of a log."""
_MAX_AMOUNT = 1e30


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What the blocks of a tenant took of one tier."""

    byte_seconds: float = 0.0
    """Bytes times the seconds for which they were held."""
    retained_byte_seconds: float = 0.0
    """The same for blocks that were charged to its retention quota."""
    moved_bytes: float = 0.0
    """Between device and host memory, or read from the tier and written to it."""

    def __add__(self, other: TierUsage) -> TierUsage:
        return TierUsage(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


Bill: TypeAlias = Mapping[str, Mapping[str, TierUsage]]
"""By tenant and tier, since the start of a server."""


def bill_of(totals: Iterable[tuple[str, float]]) -> Bill:
    """Returns the bill in ``totals``, metrics by names such as "tenant_moved_bytes:TENANT,TIER"."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    known = {f"tenant_{each.name}": each.name for each in fields(TierUsage)}
    for labelled, total in totals:
        name, _, label = labelled.partition(":")
        if name in known:
            tenant, _, tier = label.partition(",")
            found.setdefault(tenant, {}).setdefault(tier, {})[known[name]] = total
    return {tenant: {tier: TierUsage(**each) for tier, each in tiers.items()} for tenant, tiers in found.items()}


def parts_of(bill: Bill) -> Iterator[Bill]:
    """Yields bills of at most ENTRIES_PER_PART entries that are ``bill`` together."""
    entries = [(tenant, tier, usage) for tenant, tiers in bill.items() for tier, usage in tiers.items()]
    for start in range(0, len(entries), ENTRIES_PER_PART):
        part: dict[str, dict[str, TierUsage]] = {}
        for tenant, tier, usage in entries[start : start + ENTRIES_PER_PART]:
            part.setdefault(tenant, {})[tier] = usage
        yield part


def read_bill(data: object) -> Bill:
    """Returns the bill that was written as JSON. The source need not be trusted. Raises ValueError."""
    if not isinstance(data, Mapping) or not all(isinstance(tiers, Mapping) for tiers in data.values()):
        raise ValueError("the usage of tenants is not a mapping")
    if sum(map(len, data.values())) > MAX_ENTRIES:
        raise ValueError(f"the usage of tenants has more than {MAX_ENTRIES} entries")
    return {
        str(tenant): {str(tier): _read_usage(each) for tier, each in tiers.items()} for tenant, tiers in data.items()
    }


def _read_usage(data: object) -> TierUsage:
    amounts = []
    for each in fields(TierUsage):
        amount = data.get(each.name, 0.0) if isinstance(data, Mapping) else None
        if not isinstance(amount, int | float) or not 0 <= amount <= _MAX_AMOUNT:
            raise ValueError(f"{each.name} of the usage of a tenant is not an amount")
        amounts.append(float(amount))
    return TierUsage(*amounts)


def add_bills(bills: Iterable[Bill]) -> Bill:
    """Returns the sum of the bills of several servers."""
    total: dict[str, dict[str, TierUsage]] = {}
    for bill in bills:
        for tenant, tiers in bill.items():
            own = total.setdefault(tenant, {})
            for tier, usage in tiers.items():
                own[tier] = own.get(tier, TierUsage()) + usage
    return total


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
            len(records),
            sum(record.tokens_asked for record in records),
            sum(record.device_tokens for record in records),
            sum(record.host_tokens for record in records),
            sum_by_tier(records),
            sum(record.tokens_missing for record in records),
            math.fsum(record.saved_s or 0.0 for record in records),
            sum(record.stored_tokens for record in records),
            sum(record.retained_tokens for record in records),
            sum(record.retained_in is not None for record in records),
            sum(record.retain_refused is not None for record in records),
            tiers,
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
    return Usage.of(None, records, add_bills({"": tiers} for tiers in bill.values()).get("", {}))


def to_json(bill: Bill) -> dict[str, dict[str, Any]]:
    """Returns ``bill`` for JSON, as ``read_bill`` reads it."""
    return {
        tenant: {
            tier: {each.name: getattr(usage, each.name) for each in fields(usage)} for tier, usage in tiers.items()
        }
        for tenant, tiers in bill.items()
    }
