"""The conformance suite of tiers: a shared directory that another server uses too."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import ByteArray, Tier
from kvoffload.testing.tier_conformance import SharedTierConformance, make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.shared_dir.tier import SharedDirTier, Surroundings
from tests.sim.executor import SteppedExecutor
from tests.tiers.disk.rig import FINGERPRINT, spoil
from tests.tiers.shared_dir.rig import capacity, still


class TestTwoServers(SharedTierConformance):
    """Another server uses the directory, and follows this one."""

    tmp_path: Path

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> Iterator[None]:
        self.tmp_path = tmp_path
        self.numbers = itertools.count()
        self.opened: list[SharedDirTier] = []
        self.executors: dict[int, SteppedExecutor] = {}
        self.path_of: dict[int, Path] = {}
        self.closed: set[int] = set()
        yield
        for tier in self.opened:
            tier.close()

    def open(self, path: Path, pools: Sequence[ByteArray], num_blocks: int) -> SharedDirTier:
        executor = SteppedExecutor(seed=1)
        tier = SharedDirTier(
            DirectoryStorage(path),
            TierContext(pools, FINGERPRINT),
            capacity(num_blocks, *(pool.shape[1] for pool in pools)),
            surroundings=Surroundings(executor=executor, repeat=partial(still, time.monotonic)),
        )
        self.executors[id(tier)] = executor
        self.opened.append(tier)
        self.path_of[id(tier)] = path
        poll = tier.poll

        def poll_and_follow() -> Any:
            """Does what the threads of the servers on this directory do."""
            results = poll()
            for each in self.opened:
                if self.path_of[id(each)] == path and id(each) not in self.closed:
                    each.keep()
                    each.follow()
            return results

        close = tier.close

        def note_and_close() -> None:
            self.closed.add(id(tier))
            close()

        tier.poll, tier.close = poll_and_follow, note_and_close  # type: ignore[method-assign]
        return tier

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        path = self.tmp_path / str(next(self.numbers))
        self.open(path, make_pools(8, *(pool.shape[1] for pool in pools)), num_blocks)
        return self.open(path, pools, num_blocks)

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier | None:
        assert isinstance(tier, SharedDirTier)
        path = max(self.tmp_path.iterdir(), key=lambda each: int(each.name))
        return self.open(path, pools, num_blocks)

    def hold(self, tier: Tier) -> AbstractContextManager[None] | None:
        return self.executors[id(tier)].hold()

    def spoil(self, tier: Tier) -> bool:
        for slab in self.tmp_path.glob("*/writer-*/*/slab-*"):
            spoil(slab)
        return True

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.open(self.path_of[id(tier)], pools, 16)
