"""Why a request missed: a bounded memory that rather knows nothing than says something wrong."""

from __future__ import annotations

import json
import random

import pytest

from kvoffload.base import Miss, MissReason
from kvoffload.explain import MissMemory, RequestRecord, count_reasons

NEVER = Miss(MissReason.NEVER_STORED)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def table_bytes(memory: MissMemory) -> int:
    return sum(value.nbytes for value in vars(memory).values() if hasattr(value, "nbytes"))


def colliding(entries: int) -> tuple[bytes, bytes]:
    """Two keys that share a place in a table of so many entries."""
    first = key(0)
    return first, next(k for k in map(key, range(1, 10**6)) if not (hash(k) ^ hash(first)) & (entries - 1))


@pytest.mark.parametrize("reason", list(MissReason))
def test_a_reason_is_remembered_with_its_age(reason: MissReason) -> None:
    clock = Clock()
    memory = MissMemory(clock=clock)
    clock.now = 10.0
    memory.record([key(1), key(2)], reason)
    clock.now = 12.5
    assert memory.explain(key(1)) == memory.explain(key(2)) == Miss(reason, 2.5)
    assert memory.explain(key(3)) == NEVER


def test_the_newest_reason_counts() -> None:
    clock = Clock()
    memory = MissMemory(clock=clock)
    memory.record([key(1)], MissReason.EVICTED)
    clock.now = 4.0
    memory.record(iter([key(1)]), MissReason.RESET)
    assert memory.explain(key(1)) == Miss(MissReason.RESET, 0.0)


def test_recording_nothing_does_nothing() -> None:
    memory = MissMemory()
    memory.record([], MissReason.EVICTED)
    assert memory.explain(key(1)) == NEVER


def test_of_two_keys_in_one_place_the_older_is_forgotten_and_not_mistaken() -> None:
    memory = MissMemory(entries=64, clock=Clock())
    older, newer = colliding(64)
    memory.record([older], MissReason.EVICTED)
    assert memory.explain(newer) == NEVER, "another key's reason is not its own"
    memory.record([newer], MissReason.RESET)
    assert memory.explain(older) == NEVER
    assert memory.explain(newer) == Miss(MissReason.RESET, 0.0)


def test_it_never_grows() -> None:
    memory = MissMemory(entries=64, clock=Clock())
    before = table_bytes(memory)
    assert before > 0
    for i in range(100):
        memory.record([key(100 * i + j) for j in range(100)], MissReason.EVICTED)
    assert table_bytes(memory) == before
    known = [i for i in range(10_000) if memory.explain(key(i)) != NEVER]
    assert 0 < len(known) <= 64


def test_what_it_says_is_what_happened_last_to_that_key() -> None:
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


@pytest.mark.parametrize("entries", [3, 100, 65_535])
def test_its_size_is_a_power_of_two(entries: int) -> None:
    with pytest.raises(ValueError, match=f"entries={entries}"):
        MissMemory(entries=entries)


def test_a_memory_of_no_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="entries=0"):
        MissMemory(entries=0)


# Records.

HIT = RequestRecord(1.5, "r1", 100, 16, 64)
MISSED = RequestRecord(2.5, "r2", 100, 16, 0, "ab" * 36, MissReason.EVICTED, 12.34)


def test_a_record_reads_as_a_sentence() -> None:
    assert str(HIT) == "request r1: 100 tokens asked, 16 on device, 64 in host"
    assert str(MISSED) == (
        "request r2: 100 tokens asked, 16 on device, 0 in host; first miss abababababababab: evicted 12.3 s ago"
    )


def test_a_record_without_an_age_does_not_make_one_up() -> None:
    record = RequestRecord(1.5, "r", 10, 0, 0, "ab", MissReason.NEVER_STORED)
    assert str(record).endswith("first miss ab: never_stored")


def test_a_record_goes_through_json() -> None:
    assert json.loads(json.dumps(MISSED.to_dict())) == {
        "time": 2.5,
        "req_id": "r2",
        "tokens_asked": 100,
        "device_tokens": 16,
        "host_tokens": 0,
        "missed_key": "ab" * 36,
        "reason": "evicted",
        "age_s": 12.34,
    }
    assert RequestRecord(**HIT.to_dict()) == HIT


def test_reasons_are_counted() -> None:
    other = RequestRecord(3.5, "r3", 10, 0, 0, "cd", MissReason.RESET, 1.0)
    assert count_reasons([HIT, MISSED, MISSED, other]) == {"evicted": 2, "reset": 1}
    assert count_reasons([HIT]) == {}
