"""The hot structures as they run here: compiled, or from the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.native import load, reference

if TYPE_CHECKING:
    from kvoffload.native.reference import BlockTable, FreeSlots, GapLists, GhostTable, KeyQueue, RecencyList
else:
    _cache, _ghosts = (load(name) or reference for name in ("_cache", "_ghosts"))
    BlockTable, FreeSlots = _cache.BlockTable, _cache.FreeSlots
    GapLists, RecencyList = _ghosts.GapLists, _ghosts.RecencyList
    GhostTable, KeyQueue = _ghosts.GhostTable, _ghosts.KeyQueue

__all__ = ["BlockTable", "FreeSlots", "GapLists", "GhostTable", "KeyQueue", "RecencyList"]
