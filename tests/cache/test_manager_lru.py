"""LRUOffloadingManager, and what every manager made of a policy and a backend does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import (
    Backend,
    BlockNotPinnedError,
    BlockStatus,
    Eviction,
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    MissReason,
    OffloadingManager,
    OffloadKey,
    Slots,
)
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager, PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import keys, letters
from tests.suites.conformance import ManagerConformance
from tests.suites.reference import ReferenceLRUManager
from tests.suites.stateful import WALK_SEEDS, manager_machine, walk


class ShelfBackend(Backend):
    """A third-party backend: another medium, slots handed out highest first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(4, "shelf")
        self.free_slots = list(range(num_blocks))
        self.size = num_blocks

    @property
    def num_blocks(self) -> int:
        return self.size

    def get_num_free_blocks(self) -> int:
        return len(self.free_slots)

    def allocate_blocks(self, keys: Sequence[OffloadKey]) -> Slots:
        return np.array([self.free_slots.pop() for _ in keys], dtype=np.int64)

    def free(self, slots: Slots) -> None:
        self.free_slots += slots.tolist()


def make_lru(num_blocks: int) -> LRUOffloadingManager:
    return LRUOffloadingManager(HostBackend(16, num_blocks), enable_events=True)


def make_on_a_shelf(num_blocks: int) -> PolicyOffloadingManager:
    return PolicyOffloadingManager(ShelfBackend(num_blocks), make_policy("lru", num_blocks), enable_events=True)


class TestConformance(ManagerConformance):
    def make_manager(self, num_blocks: int) -> OffloadingManager:
        return make_lru(num_blocks)


class TestConformanceOnAnotherBackend(ManagerConformance):
    def make_manager(self, num_blocks: int) -> OffloadingManager:
        return make_on_a_shelf(num_blocks)


class TestConformanceOfTheReference(ManagerConformance):
    def make_manager(self, num_blocks: int) -> OffloadingManager:
        return ReferenceLRUManager(num_blocks)


Machine = manager_machine(make_lru, ReferenceLRUManager)
TestAgainstTheReference = Machine.TestCase


def stored(manager: OffloadingManager, names: str) -> None:
    assert manager.prepare_store(keys(names)) is not None
    manager.complete_store(keys(names))


def test_specs_name_the_backends_medium() -> None:
    manager = make_on_a_shelf(2)
    output = manager.prepare_store(keys("a"))
    assert output is not None
    manager.complete_store(keys("a"))
    assert output.store_spec.medium() == "shelf"
    assert manager.prepare_load(keys("a")).medium() == "shelf"
    assert [event.medium for event in manager.take_events()] == ["shelf"]


@pytest.mark.parametrize(
    "manager",
    [LRUOffloadingManager(HostBackend(16, 1)), PolicyOffloadingManager(HostBackend(16, 1), LRUPolicy(1))],
)
def test_events_are_off_unless_asked_for(manager: OffloadingManager) -> None:
    stored(manager, "a")
    stored(manager, "b")
    manager.reset()
    assert list(manager.take_events()) == []


def test_block_status_is_a_view_of_now() -> None:
    manager = make_lru(2)
    assert manager.block_status(keys("a")[0]) is None
    output = manager.prepare_store(keys("a"))
    assert output is not None
    slot = int(output.store_spec.slots[0])
    assert manager.block_status(keys("a")[0]) == BlockStatus(slot, -1)
    manager.complete_store(keys("a"))
    assert manager.block_status(keys("a")[0]) == BlockStatus(slot, 0)
    manager.prepare_load(keys("a"))
    manager.prepare_load(keys("a"))
    status = manager.block_status(keys("a")[0])
    assert status == BlockStatus(slot, 2)
    status.ref_cnt = 0
    assert manager.block_status(keys("a")[0]) == BlockStatus(slot, 2)
    manager.reset()
    assert manager.block_status(keys("a")[0]) is None


def test_every_slot_is_back_in_the_backend_after_transfers_end() -> None:
    backend = HostBackend(16, 5)
    manager = LRUOffloadingManager(backend)
    stored(manager, "abc")
    manager.prepare_load(keys("ab"))
    manager.prepare_store(keys("de"))
    assert backend.get_num_free_blocks() == 0
    manager.shutdown()
    assert backend.get_num_free_blocks() == 1
    manager.complete_load(keys("ab"))
    manager.complete_store(keys("de"), success=False)
    assert backend.get_num_free_blocks() == 5
    backend.check_integrity()


