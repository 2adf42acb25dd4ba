"""The conformance suite of eviction policies, as a plain pytest class.

Subclass it and define how to make your policy; pytest does the rest. The suite uses only the public contract.
Keys are written as letters: ``"abc"`` is a chain of three blocks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.abc import Access, CachePolicy, Eviction, IntegrityError, Keys, OffloadKey, Slots
from kvoffload.cache.keys import key_block_hash, make_offload_key
from kvoffload.cache.policies.tenants import TenantPolicy

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def keys(letters: str) -> list[OffloadKey]:
    """Returns one key per letter."""
    return [make_offload_key(letter.encode() * 32, 0) for letter in letters]


def letters(keys: Iterable[OffloadKey]) -> str:
    """Returns the letters of keys made by ``keys``."""
    return "".join(chr(key_block_hash(key)[0]) for key in keys)


def check_slots(slots: Slots, num_blocks: int) -> list[int]:
    """Returns the slots as a list, and checks that each is an integer in range and none occurs twice."""
    assert isinstance(slots, np.ndarray)
    assert slots.ndim == 1
    assert slots.dtype == np.int64
    listed: list[int] = slots.tolist()
    assert len(set(listed)) == len(listed), f"a slot twice: {listed}"
    assert all(0 <= slot < num_blocks for slot in listed), f"slot out of range: {listed}"
    return listed


class PolicyConformance:
    """The contract of ``CachePolicy``. Where the order matters, it is compared with that of an undisturbed policy."""

    KEEPS_ORDER = True
    """Whether insertions, uses and reorders alone decide in which order blocks leave, and a block keeps its place while
    it is passed over. Not so in a policy that draws lots or counts uses: tests of the order are skipped."""
    OLDEST_FIRST = True
    """Whether blocks that were used once leave in the order of their insertion. Not so in a policy that gives the first
    blocks a better place than blocks that come when the cache is full."""
    USES_MOVE_BLOCKS = True
    """Whether a use moves a block that was used once to the recent end of its list. Then ``reorder`` moves the whole
    chain, else only its new blocks."""

    def make_policy(self, capacity: int) -> CachePolicy:
        """Returns a new policy for slots ``0 .. capacity - 1``."""
        raise NotImplementedError

    # How the tests drive it. Lists of slots are tail first, as in the contract.

    def insert(self, policy: CachePolicy, slots: list[int], written: bool = True) -> None:
        """Inserts new blocks. The key of a block is made of its slot. Unless they are ``written``, they stay busy."""
        policy.insert(_array(slots), _slot_keys(slots))
        if written:
            policy.mark_evictable(_array(slots))

    def access(self, policy: CachePolicy, slots: list[int], ready: bool = True, absent: Keys = ()) -> None:
        """A request uses a chain: the cached blocks ``slots``, and behind them ``absent`` keys."""
        chain = [*reversed(_slot_keys(slots)), *reversed(absent)]
        found = _array([*reversed(slots), *(-1 for _ in absent)])
        policy.access(Access(chain, found, _array(slots), np.full(len(slots), ready), 0.0))

    def evict(self, policy: CachePolicy, n: int, busy: Iterable[int] = (), entering: Keys = ()) -> list[int]:
        """Evicts ``n`` blocks while ``busy`` ones must stay, and checks that the policy does."""
        mask = np.zeros(policy.capacity, dtype=np.bool_)
        mask[list(busy)] = True
        _mark_busy(policy, busy)
        key_of = np.empty(policy.capacity, dtype=np.object_)
        key_of[:] = _slot_keys(range(policy.capacity))
        evicted = check_slots(policy.evict(Eviction(n, mask, key_of, entering)), policy.capacity)
        assert len(evicted) == n
        assert not mask[evicted].any(), f"evicted a busy block: {evicted}"
        return evicted

    def reorder(self, policy: CachePolicy, slots: list[int], new: bool) -> None:
        policy.reorder(_array(slots), np.full(len(slots), new))

    def full(self, capacity: int) -> CachePolicy:
        """Returns a policy with every slot inserted in order and evictable."""
        policy = self.make_policy(capacity)
        self.insert(policy, list(range(capacity)))
        return policy

    def order(self, capacity: int) -> list[int]:
        """Returns the order in which the blocks of ``full(capacity)`` leave if nothing else happens. Skips the test if
        the policy has no order."""
        if not self.KEEPS_ORDER:
            pytest.skip("KEEPS_ORDER is False")
        return self.evict(self.full(capacity), capacity)

    def written_but(self, capacity: int, slots: list[int]) -> CachePolicy:
        """As ``full(capacity)``, but ``slots`` are still being written."""
        policy = self.make_policy(capacity)
        self.insert(policy, list(range(capacity)), written=False)
        policy.mark_evictable(_array(sorted(set(range(capacity)) - set(slots))))
        return policy

    def same(self, evicted: list[int], oldest_first: list[int]) -> bool:
        """Returns whether blocks used once left as they should."""
        is_exact = self.KEEPS_ORDER and self.OLDEST_FIRST
        return evicted == oldest_first if is_exact else sorted(evicted) == sorted(oldest_first)

    def test_blocks_used_once_leave_in_order_of_insertion(self) -> None:
        policy = self.make_policy(8)
        self.insert(policy, [5, 2])
        self.insert(policy, [7, 0, 3])
        assert self.same(self.evict(policy, 2) + self.evict(policy, 3), [5, 2, 7, 0, 3])
        policy.check_integrity(_array([]))

    def test_an_evicted_block_is_forgotten_and_its_slot_can_be_used_again(self) -> None:
        policy = self.full(3)
        [first] = self.evict(policy, 1)
        others = [slot for slot in range(3) if slot != first]
        policy.check_integrity(_array(others))
        self.insert(policy, [first])
        policy.check_integrity(_array([0, 1, 2]))
        assert self.same(self.evict(policy, 3), [*others, first])

    def test_integrity_check_distinguishes_known_slots_from_others(self) -> None:
        policy = self.full(3)
        if type(policy).check_integrity is CachePolicy.check_integrity:
            pytest.skip("the policy checks nothing")
        policy.check_integrity(_array([2, 0, 1]))
        [first] = self.evict(policy, 1)
        for wrong in ([0, 1, 2], [(first + 1) % 3], []):
            with pytest.raises(IntegrityError):
                policy.check_integrity(_array(wrong))

    def test_a_block_being_written_is_passed_over_and_keeps_its_place(self) -> None:
        first, second, third, _ = self.order(4)
        policy = self.written_but(4, [first])
        assert self.evict(policy, 1, busy=[first]) == [second]
        policy.mark_evictable(_array([first]))
        assert self.evict(policy, 2) == [first, third]

    def test_the_order_in_which_blocks_become_evictable_does_not_matter(self) -> None:
        first, second, third, last = self.order(4)
        policy = self.written_but(4, [first, second, third])
        assert self.evict(policy, 1, busy=[first, second, third]) == [last]
        policy.mark_evictable(_array([third, first]))
        policy.mark_evictable(_array([second]))
        assert self.evict(policy, 3) == [first, second, third]

    def test_a_block_that_is_busy_later_is_passed_over_and_keeps_its_place(self) -> None:
        first, second, third, last = self.order(4)
        policy = self.full(4)
        assert self.evict(policy, 1, busy=[first, third]) == [second]
        policy.check_integrity(_array([first, third, last]))
        policy.mark_evictable(_array([first, third]))
        assert self.evict(policy, 3) == [first, third, last]

    def test_a_block_can_be_passed_over_twice(self) -> None:
        first, second, third, last = self.order(4)
        policy = self.full(4)
        assert self.evict(policy, 1, busy=[first]) == [second]
        policy.mark_evictable(_array([first]))
        assert self.evict(policy, 1, busy=[first]) == [third]
        policy.mark_evictable(_array([first]))
        assert self.evict(policy, 2) == [first, last]

    def test_a_use_of_a_busy_block_does_not_make_it_evictable(self) -> None:
        first, second, third = self.order(3)
        for is_passed_over in (False, True):
            policy = self.full(3)
            evicted = self.evict(policy, 1, busy=[first]) if is_passed_over else []
            self.access(policy, [first])
            policy.check_integrity(_array([slot for slot in range(3) if slot not in evicted]))
            assert evicted + self.evict(policy, 2 - len(evicted), busy=[first]) == [second, third]
            policy.mark_evictable(_array([first]))
            assert self.evict(policy, 1) == [first]

    def test_a_use_of_a_block_being_written_does_not_make_it_evictable(self) -> None:
        policy = self.make_policy(2)
        self.insert(policy, [0], written=False)
        self.insert(policy, [1])
        self.access(policy, [0], ready=False)
        assert self.evict(policy, 1, busy=[0]) == [1]
        policy.mark_evictable(_array([0]))
        assert self.evict(policy, 1) == [0]

    def test_a_chain_stored_in_parts_loses_its_tail_before_its_head(self) -> None:
        self.order(6)
        policy = self.make_policy(6)
        self.insert(policy, [1, 0])
        self.insert(policy, [4, 3, 2], written=False)
        self.insert(policy, [5], written=False)
        self.reorder(policy, [5, 4, 3, 2, 1, 0], new=True)
        policy.mark_evictable(_array([2, 3, 4, 5]))
        assert self.evict(policy, 6) == [5, 4, 3, 2, 1, 0]

    def test_reorder_moves_new_blocks_and_the_others_if_uses_move_blocks(self) -> None:
        first, second, third = self.order(3)
        kept_in_place, moved = [first, second, third], [first, third, second]
        for new in (True, False):
            policy = self.full(3)
            self.reorder(policy, [second], new)
            assert self.evict(policy, 3) == (moved if new or self.USES_MOVE_BLOCKS else kept_in_place)

    def test_reorder_makes_nothing_evictable(self) -> None:
        first, second, third, last = self.order(4)
        policy = self.written_but(4, [first])
        self.reorder(policy, [first], new=True)
        self.reorder(policy, [second], new=False)
        policy.check_integrity(_array([0, 1, 2, 3]))
        assert sorted(self.evict(policy, 2, busy=[first, second])) == sorted([third, last])
        policy.mark_evictable(_array([first, second]))
        assert sorted(self.evict(policy, 2)) == sorted([first, second])

    def test_a_removed_block_is_forgotten(self) -> None:
        first, second, third, last = self.order(4)
        policy = self.full(4)
        policy.remove(_array([second, last]))
        policy.check_integrity(_array([first, third]))
        assert self.evict(policy, 1) == [first]
        self.insert(policy, [last])
        assert self.same(self.evict(policy, 2), [third, last])

    def test_clear_forgets_everything(self) -> None:
        fresh = self.make_policy(4)
        self.insert(fresh, [3, 1, 0, 2])
        policy = self.make_policy(4)
        self.insert(policy, [0], written=False)
        self.insert(policy, [1, 2, 3])
        [victim] = self.evict(policy, 1, busy=[0, 1])
        self.access(policy, [0], ready=False, absent=_slot_keys([victim]))
        policy.refuse(keys("xyz"))
        policy.clear()
        policy.check_integrity(_array([]))
        self.insert(policy, [3, 1, 0, 2])
        evicted, expected = self.evict(policy, 4), self.evict(fresh, 4)
        assert evicted == expected if self.KEEPS_ORDER else sorted(evicted) == sorted(expected)

    def test_absent_keys_may_be_any(self) -> None:
        policy = self.full(3)
        self.access(policy, [])
        self.access(policy, [], absent=keys("xyz"))
        policy.refuse(keys("zya"))
        [first] = self.evict(policy, 1, entering=keys("z"))
        self.access(policy, [], absent=_slot_keys([first, first]))
        policy.refuse(_slot_keys([first]))
        policy.check_integrity(_array([slot for slot in range(3) if slot != first]))

    @pytest.mark.parametrize("full", range(5))
    def test_full_may_be_any_number_even_fewer_than_the_busy_blocks(self, full: int) -> None:
        policy = self.make_policy(4)
        self.insert(policy, [3, 2, 1, 0])
        for n in (1, 0, 2, 1):
            policy.full = full
            self.access(policy, [1, 0], absent=keys("xy"))
            admitted = policy.admit(keys("xy"), 2)
            policy.refuse(keys("xy") if admitted is None else keys("xy")[: np.count_nonzero(~admitted)])
            evicted = self.evict(policy, n, busy=[0, 1], entering=keys("xy")[:n])
            self.insert(policy, evicted)
            policy.mark_evictable(_array([0, 1]))
            policy.check_integrity(_array(range(4)))
        policy.clear()
        self.insert(policy, [3, 2, 1, 0])
        assert sorted(self.evict(policy, 4)) == [0, 1, 2, 3]

    @pytest.mark.parametrize("seed", range(20))
    def test_promises_hold_under_random_calls(self, seed: int) -> None:
        rng = random.Random(seed)
        _PolicyDriver(self, rng, capacity=rng.randint(1, 12)).run(steps=300)

    @pytest.mark.parametrize("seed", range(5))
    def test_admit_changes_nothing(self, seed: int) -> None:
        once, twice = (_PolicyDriver(self, random.Random(seed), capacity=8, num_admits=n) for n in (1, 2))
        once.run(steps=300)
        twice.run(steps=300)
        assert once.evicted == twice.evicted or not self.KEEPS_ORDER


class _PolicyDriver:
    """A caller that keeps the promises of a manager, and checks the promises of the policy."""

    def __init__(self, suite: PolicyConformance, rng: random.Random, capacity: int, num_admits: int = 1) -> None:
        self.suite = suite
        self.rng = rng
        self.policy = suite.make_policy(capacity)
        self.num_admits = num_admits
        self.now = 0.0
        self.names = [make_offload_key(b"block %d" % number, 0) for number in range(2 * capacity + 3)]
        self.key_of = np.full(capacity, None, dtype=np.object_)
        self.free = set(range(capacity))
        self.writing: set[int] = set()
        self.pinned: set[int] = set()
        self.idle: set[int] = set()
        self.evicted: list[int] = []

    def run(self, steps: int) -> None:
        calls = [self.store, self.store, self.written, self.access, self.pin, self.unpin, self.evict, self.reorder]
        calls += [self.set_full]
        for _ in range(steps):
            self.rng.choice([*calls, self.remove] if self.rng.random() < 0.5 else calls)()
            if self.rng.random() < 0.01:
                self.clear()
            self.policy.check_integrity(_array([*self.writing, *self.pinned, *self.idle]))

    def some(self, slots: set[int]) -> list[int]:
        return self.rng.sample(sorted(slots), self.rng.randint(0, len(slots)))

    def move(self, slots: Iterable[int], source: set[int], target: set[int]) -> None:
        source.difference_update(slots)
        target.update(slots)

    def held(self) -> set[int]:
        return self.writing | self.pinned | self.idle

    def absent(self) -> list[OffloadKey]:
        """Returns some keys of a chain, tail first."""
        cached = set(self.key_of.tolist())
        absent = [name for name in self.names if name not in cached]
        return self.rng.sample(absent, self.rng.randint(0, len(absent)))

    def store(self) -> None:
        names = self.absent()
        room = len(self.free) + len(self.idle)
        names = names[: self.rng.randint(0, room)]
        shortage = len(names) - len(self.free)
        if shortage > 0:
            admitted = None
            for _ in range(self.num_admits):
                admitted = self.policy.admit(names, shortage)
            if admitted is not None:
                assert admitted.dtype == np.bool_
                assert admitted.shape == (len(names),)
                self.policy.refuse([name for name, enters in zip(names, admitted, strict=True) if not enters])
                names = [name for name, enters in zip(names, admitted, strict=True) if enters]
        self.make_room(max(0, len(names) - len(self.free)), names)
        slots = self.rng.sample(sorted(self.free), len(names))
        self.key_of[slots] = names
        self.policy.insert(_array(slots), names)
        self.move(slots, self.free, self.writing)

    def evict(self) -> None:
        self.make_room(self.rng.randint(0, len(self.idle)), [])

    def make_room(self, n: int, entering: Keys) -> None:
        idle = sorted(self.idle)
        protected = set(self.rng.sample(idle, self.rng.randint(0, len(idle) - n)))
        busy = np.zeros(self.policy.capacity, dtype=np.bool_)
        busy[list(self.writing | self.pinned | protected)] = True
        _mark_busy(self.policy, protected)
        evicted = check_slots(self.policy.evict(Eviction(n, busy, self.key_of, entering)), self.policy.capacity)
        assert len(evicted) == n
        assert set(evicted) <= self.idle - protected, f"evicted busy or unknown blocks: {evicted}"
        self.evicted += evicted
        self.forget(evicted)
        self.policy.mark_evictable(_array(sorted(protected)))

    def forget(self, slots: list[int]) -> None:
        self.key_of[slots] = None
        for states in (self.writing, self.pinned, self.idle):
            states.difference_update(slots)
        self.free.update(slots)

    def written(self) -> None:
        slots = self.some(self.writing)
        self.policy.mark_evictable(_array(slots))
        self.move(slots, self.writing, self.idle)

    def access(self) -> None:
        slots = self.some(self.held())
        slot_of = {key: slot for slot, key in enumerate(self.key_of.tolist()) if key is not None}
        chain = [*self.key_of[slots].tolist(), *self.absent()]
        self.rng.shuffle(chain)
        found = [slot_of.get(key, -1) for key in chain]
        cached = [slot for slot in reversed(found) if slot >= 0]
        ready = np.array([slot not in self.writing for slot in cached], dtype=np.bool_)
        self.now += self.rng.choice((0.0, 0.1, 30.0, 1e4))
        self.policy.access(Access(chain, _array(found), _array(cached), ready, self.now))

    def reorder(self) -> None:
        slots = self.some(self.held())
        new = np.array([self.rng.random() < 0.5 for _ in slots], dtype=np.bool_)
        self.policy.reorder(_array(slots), new)

    def pin(self) -> None:
        slots = self.some(self.idle)
        _mark_busy(self.policy, slots)
        self.move(slots, self.idle, self.pinned)

    def unpin(self) -> None:
        slots = self.some(self.pinned)
        self.policy.mark_evictable(_array(slots))
        self.move(slots, self.pinned, self.idle)

    def remove(self) -> None:
        slots = self.some(self.held())
        self.policy.remove(_array(slots))
        self.forget(slots)

    def clear(self) -> None:
        self.policy.clear()
        self.forget(sorted(self.held()))

    def set_full(self) -> None:
        """To any number, fewer than the blocks that must stay included."""
        self.policy.full = self.rng.randint(0, self.policy.capacity)


def _mark_busy(policy: CachePolicy, slots: Iterable[int]) -> None:
    """Marks blocks as busy in a policy that keeps marks of its own, as a manager does beside the contract."""
    if isinstance(policy, TenantPolicy):
        policy.mark_busy(_array(sorted(slots)))


def _array(slots: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(slots), dtype=np.int64)


def _slot_keys(slots: Iterable[int]) -> list[OffloadKey]:
    """Returns the key that each slot holds in the policy tests."""
    return [make_offload_key(b"slot %d" % slot, 0) for slot in slots]
