"""A tier without bytes, for replays, in which it only counts which blocks are kept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvoffload.abc import (
    Keys,
    OffloadKey,
    RetainRefusal,
    Slots,
    States,
    TenantUse,
    Tier,
    TierError,
    TierResult,
    TierStats,
)
from kvoffload.cache.tenants import Shares
from kvoffload.tiers.catalog import Catalog


class CatalogTier(Tier):
    """A tier with the catalog of the disk tier and room for ``capacity`` blocks, whose transfers take no time.

    They end in the next ``poll``. If ``blocks_per_s`` is given, one block is written after the other at that rate.
    """

    name = "disk"

    def __init__(
        self,
        capacity: int,
        block_bytes: int,
        policy: str,
        clock: Callable[[], float],
        blocks_per_s: float = math.inf,
        shares: Shares | None = None,
    ) -> None:
        self.num_written = self.num_read = 0
        """Blocks."""
        self._catalog = Catalog(capacity, block_bytes, policy, clock, shares=shares)
        self._capacity = capacity
        self.block_bytes = block_bytes
        self._clock = clock
        self._write_seconds = 1 / blocks_per_s
        self._reads: list[tuple[OffloadKey, int]] = []
        """Blocks that are being read, with their slots."""
        self._writes: deque[tuple[float, OffloadKey, int]] = deque()
        """Blocks that are being written, each after the time at which that ends."""

    def stats(self) -> TierStats:
        size, num_blocks = self.block_bytes, self._catalog.num_blocks
        return TierStats(self._capacity * size, num_blocks, num_blocks * size, self._catalog.num_evicted)

    def tenant_uses(self) -> Sequence[TenantUse]:
        return self._catalog.blocks.tenant_uses()

    @property
    def is_busy(self) -> bool:
        """Whether transfers are under way."""
        return bool(self._reads or self._writes)

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        return self._catalog.contains(keys)

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        taken, _, own_slots = self._catalog.begin_reads(keys, slots)
        self._reads += zip(taken, own_slots.tolist(), strict=True)
        self.num_read += len(taken)
        return taken

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        taken, _, own_slots = self._catalog.begin_writes(keys, slots, self._catalog.num_available)
        ends = max(self._clock(), self._writes[-1][0] if self._writes else 0.0)
        for key, slot in zip(taken, own_slots.tolist(), strict=True):
            ends += self._write_seconds
            self._writes.append((ends, key, slot))
        self.num_written += len(taken)
        return taken

    def retain(self, keys: Keys, session: int | None, seconds: float) -> RetainRefusal | None:
        return self._catalog.retain(keys, session, seconds)

    def take_evicted(self) -> list[OffloadKey]:
        return self._catalog.take_removed()

    def poll(self) -> list[TierResult]:
        now = self._clock()
        reads, self._reads = self._reads, []
        writes = []
        while self._writes and self._writes[0][0] <= now:
            writes.append(self._writes.popleft()[1:])
        return self._end(reads, True) + self._end(writes, False)

    def _end(self, ended: list[tuple[OffloadKey, int]], is_read: bool) -> list[TierResult]:
        if not ended:
            return []
        keys, slots = [key for key, _ in ended], np.array([slot for _, slot in ended], dtype=np.int64)
        all_good = np.ones(len(keys), dtype=np.bool_)
        catalog = self._catalog
        gone = catalog.end_reads(keys, slots, all_good) if is_read else catalog.end_writes(slots, all_good)
        now, dropped = self._clock(), set(gone.tolist())
        return [
            TierResult(key, is_read, TierError.GONE if slot in dropped else None, self.block_bytes, 0.0, now, now)
            for key, slot in ended
        ]

    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> None:
        self._catalog.touch(keys, stored)

    def delete(self, keys: Keys) -> None:
        self._catalog.drop(keys)

    def reset(self) -> None:
        self._catalog.blocks.reset()

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self._catalog.blocks.reset()

    def check_integrity(self) -> None:
        self._catalog.blocks.check_integrity()
