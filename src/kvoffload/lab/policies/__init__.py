"""Textbook policies, for comparison in replays. A server takes them by import path.

In a replay they have short names, see TEXTBOOK.
"""

from __future__ import annotations

from kvoffload.abc import CachePolicy
from kvoffload.cache import policies
from kvoffload.lab.policies.fifo import FIFOPolicy
from kvoffload.lab.policies.lirs import LIRSPolicy
from kvoffload.lab.policies.s3fifo import S3FIFOPolicy
from kvoffload.lab.policies.sieve import SIEVEPolicy
from kvoffload.lab.policies.twoq import TwoQPolicy

TEXTBOOK: dict[str, type[CachePolicy]] = {
    "fifo": FIFOPolicy,
    "s3fifo": S3FIFOPolicy,
    "sieve": SIEVEPolicy,
    "lirs": LIRSPolicy,
    "2q": TwoQPolicy,
}
KNOWN = {**policies.BUILTIN, **TEXTBOOK}
"""Every policy with a short name in a replay."""


def policy_class(name: str) -> type[CachePolicy]:
    """Does the same as ``kvoffload.cache.policies.policy_class`` with the names of KNOWN."""
    return policies.policy_class(name, KNOWN)


def path_of(name: str) -> str:
    """Returns the name that a server takes for a policy of a replay: the import path of a textbook policy."""
    textbook = TEXTBOOK.get(name)
    return name if textbook is None else f"{textbook.__module__}:{textbook.__qualname__}"


def make_policy(name: str, capacity: int) -> CachePolicy:
    """Does the same as ``kvoffload.cache.policies.make_policy`` with the names of KNOWN."""
    return policies.make_policy(path_of(name), capacity)
