"""ARCOffloadingManager: the contract, a comparison with the plainest ARC, and each rule of the algorithm."""

from __future__ import annotations

import pytest

from kvoffload.cache.policies.engine_arc import ARCOffloadingManager, EngineARCPolicy
from kvoffload.cache.slots import HostBackend
from tests.cache.reference_policies import ReferenceARCManager
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


Machine = manager_machine(make_arc, ReferenceARCManager, compare_lists)
TestAgainstTheReference = Machine.TestCase


@pytest.mark.parametrize("seed", WALK_SEEDS)
def test_walk_matches_the_reference(seed: int) -> None:
    walk(Machine, seed)


def test_long_walk_matches_the_reference() -> None:
    walk(Machine, seed=0, num_blocks=64, num_steps=1500)
