"""Events of tiers: what a router learns from them is what the tier holds."""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any

import pytest

from kvoffload.abc import KVGroup, OffloadingEvent, OffloadKey, Tier, TierError, TierResult
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiering import guard
from kvoffload.tiering.guard import TierEvents
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from tests.sim.executor import SteppedExecutor
from tests.sim.memory_tier import MemoryTier
from tests.sim.shared_storage import SimulatedStorage
from tests.tiering.rig import A, Rig, SharedTier, SpyTier, chain

SLOT_BYTES = 4096


def apply(index: dict[str | None, set[OffloadKey]], events: Collection[OffloadingEvent]) -> None:
    """Does what a router does with events."""
    for event in events:
        held = index.setdefault(event.tier, set())
        (held.difference_update if event.removed else held.update)(event.keys)


def test_a_written_block_is_announced_with_medium_and_tier() -> None:
    rig = Rig(enable_events=True)
    keys = chain("a", 3)
    rig.store(keys)
    rig.settle()
    rig.settle()
    events = list(rig.manager.take_events())
    assert {(event.medium, event.tier, event.removed, event.is_shared) for event in events} == {
        ("CPU", None, False, False),
        ("STORAGE", "memory", False, False),
    }
    index: dict[str | None, set[OffloadKey]] = {}
    apply(index, events)
    assert index == {None: set(keys), "memory": set(keys)}
    assert list(rig.manager.take_events()) == []


class AskedTier(SpyTier):
    """Must not be asked what it has evicted."""

    def take_evicted(self) -> list[OffloadKey]:
        raise AssertionError("asked")


def test_a_tier_without_events_is_not_asked_and_keeps_nothing() -> None:
    rig = Rig(tier_blocks=2, tier_class=AskedTier)
    for name in "ab":
        rig.store(chain(name, 2))
        rig.settle()
    assert rig.tier.num_evicted == 2
    assert list(rig.manager.take_events()) == []
    assert rig.manager.tiers[0].tier.events is None


@pytest.mark.parametrize("error", [TierError.CORRUPT, TierError.GONE])
def test_a_block_that_could_not_be_read_is_gone(error: TierError) -> None:
    rig = Rig(enable_events=True)
    keys = chain("a", 2)
    rig.store_below(keys)
    rig.tier.fails = error
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    index: dict[str | None, set[OffloadKey]] = {"memory": set(keys)}
    apply(index, list(rig.manager.take_events()))
    assert index["memory"] == set()


def test_a_failing_medium_says_nothing_about_a_block() -> None:
    """The tier says itself, by ``take_evicted``, if it gives the block up."""
    events = TierEvents(MemoryTier(make_pools(1, SLOT_BYTES), 1))
    events.ended([TierResult(b"a", True, TierError.IO), TierResult(b"b", False, TierError.IO)])
    assert list(events.take()) == []


def test_a_block_found_in_a_shared_medium_is_announced_too() -> None:
    events = TierEvents(SharedTier(make_pools(1, SLOT_BYTES), 1))
    events.ended([TierResult(b"a", False, nbytes=0)])
    (event,) = events.take()
    assert (event.keys, event.removed, event.is_shared) == ([b"a"], False, True)


def test_pending_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_PENDING_EVENTS", 4)
    events = TierEvents(MemoryTier(make_pools(1, SLOT_BYTES), 1))
    names = [bytes([i]) for i in range(10)]
    events.ended([TierResult(name, False) for name in names])
    (event,) = events.take()
    assert event.keys == names[-4:]
    for name in names:
        events.deleted.append(name)
    events.ended([])
    (event,) = events.take()
    assert event.keys == names[-4:]


# An index made from events alone, over a random history.


def disk_tier(pools: Any, executor: SteppedExecutor, clock: Any) -> Tier:
    return DiskTier(
        SimulatedStorage(1 << 24, pause=executor.pause),
        pools,
        DiskSettings("0" * 64, 160 << 10, slab_bytes=1 << 15),
        executor=executor,
        clock=clock,
    )


def history(make_tier: Any, seed: int) -> tuple[set[OffloadKey], set[OffloadKey]]:
    """Runs random stores, reads, deletions and resets on a small tier. Returns what a router believes that the tier
    holds, and what it holds."""
    random, clock = Random(seed), lambda: 0.0
    pools = make_pools(16, SLOT_BYTES)
    executor = SteppedExecutor(seed, clock=clock)
    tier = make_tier(pools, executor, clock)
    host = PolicyOffloadingManager(HostBackend(16, 16), make_policy("lru", 16), True, must_store=True, clock=clock)
    manager = TieredOffloadingManager(
        host, [tier], TieringSettings([KVGroup(16)], load_only_if_faster=False), clock=clock
    )
    index: dict[str | None, set[OffloadKey]] = {tier.name: set()}
    chains = [chain(chr(ord("a") + i), 6) for i in range(12)]
    for step in range(150):
        keys, action = random.choice(chains), random.random()
        if action < 0.5:
            output = manager.prepare_store(keys)
            if output is not None:
                for slot in output.store_spec.slots.tolist():
                    pools[0][slot] = random.randrange(256)
                manager.complete_store(output.store_spec)
                manager.touch(keys)
                manager.end_chain(keys, [])
        elif action < 0.8:
            manager.lookup(keys, A)
        elif action < 0.87:
            manager.drop(keys[random.randrange(6) :])
        elif action < 0.88 and step < 100:
            manager.reset()
        executor.tick()
        manager.poll()
        manager.release_request(A)
        if random.random() < 0.3:
            apply(index, list(manager.take_events()))
    executor.drain()
    manager.poll()
    manager.poll()
    apply(index, list(manager.take_events()))
    everything = [key for keys in chains for key in keys]
    held = {key for key, state in zip(everything, tier.contains(everything).tolist(), strict=True) if state == 1}
    assert index[None] == {key for key in everything if host.table.find([key])[0] >= 0}
    return index[tier.name], held


@pytest.mark.parametrize("seed", range(6))
def test_a_router_knows_what_the_disk_tier_holds(seed: int) -> None:
    believed, held = history(disk_tier, seed)
    assert held
    assert believed == held
