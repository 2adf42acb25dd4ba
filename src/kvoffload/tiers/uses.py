"""Uses: which part of a request's chain the tiers have not been told of yet."""

from __future__ import annotations

from kvoffload.abc import ReqContext, Slots

MAX_REQUESTS = 4096
"""Requests with a held-back part. Beyond it the oldest is forgotten: its use is not counted, but its order is kept."""


class HeldBackUses:
    """Counts, per request, the leading blocks of its chain whose use the tiers are not shown before the request ends.

    These are the blocks that host memory holds when the request arrives: nothing is read for them from a tier. The
    order of a tier's blocks is that of the ends of requests anyway, so one pass over these blocks is enough.
    """

    def __init__(self) -> None:
        self._num_blocks: dict[str, int] = {}

    def hold_back(self, found: Slots, context: ReqContext | None) -> int:
        """Takes in where host memory has the blocks of a request's chain, -1 for those it lacks. Returns how many
        leading ones the tiers are not shown now."""
        if context is None:
            return 0
        num_blocks = int((found < 0).argmax()) if found.size and found.min() < 0 else len(found)
        self._num_blocks.pop(context.req_id, None)
        if num_blocks:
            self._num_blocks[context.req_id] = num_blocks
            if len(self._num_blocks) > MAX_REQUESTS:
                del self._num_blocks[next(iter(self._num_blocks))]
        return num_blocks

    def end(self, context: ReqContext | None) -> int:
        """Returns for how many leading blocks the request's use is to be shown now."""
        return 0 if context is None else self._num_blocks.pop(context.req_id, 0)
