"""ARCOffloadingManager: the contract, a comparison with the plainest ARC, and each rule of the algorithm."""

from __future__ import annotations

import pytest

from kvoffload.abc import OffloadingManager
from kvoffload.cache.policies.engine_arc import ARCOffloadingManager, EngineARCPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import keys, letters
from tests.cache.reference_policies import ReferenceARCManager
from tests.suites.conformance import ManagerConformance
from tests.suites.stateful import WALK_SEEDS, manager_machine, walk


def make_arc(num_blocks: int) -> ARCOffloadingManager:
    return ARCOffloadingManager(HostBackend(16, num_blocks), enable_events=True)


def policy_of(manager: ARCOffloadingManager) -> EngineARCPolicy:
    assert isinstance(manager.policy, EngineARCPolicy)
    return manager.policy


def compare_lists(manager: ARCOffloadingManager, reference: ReferenceARCManager) -> None:
    policy = policy_of(manager)
    assert (len(policy.t1), len(policy.t2)) == (len(reference.t1), len(reference.t2))
    assert list(policy.b1) == reference.b1
    assert list(policy.b2) == reference.b2
    assert policy.target_t1_size == reference.target_t1_size


class TestConformance(ManagerConformance):
    def make_manager(self, num_blocks: int) -> OffloadingManager:
        return make_arc(num_blocks)


class TestConformanceOfTheReference(ManagerConformance):
    def make_manager(self, num_blocks: int) -> OffloadingManager:
        return ReferenceARCManager(num_blocks)


Machine = manager_machine(make_arc, ReferenceARCManager, compare_lists)
TestAgainstTheReference = Machine.TestCase


def test_events_are_off_unless_asked_for() -> None:
    manager = ARCOffloadingManager(HostBackend(16, 1))
    manager.prepare_store(keys("a"))
    manager.complete_store(keys("a"))
    assert list(manager.take_events()) == []


