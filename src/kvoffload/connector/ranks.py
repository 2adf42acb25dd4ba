"""What the ranks of an engine agree on at their start: which of them share a host pool, and how blocks are divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from kvoffload.abc import ConfigError
from kvoffload.connector.canonical import CanonicalPages
from kvoffload.deadlines import within

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""A collective call: takes a value from each rank of a group, and returns the values of all of them in order."""
EXCHANGE_DEADLINE_S = 300.0
"""How long a rank waits for the others by default. They come as soon as they have allocated their KV caches."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of an engine, seen from rank ``index``.

    ``gathers`` collect a value from every rank, one dimension after the other: first over the ranks next to this one
    (tensor parallelism), then over groups of such ranks (pipeline stages). Without any, this rank is alone.
    """

    index: int = 0
    gathers: Sequence[Gather] = ()

    def collect(self, make: Callable[[], T], deadline_s: float = EXCHANGE_DEADLINE_S) -> list[T]:
        """Returns what ``make`` returns on every rank, in the order of the ranks. All ranks must call this.

        If ``make`` raises on some rank, this raises on every rank, so no rank waits for one that has failed: there the
        same error, on the others ConfigError. Raises ConfigError too if some rank does not come within ``deadline_s``
        after this one.
        """
        own: Exception | None = None
        values: list[tuple[T | None, str]]
        try:
            values = [(make(), "")]
        except Exception as error:
            own, values = error, [(None, str(error) or type(error).__name__)]
        for gather in self.gathers:
            try:
                parts = within(deadline_s, partial(gather, values))
            except Exception as error:
                raise (own or _no_answer(error, deadline_s)) from error
            values = [value for part in parts for value in part]
        if own is not None:
            raise own
        for rank, (_, error_text) in enumerate(values):
            if error_text:
                raise ConfigError(f"rank {rank} cannot start: {error_text}")
        return [value for value, _ in values]  # type: ignore[misc]


def _no_answer(error: Exception, deadline_s: float) -> ConfigError:
    """Returns what to say if the exchange with the other ranks has ended with ``error``."""
    if isinstance(error, TimeoutError):
        return ConfigError(
            fault=f"some rank has not registered its KV cache within {deadline_s:g} s",
            fix="its log says why, unless kvoffload is not configured there: give every node the same "
            "--kv-transfer-config",
        )
    return ConfigError(fault=f"the connection to the other ranks broke ({error})", fix="their logs say why")


@dataclass(frozen=True, slots=True)
class KVShare:
    """The KV of one rank, as other ranks need to know it."""

    replicas: int
    """How many consecutive ranks hold the same KV as this one, in every layer, as far as this rank knows."""
    layers: tuple[Any, ...]
    """Describes its layers and their pages. Ranks with other layers do not hold the same KV."""
    device_block_bytes: tuple[int, ...] = ()
    """Bytes of one device block of each KV cache group."""
    node: object = 0
    """Equal for all ranks that share a budget and may share a pool."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Names and values of what has to be the same on all ranks. Each node reads its own configuration."""
    canonical: CanonicalPages | str = "it is not set"
    """Its layers in the canonical layout, or why there is none."""


def check_settings(shares: Sequence[KVShare]) -> None:
    """Raises ConfigError, on every rank the same, if some setting is not the same on all ranks."""
    for rank, share in enumerate(shares):
        for (name, value), (_, expected) in zip(share.settings, shares[0].settings, strict=True):
            if value != expected:
                raise ConfigError(
                    f"{name}={value} on rank {rank}, but {expected} on rank 0: start every node with the same "
                    "--kv-transfer-config"
                )


def count_replicas(shares: Sequence[KVShare]) -> int:
    """Returns how many consecutive ranks can share a pool: the same number everywhere, or 1.

    These are on one node. If any layer of any rank differs, no rank shares its pool.
    """
    on_nodes = [len(list(ranks)) for _, ranks in groupby(share.node for share in shares)]
    replicas = math.gcd(*on_nodes, *(share.replicas for share in shares))
    is_alike = all(share.layers == shares[i - i % replicas].layers for i, share in enumerate(shares))
    return replicas if is_alike else 1


def count_pools(shares: Sequence[KVShare], rank: int, replicas: int) -> int:
    """Returns how many pools are on the node of ``rank``, if ``replicas`` consecutive ranks share each."""
    return sum(share.node == shares[rank].node for share in shares) // replicas
