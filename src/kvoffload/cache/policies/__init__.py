"""Cache policies, one per file, chosen by name or by import path, and the parts to build your own from."""

from __future__ import annotations

from kvoffload.abc import Access, CachePolicy, ConfigError, Eviction
from kvoffload.cache.policies.arc import ARCPolicy
from kvoffload.cache.policies.auto import AutoPolicy
from kvoffload.cache.policies.base import ListPolicy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.policies.tenants import TenantPolicy
from kvoffload.cache.tenants import Shares
from kvoffload.native.structures import RecencyList
from kvoffload.settings import import_subclass

__all__ = ["BUILTIN", "Access", "CachePolicy", "Eviction", "ListPolicy", "RecencyList", "make_policy", "policy_class"]

BUILTIN: dict[str, type[CachePolicy]] = {"auto": AutoPolicy, "lru": LRUPolicy, "arc": ARCPolicy}


def policy_class(name: str) -> type[CachePolicy]:
    """Returns the class called ``name``: one of BUILTIN, or any other as "package.module:Class".

    Raises ConfigError if it cannot be imported or is not a CachePolicy.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    choice = f'write one of {", ".join(sorted(BUILTIN))}, or a class of your own as "package.module:Class"'
    if not name.partition(":")[2]:
        raise ConfigError("policy", name, "no policy has this name", choice)
    return import_subclass("policy", name, CachePolicy, choice)  # type: ignore[type-abstract]


def make_policy(name: str, capacity: int, shares: Shares | None = None) -> CachePolicy:
    """Makes a policy for ``capacity`` blocks. With ``shares``, each tenant's blocks are in a policy of this name.

    Raises ConfigError as ``policy_class`` does, or if the class fails.
    """
    if shares is not None:
        return TenantPolicy(capacity, shares, lambda quota: make_policy(name, quota))
    chosen = policy_class(name)
    try:
        return chosen(capacity)
    except Exception as error:
        raise ConfigError(
            "policy",
            name,
            f"{chosen.__name__}(capacity={capacity}) failed ({type(error).__name__}: {error})",
            "its constructor takes the number of blocks",
        ) from error
