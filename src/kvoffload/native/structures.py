"""The hot structures as they run here: compiled, or from the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.native import load, reference

if TYPE_CHECKING:
    from kvoffload.native.reference import (
        BlockTable,
        FreeSlots,
        GapLists,
        GhostTable,
        KeyQueue,
        RecencyList,
        ReturnRates,
    )
else:
    _cache, _ghosts = (load(name) or reference for name in ("_cache", "_ghosts"))
    BlockTable, FreeSlots = _cache.BlockTable, _cache.FreeSlots
    GapLists, GhostTable, KeyQueue = _ghosts.GapLists, _ghosts.GhostTable, _ghosts.KeyQueue
    RecencyList, ReturnRates = _ghosts.RecencyList, _ghosts.ReturnRates

__all__ = ["BlockTable", "FreeSlots", "GapLists", "GhostTable", "KeyQueue", "RecencyList", "ReturnRates"]
