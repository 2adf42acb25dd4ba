"""A chain that host memory holds is shown to tiers when its request ends; other chains when it arrives, too."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from kvoffload.abc import KVGroup, OffloadKey, ReqContext
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiering import steps
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from tests.sim.memory_tier import MemoryTier

KEYS = [bytes([i]) * 36 for i in range(6)]


def context(name: str = "r") -> ReqContext:
    return ReqContext(name)


class WatchedTier(MemoryTier):
    """Records what it is shown."""

    def __init__(self) -> None:
        super().__init__(make_pools(16, 4096), 16)
        self.shown: list[tuple[str, list[OffloadKey]]] = []

    def touch(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey] | None = None) -> None:
        self.shown.append(("touch" if stored is None else "reorder", list(keys)))


@pytest.fixture
def tier() -> WatchedTier:
    return WatchedTier()


@pytest.fixture
def manager(tier: WatchedTier) -> TieredOffloadingManager:
    """Host memory holds the first four KEYS."""
    manager = TieredOffloadingManager(LRUOffloadingManager(HostBackend(1, 16)), [tier], TieringSettings([KVGroup(1)]))
    manager.prepare_store(KEYS[:4])
    manager.complete_store(KEYS[:4])
    return manager


def test_a_chain_in_host_memory_is_shown_when_the_request_ends(
    manager: TieredOffloadingManager, tier: WatchedTier
) -> None:
    manager.touch(KEYS[:4], context())
    assert tier.shown == []
    manager.end_chain(KEYS, [], context())
    # The tail first, so that it is evicted before the head.
    assert tier.shown == [("reorder", KEYS[4:]), ("touch", KEYS[:4])]


@pytest.mark.parametrize("name", ["r", None], ids=["request", "no request"])
def test_other_chains_are_shown_whole_when_they_arrive(
    manager: TieredOffloadingManager, tier: WatchedTier, name: str | None
) -> None:
    """Otherwise a head that host memory holds would be older than its tail, and evicted first."""
    keys = KEYS if name else KEYS[:4]
    request = context(name) if name else None
    manager.touch(keys, request)
    manager.end_chain(keys, [], request)
    assert tier.shown == [("touch", keys), ("reorder", keys)]


def test_requests_that_never_end_are_forgotten(
    manager: TieredOffloadingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_REQUESTS", 2)
    for name in "abc":
        manager.touch(KEYS[:1], context(name))
    assert list(manager._steps._held_back) == ["b", "c"]
