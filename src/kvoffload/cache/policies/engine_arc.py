"""Adaptive Replacement Cache as engines have it: a block whose key is in a ghost list still counts as new."""

from __future__ import annotations

from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Backend, Keys, Slots
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.arc import ARCPolicy
from kvoffload.native.structures import KeyQueue


class EngineARCPolicy(ARCPolicy):
    """New blocks always enter t1. A key that is asked for stays in its ghost list, as the most recent one. A block
    leaves t1 until t1 is shorter than its target. Each ghost list is at most as long as the cache."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._asked = KeyQueue(1)  # Stays empty: a returning block is new, so its key need not be remembered.

    def insert(self, slots: Slots, keys: Keys) -> None:
        self.b1.discard(keys)
        self.b2.discard(keys)
        self.t1.append(slots)

    def _ask(self, keys: Keys) -> None:
        asked, in_b1 = self._adapt(keys, leave=False)
        self.b1.add(list(compress(asked, in_b1)))
        self.b2.add(list(compress(asked, (not each for each in in_b1))))

    def _t1_surplus(self) -> int:
        return len(self.t1) - int(self.target_t1_size) + 1

    def admit(self, keys: Keys, shortage: int) -> npt.NDArray[np.bool_] | None:
        return None

    def refuse(self, keys: Keys) -> None:
        """Forgets them."""

    def _check_ghosts(self) -> None:
        """Each ghost list is bounded by itself."""


class ARCOffloadingManager(PolicyOffloadingManager):
    """Evicts by EngineARCPolicy."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, EngineARCPolicy(backend.num_blocks), enable_events)
