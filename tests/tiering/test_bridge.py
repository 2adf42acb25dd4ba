"""TierBridge: blocks of foreign pages in tiers. The test plays the bridge's thread unless it needs a real one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ConfigError, IntegrityError, KVGroup, MissReason, OffloadKey, TierError, TierResult
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.tiering import bridge_jobs
from kvoffload.tiering.bridge import STORE_DEADLINE_S, BridgeSettings, JobEnd, TierBridge, build_bridge
from kvoffload.tiering.health import BreakerState
from kvoffload.tiers.config import TierEntry, load_tiers
from kvoffload.tiers.threads import IOThreads
from tests.tiering.bridge_rig import FINGERPRINT, BridgeRig, Foreign
from tests.tiering.rig import SLOT_BYTES, SharedTier, chain


def indices(end: JobEnd, keys: Sequence[OffloadKey]) -> list[int]:
    return [i for i, key in enumerate(keys) if key in end.done]


# Stores and loads.


def test_what_is_stored_is_loaded_again() -> None:
    rig = BridgeRig()
    keys = chain("x", 6)
    stored = rig.store(keys, keys)
    assert stored == JobEnd(1, False, frozenset(keys), True, 6 * SLOT_BYTES, 0.0)
    assert rig.held(keys) == [0, 1, 2, 3, 4, 5]
    rig.rig.host.reset()
    assert rig.bridge.lookup([*keys, b"other" + bytes(4)]).tolist() == [HIT] * 6 + [MISS]
    loaded = rig.load(keys)
    assert loaded == JobEnd(2, True, frozenset(keys), True, 6 * SLOT_BYTES, 0.0)
    assert all(rig.foreign.holds(i, key) for i, key in enumerate(keys))
    assert rig.bridge.finished() == [], "each job is reported once"


def test_blocks_that_every_tier_holds_end_without_a_copy() -> None:
    rig = BridgeRig(num_tiers=2)
    keys = chain("x", 4)
    rig.store_all(keys)
    rig.bridge.store(3, keys, rig.foreign.clear(range(4)), keys, "again")
    (end,) = rig.settle()
    assert (end.ok, end.nbytes) == (True, 0)
    del rig.rig.tiers[1].blocks[rig.name(keys)[-1]]
    rig.rig.tiers[1].num_evicted += 1
    rig.bridge.store(4, keys, rig.foreign.fill(range(4), keys), keys, "again")
    (end,) = rig.settle()
    assert (end.ok, end.nbytes) == (True, SLOT_BYTES), "one tier lacks the last block"
    assert rig.rig.tiers[1].contains(rig.name(keys)).tolist() == [HIT] * 4


def test_a_store_without_room_is_dropped_in_time_and_leaves_no_hole() -> None:
    rig = BridgeRig(staging=8)
    keys = chain("x", 12)
    rig.bridge.store(1, keys[:8], rig.foreign.fill(range(8), keys[:8]), keys, "r")
    rig.bridge.store(2, keys[8:10], rig.foreign.fill(range(8, 10), keys[8:10]), keys, "r")
    rig.step(5)
    rig.clock.now += STORE_DEADLINE_S - 0.1
    rig.step(5)
    assert rig.bridge.finished() == []
    rig.clock.now += 0.2
    with rig.executor.hold():
        rig.step(5)
        ends = rig.bridge.finished()
    assert [(end.job, end.ok, len(end.done)) for end in ends] == [(1, False, 4), (2, False, 0)]
    assert rig.rig.counts()["tier_dropped_writes:memory"] == 6
    assert rig.bridge.explain(keys[7]).reason is MissReason.NO_ROOM
    rig.foreign.clear(range(12))
    rig.bridge.store(3, keys[10:], rig.foreign.fill(range(2), keys[10:]), keys, "r")
    (end,) = rig.settle()
    assert not end.done, "nothing behind the hole is copied"
    assert rig.held(keys) == [0, 1, 2, 3]
    assert rig.load(keys[:4]).ok
    assert all(rig.foreign.holds(i, key) for i, key in enumerate(keys[:4]))


def test_stores_of_too_many_pages_are_dropped_at_once() -> None:
    rig = BridgeRig(max_pages=8)
    keys = chain("x", 30)
    rig.bridge.store(1, keys[:6], rig.foreign.fill(range(6), keys[:6]), keys, "r")
    rig.bridge.store(2, keys[6:10], rig.foreign.fill(range(6, 10), keys[6:10]), keys, "r")
    (end,) = rig.bridge.finished()
    assert (end.job, end.ok) == (2, False)
    rig.settle()
    assert rig.rig.counts()["tier_dropped_writes:memory"] == 4
    assert rig.store(keys[10:20], keys, "other", job=3).ok, "a job alone may be larger"
    assert rig.held(keys) == [0, 1, 2, 3, 4, 5]


def test_a_load_ends_at_its_deadline_with_what_has_arrived() -> None:
    rig = BridgeRig(load_deadline_ms=500.0)
    keys = chain("x", 4)
    rig.store_all(keys)
    rig.tier.hanging = {rig.name(keys)[2]: 1e6}
    rig.bridge.load(1, keys, rig.foreign.clear(range(4)), "l")
    rig.step(3)
    rig.executor.drain()
    rig.step(3)
    rig.clock.now += 0.4
    rig.step(3)
    assert rig.bridge.finished() == []
    rig.clock.now += 0.2
    rig.step(3)
    (end,) = rig.bridge.finished()
    assert indices(end, keys) == [0, 1, 3]
    rig.foreign.clear(range(4))
    rig.tier.hanging.clear()
    rig.clock.now += 1e7
    rig.settle()
    assert rig.foreign.memory[:] == bytes(len(rig.foreign.memory)), "later nothing touches the pages"


def test_a_job_may_name_a_key_twice() -> None:
    rig, keys = BridgeRig(), chain("x", 2)
    twice = [*keys, keys[0]]
    rig.bridge.store(1, twice, rig.foreign.fill(range(3), twice), keys, "r")
    ends = rig.settle()
    rig.rig.host.reset()
    rig.bridge.load(2, twice, rig.foreign.clear(range(3)), "l")
    assert [end.ok for end in ends + rig.settle()] == [True, True]
    assert all(rig.foreign.holds(i, key) for i, key in enumerate(twice))


def test_a_page_of_another_size_is_a_bug_and_switches_the_bridge_off() -> None:
    rig = BridgeRig()
    keys = chain("x", 1)
    rig.bridge.store(1, keys, [[np.zeros(SLOT_BYTES - 1, dtype=np.uint8)]], keys, "r")
    with pytest.raises(IntegrityError, match="a page has 4095 bytes"):
        rig.bridge._thread.step()


# Uses.


def touched(rig: BridgeRig) -> list[OffloadKey]:
    return [key for how, keys in rig.tier.shown if how == "touch" for key in keys]


def test_a_request_is_one_use_of_its_chain() -> None:
    rig = BridgeRig(load_deadline_ms=1.0)
    keys = chain("x", 8)
    rig.store(keys[:3], keys[:4])
    rig.store(keys[3:5], keys[:5])
    rig.bridge.end_request("r", keys)
    rig.settle()
    assert touched(rig) == rig.name(keys), "each block once, those that are new before they are stored"
    rig.bridge.end_request("another", keys[:4])
    rig.settle()
    assert touched(rig) == rig.name([*keys, *keys[:4]])
    rig.tier.shown.clear()
    assert rig.bridge.get(keys[:2], rig.foreign.pages(range(2))) == [False] * 2, "the thread does not run"
    rig.settle()
    assert touched(rig) == rig.name(keys[:2])
    rig.bridge.load(7, keys[:2], rig.foreign.pages(range(2)), "r")
    rig.settle()
    assert touched(rig) == rig.name(keys[:2]), "the load of a request is counted when it ends"


def test_requests_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.bridge_thread.MAX_REQUESTS", 10)
    rig = BridgeRig()
    for i in range(100):
        keys = chain(f"x{i}-", 2)
        rig.store(keys, keys, f"request {i}")
    assert len(rig.bridge._thread._stores._requests) == 10
    rig.bridge.end_request("request 0", chain("x0-", 2))
    rig.settle()


def test_requests_are_forgotten_for_the_keys_of_others_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those of a chain that another one has replaced, nor for those from before a reset."""
    monkeypatch.setattr("kvoffload.tiering.bridge_thread.MAX_CHAIN_KEYS", 10)
    rig = BridgeRig()

    def known_after(*requests: str) -> list[str]:
        for i, request in enumerate(requests):
            keys = chain(f"{request}{i}-", 4)
            rig.store(keys, keys, request)
        return list(rig.bridge._thread._stores._requests)

    assert known_after("a", "a", "a", "b") == ["a", "b"]
    assert known_after("c") == ["b", "c"]
    rig.bridge.reset()
    assert known_after("d", "e") == ["d", "e"]


