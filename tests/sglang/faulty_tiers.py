"""Tiers that fail, as entries of a configuration."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvoffload.abc import ByteArray, OffloadKey, Slots, States, Tier
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


class RaisingTier(MemoryTier):
    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        raise RuntimeError("a bug of the tier")


@dataclass(frozen=True, kw_only=True)
class FaultyConfig(TierConfig):
    kind = "faulty"

    fault: str

    def open(self, context: TierContext) -> Tier:
        made: dict[str, Any] = {"hangs": HangingTier, "raises": RaisingTier}
        tier: Tier = made[self.fault](context.pools, BLOCKS)
        return tier
