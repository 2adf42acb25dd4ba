"""A model of the prefix cache in front: vLLM's pool of device blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_NOTHING = -1


class DeviceCache:
    """``num_blocks`` device blocks that can be used: vLLM's own figure, which it logs at start, counts its null block
    too.

    As in vLLM's block pool, a free block keeps what it holds until it is handed out again; free blocks wait in a queue,
    and those of a request join its end tail first, so that a prefix goes block by block from its tail. The only
    difference: of two blocks that hold the same, the older counts as empty. Requests come one after the other, so all
    blocks are free between them.
    """

    def __init__(self, num_blocks: int, num_distinct: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._held = [_NOTHING] * num_blocks
        """Which of the trace's blocks each device block holds."""
        self._place = np.full(num_distinct, _NOTHING, dtype=np.int64)
        """Where each of the trace's blocks is."""

    def lookup(self, chain: Sequence[int]) -> int:
        """Length of the longest run of leading blocks that are here."""
        hits = 0
        for place in self._place[chain].tolist():
            if place == _NOTHING:
                break
            hits += 1
        return hits

    def serve(self, chain: Sequence[int], hits: int, num_held: int) -> None:
        """A request goes on from its first ``hits`` blocks, holds ``num_held`` in all, no more than there are, computes
        or loads the rest of ``chain``, its whole blocks, and ends."""
        queue, held, place = self._queue, self._held, self._place
        mine: list[int] = place[chain[:hits]].tolist()
        for block in mine:
            queue.pop(block, None)
        fresh = [queue.popitem(last=False)[0] for _ in range(num_held - hits)]
        for block in fresh:
            if held[block] != _NOTHING:
                self._forget(block)
        for block, content in zip(fresh, chain[hits:], strict=False):
            if place[content] != _NOTHING:
                held[place[content]] = _NOTHING
            held[block] = content
            place[content] = block
        queue.update(dict.fromkeys(reversed(mine + fresh)))

    def _forget(self, block: int) -> None:
        self._place[self._held[block]] = _NOTHING
        self._held[block] = _NOTHING
        self.num_evicted += 1
