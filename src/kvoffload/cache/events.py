"""Events of a medium: which blocks became ready in it, and which have left it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvoffload.abc import OffloadingEvent, OffloadKey, Slots

MAX_PENDING_EVENTS = 1 << 16
"""Events kept for a taker; beyond it the oldest are lost."""


class NoEvents:
    """Nobody takes events."""

    def add(self, keys: list[OffloadKey], removed: bool) -> None:
        """Notes that blocks became ready, or were removed."""

    def add_slots(self, slots: Slots, removed: bool) -> None:
        """Does the same for the blocks that are in ``slots`` now."""

    def take(self) -> Iterable[OffloadingEvent]:
        """Returns the events since the last call."""
        return ()


class Events(NoEvents):
    """Keeps events for a taker. ``key_of``: the key in each slot."""

    def __init__(self, medium: str, key_of: npt.NDArray[np.object_]) -> None:
        self._medium = medium
        self._key_of = key_of
        self._pending: deque[OffloadingEvent] = deque(maxlen=MAX_PENDING_EVENTS)

    def add(self, keys: list[OffloadKey], removed: bool) -> None:
        if keys:
            self._pending.append(OffloadingEvent(keys, self._medium, removed))

    def add_slots(self, slots: Slots, removed: bool) -> None:
        self.add(self._key_of[slots].tolist(), removed)

    def take(self) -> Iterable[OffloadingEvent]:
        while self._pending:
            yield self._pending.popleft()
