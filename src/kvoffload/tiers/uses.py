"""HeldBackUses: how much of each request's chain has not been touched in the tiers yet."""

from __future__ import annotations

from collections import OrderedDict

from kvoffload.abc import ReqContext, Slots

MAX_REQUESTS = 4096
"""Requests that are remembered. The oldest is forgotten: its use is not counted."""


class HeldBackUses:
    """Counts, per request, the blocks of its chain that tiers are shown when it ends, and not when it arrives.

    If host memory holds the whole chain of a request when it arrives, nothing is read from a tier for it, and one pass
    over the chain is enough. Otherwise tiers are shown the whole chain at once, so that no head is older than its tail.
    """

    def __init__(self) -> None:
        self._num_blocks: OrderedDict[str, int] = OrderedDict()

    def hold_back(self, found: Slots, context: ReqContext | None) -> int:
        """Takes in the slots of a request's chain in host memory, -1 for blocks that it lacks. Returns how many blocks
        the tiers are not shown now: all or none."""
        if context is None:
            return 0
        self._num_blocks.pop(context.req_id, None)
        if not found.size or found.min() < 0:
            return 0
        self._num_blocks[context.req_id] = len(found)
        if len(self._num_blocks) > MAX_REQUESTS:
            self._num_blocks.popitem(last=False)
        return len(found)

    def end(self, context: ReqContext | None) -> int:
        """Returns how many leading blocks of the request the tiers are shown now."""
        return 0 if context is None else self._num_blocks.pop(context.req_id, 0)
