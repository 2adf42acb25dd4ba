"""The memory of a remote tier about the blocks of its store: PresenceCache and Removals."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, repeat
from typing import Any

import numpy as np

from kvoffload.abc import Keys, OffloadKey, States
from kvoffload.abc.tier import HIT, MISS, RETRY

MAX_KNOWN = 1 << 18
"""Keys remembered; beyond that the oldest knowledge is forgotten."""
PRESENT_TTL_S = 10.0
"""How long a block counts as present. The store may lose it earlier: reading it then fails."""
MISSING_TTL_S = 1.0
"""How long a block counts as missing. Another server may store it earlier."""
MAX_WRITTEN = 1 << 18
"""Keys remembered because this process has written their blocks; the oldest are forgotten first."""
MAX_PENDING = 1 << 14
"""Keys that are to be removed; beyond that the oldest stay in the store."""
MAX_LOST = 1 << 16
"""Keys of lost blocks remembered for ``take_lost``; beyond that the oldest are left out."""
MAX_AT_ONCE = 256
"""Keys in one request."""
RETRY_S = 1.0
"""The pause after a failed removal."""


class PresenceCache:
    """Remembers answers about keys. Times are of the caller's clock, and not negative."""

    def __init__(self) -> None:
        self._until: dict[OffloadKey, float] = {}
        """Until when each key counts as present, or negative: until when it counts as missing. The oldest first."""

    def states(self, keys: Keys, now: float) -> States:
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
        _forget_oldest(self._until, MAX_KNOWN)

    def is_present_since(self, key: OffloadKey, time: float) -> bool:
        """Whether it was found or written at ``time`` or later."""
        return self._until.get(key, 0.0) >= time + PRESENT_TTL_S

    def forget_missing(self, keys: Iterable[OffloadKey], before: float) -> list[OffloadKey]:
        """Forgets those of ``keys`` that count as missing since ``before`` or longer, and returns them. Those that are
        missing until the end of a transfer are kept."""
        latest = before + MISSING_TTL_S
        forgotten = [key for key in keys if -latest <= self._until.get(key, 0.0) < 0.0]
        for key in forgotten:
            del self._until[key]
        return forgotten

    def clear(self) -> None:
        self._until.clear()


class Removals:
    """Keeps keys whose blocks this process has written, and keys whose blocks have to leave the store."""

    def __init__(self) -> None:
        self._written: dict[OffloadKey, None] = {}
        self._lost: dict[OffloadKey, None] = {}
        self._pending: dict[OffloadKey, None] = {}
        """Keys to be removed, including the request under way. The oldest first."""
        self._not_before = -float("inf")
        self._is_asked = False

    def __contains__(self, key: OffloadKey) -> bool:
        """Whether the block of ``key`` is to be removed, and has not been yet."""
        return key in self._pending

    def note_written(self, keys: Iterable[OffloadKey]) -> None:
        self._written.update(dict.fromkeys(keys))
        _forget_oldest(self._written, MAX_WRITTEN)

    def note_missing(self, keys: Iterable[OffloadKey]) -> None:
        """Notes that the store lacks these blocks: blocks that this process wrote were lost."""
        lost = [key for key in keys if key in self._written]
        for key in lost:
            del self._written[key]
        self._lost.update(dict.fromkeys(lost))
        _forget_oldest(self._lost, MAX_LOST)

    def take_lost(self) -> list[OffloadKey]:
        """Returns the keys of blocks that this process has written and the store has lost, since the last call."""
        lost, self._lost = list(self._lost), {}
        return lost

    def delete(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Requests the removal of the ``keys`` that this process wrote. Returns them."""
        own = [key for key in keys if key in self._written]
        for key in own:
            del self._written[key]
        self.remove(own)
        return own

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Requests the removal of ``keys``, also of blocks that other processes wrote."""
        self._pending.update(dict.fromkeys(keys))
        _forget_oldest(self._pending, MAX_PENDING)

    def to_ask(self, now: float) -> list[OffloadKey]:
        """Returns the keys that the store should be asked to remove now, as one request at a time."""
        if self._is_asked or now < self._not_before:
            return []
        return list(islice(self._pending, MAX_AT_ONCE))

    def asked(self) -> None:
        self._is_asked = True

    def answered(self, removed: Iterable[OffloadKey], has_failed: bool, now: float) -> None:
        """Takes in that the store no longer has the blocks of ``removed``. The others are removed later."""
        self._is_asked = False
        if has_failed:
            self._not_before = now + RETRY_S
        for key in removed:
            self._pending.pop(key, None)


def _forget_oldest(known: dict[OffloadKey, Any], most: int) -> None:
    for key in list(islice(known, max(0, len(known) - most))):
        del known[key]
