"""Entries of the option ``tiers``: the kinds of tiers, their settings, and what a tier is opened with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvoffload.abc import ByteArray, Tier
from kvoffload.host.pool import PoolHandle


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is opened with.

    ``pools`` are the host pools, one per rank, shape (num_slots, slot_bytes); ``handles`` open them in another process,
    or are None for a pool that other processes cannot reach. ``fingerprint``: 64 hexadecimal digits; blocks are found
    again only under the same one. ``identity`` says in words what the fingerprint depends on, such as {"dtype":
    "bfloat16"}, so that a log can say in what another fingerprint differs. ``policy``: the eviction policy.
    ``engine``: the index of this engine among the ``engines`` of this node that share the budgets. ``num_tokens``
    returns how many tokens have all their KV in a number of blocks.
    """

    pools: Sequence[ByteArray]
    fingerprint: str
    handles: Sequence[PoolHandle | None] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    policy: str = "lru"
    engine: int = 0
    engines: int = 1
    num_tokens: Callable[[int], int] = int


class TierConfig(ABC):
    """One entry of ``tiers``. Subclasses are frozen dataclasses whose fields are the keys of the entry, without
    ``kind``.

    The constructor and ``open`` raise ConfigError with a message that begins with the key, "KEY=VALUE: ..."; the caller
    puts "tiers[INDEX]." in front of it.
    """

    kind: ClassVar[str]
    """Name of the tier in logs and metrics."""

    @property
    def capacity_bytes(self) -> int | None:
        """The tier's budget in the medium on this node, or None if the medium bounds itself. By default None."""
        return None

    @abstractmethod
    def open(self, context: TierContext) -> Tier:
        """Returns the tier, ready to serve. A tier whose server cannot be reached is opened too, and reaches it later.

        Raises ConfigError for a wrong setting, and OSError if the medium fails: a server continues without the tier
        then, with a warning.
        """
