"""A tier that fails, as an entry of a configuration."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvoffload.abc import ByteArray, OffloadKey, Slots, Tier
from kvoffload.tiers.config import TierConfig, TierContext
from tests.sim.memory_tier import MemoryTier, StoredBlock

BLOCKS = 1000


class HangingTier(MemoryTier):
    """Writes at once, and never ends a read: nobody steps its executor. Its blocks outlive it."""

    kept: ClassVar[OrderedDict[OffloadKey, StoredBlock]] = OrderedDict()

    def __init__(self, pools: Sequence[ByteArray], num_blocks: int) -> None:
        super().__init__(pools, num_blocks)
        self.blocks = self.kept

    def reset(self) -> None:
        pass

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = super().write(keys, slots)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if key in taken:
                self.write_block(key, slot, self.blocks[key])
        return taken


@dataclass(frozen=True, kw_only=True)
class HangingConfig(TierConfig):
    kind = "hanging"

    def open(self, context: TierContext) -> Tier:
        return HangingTier(context.pools, BLOCKS)