def test_a_tier_may_ask_for_several_uses(tmp_path: Path) -> None:
    bridge, foreign, keys = make_bridge(tmp_path, store_threshold=2), Foreign(4), chain("x", 4)
    try:
        for job in range(2):
            bridge.store(job, keys, foreign.fill(range(4), keys), keys, f"request {job}")
            bridge.end_request(f"request {job}", keys)
            (end,) = wait_for(bridge.finished)
            assert (end.ok, end.nbytes) == (True, job * 4 * SLOT_BYTES)
    finally:
        bridge.close()


def test_a_question_whether_blocks_exist_waits_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, answers = BridgeRig(), iter([[RETRY, MISS, HIT], [HIT, MISS, HIT]])
    monkeypatch.setattr(rig.bridge, "lookup", lambda keys, chain: np.array(next(answers), dtype=np.uint8))
    assert rig.bridge.exists(chain("x", 3)).tolist() == [HIT, MISS, HIT]


# The end.


def test_drain_waits_for_the_copy_under_way_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that hangs for ever does not matter, since it never touches foreign pages."""
    rig = BridgeRig()
    keys = chain("x", 4)
    begun, go_on, copied = threading.Event(), threading.Event(), list[int]()
    copy = bridge_jobs._copy

    def slow(*args: object) -> None:
        begun.set()
        assert go_on.wait(60)
        copied.append(1)
        copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bridge_jobs, "_copy", slow)
    rig.bridge.store(1, keys, rig.foreign.fill(range(4), keys), keys, "r")
    stepping = threading.Thread(target=rig.bridge._thread.step)
    stepping.start()
    assert begun.wait(60)
    with pytest.raises(BufferError):
        rig.foreign.close()
    draining = threading.Thread(target=rig.bridge._jobs.stop)
    draining.start()
    draining.join(0.05)
    assert draining.is_alive(), "the page is being touched"
    assert rig.bridge.finished() == []
    go_on.set()
    draining.join(60)
    stepping.join(60)
    assert copied == [1], "the others are not copied"
    (end,) = rig.bridge.finished()
    assert not end.ok
    rig.foreign.close()
    rig.settle()
    assert rig.bridge.lookup(keys).tolist() == [HIT] + [MISS] * 3, "nor found"
    assert rig.held(keys) == [0]


def test_after_a_reset_nothing_from_before_is_found() -> None:
    rig = BridgeRig()
    keys = chain("x", 4)
    rig.store_all(keys)
    rig.store(chain("y", 2), chain("y", 2), "y")
    rig.bridge.load(7, keys, rig.foreign.clear(range(4)), "l")
    rig.step()
    rig.bridge.reset()
    assert [(end.job, end.ok) for end in rig.bridge.finished()] == [(7, False)]
    for _ in range(2):
        assert rig.bridge.lookup([*keys, *chain("y", 2)]).tolist() == [MISS] * 6
        assert not rig.load(keys).done
    pages = rig.foreign.fill(range(4), keys, generation=1)
    rig.bridge.store(3, keys, pages, keys, "new")
    assert [end.ok for end in rig.settle()] == [True]
    rig.rig.host.reset()
    assert rig.load(keys).ok
    assert all(rig.foreign.holds(i, key, generation=1) for i, key in enumerate(keys))
    assert rig.held(keys) == [0, 1, 2, 3], "the next process finds those of before"
    rig.bridge.reset()
    rig.clock.now += 3
    miss = rig.bridge.explain(chain("y", 1)[0])
    assert (miss.reason, miss.tier) == (MissReason.RESET, "memory"), "it was stored before the first of two resets"
    assert miss.age_s == pytest.approx(3, abs=0.1)
    assert rig.bridge.explain(chain("z", 1)[0]).reason is MissReason.NEVER_STORED


def test_jobs_that_come_during_a_reset_do_not_cross_it() -> None:
    rig = BridgeRig()
    keys = chain("x", 2)
    rig.store_all(keys)
    namespace = rig.bridge._thread.namespace
    rig.bridge.reset()
    # As if their submission had begun before.
    rig.bridge._thread.namespace, now = namespace, rig.bridge._thread.namespace
    rig.bridge.load(1, keys, rig.foreign.clear(range(2)), "l")
    rig.bridge.store(2, chain("y", 1), rig.foreign.fill([3], chain("y", 1)), chain("y", 1), "r")
    rig.bridge.end_request("r", chain("y", 1))
    rig.bridge._thread.namespace = now
    assert [(end.job, end.ok) for end in rig.settle()] == [(1, False), (2, False)]
    assert rig.held(chain("y", 1)) == []


def test_a_reset_in_the_middle_of_a_step_forgets_nothing_that_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = BridgeRig(staging=8)
    keys, poll = chain("x", 12), rig.manager.poll

    def reset_meanwhile() -> None:
        monkeypatch.setattr(rig.manager, "poll", poll)
        rig.bridge.reset()
        rig.bridge.store(1, keys, rig.foreign.fill(range(12), keys), keys, "r")

    monkeypatch.setattr(rig.manager, "poll", reset_meanwhile)
    rig.step()
    assert [(end.job, end.ok) for end in rig.settle()] == [(1, True)]
    assert rig.load(keys).ok


def test_a_closed_bridge_refers_to_nothing_and_does_nothing() -> None:
    rig = BridgeRig(staging=8)
    keys = chain("x", 20)
    rig.bridge.store(1, keys, rig.foreign.fill(range(20), keys), keys, "r")
    rig.bridge.load(2, keys, rig.foreign.pages(range(20, 40)), "l")
    rig.step(3)
    with pytest.raises(BufferError):
        rig.foreign.close()
    slots = weakref.ref(rig.rig.pools[0])
    rig.bridge.close()
    rig.bridge.close()
    rig.foreign.close()
    assert [end.ok for end in rig.bridge.finished()] == [False, False]
    bridge, foreign = rig.bridge, Foreign(4)
    bridge.store(3, keys[:4], foreign.pages(range(4)), keys, "r")
    bridge.load(4, keys[:4], foreign.pages(range(4)), "r")
    bridge.end_request("r", keys)
    bridge._jobs.stop()
    bridge.reset()
    assert [(end.job, end.ok) for end in bridge.finished()] == [(3, False), (4, False)]
    assert bridge.lookup(keys).tolist() == [MISS] * 20
    assert bridge.exists(keys).tolist() == [MISS] * 20
    assert (
        bridge.get(keys[:4], foreign.pages(range(4)))
        == bridge.put(keys[:4], foreign.pages(range(4)), keys)
        == [False] * 4
    )
    assert bridge.explain(keys[0]).reason is MissReason.NOT_IN_TIME
    assert (bridge.take_counts(), list(bridge.take_events()), bridge.is_idle) == ({}, [], True)
    foreign.close()
    del rig
    gc.collect()
    assert slots() is None, "the staging pool is freed"


def test_what_is_staged_is_written_when_a_bridge_closes() -> None:
    rig = BridgeRig()
    keys = chain("x", 8)
    rig.tier.most_writes = 1
    rig.tier.executor = IOThreads(1)
    rig.bridge.store(1, keys, rig.foreign.fill(range(8), keys), keys, "r")
    rig.bridge.start()
    assert wait_for(rig.bridge.finished)[0].ok
    rig.bridge.end_request("r", keys)
    rig.bridge.close()
    assert rig.tier.writes == rig.name(keys)


def wait_for(call: Callable[[], list[JobEnd]], count: int = 1) -> list[JobEnd]:
    """Returns the first ``count`` reports."""
    found: list[JobEnd] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline, "a job never ends"
        found += call()
        time.sleep(0.001)
    return found


def test_a_tier_that_hangs_in_a_call_delays_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.bridge_thread.CLOSE_DEADLINE_S", 0.1)
    rig, keys = BridgeRig(), chain("x", 4)
    rig.store_all(keys)
    poll, begun, go_on = rig.tier.poll, threading.Event(), threading.Event()

    def hang() -> list[TierResult]:
        """No tier may do this."""
        begun.set()
        go_on.wait(60)
        return poll()

    monkeypatch.setattr(rig.tier, "poll", hang)
    rig.bridge.start()
    assert begun.wait(60)
    rig.bridge.load(1, keys, rig.foreign.clear(range(4)), "l")
    assert rig.bridge.lookup(keys).tolist() == [RETRY] * 4
    rig.clock.now += 10
    assert rig.bridge.lookup(keys).tolist() == [MISS] * 4
    assert rig.bridge.take_counts() == {}
    assert not rig.bridge.is_idle
    assert [(end.job, end.ok) for end in rig.bridge.finished()] == [(1, False)], "its deadline has passed"
    rig.bridge.store(2, keys, rig.foreign.pages(range(4)), keys, "r")
    rig.bridge._jobs.stop()
    assert [(end.job, end.ok) for end in rig.bridge.finished()] == [(2, False)]
    rig.bridge.reset()
    rig.bridge.close()
    rig.foreign.close()
    thread = rig.bridge._thread.thread
    assert thread is not None
    assert thread.is_alive(), "otherwise nothing has hung"
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("call", ["explain", "take_counts", "take_events", "lookup"])
def test_calls_of_a_scheduler_do_not_wait_for_what_the_thread_does(call: str) -> None:
    rig = BridgeRig(enable_events=True)
    arguments: dict[str, list[Any]] = {"explain": [chain("x", 1)[0]], "lookup": [chain("x", 1)]}
    began = time.monotonic()
    with rig.bridge._thread.lock():
        result = getattr(rig.bridge, call)(*arguments.get(call, []))
    assert time.monotonic() - began < 30
    assert call != "explain" or result.reason is MissReason.NOT_IN_TIME


def test_calls_do_not_pile_up_while_a_tier_hangs_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.bridge_jobs.MAX_INBOX", 8)
    rig = BridgeRig()
    keys = chain("x", 1)
    for i in range(20):
        rig.bridge.store(i, keys, rig.foreign.fill([0], keys), keys, f"request {i}")
        rig.bridge.end_request(f"request {i}", keys)
    assert len(rig.bridge._jobs.inbox) == 8
    assert {end.job for end in rig.bridge.finished()} == set(range(4, 20))
    assert {(end.job, end.ok) for end in rig.settle()} == {(i, True) for i in range(4)}
    assert rig.store(keys, keys).ok


@pytest.mark.parametrize("where", ["poll", "contains"])
def test_a_check_that_fails_switches_the_bridge_off(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, keys = BridgeRig(), chain("x", 4)
    rig.store_all(keys)

    def fail(*args: object) -> None:
        """Breaks a check of kvoffload's own."""
        raise IntegrityError("planted")

    monkeypatch.setattr(rig.tier, where, fail)
    rig.bridge.load(1, keys, rig.foreign.clear(range(4)), "l")
    rig.bridge.store(2, chain("y", 2), rig.foreign.pages([5, 6]), chain("y", 2), "r")
    if where == "contains":
        assert rig.bridge.lookup(keys).tolist() == [MISS] * 4
    else:
        rig.bridge.start()
    assert sorted((end.job, end.ok) for end in wait_for(rig.bridge.finished, 2)) == [(1, False), (2, False)]
    assert rig.bridge.fault == "IntegrityError: planted"
    assert rig.bridge.lookup(keys).tolist() == [MISS] * 4
    assert "THE TIERS MEMORY ARE OFF" in caplog.text
    num_calls = len(rig.bridge._jobs.inbox)
    rig.bridge.load(3, keys, rig.foreign.pages(range(4)), "l")
    rig.bridge.store(4, keys, rig.foreign.pages(range(4)), keys, "r")
    rig.bridge.end_request("r", keys)
    assert [(end.job, end.ok) for end in rig.bridge.finished()] == [(3, False), (4, False)]
    assert len(rig.bridge._jobs.inbox) <= num_calls, "nothing is kept"
    rig.bridge.close()
    rig.foreign.close()


