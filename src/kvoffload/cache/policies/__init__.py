"""Cache policies, one per file, chosen by name or by import path, and the parts to build your own from."""

from __future__ import annotations

import importlib
import inspect

from kvoffload.abc import Access, CachePolicy, ConfigError, Eviction
from kvoffload.cache.policies.arc import TextbookARCPolicy
from kvoffload.cache.policies.auto import AutoPolicy
from kvoffload.cache.policies.base import ListPolicy
from kvoffload.cache.policies.fifo import FIFOPolicy
from kvoffload.cache.policies.lirs import LIRSPolicy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.policies.recency import RecencyList
from kvoffload.cache.policies.s3fifo import S3FIFOPolicy
from kvoffload.cache.policies.sieve import SIEVEPolicy
from kvoffload.cache.policies.twoq import TwoQPolicy

__all__ = [
    "BUILTIN",
    "Access",
    "CachePolicy",
    "Eviction",
    "ListPolicy",
    "RecencyList",
    "make_policy",
    "policy_class",
]

BUILTIN: dict[str, type[CachePolicy]] = {
    "fifo": FIFOPolicy,
    "lru": LRUPolicy,
    "arc": TextbookARCPolicy,
    "s3fifo": S3FIFOPolicy,
    "sieve": SIEVEPolicy,
    "lirs": LIRSPolicy,
    "2q": TwoQPolicy,
    "auto": AutoPolicy,
}


def policy_class(name: str) -> type[CachePolicy]:
    """Returns the class called ``name``: that of a built-in policy, or your own as "package.module:Class".

    Raises ConfigError if it cannot be imported or is not a CachePolicy.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    choice = f'write one of {", ".join(sorted(BUILTIN))}, or your own class as "package.module:Class"'
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise ConfigError(f"policy={name!r}: no policy has this name; {choice}")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(f"policy={name!r}: cannot be imported ({error}); {choice}") from error
    if not (isinstance(found, type) and issubclass(found, CachePolicy)):
        raise ConfigError(f"policy={name!r}: is not a subclass of kvoffload.CachePolicy; {choice}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"policy={name!r}: does not define {missing} of kvoffload.CachePolicy; add what is missing")
    return found


def make_policy(name: str, capacity: int) -> CachePolicy:
    """Makes a policy for ``capacity`` blocks. Raises ConfigError as ``policy_class`` does, or if the class fails."""
    chosen = policy_class(name)
    try:
        return chosen(capacity)
    except Exception as error:
        raise ConfigError(
            f"policy={name!r}: {chosen.__name__}(capacity={capacity}) failed ({type(error).__name__}: {error}); "
            "its constructor takes the number of blocks"
        ) from error
