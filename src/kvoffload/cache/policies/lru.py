"""Least recently used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, OffloadKey, Slots
from kvoffload.cache.policies.base import RecencyList


class LRUPolicy(CachePolicy):
    """Evicts the block whose insertion, last touch or last unpin is longest ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order = RecencyList(capacity)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self._order.append(slots)

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        self._order.append(slots[~pinned])

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        self._order.append(slots[~pinned])

    def settle(self, slots: Slots) -> None:
        self._order.settle(slots)

    def pin(self, slots: Slots) -> None:
        self._order.park(slots)

    def unpin(self, slots: Slots) -> None:
        self._order.append(slots)

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        return self._order.pop_oldest(n, busy)

    def remove(self, slots: Slots) -> None:
        self._order.discard(slots)

    def clear(self) -> None:
        self._order.clear()

    def check_integrity(self, slots: Slots) -> None:
        self._order.check_integrity(slots.tolist())