class Driver:
    """Calls by letters, and what the lists look like. The letters of a store are oldest first, so tail first."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = make_arc(num_blocks)
        self.policy = policy_of(self.manager)

    def begin(self, names: str) -> str | None:
        output = self.manager.prepare_store(keys(names)[::-1])
        self.manager.check_integrity()
        return None if output is None else letters(output.evicted_keys)

    def store(self, names: str) -> str | None:
        evicted = self.begin(names)
        self.finish(names)
        return evicted

    def touch(self, names: str) -> None:
        self.manager.touch(keys(names))
        self.manager.check_integrity()

    def finish(self, names: str, success: bool = True) -> None:
        self.manager.complete_store(keys(names), success=success)
        self.manager.check_integrity()

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.policy.t1), len(self.policy.t2)

    @property
    def ghosts(self) -> tuple[str, str]:
        return letters(self.policy.b1), letters(self.policy.b2)

    @property
    def target(self) -> float:
        return self.policy.target_t1_size


# touch


def test_touch_moves_a_ready_block_of_t1_to_t2() -> None:
    arc = Driver(4)
    arc.store("abc")
    assert arc.sizes == (3, 0)
    arc.touch("b")
    assert arc.sizes == (2, 1)
    assert arc.store("wxyz") == "acb"
    assert arc.ghosts == ("ac", "b")


def test_touch_of_a_block_being_written_moves_it_within_t1() -> None:
    arc = Driver(3)
    arc.begin("abc")
    arc.touch("a")
    assert arc.sizes == (3, 0)
    arc.finish("abc")
    arc.touch("b")
    assert arc.sizes == (2, 1)
    assert arc.store("xyz") == "cab"


def test_touch_of_a_block_of_t2_moves_it_to_the_recent_end() -> None:
    arc = Driver(3)
    arc.store("abc")
    arc.touch("cba")
    assert arc.sizes == (0, 3)
    arc.touch("b")
    assert arc.store("xyz") == "acb"
    assert arc.ghosts == ("", "acb")


def test_a_load_is_no_use_and_moves_nothing() -> None:
    arc = Driver(4)
    arc.store("abcd")
    arc.touch("dc")
    assert arc.sizes == (2, 2)
    arc.manager.prepare_load(keys("ac"))
    arc.manager.complete_load(keys("ac"))
    assert arc.sizes == (2, 2)
    assert arc.store("wxyz") == "abcd"


def test_touch_of_a_pinned_block_of_t1_moves_it_to_t2() -> None:
    arc = Driver(3)
    arc.store("abc")
    arc.manager.prepare_load(keys("ab"))
    arc.touch("a")
    assert arc.sizes == (2, 1)
    arc.manager.complete_load(keys("ab"))
    assert arc.store("xyz") == "bca"
    assert arc.ghosts == ("bc", "a")


def test_touch_of_unknown_keys_teaches_nothing() -> None:
    arc = Driver(2)
    arc.store("ab")
    arc.store("cd")
    arc.touch("xyz")
    assert (arc.target, arc.ghosts, arc.sizes) == (0.0, ("ab", ""), (2, 0))


# ghosts and the target


def test_target_grows_by_the_ratio_of_the_ghost_lists_up_to_the_capacity() -> None:
    arc = Driver(5)
    arc.store("abcde")
    arc.touch("abc")
    arc.store("vwxyz")
    assert arc.ghosts == ("de", "cba")
    arc.touch("d")
    assert arc.target == 1.5
    assert arc.ghosts == ("ed", "cba")
    arc.touch("ed")
    assert arc.target == 4.5
    arc.touch("d")
    assert arc.target == 5.0


def test_target_grows_by_one_at_least() -> None:
    arc = Driver(2)
    arc.store("ab")
    arc.store("cd")
    arc.touch("a")
    assert arc.target == 1.0
    arc.touch("aa")
    assert arc.target == 2.0
    arc.touch("b")
    assert arc.target == 2.0


def test_target_shrinks_by_the_ratio_of_the_ghost_lists_down_to_zero() -> None:
    arc = Driver(5)
    arc.store("abcde")
    arc.touch("ab")
    arc.store("vwxyz")
    assert arc.ghosts == ("cde", "ba")
    arc.touch("cd")
    assert arc.target == 2.0
    arc.touch("b")
    assert arc.target == 0.5
    assert arc.ghosts == ("edc", "ab")
    arc.touch("a")
    assert arc.target == 0.0


def test_target_shrinks_by_one_at_least() -> None:
    arc = Driver(5)
    arc.store("abcde")
    arc.touch("abc")
    arc.store("vwxyz")
    arc.touch("d")
    assert (arc.target, arc.ghosts) == (1.5, ("ed", "cba"))
    arc.touch("a")
    assert arc.target == 0.5


def test_touch_of_ghosts_is_applied_last_key_first() -> None:
    arc = Driver(3)
    arc.store("abc")
    arc.store("def")
    arc.touch("ab")
    assert arc.ghosts == ("cba", "")
    arc.store("x")
    assert arc.ghosts == ("bad", "")


def test_ghost_lists_are_cut_to_the_capacity_oldest_first() -> None:
    arc = Driver(2)
    for names in ("ab", "cd", "ef"):
        arc.store(names)
    assert arc.ghosts == ("cd", "")
    arc.touch("ef")
    arc.store("gh")
    arc.touch("gh")
    arc.store("ij")
    assert arc.ghosts == ("cd", "hg")


def test_an_inserted_key_leaves_the_ghosts_and_enters_t1() -> None:
    arc = Driver(2)
    arc.store("ab")
    arc.touch("b")
    assert arc.store("cd") == "ab"
    assert arc.ghosts == ("a", "b")
    assert arc.store("ba") == "cd"
    assert arc.ghosts == ("cd", "")
    assert arc.sizes == (2, 0)


def test_a_failed_store_leaves_no_ghost() -> None:
    arc = Driver(2)
    arc.begin("ab")
    arc.finish("ab", success=False)
    assert (arc.sizes, arc.ghosts) == ((0, 0), ("", ""))


def test_a_refused_store_leaves_lists_and_target_alone() -> None:
    arc = Driver(3)
    arc.store("abc")
    arc.store("def")
    arc.touch("ae")
    arc.manager.prepare_load(keys("f"))
    before = (arc.sizes, arc.ghosts, arc.target)
    assert arc.begin("abc") is None
    assert (arc.sizes, arc.ghosts, arc.target) == before


def test_reset_forgets_ghosts_and_target() -> None:
    arc = Driver(2)
    arc.store("ab")
    arc.store("cd")
    arc.touch("a")
    arc.manager.reset()
    assert (arc.sizes, arc.ghosts, arc.target) == ((0, 0), ("", ""), 0.0)


# evict


def with_target_of_two() -> Driver:
    """Four blocks "wxyz" in t1, "abcd" in b1."""
    arc = Driver(4)
    arc.store("abcd")
    arc.store("wxyz")
    arc.touch("ab")
    assert (arc.target, arc.sizes) == (2.0, (4, 0))
    return arc


def test_evicts_from_t1_at_its_target_and_above_from_t2_below() -> None:
    arc = with_target_of_two()
    arc.touch("wxy")
    assert arc.sizes == (1, 3)
    assert arc.store("m") == "y"
    assert arc.sizes == (2, 2)
    assert arc.store("n") == "z"
    assert arc.store("o") == "m"
    assert arc.sizes == (2, 2)


def test_a_batch_of_evictions_is_one_at_a_time() -> None:
    arc = with_target_of_two()
    arc.touch("z")
    assert arc.sizes == (3, 1)
    assert arc.store("mnop") == "wxzy"  # t1 3, 2: from t1; 1: from t2; nothing left there: from t1 after all


def test_the_target_counts_in_whole_blocks() -> None:
    arc = Driver(5)
    arc.store("abcde")
    arc.touch("abc")
    arc.store("vwxyz")
    arc.touch("d")
    assert arc.target == 1.5
    arc.touch("vwxy")
    assert arc.sizes == (1, 4)
    assert arc.store("m") == "z"


def test_evicts_from_t2_when_t1_has_nothing_evictable() -> None:
    arc = Driver(2)
    arc.store("ab")
    arc.touch("a")
    arc.manager.prepare_load(keys("b"))
    assert arc.store("x") == "a"
    assert arc.ghosts == ("", "a")


def test_evicts_from_t1_below_its_target_when_t2_has_nothing_evictable() -> None:
    arc = Driver(2)
    arc.store("ab")
    arc.store("cd")
    arc.touch("ab")
    arc.touch("c")
    assert (arc.target, arc.sizes) == (2.0, (1, 1))
    arc.manager.prepare_load(keys("c"))
    assert arc.store("x") == "d"
    arc.manager.complete_load(keys("c"))
    assert arc.store("y") == "c"


def test_blocks_that_cannot_be_evicted_count_in_the_length_of_t1() -> None:
    arc = with_target_of_two()
    arc.touch("z")
    arc.manager.prepare_load(keys("wx"))
    assert arc.sizes == (3, 1)
    assert arc.store("m") == "y"
    assert arc.begin("n") == "m"
    assert arc.begin("o") == "z"
    assert arc.begin("p") is None


def test_a_scan_does_not_flush_what_was_used_twice() -> None:
    arc = Driver(8)
    arc.store("abcd")
    arc.touch("abcd")
    for name in "efghijklmnopqrstuvwxyz":
        arc.store(name)
    assert arc.manager.lookup(keys("abcd")) == 4
    assert arc.sizes == (4, 4)


@pytest.mark.parametrize("seed", WALK_SEEDS)
def test_walk_matches_the_reference(seed: int) -> None:
    walk(Machine, seed)


def test_long_walk_matches_the_reference() -> None:
    walk(Machine, seed=0, num_blocks=64, num_steps=1500)
