"""UnwrittenPins: what a tier is to retain and has not got yet stays in host memory until it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvoffload.abc import IntegrityError, OffloadKey
from kvoffload.abc.tier import HIT
from kvoffload.cache.manager import PolicyOffloadingManager

UNWRITTEN_SHARE = 0.125
"""At most this share of the host's blocks waits, pinned, to be written to a tier that retains it."""
WRITE_WITHIN_S = 30.0
"""A block that was not written within this time is not pinned any more, and may be lost."""
_NOT_PINNED = -1


class UnwrittenPins:
    """Pins blocks in ``host`` until ``written`` names them, at most WRITE_WITHIN_S each."""

    def __init__(self, host: PolicyOffloadingManager, clock: Callable[[], float]) -> None:
        self._host = host
        self._clock = clock
        self.most = max(1, int(host.num_blocks * UNWRITTEN_SHARE))
        self.slots: dict[OffloadKey, int] = {}
        """Host slots, read only for others; _NOT_PINNED while a block is being copied to the host."""
        self._deadlines: OrderedDict[OffloadKey, float] = OrderedDict()
        """The first to end first."""

    @property
    def num_free(self) -> int:
        """Blocks that may be added."""
        return self.most - len(self.slots)

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Pins ``keys``, at most ``num_free``, as soon as they are ready in the host."""
        deadline = self._clock() + WRITE_WITHIN_S
        for key in keys:
            self.slots.setdefault(key, _NOT_PINNED)
            self._deadlines[key] = deadline
            self._deadlines.move_to_end(key)
        self.entered(keys)

    def entered(self, keys: Collection[OffloadKey]) -> None:
        """Takes note of blocks that became ready in the host."""
        waiting = [key for key in keys if self.slots.get(key) == _NOT_PINNED]
        ready = np.flatnonzero(self._host.table.states(waiting) == HIT).tolist()
        if ready:
            pinned = [waiting[i] for i in ready]
            self.slots.update(zip(pinned, self._host.prepare_load(pinned).slots.tolist(), strict=True))

    def written(self, keys: Collection[OffloadKey]) -> None:
        """Unpins those of ``keys`` that were pinned."""
        slots = [self.slots.pop(key) for key in keys if key in self.slots]
        for key in keys:
            self._deadlines.pop(key, None)
        if slots := [slot for slot in slots if slot != _NOT_PINNED]:
            self._host.complete_load(self._host.lease(slots))

    def expire(self) -> None:
        """Unpins blocks that were not written in time."""
        now = self._clock()
        while self._deadlines and next(iter(self._deadlines.values())) <= now:
            self.written([next(iter(self._deadlines))])

    def clear(self) -> None:
        self.written(list(self.slots))

    def check_integrity(self) -> None:
        """Raises IntegrityError if more blocks are pinned than may be, or their deadlines are not known."""
        if len(self.slots) > self.most or self.slots.keys() != self._deadlines.keys():
            raise IntegrityError("blocks are pinned for writing beyond their bound, or for ever")
