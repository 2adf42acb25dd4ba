"""Every policy behind a manager, beside the plainest model of it, and what becomes of a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvoffload.base import OffloadingManager
from kvoffload.hostpool import HostBackend
from kvoffload.keys import make_offload_key
from kvoffload.manager import PolicyOffloadingManager
from kvoffload.policies import BUILTIN, make_policy
from kvoffload.policies.arc import TextbookARCPolicy
from kvoffload.policies.lirs import LIRSPolicy
from kvoffload.policies.s3fifo import S3FIFOPolicy
from kvoffload.policies.twoq import TwoQPolicy
from kvoffload.testing.conformance import keys, letters
from kvoffload.testing.reference import (
    Reference2QManager,
    ReferenceFIFOManager,
    ReferenceLIRSManager,
    ReferenceLRUManager,
    ReferenceManager,
    ReferenceS3FIFOManager,
    ReferenceSIEVEManager,
    ReferenceTextbookARCManager,
)
from kvoffload.testing.stateful import WALK_SEEDS, manager_machine, walk


@dataclass(frozen=True)
class Case:
    reference: Callable[[int], ReferenceManager]
    state: Callable[[Any], object] = lambda policy: None
    """What the policy has learned, to be equal to ``state_of_reference``."""
    state_of_reference: Callable[[Any], object] = lambda reference: None


def arc_state(policy: TextbookARCPolicy) -> object:
    return policy.len_t1, policy.len_t2, list(policy.b1), list(policy.b2), policy.target_t1_size


CASES: dict[str, Case] = {
    "fifo": Case(ReferenceFIFOManager),
    "lru": Case(ReferenceLRUManager),
    "arc": Case(
        ReferenceTextbookARCManager, arc_state, lambda r: (len(r.t1), len(r.t2), r.b1, r.b2, r.target_t1_size)
    ),
    "s3fifo": Case(
        ReferenceS3FIFOManager,
        lambda p: (len(p._small), len(p._main), list(p._ghost.left), list(p._ghost.asked)),
        lambda r: (len(r.small), len(r.main), r.ghost, r.asked),
    ),
    "sieve": Case(ReferenceSIEVEManager, lambda p: len(p._ahead), lambda r: len(r.ahead)),
    "lirs": Case(
        ReferenceLIRSManager,
        lambda p: (len(p._lir), len(p._queue), list(p._ghosts.left), list(p._ghosts.asked)),
        lambda r: (len(r.lir), len(r.queue), r.left, r.asked),
    ),
    "2q": Case(
        Reference2QManager,
        lambda p: (len(p._a1in), len(p._am), list(p._a1out.left), list(p._a1out.asked)),
        lambda r: (len(r.a1in), len(r.am), r.a1out, r.asked),
    ),
}
policies = pytest.mark.parametrize("name", CASES)


def make_manager(name: str, num_blocks: int) -> PolicyOffloadingManager:
    return PolicyOffloadingManager(HostBackend(16, num_blocks), make_policy(name, num_blocks), enable_events=True)


def machine(name: str) -> Any:
    case = CASES[name]

    def compare(manager: Any, reference: Any) -> None:
        assert case.state(manager.policy) == case.state_of_reference(reference)

    return manager_machine(lambda n: make_manager(name, n), case.reference, compare)


TestFIFO = machine("fifo").TestCase
TestTextbookARC = machine("arc").TestCase
TestS3FIFO = machine("s3fifo").TestCase
TestSIEVE = machine("sieve").TestCase
TestLIRS = machine("lirs").TestCase
Test2Q = machine("2q").TestCase


@policies
@pytest.mark.parametrize("seed", WALK_SEEDS)
def test_walk_beside_the_reference(name: str, seed: int) -> None:
    walk(machine(name), seed)


@policies
def test_long_walk_beside_the_reference(name: str) -> None:
    walk(machine(name), seed=0, num_blocks=64, num_steps=400)
