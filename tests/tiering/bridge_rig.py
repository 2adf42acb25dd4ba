"""A bridge whose thread the test plays, in front of plain tiers in memory, with a clock of their own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import LookupState, OffloadKey
from kvoffload.cache.keys import namespace
from kvoffload.tiering.bridge import BridgeSettings, JobEnd, Page, TierBridge
from kvoffload.tiering.bridge_thread import STORE_SHARE
from tests.tiering.rig import SLOT_BYTES, Rig, SpyTier, content

FINGERPRINT = "ab" * 32
PARTS = (1000, 3, SLOT_BYTES - 1003)
"""Sizes of the arrays of which a page is made."""


class Foreign:
    """The host memory of an engine: ``num_pages`` blocks. ``close`` raises BufferError while somebody refers to it."""

    def __init__(self, num_pages: int) -> None:
        self.memory = mmap.mmap(-1, num_pages * SLOT_BYTES)

    def close(self) -> None:
        self.memory.close()

    def page(self, index: int) -> Page:
        whole = np.frombuffer(self.memory, dtype=np.uint8)[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]
        return np.split(whole, np.cumsum(PARTS[:-1]))

    def pages(self, indices: Sequence[int]) -> list[Page]:
        return [self.page(index) for index in indices]

    def fill(self, indices: Sequence[int], keys: Sequence[OffloadKey], generation: int = 0) -> list[Page]:
        """Writes the bytes of ``keys`` and returns their pages."""
        for index, key in zip(indices, keys, strict=True):
            self.memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = block(key, generation)
        return self.pages(indices)

    def clear(self, indices: Sequence[int]) -> list[Page]:
        for index in indices:
            self.memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
        return self.pages(indices)

    def holds(self, index: int, key: OffloadKey, generation: int = 0) -> bool:
        return self.memory[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] == block(key, generation)


def block(key: OffloadKey, generation: int = 0) -> bytes:
    """Returns the bytes of a block, computed with the weights of ``generation``."""
    blocks: npt.NDArray[np.uint8] = content(key) + np.uint8(generation)
    return blocks.tobytes()


class BridgeRig:
    """``bridge`` has a staging pool of ``staging`` blocks. ``options`` are those of Rig and of TierBridge."""

    def __init__(
        self,
        staging: int = 16,
        tier_blocks: int = 256,
        num_pages: int = 64,
        max_pages: int = 1 << 14,
        tier_class: type[SpyTier] = SpyTier,
        **options: Any,
    ) -> None:
        deadlines = {name: options.get(name, 1000.0) for name in ("lookup_deadline_ms", "load_deadline_ms")}
        self.rig = Rig(
            staging,
            tier_blocks,
            tier_class=tier_class,
            load_only_if_faster=False,
            write_share=STORE_SHARE,
            backlog_share=1e3,
            **(options | deadlines),
        )
        self.tier, self.clock, self.executor, self.manager = (
            self.rig.tier,
            self.rig.clock,
            self.rig.executor,
            self.rig.manager,
        )
        self.foreign = Foreign(num_pages)
        self.bridge = TierBridge(
            self.manager,
            self.rig.pools[0],
            SLOT_BYTES,
            FINGERPRINT,
            BridgeSettings(max_pages=max_pages, **deadlines),
            clock=self.clock,
        )
        self.ends: list[JobEnd] = []

    def name(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [namespace(FINGERPRINT) + key for key in keys]

    def held(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Returns the indices of the keys that the first tier holds."""
        return np.flatnonzero(self.tier.contains(self.name(keys)) == LookupState.HIT).tolist()

    def step(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.bridge._thread.step()
            self.manager.check_integrity()

    def settle(self) -> list[JobEnd]:
        """Runs until nothing happens any more. Returns the reports since the last call."""
        for _ in range(1000):
            self.executor.drain()
            if not self.bridge._thread.step() and self.executor.idle:
                break
        else:
            raise AssertionError("the bridge never comes to rest")
        self.manager.check_integrity()
        return self.bridge.finished()

    def store(
        self, keys: Sequence[OffloadKey], chain: Sequence[OffloadKey], request: str = "r", job: int = 1
    ) -> JobEnd:
        """Stores ``keys`` from the first pages and returns the report."""
        self.bridge.store(job, keys, self.foreign.fill(range(len(keys)), keys), chain, request)
        (end,) = self.settle()
        return end

    def store_all(self, keys: Sequence[OffloadKey], request: str = "r") -> None:
        """A request stores its whole chain and ends; the staging pool forgets it."""
        assert self.store(keys, keys, request).ok
        self.bridge.end_request(request, keys)
        self.settle()
        self.rig.host.reset()
        assert self.held(keys) == list(range(len(keys)))

    def load(self, keys: Sequence[OffloadKey], job: int = 2) -> JobEnd:
        self.bridge.load(job, keys, self.foreign.clear(range(len(keys))), "l")
        (end,) = self.settle()
        return end
