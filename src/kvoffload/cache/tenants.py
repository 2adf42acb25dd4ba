"""Tenants: whose blocks are whose, by the first bytes of their keys, and what each may take of a tier."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import NOT_SET, ConfigError, Keys, OffloadKey
from kvoffload.cache.keys import NAMESPACE_BYTES, root_hash, same_starts
from kvoffload.printable import printable
from kvoffload.settings import unknown
from kvoffload.units import Amount, format_bytes, parse_bytes

OTHER = "other"
"""The name under which all requests count that belong to no configured tenant."""
HOST = "host"
"""The name of host memory, beside the names of tiers."""
RETAIN_SHARE = 0.5
"""The most of a tier, and of a tenant's quota of it, that may be retained. The rest serves requests in progress."""
MAX_TENANTS = 32
"""Configured tenants. Each has a policy of its own in every tier, and time series of its own."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHA256 = re.compile("[0-9a-f]{64}")
_EXAMPLE = {"search": {"guaranteed": {HOST: "8GiB"}, "quota": {HOST: "16GiB"}}}


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """One entry of the option ``tenants``. Amounts are bytes on this node by the name of a tier."""

    name: str
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    """Bytes per tier within which no other tenant's blocks push out blocks of this tenant."""
    quota: Mapping[str, int] = field(default_factory=dict)
    """The most that its blocks may take. By default the whole tier."""
    retain: Mapping[str, int] = field(default_factory=dict)
    """The most that its blocks may take while its requests have them retained. By default nothing."""
    salt_sha256: str | None = None
    """Requests without a tenant whose ``cache_salt`` has this SHA-256 belong to it."""

    @property
    def shares(self) -> dict[str, Mapping[str, int]]:
        """The amounts by their names in the configuration."""
        return {"guaranteed": self.guaranteed, "quota": self.quota, "retain": self.retain}

    def claim(self, tier: str) -> int:
        """Returns how many bytes of ``tier`` no other tenant can count on."""
        return max(self.guaranteed.get(tier, 0), self.retain.get(tier, 0))


def load_tenants(value: object) -> tuple[TenantConfig, ...]:
    """Returns the tenants of the option ``tenants``: a mapping from names to mappings, or TenantConfigs.

    Raises ConfigError that names tenant, key and value for everything that is wrong with one of them alone.
    """
    if isinstance(value, tuple) and all(isinstance(each, TenantConfig) for each in value):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            "tenants", value, f"must be a mapping from names to shares, such as tenants={json.dumps(_EXAMPLE)}"
        )
    if len(value) > MAX_TENANTS:
        raise ConfigError(
            "tenants", NOT_SET, f"has {len(value)} entries, at most {MAX_TENANTS} may be configured", "remove some"
        )
    loaded = tuple(_load(name, entry) for name, entry in value.items())
    salts = [tenant.salt_sha256 or _digest(tenant.name) for tenant in loaded]
    for tenant in loaded:
        if tenant.salt_sha256 is not None and salts.count(tenant.salt_sha256) > 1:
            raise ConfigError(
                f"tenants.{tenant.name}.salt_sha256",
                NOT_SET,
                "is that of another tenant's salt or name",
                "give each tenant a salt of its own",
            )
    return loaded


def _load(name: object, entry: object) -> TenantConfig:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"tenants.{printable(str(name), 64)}",
            NOT_SET,
            "cannot be the name of a tenant",
            "use up to 63 letters, digits, '.', '_' and '-', of which the first is a letter or a digit",
        )
    setting = f"tenants.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(setting, entry, f"must be a mapping such as {json.dumps(_EXAMPLE['search'])}")
    known = ["guaranteed", "quota", "retain", "salt_sha256"]
    for key in entry:
        if key not in known:
            otherwise = f"write an entry such as {json.dumps(_EXAMPLE['search'])}."
            raise unknown(str(key), entry[key], "key", known, otherwise).within(f"{setting}.")
    salt = entry.get("salt_sha256")
    if salt is not None and name == OTHER:
        raise ConfigError(
            f"{setting}.salt_sha256",
            NOT_SET,
            f'"{OTHER}" is every request without a configured tenant, whatever its salt',
            "remove it, or give the tenant another name",
        )
    if salt is not None and not (isinstance(salt, str) and _SHA256.fullmatch(salt)):
        # Somebody may have written the salt itself.
        raise ConfigError(
            f"{setting}.salt_sha256",
            NOT_SET,
            "must be the SHA-256 of a cache_salt in 64 lower-case hex digits",
            "make it with: printf %s SALT | sha256sum",
        )
    guaranteed, quota, retain = (_amounts(f"{setting}.{key}", entry.get(key)) for key in known[:3])
    for tier, most in quota.items():
        if guaranteed.get(tier, 0) > most:
            raise ConfigError(
                f"{setting}.quota.{tier}",
                Amount(most),
                f"less than the {format_bytes(guaranteed[tier])} that are guaranteed",
                "raise it, or lower what is guaranteed",
            )
        if retain.get(tier, 0) > most * RETAIN_SHARE:
            raise ConfigError(
                f"{setting}.retain.{tier}",
                Amount(retain[tier]),
                f"more than half of its quota of {format_bytes(most)}",
                "lower it, or raise the quota",
            )
    return TenantConfig(name, guaranteed, quota, retain, salt)


