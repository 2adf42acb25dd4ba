"""History: which blocks became ready in a medium, which have left it, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from kvoffload.abc import IntegrityError, MissReason, OffloadingEvent, OffloadKey, Slots
from kvoffload.cache.misses import MISS_MEMORY_ENTRIES, MissMemory
from kvoffload.cache.table import BlockTable

MAX_PENDING_EVENTS = 1 << 16
"""Events kept for a taker; beyond it the oldest are lost."""


class History:
    """Counts the blocks of ``table`` that became ready and that left, keeps events if there is a taker, and records in
    ``misses`` why keys are missing."""

    def __init__(self, medium: str, table: BlockTable, misses: MissMemory, has_events: bool) -> None:
        self.num_entered = self.num_removed = 0
        """Blocks that became ready since the start, and ready blocks that left."""
        self.has_events = has_events
        """Whether events are kept from now on."""
        self.misses = misses
        self._medium = medium
        self._table = table
        self._events: deque[OffloadingEvent] = deque(maxlen=MAX_PENDING_EVENTS)

    def entered(self, slots: Slots) -> None:
        """Records that the blocks in ``slots`` became ready."""
        self.num_entered += len(slots)
        self._add_event(slots, removed=False)

    def evicted(self, keys: list[OffloadKey]) -> None:
        """Records that blocks, which are not in the table any more, have left for others."""
        self.num_removed += len(keys)
        self.misses.record(keys, MissReason.EVICTED)
        if self.has_events and keys:
            self._events.append(OffloadingEvent(keys, self._medium, removed=True))

    def dropped(self, slots: Slots) -> None:
        """Records that the blocks in ``slots`` are about to be dropped. Those being written were never there."""
        ready = slots[~self._table.is_writing(slots)]
        self.num_removed += len(ready)
        self._add_event(ready, removed=True)
        # No more than the memory can hold: this may be of millions of blocks, on the engine's thread.
        self.misses.record(self._table.key_of[slots[-MISS_MEMORY_ENTRIES:]].tolist(), MissReason.RESET)

    def _add_event(self, slots: Slots, removed: bool) -> None:
        if self.has_events and len(slots):
            keys: list[OffloadKey] = self._table.key_of[slots].tolist()
            self._events.append(OffloadingEvent(keys, self._medium, removed))

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events since the last call."""
        while self._events:
            yield self._events.popleft()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every ready block that has left was counted."""
        if np.count_nonzero(~self._table.is_writing(self._table.slots())) != self.num_entered - self.num_removed:
            raise IntegrityError("a block has left without being counted: requests may be promised what is gone")
