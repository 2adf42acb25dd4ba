"""The blocks that host memory holds are shown to tiers once per request, when it ends; the others when it arrives."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from kvoffload.abc import OffloadKey, ReqContext
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.tiers import MemoryTier, make_pools
from kvoffload.tiers import uses
from kvoffload.tiers.manager import TieredOffloadingManager
from kvoffload.tiers.uses import HeldBackUses

KEYS = [bytes([i]) * 36 for i in range(6)]


def context(name: str = "r") -> ReqContext:
    return ReqContext(name)


def test_the_leading_blocks_that_were_found_are_held_back_until_the_end() -> None:
    held = HeldBackUses()
    assert held.hold_back(np.array([3, 4, -1, 5]), context()) == 2
    assert held.hold_back(np.array([3, 4]), context("s")) == 2
    assert held.hold_back(np.array([-1]), context("t")) == 0
    assert held.hold_back(np.array([], dtype=np.int64), context("u")) == 0
    assert held.hold_back(np.array([3, 4]), None) == 0
    assert [held.end(context(name)) for name in "rrstu"] == [2, 0, 2, 0, 0]


def test_requests_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "MAX_REQUESTS", 2)
    held = HeldBackUses()
    for name in "abc":
        held.hold_back(np.array([1]), context(name))
    assert [held.end(context(name)) for name in "abc"] == [0, 1, 1]


class WatchedTier(MemoryTier):
    """Records what it is shown."""

    shown: list[tuple[str, list[OffloadKey]]]

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.shown.append(("touch", list(keys)))

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey]) -> None:
        self.shown.append(("reorder", list(keys)))


def test_a_tier_is_shown_each_block_at_most_once_when_a_request_arrives_and_once_when_it_ends() -> None:
    host = LRUOffloadingManager(HostBackend(1, 16))
    tier = WatchedTier(make_pools(16, 4096), 16)
    tier.shown = []
    manager = TieredOffloadingManager(host, [tier], tokens_per_block=[1])
    manager.prepare_store(KEYS[:4])
    manager.complete_store(KEYS[:4])
    manager.touch(KEYS, context())
    assert tier.shown == [("touch", KEYS[4:])]
    manager.reorder_chain(KEYS, [], context())
    # The tail first, so that it is evicted before the head.
    assert tier.shown[1:] == [("reorder", KEYS[4:]), ("touch", KEYS[:4])]
    tier.shown.clear()
    manager.touch(KEYS)
    manager.reorder_chain(KEYS, [])
    assert tier.shown == [("touch", KEYS), ("reorder", KEYS)]