def _amounts(setting: str, value: object) -> dict[str, int]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(tier, str) for tier in value):
        raise ConfigError(setting, value, f'must map names of tiers to bytes, such as {{"{HOST}": "8GiB"}}')
    return {tier: parse_bytes(f"{setting}.{tier}", amount) for tier, amount in value.items()}


def check_budgets(tenants: Sequence[TenantConfig], budgets: Mapping[str, int | None], retaining: Sequence[str]) -> None:
    """Raises ConfigError if a share is of a tier that is not in ``budgets``, which are in bytes by the name of the
    tier, or has no budget (None), or if more is guaranteed, or may be retained, than a budget allows. ``retaining``:
    the tiers in which blocks can be retained."""
    for tenant in tenants:
        for kind, amounts in tenant.shares.items():
            for tier, amount in amounts.items():
                named = f"tenants.{tenant.name}.{kind}.{tier}", Amount(amount)
                if tier not in budgets:
                    raise ConfigError(
                        *named, f"this configuration has no tier {tier}", f"use one of {', '.join(budgets)}"
                    )
                if budgets[tier] is None:
                    raise ConfigError(*named, "this tier bounds itself and has no shares", "remove it")
                if kind == "retain" and tier not in retaining:
                    raise ConfigError(
                        *named, "nothing can be retained in this tier", f"name one of {', '.join(retaining)}"
                    )
    for tier, budget in budgets.items():
        if budget is None:
            continue
        whole, half = f"the {format_bytes(budget)} of its budget", f"half of its budget of {format_bytes(budget)}"
        for what, claims, most, limit in (
            ("are guaranteed", [tenant.guaranteed.get(tier, 0) for tenant in tenants], budget, whole),
            ("may be retained", [tenant.retain.get(tier, 0) for tenant in tenants], budget * RETAIN_SHARE, half),
            ("are guaranteed or may be retained", [tenant.claim(tier) for tenant in tenants], budget, whole),
        ):
            if sum(claims) > most:
                fault = f"{format_bytes(sum(claims))} of {tier} {what}, more than {limit}"
                raise ConfigError("tenants", NOT_SET, fault, "lower some, or raise the budget")


KeysOfTenant: TypeAlias = tuple[int, Keys, npt.NDArray[np.bool_] | None]


@dataclass(frozen=True, slots=True)
class Shares:
    """What each tenant may take of one tier, in blocks; the last tenant is OTHER.

    ``index_of`` maps the namespaces of configured tenants to their indices.
    """

    names: tuple[str, ...]
    index_of: Mapping[bytes, int]
    guaranteed: tuple[int, ...]
    quota: tuple[int, ...]
    num_blocks: int
    retain: tuple[int, ...] = ()
    """By default nothing."""
    block_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.retain:
            object.__setattr__(self, "retain", (0,) * len(self.names))

    def tenants_of(self, keys: Keys) -> int | list[int]:
        """Returns the tenant of each key; only one number if all keys have the same namespace."""
        other = len(self.names) - 1
        if not keys:
            return other
        if same_starts(keys, NAMESPACE_BYTES):
            return self.index_of.get(keys[0][:NAMESPACE_BYTES], other)
        return [self.index_of.get(key[:NAMESPACE_BYTES], other) for key in keys]

    def tenant(self, key: OffloadKey) -> int:
        """Returns the tenant of ``key``."""
        tenant = self.tenants_of((key,))
        assert isinstance(tenant, int)
        return tenant

    def split(self, keys: Keys) -> Sequence[KeysOfTenant]:
        """Returns each tenant that has some of ``keys``, these keys, and which they are, None for all."""
        tenants = self.tenants_of(keys)
        if isinstance(tenants, int):
            return [(tenants, keys, None)] if keys else []
        of_key = np.array(tenants)
        parts = [(t, of_key == t) for t in np.unique(of_key).tolist()]
        return [(t, list(compress(keys, chosen.tolist())), chosen) for t, chosen in parts]

    @property
    def num_unclaimed(self) -> int:
        """Blocks that are neither guaranteed to anybody nor may be retained."""
        return self.num_blocks - sum(map(max, self.guaranteed, self.retain))

    def sure_blocks(self, tenant: int) -> int:
        """Returns how many blocks a tenant can have whatever the others hold, beside those that it has retained."""
        own = max(self.guaranteed[tenant], self.retain[tenant])
        return min(self.quota[tenant], self.num_unclaimed + own) - self.retain[tenant]


MakeShares: TypeAlias = Callable[[int, int], Shares]
"""Returns the shares of a tier with so many blocks, of so many bytes each."""


