"""The canonical layout: blocks that have the same bytes whatever the parallelism of the engine.

All ranks of an engine share one pool. A slot has the rows of whole blocks: the pages of all layers, stage after stage,
and each page as one rank alone would have it, with the heads of all tensor-parallel ranks. Each rank copies its own
heads. Of ranks that hold the same heads, one stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from kvoffload.abc import KVGroup, PageGroup, Placement
from kvoffload.connector.parts import plan_parts


@dataclass(frozen=True, slots=True)
class CanonicalLayer:
    """A layer as it is without parallelism."""

    name: str
    page_bytes: int
    """Bytes of one device block in this layer, of all tensor-parallel ranks together."""
    page_format: str
    """Describes such a page."""


@dataclass(frozen=True, slots=True)
class CanonicalPages:
    """The layers of one rank: for each KV cache group, in order."""

    layers: tuple[tuple[CanonicalLayer, ...], ...]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Bytes that a page of this rank and the page of all ranks have in common: ``nbytes`` at ``local`` of the one and
    at ``canonical`` of the other."""

    local: int
    canonical: int
    nbytes: int


class Share(Protocol):
    """What ``join`` needs of a rank. See ``KVShare``."""

    @property
    def canonical(self) -> CanonicalPages | str: ...

    @property
    def node(self) -> object: ...


@dataclass(frozen=True, slots=True)
class CanonicalRows:
    """The rows of all ranks together, as one of these ranks sees them."""

    layers: tuple[CanonicalLayer, ...]
    """All layers of the engine, KV cache group after group."""
    row_bytes: tuple[int, ...]
    """By KV cache group."""
    begins: tuple[int, ...]
    """Where the pages of this rank's stage begin in a row, by KV cache group."""


def join(shares: Sequence[Share], kv_groups: Sequence[KVGroup], rank: int, stage_ranks: int) -> CanonicalRows | str:
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
    groups = [tuple(layer for of_stage in stages for layer in of_stage.layers[g]) for g in range(len(pages[0].layers))]
    layers = tuple(layer for group in groups for layer in group)
    if len({layer.name for layer in layers}) != len(layers):
        return "several ranks have a layer of the same name"
    row_bytes = tuple(map(_bytes, groups))
    if plan_parts(kv_groups, [row_bytes]).parts.is_divided:
        return "the KV cache groups have blocks of different sizes, which are divided"
    before = stages[: rank // stage_ranks]
    return CanonicalRows(
        layers,
        row_bytes,
        tuple(sum(_bytes(stage.layers[g]) for stage in before) for g in range(len(groups))),
    )


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
                raise ValueError(
                    f"{run} is not in a page of {page_bytes} bytes, or in one of {size} bytes of all ranks"
                )
            ends += run.nbytes
            views.append(view[:, run.local : ends])
            offsets.append(at + run.canonical)
        if ends != page_bytes:
            raise ValueError(f"{len(of_view)} runs cover {ends} of the {page_bytes} bytes of a page")
    is_whole = offsets == [*accumulate((view.shape[1] for view in views), initial=0)][:-1]
    placed = PageGroup(views, group.factor, Placement(tuple(offsets), row))
    # The pages of a rank that is alone are the whole row.
    return group if is_whole and placed.device_block_bytes == row else placed


def _bytes(layers: Iterable[CanonicalLayer]) -> int:
    return sum(layer.page_bytes for layer in layers)