def test_stores_are_dropped_while_no_tier_can_be_written() -> None:
    rig = BridgeRig()
    keys = chain("x", 20)
    rig.tier.fails = TierError.IO
    for i in range(20):
        rig.store(keys[i : i + 1], keys[: i + 1], f"request {i}")
    assert rig.manager.tiers[0].write_health.state is BreakerState.OPEN
    others = chain("y", 4)
    assert not rig.store(others, others, "y").done
    rig.tier.fails = None
    rig.clock.now += 100
    rig.settle()
    rig.store(others, others, "z")
    rig.settle()
    assert rig.held(others) == [0, 1, 2, 3]


# Calls that wait, and threads.


def test_answers_that_are_late_are_misses() -> None:
    rig = BridgeRig(tier_class=SharedTier, lookup_deadline_ms=50.0)
    keys = chain("x", 6)
    rig.store_all(keys)
    rig.tier.unsure = True
    rig.bridge._jobs.wake.clear()
    assert rig.bridge.lookup(keys[:2], keys[2:]).tolist() == [RETRY] * 2
    assert rig.bridge._jobs.wake.is_set(), "the thread is to take in the answer"
    assert rig.tier.expected[-1] == rig.name(keys), "the medium is asked for all at once"
    rig.clock.now += 0.04
    assert rig.bridge.lookup(keys[:2]).tolist() == [RETRY] * 2
    rig.clock.now += 0.02
    assert rig.bridge.lookup(keys[:2]).tolist() == [MISS] * 2
    rig.tier.unsure = False
    assert rig.bridge.lookup(keys[:2]).tolist() == [HIT] * 2


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[TierBridge]:
    bridge = make_bridge(tmp_path)
    yield bridge
    bridge.close()