def test_refused_store_leaves_backend_and_order_alone() -> None:
    manager = make_lru(4)
    stored(manager, "abcd")
    manager.prepare_load(keys("c"))
    before = {name: manager.block_status(keys(name)[0]) for name in "abcd"}
    assert manager.prepare_store(keys("wxyz")) is None
    assert {name: manager.block_status(keys(name)[0]) for name in "abcd"} == before
    output = manager.prepare_store(keys("wxy"))
    assert output is not None
    assert letters(output.evicted_keys) == "dba"


def test_keys_that_differ_in_trailing_zero_bytes_are_different_blocks() -> None:
    names = [b"k" + b"\0" * n for n in range(20)] + [b"\0" * n for n in range(20)]
    manager = make_lru(40)
    assert manager.prepare_store(names) is not None
    manager.complete_store(names[:2])
    assert manager.lookup(names) == 2
    manager.complete_store(names)
    output = manager.prepare_store([b"x%d" % n for n in range(40)])
    assert output is not None
    assert output.evicted_keys == names[::-1]
    assert all(type(key) is bytes for key in output.evicted_keys)


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


class Pinless(LRUPolicy):
    """Ignores which blocks are busy."""

    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(replace(eviction, busy=np.zeros_like(eviction.busy)))


class Short(LRUPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(eviction)[:-1]


class Repeating(LRUPolicy):
    def evict(self, eviction: Eviction) -> Slots:
        return super().evict(eviction)[[0] * eviction.n]


@pytest.mark.parametrize("policy", [Pinless, Short, Repeating])
def test_a_policy_that_breaks_its_promise_is_stopped_before_harm_is_done(policy: type[LRUPolicy]) -> None:
    manager = PolicyOffloadingManager(HostBackend(16, 3), policy(3))
    stored(manager, "cba")  # the first to leave is pinned
    manager.prepare_load(keys("a"))
    with pytest.raises(IntegrityError, match=policy.__name__):
        manager.prepare_store(keys("xy"))
    assert manager.lookup_each(keys("abc")).tolist() == [LookupState.HIT] * 3


@pytest.mark.parametrize("seed", WALK_SEEDS)
def test_walk_matches_the_reference(seed: int) -> None:
    walk(Machine, seed)


@pytest.mark.parametrize("seed", WALK_SEEDS)
def test_walk_on_another_backend(seed: int) -> None:
    walk(manager_machine(make_on_a_shelf, ReferenceLRUManager), seed)


def test_long_walk_matches_the_reference() -> None:
    walk(Machine, seed=0, num_blocks=64, num_steps=1500)


class Key(bytes):
    """A key whose hash can be chosen."""

    hash_of: Callable[[int], int]
    number: int

    def __hash__(self) -> int:
        return self.hash_of(self.number)


HASHES: dict[str, Callable[[int], int]] = {
    "all the same": lambda n: 7,
    "all but the high bits the same": lambda n: 7 + (n << 32),
    "all but the low bits the same": lambda n: 7 + (5 << 40) + n,
    "a few, negative too": lambda n: (n % 5 - 2) << 33,
}


@pytest.mark.parametrize("num_blocks", [5, 40])
@pytest.mark.parametrize("hashes", HASHES)
def test_walk_with_keys_whose_hashes_collide(hashes: str, num_blocks: int) -> None:
    class CollidingKey(Key):
        hash_of = staticmethod(HASHES[hashes])

    def make_key(n: int) -> OffloadKey:
        key = CollidingKey(make_offload_key(b"%d" % n, 0))
        key.number = n
        return key

    machine = manager_machine(make_lru, ReferenceLRUManager, make_key=make_key)
    for seed in range(3):
        walk(machine, seed, num_blocks)


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


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_random_pins_never_lose_a_block_or_its_place(policy: str) -> None:
    """Compared with a manager without pins: the same blocks leave in the same order, except the pinned ones."""
    rng = random.Random(7)
    for _ in range(150):
        n = rng.randint(2, 8)
        manager = PolicyOffloadingManager(HostBackend(1, n), make_policy(policy, n))
        leases: list[tuple[bytes, LoadStoreSpec]] = []
        pins: list[bytes] = []
        for turn in range(60):
            key = b"%d" % rng.randrange(12)
            status = manager.block_status(key)
            action = rng.random()
            if action < 0.4:
                if manager.prepare_store([key]) is not None and rng.random() < 0.9:
                    manager.complete_store([key])
            elif action < 0.55 and status is not None and status.is_ready:
                leases.append((key, manager.prepare_load([key])))
            elif action < 0.7 and leases:
                manager.complete_load(leases.pop(rng.randrange(len(leases)))[1])
            elif action < 0.8 and status is not None and status.is_ready:
                manager.prepare_load([key])
                pins.append(key)
            elif action < 0.9 and pins:
                manager.complete_load([pins.pop(rng.randrange(len(pins)))])
            elif action < 0.95:
                manager.touch([key])
            elif turn == 40:
                manager.reset()
            manager.check_integrity()
            assert all(manager.lookup([key]) for key in [*(key for key, _ in leases), *pins]) or turn >= 40
        for _, lease in leases:
            manager.complete_load(lease)
        for key in pins:
            manager.complete_load([key])
        manager.complete_store([b"%d" % i for i in range(12)])
        manager.check_integrity()
        assert manager.num_available_blocks == n
        assert manager.prepare_store([b"new%d" % i for i in range(n)]) is not None


@pytest.mark.parametrize("by_lease", [True, False])
@pytest.mark.parametrize("call", ["reset", "drop"])
def test_slots_in_transfer_come_back_when_their_transfers_end(call: str, by_lease: bool) -> None:
    manager = LRUOffloadingManager(HostBackend(1, 4), enable_events=True)
    manager.prepare_store([b"a", b"b"])
    manager.complete_store([b"a", b"b"])
    load, output = manager.prepare_load([b"a", b"b"]), manager.prepare_store([b"c"])
    assert output is not None
    list(manager.take_events())
    manager.reset() if call == "reset" else manager.drop([b"a", b"b", b"c", b"unknown"])
    manager.check_integrity()
    assert [(event.keys, event.removed) for event in manager.take_events()] == [([b"a", b"b"], True)]
    assert (manager.lookup([b"a"]), manager.num_used_blocks) == (0, 3)
    assert manager.table.is_dropped(load.slots).all()
    again = manager.prepare_store([b"a", b"c", b"d"])
    assert again is not None
    assert again.keys_to_store == [b"d"], "in transfer, so that no completion can be taken for another's"
    manager.complete_load(load if by_lease else [b"a", b"b"])
    manager.complete_store(output.store_spec if by_lease else [b"c"])
    manager.check_integrity()
    assert (manager.num_used_blocks, manager.lookup_each([b"c"]).tolist()) == (1, [LookupState.MISS])
    manager.complete_store(again.store_spec)
    assert [event.keys for event in manager.take_events()] == [[b"d"]]


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


def test_a_lease_with_a_key_twice_is_pinned_once() -> None:
    manager = make_lru(2)
    stored(manager, "a")
    lease = manager.prepare_load(keys("aa"))
    manager.complete_load(lease)
    assert manager.pin(lease).tolist() == [True, True]
    manager.check_integrity()
    manager.complete_load(lease)
    assert manager.num_available_blocks == 2
    manager.check_integrity()


def test_a_drop_spares_the_rest_and_leaves_idle_slots_free() -> None:
    manager = LRUOffloadingManager(HostBackend(1, 3))
    manager.prepare_store([b"a", b"b", b"c"])
    manager.complete_store([b"a", b"b", b"c"])
    manager.drop([b"b", b"b"])
    manager.check_integrity()
    assert (manager.lookup([b"a", b"c"]), manager.num_used_blocks) == (2, 2)
    assert manager.explain_miss(b"b").reason is MissReason.RESET
    output = manager.prepare_store([b"b"])
    assert output is not None
    assert output.evicted_keys == []


def test_blocks_in_the_medium_are_restored_least_recently_used_first() -> None:
    backend = HostBackend(1, 3)
    manager = LRUOffloadingManager(backend)
    manager.restore([b"old", b"new"], backend.allocate_blocks([b"old", b"new"]))
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


def test_keys_that_found_their_bucket_full_are_forgotten_in_a_reset() -> None:
    class Crowded(bytes):
        """All in one bucket."""

        def __hash__(self) -> int:
            return 7

    manager = LRUOffloadingManager(HostBackend(1, 20))
    names = [Crowded([number]) for number in range(20)]
    manager.prepare_store(names)
    manager.complete_store(names[:15])
    manager.reset()
    manager.check_integrity()
    assert (manager.lookup(names), manager.num_used_blocks) == (0, 5)
    manager.check_integrity()
    manager.complete_store(names[15:])
    assert manager.num_used_blocks == 0
    output = manager.prepare_store(names)
    assert output is not None
    assert len(output.keys_to_store) == 20
    manager.check_integrity()


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


def test_victims_may_be_any_sequence_of_slots() -> None:
    policy = Misbehaving(1)
    policy.answer = lambda eviction, victims: victims.tolist()
    manager = PolicyOffloadingManager(HostBackend(1, 1), policy)
    manager.prepare_store([b"a"])
    manager.complete_store([b"a"])
    output = manager.prepare_store([b"b"])
    assert output is not None
    assert output.evicted_keys == [b"a"]
