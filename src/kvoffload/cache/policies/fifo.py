"""First in, first out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, OffloadKey, Slots
from kvoffload.cache.policies.base import RecencyList


class FIFOPolicy(CachePolicy):
    """Evicts the block that was stored first, however often it was used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order = RecencyList(capacity)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self._order.append(slots)

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        pass

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        self._order.append(slots[new])

    def settle(self, slots: Slots) -> None:
        self._order.settle(slots)

    def pin(self, slots: Slots) -> None:
        pass

    def unpin(self, slots: Slots) -> None:
        self._order.settle(slots)

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        return self._order.pop_oldest(n, busy)

    def remove(self, slots: Slots) -> None:
        self._order.discard(slots)

    def clear(self) -> None:
        self._order.clear()

    def check_integrity(self, slots: Slots) -> None:
        self._order.check_integrity(slots.tolist())