class Tenant(NamedTuple):
    """The tenant of a request: the namespace before its block hashes, and the name in metrics, None if it has none."""

    namespace: bytes
    label: str | None


class Tenants:
    """Maps requests to tenants, of which ``configured`` have shares. ``namespace`` is that of requests without one.

    A request with another tenant has a namespace of its own too, so no request of somebody else finds its blocks.
    """

    def __init__(
        self,
        namespace: bytes,
        configured: Sequence[TenantConfig] = (),
        budgets: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        """``budgets``: bytes by the name of a tier that keeps more than blocks in them; shares are of these bytes."""
        self._namespace = namespace
        self._budgets = budgets
        named = [tenant for tenant in configured if tenant.name != OTHER]
        self._configured = {tenant.name: tenant for tenant in configured}
        self._named = {tenant.name: Tenant(self._namespace_of(tenant.name), tenant.name) for tenant in named}
        # A name is no secret. A tenant with a secret salt is not found by its name.
        self._salted = {tenant.salt_sha256 or _digest(tenant.name): tenant.name for tenant in named}
        self.names = (*self._named, OTHER) if configured else ()
        """The names in metrics; none without configured tenants."""
        self._other = OTHER if configured else None
        self._labels = {tenant.namespace: tenant.label for tenant in self._named.values()}

    def _namespace_of(self, name: str) -> bytes:
        return root_hash(self._namespace, name)[:NAMESPACE_BYTES]

    def of(self, name: str | None, salt: Any = None) -> Tenant:
        """Returns the tenant of a request with this option ``tenant`` and this ``cache_salt``. Without the first, the
        salt of a configured tenant counts: what its ``salt_sha256`` was made of, its name if there is none."""
        if name is None and self._named and isinstance(salt, str):
            name = self._salted.get(_digest(salt))
        if name is None:
            return Tenant(self._namespace, self._other)
        return self._named.get(name) or Tenant(self._namespace_of(name), self._other)

    def label_of(self, namespace: bytes) -> str | None:
        """Returns the name in metrics of the tenant whose keys begin with ``namespace``."""
        return self._labels.get(namespace, self._other)

    def shares(self, tier: str, num_blocks: int, block_bytes: int, engines: int = 1) -> Shares:
        """Returns the shares of ``tier``, which has ``num_blocks`` blocks on this one of ``engines`` engines, each of
        which has an equal part of every share. Raises ConfigError for shares that cannot be kept."""
        configured = [self._configured.get(name, TenantConfig(name)) for name in self.names]
        for tenant in configured:
            for kind, amounts in tenant.shares.items():
                if amounts.get(tier, math.inf) < engines * block_bytes:
                    raise ConfigError(
                        f"tenants.{tenant.name}.{kind}.{tier}",
                        Amount(amounts[tier]),
                        "has no room for one block",
                        f"write {format_bytes(engines * block_bytes)} or more",
                    )
        budget, for_blocks = self._budgets.get(tier) or 0, num_blocks * block_bytes * engines
        unless_set = {"quota": for_blocks}
        guaranteed, quota, retain = (
            [each.shares[kind].get(tier, unless_set.get(kind, 0)) // engines // block_bytes for each in configured]
            for kind in ("guaranteed", "quota", "retain")
        )
        claimed = sum(map(max, guaranteed, retain))
        if for_blocks < budget and (claimed > num_blocks or sum(retain) > num_blocks * RETAIN_SHARE):
            # They are parts of the budget, all of which is promised, and blocks have less than all of it.
            guaranteed = [each * for_blocks // budget for each in guaranteed]
            retain = [each * for_blocks // budget for each in retain]
        for what, claims, most in (
            ("are guaranteed", guaranteed, num_blocks),
            ("may be retained", retain, int(num_blocks * RETAIN_SHARE)),
            ("are guaranteed or may be retained", list(map(max, guaranteed, retain)), num_blocks),
        ):
            if sum(claims) > most:
                wanted, there = (format_bytes(n * engines * block_bytes) for n in (sum(claims), most))
                fault = f"{wanted} of {tier} {what}, and its budget has room for {there} of blocks"
                raise ConfigError("tenants", NOT_SET, fault, "lower some, or raise the budget")
        made = Shares(
            self.names,
            {tenant.namespace: i for i, tenant in enumerate(self._named.values())},
            tuple(guaranteed),
            tuple(min(each, num_blocks) for each in quota),
            num_blocks,
            tuple(retain),
            block_bytes,
        )
        without = replace(made, retain=(0,) * len(self.names))
        for i, tenant in enumerate(configured):
            if retain[i] and made.sure_blocks(i) < 1 <= without.sure_blocks(i):
                raise ConfigError(
                    f"tenants.{tenant.name}.retain.{tier}",
                    Amount(tenant.retain[tier]),
                    "leaves it no block that is not retained, so it could store nothing",
                    f"lower it, raise its guaranteed.{tier} above it, or raise the budget of {tier}",
                )
        return made


def _digest(salt: str) -> str:
    return hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()
