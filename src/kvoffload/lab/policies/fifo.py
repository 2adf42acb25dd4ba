"""First in, first out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Eviction, OffloadKey, Slots
from kvoffload.cache.policies.base import ListPolicy


class FIFOPolicy(ListPolicy):
    """Evicts the block that was stored first, however often it was used."""

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self.lists[0].append(slots)

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        self.lists[0].append(slots[new])

    def evict(self, eviction: Eviction) -> Slots:
        return self.lists[0].pop_oldest(eviction.n, eviction.busy)
