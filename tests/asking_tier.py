"""A tier that must ask its medium first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from kvoffload.abc import ByteArray, LookupState, OffloadKey, States
from kvoffload.tiers.threads import Executor
from tests.sim.memory_tier import MemoryTier


class AskingTier(MemoryTier):
    """A MemoryTier whose first answer about a key is RETRY, like that of a tier beyond a network."""

    name = "asking"

    def __init__(
        self,
        pools: Sequence[ByteArray],
        num_blocks: int,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pools, num_blocks, executor, clock)
        self.answered: set[OffloadKey] = set()

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        states = super().contains(keys)
        for i, key in enumerate(keys):
            if key not in self.answered and not self.is_closed:
                self.executor.submit_read(partial(self.answered.add, key))
                states[i] = LookupState.RETRY
        return states
