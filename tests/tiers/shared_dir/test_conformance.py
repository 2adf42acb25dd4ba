"""The conformance suite of tiers: a shared directory that another server uses too."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from kvoffload.abc import ByteArray, Tier, TierResult
from kvoffload.testing.tier_conformance import SharedTierConformance, make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.shared_dir.tier import SharedDirTier, Surroundings
from tests.sim.executor import SteppedExecutor
from tests.tiers.disk.rig import FINGERPRINT, spoil
from tests.tiers.shared_dir.rig import capacity, still


class Followed(SharedDirTier):
    """When it is polled, it does what the threads of all servers on its directory do."""

    def __init__(self, path: Path, pools: Sequence[ByteArray], num_blocks: int, opened: list[Followed]) -> None:
        self.path, self.opened, self.jobs = path, opened, SteppedExecutor(seed=1)
        super().__init__(
            DirectoryStorage(path),
            TierContext(pools, FINGERPRINT),
            capacity(num_blocks, *(pool.shape[1] for pool in pools)),
            surroundings=Surroundings(executor=self.jobs, repeat=partial(still, time.monotonic)),
        )
        opened.append(self)

    def poll(self) -> list[TierResult]:
        results = super().poll()
        for each in self.opened:
            if each.path == self.path:
                each.writer.keep()
                each.others.follow()
        return results

    def close(self) -> None:
        if self in self.opened:
            self.opened.remove(self)
        super().close()


class TestTwoServers(SharedTierConformance):
    """Another server uses the directory, and follows this one."""

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> Iterator[None]:
        self.tmp_path, self.numbers, self.opened = tmp_path, itertools.count(), list[Followed]()
        yield
        for tier in list(self.opened):
            tier.close()

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        path = self.tmp_path / str(next(self.numbers))
        Followed(path, make_pools(8, *(pool.shape[1] for pool in pools)), num_blocks, self.opened)
        return Followed(path, pools, num_blocks, self.opened)

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier | None:
        assert isinstance(tier, Followed)
        return Followed(tier.path, pools, num_blocks, self.opened)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        assert isinstance(tier, Followed)
        return Followed(tier.path, pools, 16, self.opened)

    def hold(self, tier: Tier) -> AbstractContextManager[None] | None:
        assert isinstance(tier, Followed)
        return tier.jobs.hold()

    def spoil(self, tier: Tier) -> bool:
        for slab in self.tmp_path.glob("*/writer-*/*/slab-*"):
            spoil(slab)
        return True
