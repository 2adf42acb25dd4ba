"""A model of the engine's own prefix cache: vLLM's pool of device blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

NOTHING = -1
"""What an empty device block holds."""


class DeviceCache:
    """A pool of ``num_blocks`` usable device blocks. (The figure that vLLM logs at start includes its null block.)

    As in vLLM's block pool, a free block keeps its content until it is allocated again. Free blocks form a queue; those
    of a request join its end tail first, so that a prefix is evicted from its tail. There is one difference: if two
    blocks have the same content, the older counts as empty. Requests run one after the other, so all blocks are free
    between them.
    """

    def __init__(self, num_blocks: int, num_distinct: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._held = [NOTHING] * num_blocks
        """The trace's block in each device block."""
        self._place = np.full(num_distinct, NOTHING, dtype=np.int64)
        """The device block of each of the trace's blocks."""

    def lookup(self, chain: Sequence[int]) -> int:
        """Returns how many leading blocks of ``chain`` are in the cache."""
        hits = 0
        for place in self._place[chain].tolist():
            if place == NOTHING:
                break
            hits += 1
        return hits

    def serve(self, chain: Sequence[int], hits: int, num_held: int) -> list[int]:
        """Runs a request that reuses its first ``hits`` blocks, holds ``num_held`` blocks (at most ``num_blocks``) and
        computes or loads the rest of ``chain``, its whole blocks. Returns the contents that have left the cache for
        them, one per block, in this order, or NOTHING; the request may have computed some again."""
        queue, held, place = self._queue, self._held, self._place
        mine: list[int] = place[chain[:hits]].tolist()
        for block in mine:
            queue.pop(block, None)
        fresh = [queue.popitem(last=False)[0] for _ in range(num_held - hits)]
        left = [held[block] for block in fresh]
        for block in fresh:
            if held[block] != NOTHING:
                self._evict(block)
        for block, content in zip(fresh, chain[hits:], strict=False):
            if place[content] != NOTHING:
                held[place[content]] = NOTHING
            held[block] = content
            place[content] = block
        queue.update(dict.fromkeys(reversed(mine + fresh)))
        return left

    def _evict(self, block: int) -> None:
        self._place[self._held[block]] = NOTHING
        self._held[block] = NOTHING
        self.num_evicted += 1
