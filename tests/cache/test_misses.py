"""MissMemory: bounded; it may forget a key, but it never says something wrong about one."""

from __future__ import annotations

import random

import pytest

from kvoffload.abc import Miss, MissReason
from kvoffload.cache.misses import MissMemory
from tests.clock import Clock

NEVER = Miss(MissReason.NEVER_STORED)


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def table_bytes(memory: MissMemory) -> int:
    return sum(value.nbytes for value in vars(memory).values() if hasattr(value, "nbytes"))


@pytest.mark.parametrize("reason", list(MissReason))
def test_a_reason_is_remembered_with_its_age(reason: MissReason) -> None:
    clock = Clock()
    memory = MissMemory(clock=clock)
    clock.now = 10.0
    memory.record([key(1), key(2)], reason)
    clock.now = 12.5
    assert memory.explain(key(1)) == memory.explain(key(2)) == Miss(reason, 2.5)
    assert memory.explain(key(3)) == NEVER


def test_the_memory_never_grows() -> None:
    memory = MissMemory(entries=64, clock=Clock())
    before = table_bytes(memory)
    assert before > 0
    for i in range(100):
        memory.record([key(100 * i + j) for j in range(100)], MissReason.EVICTED)
    assert table_bytes(memory) == before
    known = [i for i in range(10_000) if memory.explain(key(i)) != NEVER]
    assert 0 < len(known) <= 64


def test_an_explanation_is_the_last_event_of_that_key_or_none() -> None:
    rng = random.Random(0)
    memory = MissMemory(entries=64, clock=Clock())
    last: dict[bytes, MissReason] = {}
    reasons = [reason for reason in MissReason if reason is not MissReason.NEVER_STORED]
    for _ in range(500):
        keys = [key(rng.randrange(300)) for _ in range(rng.randrange(5))]
        reason = rng.choice(reasons)
        memory.record(keys, reason)
        last.update(dict.fromkeys(keys, reason))
        for asked in map(key, rng.sample(range(300), 10)):
            assert memory.explain(asked).reason in (MissReason.NEVER_STORED, last.get(asked))
