"""Policies: their contract, their order at sizes at which the log is split and compacted, and their names."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import Access, CachePolicy, ConfigError, Eviction, IntegrityError, OffloadKey, Slots
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.policies import make_policy
from kvoffload.cache.policies.arc import ARCPolicy
from kvoffload.cache.policies.engine_arc import EngineARCPolicy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.testing.conformance import PolicyConformance
from tests.lab.traces import make_trace

POLICIES: list[Callable[[int], CachePolicy]] = [LRUPolicy, EngineARCPolicy, ARCPolicy]


def array(slots: list[int] | range) -> np.ndarray:
    return np.array(slots, dtype=np.int64)


def slot_keys(slots: list[int] | range) -> list[bytes]:
    return [make_offload_key(b"slot %d" % slot, 0) for slot in slots]


def touch(
    policy: CachePolicy, slots: list[int], ready: bool = True, absent: list[OffloadKey] | None = None, time: float = 0.0
) -> None:
    """A request uses a chain: blocks, tail first, and absent keys behind them."""
    absent = absent or []
    found = array([*reversed(slots), *(-1 for _ in absent)])
    policy.access(Access([*slot_keys(slots)[::-1], *absent], found, array(slots), np.full(len(slots), ready), time))


class TestLRU(PolicyConformance):
    def make_policy(self, capacity: int) -> CachePolicy:
        return LRUPolicy(capacity)


class TestARC(PolicyConformance):
    def make_policy(self, capacity: int) -> CachePolicy:
        return EngineARCPolicy(capacity)

    def test_integrity_check_finds_a_target_out_of_range(self) -> None:
        policy = EngineARCPolicy(2)
        policy.check_integrity(array([]))
        policy.target_t1_size = 2.5
        with pytest.raises(IntegrityError):
            policy.check_integrity(array([]))

    def test_integrity_check_finds_a_block_that_is_in_both_lists(self) -> None:
        policy = self.full(3)
        assert isinstance(policy, EngineARCPolicy)
        policy.lists[1].append(array([1]))
        with pytest.raises(IntegrityError):
            policy.check_integrity(array([0, 1, 2]))


@pytest.mark.parametrize("make", POLICIES)
def test_memory_does_not_grow_with_the_number_of_calls(make: Callable[[int], CachePolicy]) -> None:
    """Uses must not lengthen any list that a policy keeps, however many there are."""

    def size_after(rounds: int) -> int:
        rng = random.Random(0)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        policy = make(64)
        policy.insert(array(range(64)), slot_keys(range(64)))
        policy.mark_evictable(array(range(64)))
        for n in range(rounds):
            touch(policy, rng.sample(range(64), 8), absent=[b"%d" % n])
            policy.refuse([b"%d" % n])
            policy.mark_evictable(array(rng.sample(range(64), 4)))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        return after - before

    tracemalloc.start()
    try:
        size_after(10)  # Takes memory that is taken once per process.
        assert size_after(1000) < 2 * size_after(100)
    finally:
        tracemalloc.stop()


def test_policies_are_made_by_name_or_import_path() -> None:
    assert type(make_policy("lru", 7)) is LRUPolicy
    assert type(make_policy("arc", 7)) is ARCPolicy
    own = make_policy(f"{__name__}:OwnPolicy", 7)
    assert type(own) is OwnPolicy
    assert own.capacity == 7


class OwnPolicy(LRUPolicy):
    """A third-party policy."""


class NoPolicy:
    pass


@pytest.mark.parametrize(
    "name", ["clock", "", "no.such.module:Policy", f"{__name__}:Missing", f"{__name__}:NoPolicy", ":", "lru:"]
)
def test_a_wrong_name_is_an_error_that_says_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=r"policy=.*arc.*lru.*package\.module:Class"):
        make_policy(name, 4)


# The example of the documentation.

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "policies.md"
MAX_LINES = 50
"""README promises about this many."""


def example() -> str:
    """Returns the first code block of the documentation."""
    return DOCUMENTATION.read_text().split("```python\n")[1].split("```")[0]


class RandomPolicy(CachePolicy):
    """Evicts any blocks."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.held: dict[int, int] = {}
        """How often each block was used, by its slot."""

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self.held |= dict.fromkeys(slots.tolist(), 1)

    def evict(self, eviction: Eviction) -> Slots:
        idle = [slot for slot in self.held if not eviction.busy[slot]]
        victims = np.array(self.chosen(idle, eviction.n), dtype=np.int64)
        self.remove(victims)
        return victims

    def chosen(self, idle: list[int], n: int) -> list[int]:
        return random.sample(idle, n)

    def remove(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.held.pop(slot, None)

    def clear(self) -> None:
        self.held.clear()


class TestRandom(PolicyConformance):
    KEEPS_ORDER = False

    def make_policy(self, capacity: int) -> CachePolicy:
        return RandomPolicy(capacity)


class TestTheExample(PolicyConformance):
    def make_policy(self, capacity: int) -> CachePolicy:
        names: dict[str, Any] = {}
        exec(example(), names)
        policy: CachePolicy = names["SLRUPolicy"](capacity)
        return policy

    def test_it_has_at_most_fifty_lines(self) -> None:
        lines = [line for line in example().splitlines() if line.strip()]
        assert 15 < len(lines) <= MAX_LINES

    def test_it_keeps_what_was_used_again(self) -> None:
        policy = self.full(5)
        touch(policy, [1, 0])
        assert self.evict(policy, 5) == [2, 3, 4, 1, 0]

    def test_it_can_be_judged_by_its_import_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "my_module.py").write_text(example())
        monkeypatch.syspath_prepend(tmp_path)
        assert "--policy lru,my_module:SLRUPolicy" in DOCUMENTATION.read_text()
        chains = [[1, 2], [3, 4], [1, 2], [5, 6], [7, 8], [1, 2]]
        trace = make_trace("t", 1, range(6), [2] * 6, [0] * 6, chains)
        found = [replay(trace, ReplayConfig(policy, 5)).block_hits for policy in ("lru", "my_module:SLRUPolicy")]
        assert found == [3, 4]
