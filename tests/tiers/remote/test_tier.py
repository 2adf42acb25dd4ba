"""RemoteTier: what it knows of a store, what it asks, and what it does when requests fail or are never answered."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.abc import OffloadKey, TierError, TierResult
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.tiers.remote import known
from kvoffload.tiers.remote import tier as remote_tier
from kvoffload.tiers.remote.known import MISSING_TTL_S, PRESENT_TTL_S, RETRY_S, PresenceCache
from kvoffload.tiers.remote.link import (
    FIRST_PAUSE_S,
    LOOKUP_DEADLINE_S,
    MAX_FAILURE_GAP_S,
    MAX_PAUSE_S,
    MIN_FAILURES,
    RENEW_AFTER_S,
    START_DEADLINE_S,
)
from kvoffload.tiers.remote.messages import Op, Unframer
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from kvoffload.tiers.remote.tier import MAX_LOOKED_FOR, RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker, ValueMemory
from tests.tiers.remote.memory_store import MemoryClient, SteppedProcess

FINGERPRINT = "5e" * 32
VALUES = ValueFormat(FINGERPRINT, "kv")
KEYS = [bytes([i]) * 36 for i in range(16)]
SLOT_BYTES = 64
PAUSE_S = 0.005


class Rig:
    """A tier of one server on ``client``. Time passes when a test says so."""

    def __init__(self, client: MemoryClient | None = None) -> None:
        self.client = client or MemoryClient()
        self.now = 100.0
        self.pool = np.random.default_rng(0).integers(0, 256, (64, SLOT_BYTES), dtype=np.uint8)
        self.worker = StoreWorker(
            self.client, ValueMemory([self.pool]), VALUES, self.clock, lambda: 0.5, lambda s: None
        )
        self.process = SteppedProcess(self.worker)
        self.tier = RemoteTier(self.process.start, SLOT_BYTES, name="memory", clock=self.clock, random=lambda: 1.0)
        self.tier.poll()

    def clock(self) -> float:
        return self.now

    def step(self, *ops: Op) -> list[TierResult]:
        """Answers all requests, or those with ``ops``."""
        self.process.run(*ops)
        return self.tier.poll()

    def write(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return self.tier.write(keys, np.arange(len(keys)))

    def read(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return self.tier.read(keys, np.arange(32, 32 + len(keys)))

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        assert self.write(keys) == list(keys)
        assert all(result.ok for result in self.step())

    def states(self, keys: Sequence[OffloadKey]) -> list[int]:
        return list(self.tier.contains(keys).tolist())

    def pass_time(self, seconds: float) -> list[TierResult]:
        self.now += seconds
        return self.tier.poll()

    def crash(self) -> None:
        self.process.kill()
        self.tier.poll()

    def lookups(self) -> list[int]:
        return [len(request.keys) for request in self.process.requests if request.op is Op.LOOKUP]


def errors(results: Sequence[TierResult]) -> list[TierError | None]:
    return [result.error for result in results]


# Lookups.


def test_a_chain_is_asked_about_at_once_and_the_answer_is_remembered() -> None:
    rig = Rig()
    rig.stored(KEYS[:2])
    rig.now += PRESENT_TTL_S
    rig.tier.contains(KEYS[:4])
    assert rig.states(KEYS[:4]) == [RETRY] * 4
    assert rig.lookups() == [4]
    rig.step()
    assert rig.states(KEYS[:4]) == [HIT, HIT, MISS, MISS]
    assert rig.lookups() == []
    rig.now += MISSING_TTL_S
    assert rig.states(KEYS[:4]) == [HIT, HIT, RETRY, RETRY]
    assert rig.lookups() == [2]


@pytest.mark.parametrize("looks", [True, False])
def test_a_store_is_asked_again_at_once_for_what_another_server_is_writing(looks: bool) -> None:
    """Without that, which is the control, not before an answer has become old."""
    rig, other = Rig(client := MemoryClient()), Rig(client)
    rig.tier.contains(KEYS[:3])
    rig.step()
    other.stored(KEYS[:2])
    rig.now += PAUSE_S
    if looks:
        rig.tier.look_for(KEYS[:3], "", PAUSE_S)
        assert rig.lookups() == [3]
        assert rig.states(KEYS[:3]) == [RETRY] * 3
        rig.tier.look_for(KEYS[:3], "", 0.0)
        assert rig.lookups() == [3], "it is being asked"
        rig.step()
        rig.tier.look_for(KEYS[:3], "", PAUSE_S)
        assert rig.lookups() == [], "it was asked just now"
    assert rig.states(KEYS[:3]) == ([HIT, HIT, MISS] if looks else [MISS] * 3)
    rig.tier.check_integrity()


def test_of_a_long_chain_few_blocks_are_looked_for_at_once() -> None:
    rig, chain = Rig(), [bytes([7, i // 256, i % 256]) * 12 for i in range(3 * MAX_LOOKED_FOR)]
    rig.tier.contains(chain[-1:])
    rig.step()
    rig.lookups()
    rig.tier.look_for(chain[-1:], "", 0.0, chain)
    assert rig.lookups() == [MAX_LOOKED_FOR + 1]


def test_an_answer_that_an_idle_engine_takes_in_late_is_as_old_as_it_is() -> None:
    rig = Rig()
    rig.tier.contains(KEYS[:2])
    rig.process.run()
    # Another server stores them, while this one takes no steps.
    rig.now += MISSING_TTL_S
    rig.tier.poll()
    assert rig.states(KEYS[:2]) == [RETRY] * 2, "it is asked again"
    rig.step()
    assert rig.states(KEYS[:2]) == [MISS] * 2


def test_an_answer_from_before_a_write_does_not_say_that_the_block_is_missing() -> None:
    """A chain that seems to have a hole is not written any further, and what is behind the hole is deleted."""
    rig = Rig()
    rig.tier.contains(KEYS[:2])
    rig.process.run(Op.LOOKUP)
    rig.now += PAUSE_S
    rig.write(KEYS[:1])
    rig.process.run(Op.WRITE)
    rig.process.responses.reverse()
    assert [result.ok for result in rig.tier.poll()] == [True]
    assert rig.states(KEYS[:2]) == [HIT, MISS]
    assert rig.tier.take_evicted() == []


def test_a_lookup_that_fails_is_counted_and_counts_as_a_miss_for_a_while() -> None:
    rig = Rig()
    rig.client.num_errors = 2
    rig.tier.contains(KEYS[:3])
    rig.step()
    assert rig.tier.num_failed_lookups == 1
    assert rig.states(KEYS[:3]) == [MISS] * 3
    rig.now += MISSING_TTL_S
    assert rig.states(KEYS[:3]) == [RETRY] * 3


def test_keys_asked_about_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "MAX_ASKED", 3)
    rig = Rig()
    assert rig.states(KEYS[:5]) == [RETRY] * 3 + [MISS] * 2
    rig.tier.check_integrity()
    rig.step()
    assert rig.states(KEYS[:5]) == [MISS] * 3 + [RETRY] * 2


# Transfers.


def test_a_block_that_the_store_has_evicted_is_gone_and_reported_as_lost() -> None:
    rig = Rig()
    rig.stored(KEYS[:2])
    del rig.client.values[VALUES.name(KEYS[0])]
    rig.read(KEYS[:2])
    assert errors(rig.step()) == [TierError.GONE, None]
    assert rig.states(KEYS[:2]) == [MISS, HIT]
    assert rig.tier.take_evicted() == [KEYS[0]]
    assert rig.tier.take_evicted() == []
    assert rig.write(KEYS[:1]) == KEYS[:1]


def test_removing_a_corrupt_block_is_tried_until_it_is_done() -> None:
    rig = Rig()
    rig.stored(KEYS[:1])
    rig.client.values[VALUES.name(KEYS[0])][0] ^= 1
    rig.read(KEYS[:1])
    rig.step()
    rig.client.num_errors = 1
    rig.step()
    assert len(rig.client.values) == 1
    rig.now += PRESENT_TTL_S
    assert rig.states(KEYS[:1]) == [MISS]
    rig.pass_time(RETRY_S)
    rig.step()
    assert not rig.client.values
    rig.now += MISSING_TTL_S
    assert rig.states(KEYS[:1]) == [RETRY]


def test_blocks_in_flight_are_bounded_and_share_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    block = RECORD_BYTES + SLOT_BYTES
    monkeypatch.setattr(remote_tier, "MAX_MOVING_BYTES", 5 * block)
    monkeypatch.setattr(remote_tier, "REQUEST_BYTES", 2 * block)
    rig = Rig()
    assert rig.write(KEYS[:8]) == KEYS[:5]
    assert [len(request.keys) for request in rig.process.requests] == [2, 2, 1]
    assert rig.write(KEYS[5:8]) == []
    rig.step()
    assert rig.read(KEYS[:3]) == KEYS[:3]
    assert rig.write(KEYS[5:8]) == KEYS[5:8], "reads leave no room for writes"
    rig.tier.check_integrity()


def test_a_key_is_moved_once_at_a_time() -> None:
    rig = Rig()
    rig.stored(KEYS[:1])
    assert rig.read(KEYS[:1]) == KEYS[:1]
    assert rig.read(KEYS[:1]) == []
    assert rig.write(KEYS[1:2]) == KEYS[1:2]
    assert rig.write(KEYS[1:2]) == []
    assert rig.states(KEYS[1:2]) == [MISS], "it is not asked for before its write was reported"


# Delete and reset.


def test_a_lookup_under_way_does_not_bring_a_deleted_block_back() -> None:
    rig = Rig()
    rig.stored(KEYS[:1])
    rig.now += PRESENT_TTL_S
    rig.tier.contains(KEYS[:1])
    rig.process.run(Op.LOOKUP)
    rig.tier.delete(KEYS[:1])
    rig.tier.poll()
    assert rig.states(KEYS[:1]) == [MISS]


# Deadlines and restarts.


def test_a_lookup_has_a_shorter_deadline() -> None:
    rig = Rig()
    rig.tier.contains(KEYS[2:4])
    rig.step()
    rig.tier.contains(KEYS[:2])
    rig.pass_time(LOOKUP_DEADLINE_S - 1)
    rig.pass_time(0)
    assert rig.tier.num_failed_lookups == 0
    rig.pass_time(1)
    rig.pass_time(0)
    assert rig.tier.num_failed_lookups == 1
    rig.pass_time(FIRST_PAUSE_S)
    assert rig.process.num_starts == 2


def test_pauses_between_restarts_grow_up_to_a_bound() -> None:
    rig = Rig()
    rig.process.is_reachable = False
    pauses = []
    for _ in range(9):
        rig.crash()
        begun, starts = rig.now, rig.process.num_starts
        while rig.process.num_starts == starts:
            rig.pass_time(0.25)
        pauses.append(rig.now - begun)
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-2:] == [MAX_PAUSE_S] * 2


def test_an_answer_of_the_store_makes_pauses_short_again() -> None:
    rig = Rig()
    for _ in range(5):
        rig.crash()
        rig.pass_time(MAX_PAUSE_S)
        rig.pass_time(0)
    rig.stored(KEYS[:1])
    rig.crash()
    starts = rig.process.num_starts
    rig.pass_time(FIRST_PAUSE_S)
    assert rig.process.num_starts == starts + 1


def test_a_process_that_never_reaches_the_store_is_replaced() -> None:
    rig = Rig()
    rig.process.is_reachable = False
    rig.crash()
    rig.pass_time(FIRST_PAUSE_S)
    assert rig.process.num_starts == 2
    rig.pass_time(START_DEADLINE_S)
    rig.pass_time(0)
    rig.pass_time(2 * FIRST_PAUSE_S)
    assert rig.process.num_starts == 3


def test_a_process_that_sends_what_makes_no_sense_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.write(KEYS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(rig.process, "poll", lambda: list(Unframer().feed(b"GET / HTTP/1.1")))
        assert rig.tier.poll() == []
    assert [result.error for result in rig.tier.poll()] == [TierError.IO]
    rig.pass_time(FIRST_PAUSE_S)
    assert rig.process.num_starts == 2


def test_a_process_that_answers_nothing_but_failures_is_replaced() -> None:
    """A new one reads passwords, certificates and credentials again."""
    rig = Rig()

    def ask(second: int, succeeds: bool) -> None:
        rig.client.num_errors = 0 if succeeds else 2
        rig.tier.contains([bytes([second]) * 36])
        rig.step()
        rig.pass_time(1.0)

    for second in range(100):
        ask(second, succeeds=second % 20 == 19)
    for second in range(100, 100 + MIN_FAILURES):
        # No run of failures: hardly anything is asked.
        ask(second, succeeds=False)
        rig.pass_time(MAX_FAILURE_GAP_S)
    for second in range(120, 120 + int(RENEW_AFTER_S)):
        ask(second, succeeds=False)
    assert rig.process.num_starts == 1
    ask(200, succeeds=False)
    rig.pass_time(FIRST_PAUSE_S)
    assert rig.process.num_starts == 2
    rig.client.num_errors = 0
    rig.pass_time(0)
    rig.stored(KEYS[:2])
    for second in range(201, 201 + MIN_FAILURES):
        # The tier is hardly used, because its circuit breaker is open.
        ask(second, succeeds=False)
        rig.pass_time(MAX_PAUSE_S)
    assert rig.process.num_starts == 3


def test_an_orderly_end_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.stored(KEYS[:1])
    rig.tier.close()
    rig.pass_time(MAX_PAUSE_S)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert rig.process.num_starts == 1, "the process was started again"


def test_closing_reports_what_was_under_way_unless_it_may_still_go_on() -> None:
    rig = Rig()
    rig.write(KEYS[:2])
    rig.tier.close()
    assert errors(rig.tier.poll()) == [None] * 2
    stuck = Rig()
    stuck.write(KEYS[:2])
    stuck.process.is_stuck = True
    stuck.process.requests.clear()
    stuck.tier.close()
    assert stuck.tier.poll() == []


# What is known is trusted for a while, and bounded.


def test_the_oldest_knowledge_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MAX_KNOWN", 3)
    cache = PresenceCache()
    cache.note_present([b"a", b"b", b"c"], 0.0)
    cache.note_present([b"a"], 1.0)
    cache.note_missing([b"d"], 1.0)
    assert cache.states([b"a", b"b", b"c", b"d"], 1.0).tolist() == [HIT, RETRY, HIT, MISS]


def test_what_is_missing_is_forgotten_if_it_is_old_enough() -> None:
    """Neither what is there nor what is missing until the end of its transfer."""
    cache = PresenceCache()
    cache.note_missing([b"old"], 0.0)
    cache.note_missing([b"new"], 0.2)
    cache.note_missing([b"moving"], 0.0, float("inf"))
    cache.note_present([b"there"], 0.0)
    keys = [b"there", b"old", b"new", b"moving", b"unknown"]
    assert cache.forget_missing(keys, -0.1) == []
    assert cache.forget_missing(keys, 0.1) == [b"old"]
    assert cache.states(keys, 0.3).tolist() == [HIT, RETRY, MISS, MISS, RETRY]
    assert cache.forget_missing(keys, 0.1) == [], "it is not known any more"
    assert cache.forget_missing(keys, 0.2) == [b"new"]
