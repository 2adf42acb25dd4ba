"""The simulated store, its clients and its processes; a remote tier on them passes the conformance suite."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from random import Random

import pytest

from kvoffload.abc import ByteArray, Tier
from kvoffload.testing.conformance import keys
from kvoffload.testing.tier_conformance import DEADLINE_S, SharedTierConformance
from kvoffload.tiers.remote.memory import ValueMemory
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker
from tests.sim.stores import (
    ClientState,
    SimulatedClient,
    SimulatedStarter,
    SimulatedStore,
    StoreFaults,
)

FINGERPRINT = "0f" * 32


class TestRemoteTierOnASimulatedStore(SharedTierConformance):
    @pytest.fixture(autouse=True)
    def without_tiers(self) -> None:
        self.starters: dict[int, SimulatedStarter] = {}
        self.stores: dict[int, SimulatedStore] = {}

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(SimulatedStore(time.monotonic), pools)

    def on(self, store: SimulatedStore, pools: Sequence[ByteArray]) -> Tier:
        def stall(seconds: float) -> None:
            starter.stall(seconds)

        state = ClientState(object(), StoreFaults, Random(0), lambda: starter.pause(), stall)
        starter = SimulatedStarter(
            lambda: StoreWorker(SimulatedClient(store, state), ValueMemory(pools), ValueFormat(FINGERPRINT, "kv")),
            time.monotonic,
        )
        tier = RemoteTier(starter.start, sum(pool.shape[1] for pool in pools), random=lambda: 0.5)
        self.starters[id(tier)], self.stores[id(tier)] = starter, store
        deadline = time.monotonic() + DEADLINE_S
        while not tier.stats().is_connected and time.monotonic() < deadline:
            tier.poll()
        return tier

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.another(tier, pools)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.on(self.stores[id(tier)], pools)

    def hold(self, tier: Tier) -> AbstractContextManager[None]:
        return self.starters[id(tier)].hold()

    def spoil(self, tier: Tier) -> bool:
        for value in self.stores[id(tier)].values.values():
            value.data[200] ^= 1
        return True

    def lose(self, tier: Tier, names: str) -> bool:
        for key in keys(names):
            self.stores[id(tier)].evict(ValueFormat(FINGERPRINT, "kv").name(key))
        return True
