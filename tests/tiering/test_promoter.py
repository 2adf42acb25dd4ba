"""Promotions: pins, shares, order and deadlines."""

from __future__ import annotations

from functools import partial

import pytest

from kvoffload.abc import BlockNotReadyError, KVGroup, LookupState, MissReason, OffloadKey, ReqContext
from kvoffload.tiering import reads, waits
from tests.counting import lines_of
from tests.tiering.rig import A, B, Rig, arrived, below, chain


def test_aborted_requests_are_forgotten_while_a_read_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MAX_WAITS", 4)
    rig, keys = below(4)
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    for i in range(50):
        context = ReqContext(f"aborted {i}")
        assert rig.manager.lookup(keys, context) is None
        rig.manager.poll()
        rig.manager.release_request(context)
    assert len(rig.manager._waits._begun) <= 8
    assert [len(batch.waits) for batch in set(rig.manager.tiers[0].reads.values())] == [1]
    rig.clock.now += 2
    rig.manager.poll()
    assert rig.manager.lookup(keys, A) == 0, "its own deadline counts still"


def test_blocks_pinned_for_a_whole_deadline_give_way_to_another_request() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1000)
    keys, more = chain("x", 4), chain("y", 4)
    rig.store_below(keys + more)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.clock.now += 0.999
    rig.manager.lookup(more, B)
    rig.settle()
    assert sum(arrived(rig.manager, B).values()) == 0, "the first blocks have not been pinned for a whole deadline"
    rig.clock.now += 0.001
    rig.settle()
    rig.settle()
    assert rig.manager.lookup(more, B) == 4
    rig.fill_host()
    assert rig.manager.lookup(keys, A) is None, "a request that has lost its blocks may wait again"


@pytest.mark.parametrize("second_asks_first", [True, False])
def test_requests_with_some_blocks_that_want_more_do_not_wait_for_each_other(second_asks_first: bool) -> None:
    rig = Rig(host_blocks=8)
    first, second = chain("x", 4), chain("y", 4)
    rig.store_below(first + second)
    rig.manager.lookup(first[2:], A)
    rig.manager.lookup(second[2:], B)
    rig.settle()
    assert [sum(arrived(rig.manager, context).values()) for context in (A, B)] == [2, 2]
    questions = [(first, A), (second, B)]
    for keys, context in questions[::-1] if second_asks_first else questions:
        assert rig.manager.lookup(keys, context) is None
    rig.settle(3)
    assert rig.manager.lookup(first, A) == 4, "the older request continues"
    rig.manager.release_request(A)
    for _ in range(3):
        rig.settle()
        found = rig.manager.lookup(second, B)
    assert found == 4


def test_a_younger_request_takes_no_room_from_an_older_one() -> None:
    rig = Rig(host_blocks=8)
    first, second = chain("x", 4), chain("y", 4)
    rig.store_below(first + second)
    rig.manager.lookup(first, A)
    rig.settle()
    rig.manager.lookup(second, B)
    rig.settle(5)
    assert sum(arrived(rig.manager, A).values()) == 4
    assert rig.host.num_available_blocks == 4, "the blocks of the older request are still pinned"
    assert rig.tier.reads == first


def test_groups_share_the_room_of_a_request() -> None:
    rig = Rig(host_blocks=16, groups=[KVGroup(16)] * 2)
    keys = [key[:-1] + bytes([g]) for g in range(2) for key in chain("x", 8)]
    for i in range(8):
        rig.store([keys[i], keys[8 + i]])
        rig.settle()
    rig.host.reset()
    for _ in range(2):
        found = [rig.manager.lookup(keys[8 * g : 8 * g + 8], A) for g in range(2)]
        rig.settle()
    assert [rig.manager.lookup(keys[8 * g : 8 * g + 8], A) for g in range(2)] == [4, 4], found


def test_no_more_blocks_are_read_than_can_arrive_in_time() -> None:
    rig = Rig(host_blocks=64, load_deadline_ms=1000)
    keys, more = chain("x", 1), chain("y", 20)
    rig.store_below(keys + more)
    rig.tier.seconds_per_block = 0.25
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.manager.lookup(more, B)
    with rig.executor.hold():
        for _ in range(2):
            rig.manager.poll()
            assert rig.tier.reads == keys + more[:4]


