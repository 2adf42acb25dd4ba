"""PresenceCache: which blocks a store is known to have, or to lack, for a short while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from kvoffload.abc import OffloadKey, States
from kvoffload.abc.tier import HIT, MISS, RETRY

MAX_KNOWN = 1 << 18
"""Keys remembered; beyond that the oldest knowledge is forgotten."""
PRESENT_TTL_S = 10.0
"""How long a block counts as present. The store may lose it earlier: reading it then fails."""
MISSING_TTL_S = 1.0
"""How long a block counts as missing. Another server may store it earlier."""


class PresenceCache:
    """Remembers answers about keys. Times are of the caller's clock, and not negative."""

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._until: dict[OffloadKey, float] = {}
        """Until when each key counts as present, or negative: until when it counts as missing. The oldest first."""

    def states(self, keys: Sequence[OffloadKey], now: float) -> States:
        """Returns HIT, MISS or, if nothing is known, RETRY per key."""
        until = np.fromiter(map(self._until.get, keys, repeat(0.0)), np.float64, len(keys))
        states = np.full(len(keys), RETRY, dtype=np.uint8)
        states[until > now] = HIT
        states[until < -now] = MISS
        return states

    def note_present(self, keys: Iterable[OffloadKey], now: float) -> None:
        self._note(keys, now + PRESENT_TTL_S)

    def note_missing(self, keys: Iterable[OffloadKey], now: float, ttl_s: float = MISSING_TTL_S) -> None:
        self._note(keys, -(now + ttl_s))

    def _note(self, keys: Iterable[OffloadKey], until: float) -> None:
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = until
        for key in [key for _, key in zip(range(len(self._until) - self._max_known), self._until, strict=False)]:
            del self._until[key]

    def clear(self) -> None:
        self._until.clear()
