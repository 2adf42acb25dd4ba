"""The hot structures as they run here: compiled, or from the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.native import load, reference

if TYPE_CHECKING:
    from kvoffload.native.reference import BlockTable, FreeSlots, GhostTable, KeyQueue, ListPair, RecencyList
else:
    _cache, _ghosts = (load(name) or reference for name in ("_cache", "_ghosts"))
    BlockTable, FreeSlots = _cache.BlockTable, _cache.FreeSlots
    GhostTable, KeyQueue, ListPair, RecencyList = (
        _ghosts.GhostTable,
        _ghosts.KeyQueue,
        _ghosts.ListPair,
        _ghosts.RecencyList,
    )

__all__ = ["BlockTable", "FreeSlots", "GhostTable", "KeyQueue", "ListPair", "RecencyList"]
