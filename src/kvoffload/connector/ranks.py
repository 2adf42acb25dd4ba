"""What the ranks of an engine agree on at their start: which of them share a host pool, and what its rows are.

In the canonical layout, blocks have the same bytes whatever the parallelism of the engine. All its ranks share one
pool. A slot has the rows of whole blocks: the pages of all layers, stage after stage, and each page as one rank alone
would have it, with the heads of all tensor-parallel ranks. Each rank copies its own heads. Of ranks that hold the same
heads, one stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kvoffload.abc import ConfigError, KVGroup, PageGroup, Placement
from kvoffload.connector.parts import plan_parts
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

        If ``make`` raises on some rank, this raises on every rank: there the same error, on the others ConfigError, as
        when some rank does not come within ``deadline_s`` after this one.
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
            except TimeoutError as error:
                fault = f"some rank has not registered its KV cache within {deadline_s:g} s"
                fix = "its log says why, unless kvoffload is not configured there: give every node the same"
                raise own or ConfigError(fault=fault, fix=f"{fix} --kv-transfer-config") from error
            except Exception as error:
                fault = f"the connection to the other ranks broke ({error})"
                raise own or ConfigError(fault=fault, fix="their logs say why") from error
            values = [value for part in parts for value in part]
        if own is not None:
            raise own
        for rank, (_, error_text) in enumerate(values):
            if error_text:
                raise ConfigError(f"rank {rank} cannot start: {error_text}")
        return [value for value, _ in values]  # type: ignore[misc]


class LayerPages(NamedTuple):
    """A layer, and its page in one device block."""

    name: str
    page_bytes: int
    page_format: str
    """Describes what lies where in a page."""


CanonicalPages: TypeAlias = tuple[tuple[LayerPages, ...], ...]
"""The layers of one rank, by KV cache group, with the pages that they have without parallelism."""


@dataclass(frozen=True, slots=True)
class KVShare:
    """The KV of one rank, as other ranks need to know it."""

    replicas: int
    """How many consecutive ranks hold the same KV as this one, in every layer, as far as this rank knows."""
    layers: tuple[LayerPages, ...]
    """Ranks with other layers do not hold the same KV."""
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
                fault = f"{name}={value} on rank {rank}, but {expected} on rank 0"
                raise ConfigError(f"{fault}: start every node with the same --kv-transfer-config")


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


@dataclass(frozen=True, slots=True)
class PageRun:
    """``nbytes`` that are at ``local`` of a page of this rank and at ``canonical`` of the page of all ranks."""

    local: int
    canonical: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CanonicalRows:
    """The rows of all ranks together, as one of these ranks sees them."""

    layers: tuple[LayerPages, ...]
    """All layers of the engine, KV cache group after group."""
    row_bytes: tuple[int, ...]
    """By KV cache group."""
    begins: tuple[int, ...]
    """Where the pages of this rank's stage begin in a row, by KV cache group."""


def join(shares: Sequence[KVShare], kv_groups: Sequence[KVGroup], rank: int, stage_ranks: int) -> CanonicalRows | str:
    """Returns the rows for ``rank``, or why there are none. Each ``stage_ranks`` consecutive ranks have the same
    layers. All ranks must pass the same ``shares``, and are answered alike."""
    pages = []
    for share in shares:
        if isinstance(share.canonical, str):
            return share.canonical
        pages.append(share.canonical)
    if any(share.node != shares[0].node for share in shares):
        return "the ranks are on several nodes"
    stages = pages[::stage_ranks]
    if pages != [stages[i // stage_ranks] for i in range(len(pages))]:
        return "tensor-parallel ranks have different layers"
    groups = [tuple(layer for of_stage in stages for layer in of_stage[g]) for g in range(len(pages[0]))]
    layers = tuple(layer for group in groups for layer in group)
    if len({layer.name for layer in layers}) != len(layers):
        return "several ranks have a layer of the same name"
    row_bytes = tuple(map(_bytes, groups))
    if plan_parts(kv_groups, [row_bytes]).parts.is_divided:
        return "the KV cache groups have blocks of different sizes, which are divided"
    before = stages[: rank // stage_ranks]
    begins = tuple(sum(_bytes(stage[g]) for stage in before) for g in range(len(groups)))
    return CanonicalRows(layers, row_bytes, begins)


def place(group: PageGroup, runs: Sequence[Sequence[PageRun]], pages: Sequence[int], begin: int, row: int) -> PageGroup:
    """Returns the pages of ``group`` with their places in rows of ``row`` bytes.

    ``runs``: the bytes of each view. ``pages``: the size of each view's page with those of all ranks; the first of
    these pages is at ``begin``. Raises ValueError if the runs are not exactly the bytes of a view, or leave its page.
    """
    views, offsets = [], []
    for view, of_view, at, size in zip(group.views, runs, accumulate(pages, initial=begin), pages, strict=False):
        page_bytes, ends = int(view.shape[1]), 0
        for run in sorted(of_view, key=lambda run: run.local):
            if run.local != ends or not 0 <= run.canonical <= size - run.nbytes:
                where = f"a page of {page_bytes} bytes, or in one of {size} bytes of all ranks"
                raise ValueError(f"{run} is not in {where}")
            ends += run.nbytes
            views.append(view[:, run.local : ends])
            offsets.append(at + run.canonical)
        if ends != page_bytes:
            raise ValueError(f"{len(of_view)} runs cover {ends} of the {page_bytes} bytes of a page")
    is_whole = offsets == [*accumulate((view.shape[1] for view in views), initial=0)][:-1]
    placed = PageGroup(views, group.factor, Placement(tuple(offsets), row))
    # The pages of a rank that is alone are the whole row.
    return group if is_whole and placed.device_block_bytes == row else placed


def _bytes(layers: Iterable[LayerPages]) -> int:
    return sum(layer.page_bytes for layer in layers)