def make_bridge(path: Path, **options: Any) -> TierBridge:
    (config,) = load_tiers([{"kind": "disk", "dir": str(path), "bytes": "4MiB", **options}])
    return build_bridge(
        [TierEntry("tiers[0].", config)],
        [KVGroup(16)],
        SLOT_BYTES,
        FINGERPRINT,
        BridgeSettings(staging_bytes=1, enable_events=True, load_deadline_ms=60_000.0),
    )


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    keys, foreign = chain("x", 200), Foreign(200)
    bridge = make_bridge(tmp_path)
    assert bridge.names == ("disk",)
    bridge.store(1, keys, foreign.fill(range(200), keys), keys, "r")
    assert wait_for(bridge.finished)[0].ok
    bridge.close()
    again = make_bridge(tmp_path)
    assert again.lookup(keys).tolist() == [HIT] * 200, "the tier ends its writes"
    again.load(2, keys, foreign.clear(range(200)), "l")
    assert wait_for(again.finished)[0].ok
    assert all(foreign.holds(i, key) for i, key in enumerate(keys))
    events = list(again.take_events())
    assert {key for event in events for key in event.keys} == set(keys)
    assert {(event.tier, event.removed) for event in events} == {("disk", False)}
    assert again.take_counts()["tier_read_bytes:disk"] == 200 * SLOT_BYTES
    again.close()
    foreign.close()