@pytest.mark.parametrize("event", ["room", "blocks lost", "too many wait"])
def test_promotions_wait_for_room_in_the_host(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, keys = below(2, host_blocks=4)
    busy = chain("busy", 4)
    rig.store(busy)
    rig.settle()
    rig.manager.prepare_load(busy)
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.tier.reads == []
    if event == "blocks lost":
        rig.tier.delete(keys)
    elif event == "too many wait":
        monkeypatch.setattr(waits, "MAX_WAITS", 1)
        assert rig.manager.lookup(keys, B) == 0
    rig.manager.complete_load(busy)
    rig.settle()
    if event == "blocks lost":
        assert rig.host.lookup(busy) == 4, "nothing is evicted for them"
    assert rig.manager.lookup(keys, A) == (0 if event == "blocks lost" else 2)


def test_a_refused_read_is_tried_again_and_does_not_change_why_a_block_is_missing() -> None:
    rig, keys = below(2)
    reasons = [rig.host.explain_miss(key).reason for key in keys]
    rig.tier.refuses = True
    rig.manager.lookup(keys, A)
    rig.settle()
    assert rig.host.num_used_blocks == 0
    assert [rig.host.explain_miss(key).reason for key in keys] == reasons
    rig.tier.refuses = False
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2


def test_at_the_deadline_a_request_gets_the_blocks_that_have_arrived() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys = chain("x", 4)
    rig.store_below(keys[:2])
    rig.manager.lookup(keys[:2], A)
    rig.settle()
    rig.manager.release_request(A)
    rig.host.reset()
    rig.store_below(keys[2:])
    rig.store(keys[:2])
    rig.settle()
    assert rig.manager.lookup(keys, A) is None
    rig.manager.poll()
    rig.clock.now += 0.999
    assert rig.manager.lookup(keys, A) is None
    rig.clock.now += 0.001
    assert rig.manager.lookup(keys, A) == 2
    assert rig.manager.explain_miss(keys[2]).reason is MissReason.NOT_IN_TIME
    assert rig.counts()["late_promotions"] == 1
    rig.settle()
    assert rig.host.lookup(keys) == 4, "blocks that arrive later serve the next request"


def test_a_request_that_was_not_served_in_time_may_ask_again_in_a_later_step() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys = chain("x", 2)
    rig.store_below(keys)
    assert rig.manager.lookup(keys, A) is None
    rig.manager.poll()
    rig.clock.now += 1.0
    assert [rig.manager.lookup(keys, A) for _ in range(2)] == [0, 0]
    rig.settle()
    rig.host.drop(keys)
    assert rig.manager.lookup(keys, A) is None


def promoted(rig: Rig, keys: list[OffloadKey]) -> None:
    rig.store_below(keys)
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == len(keys)


def test_a_load_that_fails_takes_no_pins() -> None:
    rig = Rig()
    keys = chain("x", 4)
    promoted(rig, keys)
    with pytest.raises(BlockNotReadyError):
        rig.manager.prepare_load([*keys, *chain("missing", 1)], A)
    rig.fill_host()
    assert rig.manager.lookup(keys, A) == 4
    rig.manager.check_integrity()


def test_dropped_blocks_are_not_kept_for_a_request() -> None:
    rig, keys = Rig(), chain("x", 4)
    promoted(rig, keys)
    rig.manager.drop(keys[1:3])
    assert rig.manager.lookup(keys, A) == 1
    rig.manager.release_request(A)
    assert rig.host.num_available_blocks == rig.host.num_blocks
    rig.manager.check_integrity()


def test_a_request_that_may_not_wait_is_answered_from_the_host() -> None:
    rig, keys = below(4)
    rig.store(keys[:1])
    rig.settle()
    at_once = ReqContext("a", may_wait=False)
    for context in (at_once, None):
        assert rig.manager.lookup(keys, context) == 1
        assert rig.manager.lookup_each(keys[:2], context).tolist() == [LookupState.HIT, LookupState.MISS]
    assert rig.manager.num_promotions == 0
    assert rig.manager.lookup(keys, A) is None
    assert rig.manager.lookup(keys, at_once) == 1, "not even if it waits already"


def queued(num_requests: int) -> Rig:
    """A full host, and requests that wait for a block each, for which there is no room."""
    rig, keys = below(num_requests, host_blocks=4, tier_blocks=1 << 12, load_deadline_ms=1e9)
    rig.fill_host()
    rig.host.prepare_load(chain("filler", 4))
    for i, key in enumerate(keys):
        assert rig.manager.lookup([key], ReqContext(str(i))) is None
    rig.manager.poll()
    return rig


def test_no_call_costs_more_because_of_the_promotions_that_are_queued() -> None:
    few, many = queued(3).manager, queued(200).manager
    for calls in (
        [partial(manager.lookup, chain("x", 1), ReqContext("new")) for manager in (few, many)],
        [manager.poll for manager in (few, many)],
        [partial(manager.drop, chain("y", 3), only_host=True) for manager in (few, many)],
        [partial(manager.release_request, ReqContext("2")) for manager in (few, many)],
    ):
        cost, cost_of_many = map(lines_of, calls)
        assert cost_of_many < cost + 30, "a search by halves, at most"
    for manager in (few, many):
        manager.check_integrity()


def test_a_tier_that_reads_nothing_lets_no_step_look_at_all_that_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "MAX_READS", 1)

    def busy(num_requests: int) -> Rig:
        rig = Rig(host_blocks=64, tier_blocks=1 << 12, num_tiers=2, load_deadline_ms=1e9)
        keys = chain("x", num_requests)
        rig.store_below(keys)
        rig.tiers[1].delete(keys)
        for i, key in enumerate(keys):
            assert rig.manager.lookup([key], ReqContext(str(i))) is None
        rig.manager.poll()
        assert rig.tier.reads == keys[:1], "it reads one at a time"
        return rig

    cost, cost_of_many = (lines_of(busy(n).manager.poll) for n in (3, 100))
    assert cost_of_many < cost + 30
