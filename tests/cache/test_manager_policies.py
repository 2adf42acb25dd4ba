"""Every policy behind a manager: compared with its reference model, and what happens to a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvoffload.abc import Access, CachePolicy, IntegrityError, Offer, OffloadingManager, OffloadKey, Slots
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import BUILTIN, make_policy
from kvoffload.cache.policies.arc import ARCPolicy
from kvoffload.cache.policies.auto import AutoPolicy
from kvoffload.cache.policies.engine_arc import EngineARCPolicy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import keys, letters
from tests.cache.reference_auto import ReferenceAutoManager, TextbookTournament
from tests.cache.reference_policies import ReferenceARCManager, ReferenceTextbookARCManager
from tests.suites.reference import ReferenceLRUManager, ReferenceManager
from tests.suites.stateful import WALK_SEEDS, ManagerMachine, manager_machine, walk


def same_lists(policy: Any, reference: Any) -> None:
    for name in ("t1", "t2"):
        assert len(getattr(policy, name)) == len(getattr(reference, name))
    for name in ("b1", "b2"):
        assert list(getattr(policy, name)) == getattr(reference, name)
    assert policy.target_t1_size == reference.target_t1_size


def same_rules(policy: AutoPolicy, reference: ReferenceAutoManager) -> None:
    state = policy.state()
    assert state["rule"] == reference.rule.name
    assert list(state["scores"].values()) == pytest.approx(reference.scores)


@dataclass(frozen=True)
class Case:
    make: Callable[[int], CachePolicy]
    reference: Callable[[int], ReferenceManager]
    compare: Callable[[Any, Any], None] = lambda policy, reference: None
    """Asserts that both have learned the same."""


CASES: dict[str, Case] = {
    "lru": Case(LRUPolicy, ReferenceLRUManager),
    "engine arc": Case(EngineARCPolicy, ReferenceARCManager, same_lists),
    "arc": Case(ARCPolicy, ReferenceTextbookARCManager, same_lists),
    "auto": Case(lambda n: AutoPolicy(n, TextbookTournament(n)), ReferenceAutoManager, same_rules),
}
policies = pytest.mark.parametrize("name", CASES)


def make_manager(name: str, num_blocks: int, must_store: bool = False) -> PolicyOffloadingManager:
    return on_a_host(make_policy(name, num_blocks), must_store)


def on_a_host(policy: CachePolicy, must_store: bool = False) -> PolicyOffloadingManager:
    return PolicyOffloadingManager(HostBackend(16, policy.capacity), policy, enable_events=True, must_store=must_store)


def machine(name: str, make: Callable[[int], CachePolicy] | None = None) -> type[ManagerMachine]:
    case = CASES[name]

    def compare(manager: Any, reference: Any) -> None:
        case.compare(manager.policy, reference)

    return manager_machine(lambda n: on_a_host((make or case.make)(n)), case.reference, compare)


TestLRU, TestEngineARC, TestARC, TestAuto = (machine(name).TestCase for name in CASES)


@policies
@pytest.mark.parametrize("seed", WALK_SEEDS)
def test_walk_matches_the_reference(name: str, seed: int) -> None:
    walk(machine(name), seed)


@policies
def test_long_walk_matches_the_reference(name: str) -> None:
    walk(machine(name), seed=0, num_blocks=64, num_steps=1500)


class ForgetsTheHead(LRUPolicy):
    def reorder(self, slots: Slots, new: Any) -> None:
        super().reorder(slots[:-1], new[:-1])


class InsertsTheHeadFirst(LRUPolicy):
    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        super().insert(slots[::-1], keys[::-1])


class ForgetsNoGhost(ARCPolicy):
    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        before = [*self.b1, *self.b2]
        super().insert(slots, keys)
        here = {*self.b1, *self.b2, *keys}
        self.b2.add([key for key in before if key not in here])


class NeverAtItsTarget(ARCPolicy):
    def access(self, access: Access) -> None:
        super().access(access)
        self.last_was_in_b2 = False


class CountsUsesWhileWritten(ARCPolicy):
    def access(self, access: Access) -> None:
        super().access(replace(access, ready=access.ready | ~access.ready))


class AdmitsAll(ARCPolicy):
    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> None:
        return None


class ForgetsWhatWasRefused(ARCPolicy):
    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("lru", ForgetsTheHead),
        ("lru", InsertsTheHeadFirst),
        ("arc", ForgetsNoGhost),
        ("arc", NeverAtItsTarget),
        ("arc", CountsUsesWhileWritten),
        ("arc", AdmitsAll),
        ("arc", ForgetsWhatWasRefused),
    ],
)
def test_the_walk_catches_a_wrong_policy(name: str, bug: type[CachePolicy]) -> None:
    def walks() -> None:
        for seed in range(40):
            walk(machine(name, bug), seed)

    with pytest.raises((AssertionError, IntegrityError)):
        walks()


CHAIN = "abcdefghij"


def store(manager: OffloadingManager, names: str) -> None:
    output = manager.prepare_store(keys(names))
    assert output is not None
    manager.complete_store(output.keys_to_store)


def used_three_times(manager: OffloadingManager, number: int) -> None:
    """Stores a block that is worth more, to any policy, than the blocks of a chain that was used once."""
    key = [make_offload_key(b"other %d" % number, 0)]
    manager.touch(key)
    output = manager.prepare_store(key)
    assert output is not None
    manager.complete_store(output.keys_to_store)
    manager.touch(key)
    manager.touch(key)


@pytest.mark.parametrize("asked", [False, True], ids=["new", "asked for before"])
def test_blocks_behind_a_refused_block_are_remembered_like_it(asked: bool) -> None:
    stored = []
    for is_recorded in (True, False):
        manager = make_manager("arc", 20)
        for number in [*range(22)] * 3:
            used_three_times(manager, number)
        if asked:
            manager.prepare_store(keys(CHAIN), offer=Offer.BEHIND_REFUSED)
        manager.touch(keys(CHAIN))
        if is_recorded:
            manager.prepare_store(keys(CHAIN), offer=Offer.BEHIND_REFUSED)
            manager.check_integrity()
            manager.touch(keys(CHAIN))
        output = manager.prepare_store(keys(CHAIN))
        assert output is not None
        stored.append(letters(output.keys_to_store))
        manager.check_integrity()
    assert stored == [CHAIN, CHAIN] if asked else stored[0] == CHAIN != stored[1]


@pytest.mark.parametrize("name", BUILTIN)
def test_a_manager_that_must_store_refuses_nothing(name: str) -> None:
    manager = make_manager(name, 20, must_store=True)
    for number in range(40):
        used_three_times(manager, number)
    output = manager.prepare_store(keys(CHAIN))
    assert output is not None
    assert letters(output.keys_to_store) == CHAIN
