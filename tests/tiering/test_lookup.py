"""Lookups in tiers that do not answer at once, and in several tiers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.abc import KVGroup, LookupState, MissReason, OffloadKey, ReqContext, States
from kvoffload.tiering.health import MAX_FAILURES, MISS_TTL_S, BreakerState, OpenQuestions
from kvoffload.tiering.lookup import FIRST_CHUNK
from kvoffload.tiering.manager import TierSettings
from tests.tiering.rig import A, B, Rig, SpyTier, below, chain, content


class RemoteTier(SpyTier):
    """Answers RETRY until the answer of its medium has come, for all keys that it was asked for or expects."""

    name = "remote"

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.questions: list[list[OffloadKey]] = []
        """Keys that the medium was asked for at a time."""
        self.known: set[OffloadKey] = set()

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        self._ask(ahead or keys)
        states = super().contains(keys, ahead)
        unknown = [i for i, key in enumerate(keys) if key not in self.known]
        states[unknown] = LookupState.RETRY
        return states

    def _ask(self, keys: Sequence[OffloadKey]) -> None:
        asked = {key for question in self.questions for key in question}
        if new := [key for key in keys if key not in asked]:
            self.questions.append(new)

    def answer(self) -> None:
        """The medium answers."""
        self.known.update(key for question in self.questions for key in question)

    def forget(self) -> None:
        self.questions.clear()
        self.known.clear()


def with_remote(**options: object) -> tuple[Rig, RemoteTier]:
    """A rig with a plain tier and a remote one below it."""
    rig = Rig(**options, tier_class=RemoteTier, num_tiers=2)  # type: ignore[arg-type]
    remote = rig.tiers[1]
    assert isinstance(remote, RemoteTier)
    return rig, remote


def test_a_tier_that_does_not_answer_in_time_does_not_hold_the_block() -> None:
    rig, keys = below(2, lookup_deadline_ms=100)
    rig.tier.unsure = True
    assert rig.manager.lookup(keys, A) is None
    assert rig.manager.poll(), "the tier must be asked again"
    rig.clock.now += 0.099
    assert rig.manager.lookup(keys, A) is None
    rig.clock.now += 0.001
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(keys, B) == 0, "a miss is remembered"
    assert rig.manager.explain_miss(keys[0]).reason is MissReason.NOT_ANSWERED
    rig.clock.now += MISS_TTL_S + 0.1
    assert rig.manager.lookup(keys, B) is None, "for a while"
    rig.tier.unsure = False
    assert rig.manager.lookup(keys, B) is None
    rig.settle()
    assert rig.manager.lookup(keys, B) == 2


def test_a_remote_tier_is_asked_once_for_a_whole_chain() -> None:
    rig, remote = with_remote(host_blocks=8 * FIRST_CHUNK, tier_blocks=8 * FIRST_CHUNK)
    keys = chain("x", 3 * FIRST_CHUNK)
    rig.put(remote, keys)
    assert rig.manager.lookup(keys, A) is None
    assert remote.questions == [keys]
    assert rig.manager.poll(), "it must be asked again"
    assert rig.manager.lookup(keys, A) is None
    remote.answer()
    assert rig.manager.lookup(keys, A) is None
    assert remote.questions == [keys]
    rig.settle()
    assert rig.manager.lookup(keys, A) == len(keys)


def test_only_the_rest_of_a_chain_is_announced() -> None:
    rig, remote = with_remote()
    keys = chain("x", 6)
    rig.store(keys[:2])
    rig.settle()
    remote.forget()
    rig.put(rig.tiers[0], keys[2:4])
    rig.tiers[0].expected.clear()
    remote.expected.clear()
    assert rig.manager.lookup(keys, A) is None
    assert rig.tiers[0].expected == [keys[2:]]
    assert remote.expected == [keys[4:]]


def test_a_chain_may_be_found_partly_in_each_tier() -> None:
    rig, remote = with_remote(host_blocks=32, load_deadline_ms=1e6)
    keys = chain("x", 6)
    rig.put(rig.tiers[0], keys[:3])
    rig.put(remote, keys[2:5])
    rig.pools[0][:] = 0
    assert rig.manager.lookup(keys, A) is None
    rig.manager.poll()
    assert rig.tiers[0].reads == keys[:3], "what is known already is read while the other tier is asked"
    rig.settle()
    assert rig.manager.lookup(keys, A) is None
    remote.answer()
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == 5
    assert remote.reads == keys[3:5], "the faster tier has the others"
    assert rig.bytes_of(keys[:5]) == [bytes(content(key)) for key in keys[:5]]
    assert rig.manager.release_request(A) == {"memory": keys[:3], "memory-2": keys[3:5]}


def test_a_slower_tier_is_asked_while_a_faster_one_does_not_know() -> None:
    rig, remote = with_remote(lookup_deadline_ms=100)
    keys = chain("x", 4)
    rig.put(remote, keys)
    rig.tiers[0].unsure = True
    assert rig.manager.lookup(keys, A) is None
    assert remote.questions == [keys]
    remote.answer()
    assert rig.manager.lookup(keys, A) is None
    rig.manager.poll()
    assert remote.reads == [], "the faster tier may have them"
    rig.clock.now += 0.11
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == 4
    assert remote.reads == keys


def test_each_tier_may_have_a_deadline_of_its_own() -> None:
    rig, remote = with_remote(lookup_deadline_ms=100, tiers=[TierSettings(), TierSettings(lookup_deadline_ms=500)])
    keys = chain("x", 4)
    rig.put(remote, keys)
    rig.tiers[0].unsure = True
    for passed, is_waiting in ((0.0, True), (0.3, True), (0.21, False)):
        rig.clock.now += passed
        assert (rig.manager.lookup(keys, A) is None) == is_waiting, passed
    assert rig.manager.lookup(keys, A) == 0, "the slower tier was given 500 ms"


def test_late_answers_count_once_per_lookup_and_pause_the_tier() -> None:
    rig, _ = with_remote(lookup_deadline_ms=100)
    for i in range(MAX_FAILURES):
        assert rig.manager.tiers[1].can_read
        keys = chain(f"x{i}/", 10)
        assert rig.manager.lookup(keys, ReqContext(f"r{i}")) is None
        rig.clock.now += 0.11
        for _ in range(3):
            assert rig.manager.lookup(keys, ReqContext(f"r{i}")) == 0
            rig.manager.poll()
    assert rig.counts()["tier_lookup_failures:memory-2"] == MAX_FAILURES
    assert rig.manager.tiers[1].read_health.state is BreakerState.OPEN
    assert rig.manager.tiers[0].can_read
    assert rig.manager.lookup(chain("y", 10), A) == 0, "no request waits for its answer any more"


def test_an_answer_that_came_in_time_is_not_late_when_the_tier_has_forgotten_it() -> None:
    rig, remote = with_remote(lookup_deadline_ms=100)
    keys = chain("x", 2)
    assert rig.manager.lookup(keys, A) is None
    remote.answer()
    assert rig.manager.lookup(keys, A) == 0
    remote.forget()
    rig.clock.now += 0.5
    assert rig.manager.lookup(keys, B) is None
    rig.manager.poll()
    assert "tier_lookup_failures:memory-2" not in rig.counts()


def test_an_idle_engine_waits_for_answers() -> None:
    rig, remote = with_remote()
    waited = []

    def wait(timeout_s: float) -> None:
        waited.append(timeout_s)

    remote.wait = wait  # type: ignore[method-assign]
    rig.manager.poll()
    rig.manager.poll(0.002)
    assert waited == []
    rig.manager.lookup(chain("x", 2), A)
    rig.manager.poll(0.002)
    assert waited == [0.002]


def test_blocks_of_a_window_are_looked_up_in_all_tiers() -> None:
    rig, remote = with_remote(groups=(KVGroup(16, sliding_window=33),), load_deadline_ms=1e6)
    keys = chain("x", 3)
    rig.put(rig.tiers[0], keys[:1])
    rig.put(remote, keys[1:])
    assert rig.manager.lookup_each(keys, A).tolist() == [LookupState.RETRY] * 3
    assert remote.questions == [keys[1:]]
    remote.answer()
    rig.settle()
    assert rig.manager.lookup_each(keys, A).tolist() == [LookupState.HIT, LookupState.RETRY, LookupState.RETRY]
    rig.settle()
    assert rig.manager.lookup_each(keys, A).tolist() == [LookupState.HIT] * 3


def test_the_keys_remembered_for_open_questions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.health.MAX_UNANSWERED", 4)
    questions = OpenQuestions(deadline_s=1.0)
    keys = chain("x", 8)
    assert questions.find_late(keys, 0.0) == ([False] * 8, 0)
    assert questions.find_late(keys[4:], 1.0) == ([True] * 4, 1)
    assert questions.find_late(keys[:4], 1.0) == ([False] * 4, 0), "the earliest are forgotten"


def test_questions_of_requests_that_have_ended_are_forgotten() -> None:
    rig, _ = with_remote(lookup_deadline_ms=100)
    for i in range(10):
        rig.manager.lookup(chain(f"x{i}", 4), ReqContext(str(i)))
        rig.manager.release_request(ReqContext(str(i)))
        rig.clock.now += 0.01
        rig.manager.poll()
    (questions,) = [tier.questions.asked_at for tier in rig.manager.tiers if tier.questions.asked_at]
    assert len(questions) == 40
    rig.clock.now += 0.1 + MISS_TTL_S
    rig.manager.poll()
    assert len(questions) == 0
