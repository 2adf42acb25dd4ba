"""A simple tier in memory."""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvoffload.abc import (
    ByteArray,
    IntegrityError,
    LookupState,
    OffloadKey,
    Slots,
    States,
    Tier,
    TierError,
    TierResult,
    TierStats,
)
from kvoffload.tiers.threads import Executor
from tests.sim.executor import SteppedExecutor


@dataclass(slots=True, eq=False)
class StoredBlock:
    """A block of MemoryTier. ``raw``: its bytes, one buffer per rank."""

    raw: list[ByteArray] = field(default_factory=list)
    checksum: int = 0
    ready: bool = False


class MemoryTier(Tier):
    """A simple tier: at most ``num_blocks`` blocks in a dict, of which the oldest is evicted first.

    ``pools``: one per rank, shape (num_slots, slot_bytes). Subclasses with a bug override its methods; ``read_block``
    and ``write_block`` run on the executor's threads.
    """

    name = "memory"

    def __init__(
        self,
        pools: Sequence[ByteArray],
        num_blocks: int,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = pools
        self.block_bytes = sum(pool.shape[1] for pool in pools)
        self.max_blocks = num_blocks
        self.executor = executor or SteppedExecutor(clock=clock)
        self.clock = clock
        self.blocks: OrderedDict[OffloadKey, StoredBlock] = OrderedDict()
        """Oldest first, including blocks that are being written."""
        self.under_way: set[OffloadKey] = set()
        """Keys that ``poll`` has not reported yet. Their blocks are not evicted."""
        self.ended: deque[tuple[TierResult, StoredBlock]] = deque()
        self.num_evicted = 0
        self.is_closed = False
        self._left: deque[OffloadKey] | None = None
        """Blocks that have left since the last ``take_evicted``, the newest; None before the first."""

    def stats(self) -> TierStats:
        size = self.block_bytes
        return TierStats(self.max_blocks * size, len(self.blocks), len(self.blocks) * size, self.num_evicted)

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        hits = [key in self.blocks and self.blocks[key].ready for key in keys]
        return np.where(hits, LookupState.HIT, LookupState.MISS).astype(np.uint8)

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            block = self.blocks.get(key)
            if block is None or not block.ready or key in self.under_way or self.is_closed:
                continue
            if self.executor.submit_read(partial(self.read_block, key, slot, block)):
                self.under_way.add(key)
                taken.append(key)
        return taken

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if key in self.blocks or key in self.under_way or self.is_closed or not self.make_room():
                continue
            block = StoredBlock()
            if self.executor.submit_write(partial(self.write_block, key, slot, block)):
                self.blocks[key] = block
                self.under_way.add(key)
                taken.append(key)
        return taken

    def touch(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey] | None = None) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def reset(self) -> None:
        if self._left is not None:
            self._left.extend(self.blocks)
        self.blocks.clear()

    def take_evicted(self) -> list[OffloadKey]:
        taken, self._left = list(self._left or ()), deque(maxlen=max(1, 4 * self.max_blocks))
        return taken

    def poll(self) -> list[TierResult]:
        results = []
        while self.ended:
            result, block = self.ended.popleft()
            self.under_way.discard(result.key)
            if self.blocks.get(result.key) is not block:
                result = TierResult(result.key, result.is_read, TierError.GONE)
            elif not result.ok:
                del self.blocks[result.key]
            block.ready = True
            results.append(result)
        return results

    def wait(self, timeout_s: float) -> None:
        if not self.ended:
            self.executor.wait(timeout_s)

    def close(self) -> None:
        self.is_closed = True
        self.executor.close(timeout_s=1.0)
        self.reset()

    def check_integrity(self) -> None:
        if len(self.blocks) > self.max_blocks:
            raise IntegrityError(f"{len(self.blocks)} blocks, but room for {self.max_blocks}")
        if any(not block.ready and key not in self.under_way for key, block in self.blocks.items()):
            raise IntegrityError("a block is not ready, but no write of it is under way")

    def make_room(self) -> bool:
        """Returns whether there is room for one more block, after an eviction if necessary."""
        return len(self.blocks) < self.max_blocks or self.evict()

    def evict(self) -> bool:
        """Evicts the oldest block that is not in transfer. Returns whether there was one."""
        victim = next((key for key in self.blocks if key not in self.under_way), None)
        if victim is not None:
            del self.blocks[victim]
            if self._left is not None:
                self._left.append(victim)
            self.num_evicted += 1
        return victim is not None

    # On the executor's threads.

    def read_block(self, key: OffloadKey, slot: int, block: StoredBlock) -> None:
        start = self.clock()
        for pool, raw in zip(self.pools, block.raw, strict=True):
            pool[slot] = raw
        good = checksum_of([pool[slot] for pool in self.pools]) == block.checksum
        self._end(key, True, None if good else TierError.CORRUPT, start, block)

    def write_block(self, key: OffloadKey, slot: int, block: StoredBlock) -> None:
        start = self.clock()
        block.raw = [pool[slot].copy() for pool in self.pools]
        block.checksum = checksum_of(block.raw)
        self._end(key, False, None, start, block)

    def _end(self, key: OffloadKey, is_read: bool, error: TierError | None, start: float, block: StoredBlock) -> None:
        now = self.clock()
        self.ended.append((TierResult(key, is_read, error, self.block_bytes, now - start, start, now), block))


def checksum_of(buffers: Sequence[ByteArray]) -> int:
    return zlib.crc32(b"".join(buffer.tobytes() for buffer in buffers))
