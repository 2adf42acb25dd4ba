"""LRUOffloadingManager, and what every manager made of a policy and a backend does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import (
    BlockNotPinnedError,
    Eviction,
    IntegrityError,
    LookupState,
    MissReason,
    OffloadingManager,
    Slots,
)
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager, PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import keys


def make_lru(num_blocks: int) -> LRUOffloadingManager:
    return LRUOffloadingManager(HostBackend(16, num_blocks), enable_events=True)


@pytest.mark.parametrize("gap", [0, 1, 127, 128, 129, 255, 256, 599])
def test_lookup_of_a_long_chain_finds_the_first_gap(gap: int) -> None:
    chain = tuple(make_offload_key(b"%032d" % n, 0) for n in range(600))
    manager = make_lru(600)
    manager.prepare_store(chain)
    manager.complete_store(chain[:gap] + chain[gap + 1 :])
    assert manager.lookup(chain) == gap
    manager.complete_store(chain)
    assert manager.lookup(chain) == 600


def test_the_callers_keys_are_left_alone() -> None:
    manager, batch = make_lru(2), keys("aab")
    manager.touch(batch)
    output = manager.prepare_store(batch)
    assert output is not None
    manager.complete_store(batch)
    assert manager.prepare_load(batch).medium() == output.store_spec.medium() == "CPU"
    manager.complete_load(batch)
    assert batch == keys("aab")
    assert output.keys_to_store is not batch


def stored(manager: OffloadingManager, names: str) -> None:
    assert manager.prepare_store(keys(names)) is not None
    manager.complete_store(keys(names))


@pytest.mark.parametrize(
    "manager",
    [LRUOffloadingManager(HostBackend(16, 1)), PolicyOffloadingManager(HostBackend(16, 1), LRUPolicy(1))],
)
def test_events_are_off_unless_asked_for(manager: OffloadingManager) -> None:
    stored(manager, "a")
    stored(manager, "b")
    manager.reset()
    assert list(manager.take_events()) == []


def test_a_miss_is_explained() -> None:
    now = 10.0
    manager = PolicyOffloadingManager(HostBackend(16, 1), LRUPolicy(1), clock=lambda: now)

    def reason(name: str) -> MissReason:
        return manager.explain_miss(keys(name)[0]).reason

    assert reason("a") is MissReason.NEVER_STORED
    manager.prepare_store(keys("a"))
    assert reason("a") is MissReason.BEING_WRITTEN
    manager.prepare_store(keys("b"))
    assert reason("b") is MissReason.NO_ROOM
    manager.complete_store(keys("a"), success=False)
    assert reason("a") is MissReason.COPY_FAILED
    stored(manager, "c")
    stored(manager, "d")
    now = 12.5
    miss = manager.explain_miss(keys("c")[0])
    assert (miss.reason, miss.age_s) == (MissReason.EVICTED, 2.5)
    manager.reset()
    assert reason("d") is MissReason.RESET


CORRUPTIONS: dict[str, Callable[[LRUOffloadingManager], object]] = {
    "a slot freed under its block": lambda m: m.backend.free(np.array([0])),
    "a slot taken without a block": lambda m: m.backend.allocate_blocks(keys("x")),
    "a block the policy forgot": lambda m: m.policy.remove(np.array([1])),
    "a block only the policy knows": lambda m: m.policy.insert(np.array([3]), keys("x")),
    "fewer than no readers": lambda m: put(m.table.ref_cnt, 0, -2),
    "an uncounted reader": lambda m: put(m.table.ref_cnt, 0, 1),
    "a block marked as in use": lambda m: put(m.table.busy, 0, True),
    "a block in use not marked": lambda m: put(m.table.busy, 2, False),
    "another key in the slot": lambda m: put(m.table.key_of, 0, keys("x")[0]),
    "readers of a free slot": lambda m: put(m.table.ref_cnt, 3, 1),
    "one evictable too many": lambda m: setattr(m.table, "num_evictable", 3),
}


def put(array: np.ndarray, index: int, value: object) -> None:
    array[index] = value


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_integrity_check_finds(corruption: str) -> None:
    manager = make_lru(4)
    stored(manager, "ab")
    manager.prepare_store(keys("c"))
    manager.check_integrity()
    CORRUPTIONS[corruption](manager)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_eviction_takes_no_longer_with_half_a_large_cache_in_use() -> None:
    """A walk past the blocks in use would take some hundred times as long."""
    size = 100_000
    names = [make_offload_key(b"%032d" % n, 0) for n in range(size)]
    new = [make_offload_key(b"n%031d" % n, 0) for n in range(1000)]

    def time_to_evict(prepare: str) -> float:
        manager = LRUOffloadingManager(HostBackend(16, size))
        manager.prepare_store(names[::-1])  # the first name is the oldest
        manager.complete_store(names[size // 2 :] if prepare == "write" else names)
        if prepare == "pin":
            manager.prepare_load(names[: size // 2])
        times = []
        for key in new:
            start = time.thread_time()
            output = manager.prepare_store([key])
            times.append(time.thread_time() - start)
            assert output is not None
            assert output.evicted_keys == [names[len(times) - 1 + (0 if prepare == "none" else size // 2)]]
        return sum(times[1:])  # the first passes over them all, once

    at_rest = time_to_evict("none")
    assert time_to_evict("pin") < 5 * at_rest
    assert time_to_evict("write") < 5 * at_rest


# Writers to lower tiers.


def test_a_lease_can_be_completed_in_parts() -> None:
    manager = LRUOffloadingManager(HostBackend(1, 4))
    output = manager.prepare_store([b"a", b"b", b"c"])
    assert output is not None
    spec = output.store_spec
    manager.complete_store(replace(spec, slots=spec.slots[1:2]))
    manager.complete_store(replace(spec, slots=spec.slots[2:]), success=False)
    states = [LookupState.PENDING, LookupState.HIT, LookupState.MISS]
    assert manager.lookup_each([b"a", b"b", b"c"]).tolist() == states
    manager.complete_store(spec)
    assert manager.pin(spec).tolist() == [True, True, False]
    manager.check_integrity()
    with pytest.raises(BlockNotPinnedError):
        manager.complete_load(spec)
    manager.complete_load(replace(spec, slots=spec.slots[:2]))
    assert manager.num_available_blocks == 4


def test_blocks_in_the_medium_are_restored_least_recently_used_first() -> None:
    backend = HostBackend(1, 3)
    manager = LRUOffloadingManager(backend)
    manager.blocks.restore([b"old", b"new"], backend.allocate_blocks([b"old", b"new"]))
    manager.check_integrity()
    output = manager.prepare_store([b"x", b"y"])
    assert output is not None
    assert output.evicted_keys == [b"old"]


def test_a_reset_costs_little_compared_with_storing_the_blocks_that_it_drops() -> None:
    """Measures this thread's CPU time. A reset that looks at every key takes almost half. Programs that use the caches
    of the processor too make it longer, so there are several tries."""
    ratio = 1.0
    for _ in range(10):
        manager = LRUOffloadingManager(HostBackend(1, 300_000))
        names = [number.to_bytes(36, "big") for number in range(300_000)]
        begun = time.thread_time()
        for start in range(0, len(names), 8192):
            manager.prepare_store(names[start : start + 8192])
            manager.complete_store(names[start : start + 8192])
        stored = time.thread_time()
        manager.reset()
        ratio = (time.thread_time() - stored) / (stored - begun)
        assert manager.lookup(names) == manager.num_used_blocks == 0
        if ratio < 0.25:
            break
    assert ratio < 0.25


class Misbehaving(LRUPolicy):
    """Returns ``answer`` of its victims, or tries to write to what it may only read."""

    answer: Callable[[Eviction, Slots], Any] = staticmethod(lambda eviction, victims: victims)

    def evict(self, eviction: Eviction) -> Slots:
        victims: Slots = self.answer(eviction, super().evict(eviction))
        return victims


@pytest.mark.parametrize(
    "answer",
    [
        lambda eviction, victims: victims[:0],
        lambda eviction, victims: victims + 100,
        lambda eviction, victims: victims - 100,
        lambda eviction, victims: victims.astype(float),
        lambda eviction, victims: np.array([0]),
        lambda eviction, victims: eviction.busy.fill(False),
        lambda eviction, victims: eviction.key_of.fill(b"x"),
    ],
    ids=["too few", "out of range", "negative", "no integers", "a pinned block", "writes busy", "writes keys"],
)
def test_a_policy_that_misbehaves_is_an_error_and_nothing_is_evicted(answer: Callable[[Eviction, Slots], Any]) -> None:
    policy = Misbehaving(2)
    policy.answer = answer
    manager = PolicyOffloadingManager(HostBackend(1, 2), policy)
    manager.prepare_store([b"a", b"b"])
    manager.complete_store([b"a", b"b"])
    manager.prepare_load([b"a"])
    with pytest.raises((IntegrityError, ValueError), match=r"may not evict|read-only"):
        manager.prepare_store([b"c"])
    assert manager.lookup([b"a", b"b"]) == 2