def test_what_is_stored_after_a_reset_is_not_kept_for_the_next_process(tmp_path: Path) -> None:
    """No process could find it: the namespace of its keys is random."""
    keys, others, foreign = chain("x", 8), chain("y", 8), Foreign(8)
    bridge = make_bridge(tmp_path)
    for chain_of, resets in ((keys, True), (others, False)):
        bridge.store(1, chain_of, foreign.fill(range(8), chain_of), chain_of, "r")
        bridge.end_request("r", chain_of)
        assert wait_for(bridge.finished)[0].ok
        while not bridge.is_idle:
            time.sleep(0.001)
        if resets:
            bridge.reset()
    bridge.close()
    again = make_bridge(tmp_path)
    assert again.take_counts()["tier_blocks:disk"] == 8
    assert again.lookup([*keys, *others]).tolist() == [HIT] * 8 + [MISS] * 8
    again.close()
    foreign.close()


def test_threads_put_and_get(on_disk: TierBridge) -> None:
    """Each thread has a chain of its own, and one that all share."""
    shared = chain("shared", 8)
    problems: list[str] = []

    def work(number: int) -> None:
        foreign, keys = Foreign(24), chain(f"{number}-", 16)
        for mine in (keys, shared):
            pages = foreign.fill(range(len(mine)), mine)
            stored = [on_disk.put(mine[i : i + 4], pages[i : i + 4], mine[: i + 4]) for i in range(0, len(mine), 4)]
            if stored != [[True] * 4] * len(stored):
                problems.append(f"thread {number}: not stored")
            if (on_disk.exists(mine) != HIT).any():
                problems.append(f"thread {number}: not found")
            if on_disk.get(mine, foreign.clear(range(len(mine)))) != [True] * len(mine):
                problems.append(f"thread {number}: not loaded")
            if not all(foreign.holds(i, key) for i, key in enumerate(mine)):
                problems.append(f"thread {number}: wrong bytes")
        if on_disk.get([b"absent" + bytes(4)], foreign.pages([0])) != [False]:
            problems.append(f"thread {number}: found what does not exist")
        del pages
        foreign.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert problems == []


def test_wrong_settings_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="fingerprint='x'"):
        build_bridge([], [KVGroup(16)], SLOT_BYTES, "x", BridgeSettings())
    with pytest.raises(ConfigError, match="no memory for the staging pool"):
        build_bridge([], [KVGroup(16)], SLOT_BYTES, FINGERPRINT, BridgeSettings(staging_bytes=1 << 50))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.dir"):
        make_bridge(blocked)
    assert not any(thread.name == "kvoffload-bridge" for thread in threading.enumerate())
