"""Chains are written to the tier, head first and never behind a hole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.abc import IntegrityError, OffloadKey, ReqContext, Slots
from kvoffload.tiering.chains import MAX_REST_S
from kvoffload.tiering.manager import WRITE_SHARE
from kvoffload.tiering.writes import PATIENCE_S
from tests.tiering.rig import A, B, Rig, begin, below, chain, compute, in_tier, on_disk


def evict(rig: Rig, victims: list[OffloadKey], stored: list[OffloadKey]) -> None:
    """Evicts ``victims`` from the host, which has exactly the blocks ``stored``."""
    fillers = chain("filler", rig.host.num_blocks - len(stored))
    assert rig.host.prepare_store(fillers) is not None
    rig.host.complete_store(fillers)
    rig.host.touch([key for key in stored if key not in victims] + fillers)
    output = rig.host.prepare_store(chain("new", len(victims)))
    assert output is not None
    assert sorted(output.evicted_keys) == sorted(victims)


def test_a_write_does_not_change_the_eviction_order() -> None:
    rig = Rig(host_blocks=8)
    keys = chain("x", 8)
    for key in keys:
        rig.store([key])
    rig.settle()
    output = rig.manager.prepare_store(chain("y", 3))
    assert output is not None
    assert output.evicted_keys == keys[:3]


def test_a_chain_that_grows_is_not_looked_up_from_its_head_each_time() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 40)
    for n in range(1, 41):
        rig.manager.touch([], A, keys[:n])
        compute(rig, keys[n - 1 : n])
        for _ in range(2):
            rig.executor.drain()
            rig.manager.poll()
    assert len(rig.tier.asked) < 5 * 40, "from the head it would be at least 40 * 40 / 2 times"
    assert on_disk(rig, keys) == 40
    rig.manager.end_chain(keys, [], A)
    rig.settle()
    assert rig.manager.tiers[0].writes.backlog.of_request("a") is None


@pytest.mark.parametrize("lost_by", ["drop", "eviction"])
def test_a_chain_that_grows_is_written_again_where_the_tier_has_lost_blocks(lost_by: str) -> None:
    rig = Rig(write_share=0.5)
    keys = chain("x", 6)
    rig.manager.touch([], A, keys[:4])
    compute(rig, keys[:4])
    rig.settle()
    if lost_by == "drop":
        rig.manager.drop(keys[1:2])
    else:
        assert rig.tier.evict()
    rig.manager.touch([], A, keys)
    compute(rig, keys[4:])
    rig.settle()
    assert in_tier(rig, keys) == ([0, 2, 3] if lost_by == "drop" else [0, 1, 2, 3, 4, 5]), "nothing behind a hole"
    rig.manager.end_chain(keys, [], A)
    rig.settle()
    assert on_disk(rig, keys) == (1 if lost_by == "drop" else 6)


def test_blocks_whose_store_ends_after_their_request_are_written() -> None:
    """Every request ends like this: its last stores end in the step after it."""
    rig = Rig(host_blocks=64)
    keys = chain("x", 4)
    begin(rig, keys, A)
    output = rig.manager.prepare_store(keys, A)
    assert output is not None
    rig.manager.end_chain(keys, [], A)
    rig.settle()
    assert on_disk(rig, keys) == 0
    rig.manager.complete_store(output.store_spec, A)
    rig.settle()
    assert on_disk(rig, keys) == 4


@pytest.mark.parametrize("by_key", [False, True])
def test_a_store_that_fails_after_its_request_leaves_the_blocks_before_it(by_key: bool) -> None:
    rig = Rig()
    keys = chain("x", 4)
    begin(rig, keys, A)
    outputs = [rig.manager.prepare_store(part, A) for part in (keys[:2], keys[2:3], keys[3:])]
    rig.manager.end_chain(keys, [], A)
    for output, success in zip(outputs, (True, False, True), strict=True):
        assert output is not None
        rig.manager.complete_store(output.keys_to_store if by_key else output.store_spec, A, success=success)
        rig.settle()
    assert on_disk(rig, keys) == 2
    assert not rig.manager.has_pending_writes


def test_the_end_of_a_host_hit_offers_its_chain_again() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    rig.host.prepare_store(keys)
    rig.host.complete_store(keys)
    rig.settle()
    begin(rig, keys, A)
    rig.settle()
    assert on_disk(rig, keys) == 0
    rig.manager.end_chain(keys, [], A)
    rig.settle()
    assert on_disk(rig, keys) == 6


def test_a_block_that_the_host_has_evicted_ends_its_chain() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 20)
    rig.store(keys)
    held = int(64 * WRITE_SHARE)
    evict(rig, keys[held + 2 : held + 4], keys)
    rig.settle(4)
    assert on_disk(rig, keys) == held + 2
    assert rig.counts()["tier_dropped_writes:memory"] == 20 - held - 2
    assert not rig.manager.has_pending_writes


@pytest.mark.parametrize("times", [1, 2])
def test_after_a_failed_write_the_chain_is_written_again_or_cut_off(times: int) -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    rig.tier.fails_for, rig.tier.num_fails = keys[2], times
    rig.store(keys)
    rig.settle(4)
    assert rig.tier.writes.count(keys[2]) == 1, "a pause comes first"
    for _ in range(4):
        rig.clock.now += MAX_REST_S
        rig.settle()
    assert on_disk(rig, keys) == (6 if times == 1 else 2)
    assert rig.host.num_available_blocks == rig.host.num_blocks
    assert not rig.manager.has_pending_writes


def test_the_tail_of_a_written_chain_is_evicted_first() -> None:
    rig = Rig(host_blocks=64, tier_blocks=20)
    keys = chain("x", 20)
    rig.store(keys)
    rig.settle(4)
    assert on_disk(rig, keys) == 20
    rig.store(chain("y", 5))
    rig.settle()
    assert on_disk(rig, keys) == 15


def test_the_backlog_is_bounded_and_the_oldest_chain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.tiering.chains.MAX_CHAINS", 3)
    rig = Rig(host_blocks=64)
    chains = [chain(name, 4) for name in "abcde"]
    rig.tier.most_writes = 0
    for keys in chains:
        rig.store(keys)
    rig.tier.most_writes = 1000
    rig.clock.now += 0.02
    rig.settle(4)
    assert [on_disk(rig, keys) for keys in chains] == [0, 0, 4, 4, 4]
    assert rig.counts()["tier_dropped_writes:memory"] == 8


def test_an_idle_engine_keeps_stepping_while_the_tier_writes() -> None:
    rig = Rig(host_blocks=64)
    assert not rig.manager.has_pending_writes
    with rig.executor.hold():
        rig.store(chain("x", 20))
        assert rig.manager.has_pending_writes
        rig.clock.now += PATIENCE_S
        assert not rig.manager.has_pending_writes, "the tier hangs"
    rig.settle(3)
    assert not rig.manager.has_pending_writes


def test_an_idle_engine_stops_stepping_if_the_tier_refuses_all_writes() -> None:
    rig, asked = Rig(host_blocks=64), list[float]()

    def refuse(keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        asked.append(rig.clock.now)
        return []

    rig.tier.write = refuse  # type: ignore[method-assign]
    rig.store(chain("x", 3))
    for _ in range(300):
        rig.clock.now += 0.01
        for _ in range(3):
            rig.manager.poll()
    assert len(asked) == len(set(asked)), "it is asked again after a pause"
    assert not rig.manager.has_pending_writes
    assert not rig.manager.tiers[0].writes.backlog.num_ready


def test_the_check_finds_a_chain_that_is_written_behind_a_hole() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    begin(rig, keys, A)
    compute(rig, keys[:4])
    rig.settle()
    writes = rig.manager.tiers[0].writes
    started = writes.backlog.of_request(A.req_id)
    assert started is not None
    started.done = 5
    with pytest.raises(IntegrityError, match="behind a hole"):
        writes.check_integrity()


def test_a_dropped_chain_keeps_blocks_behind_one_that_another_chain_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(host_blocks=512, tier_blocks=600)
    shared, tail = chain("x", 10), chain("y", 4)
    rig.tier.hanging[shared[3]] = 1.0
    rig.store(shared)
    rig.settle()
    assert in_tier(rig, shared) == [0, 1, 2, *range(4, 10)]
    begin(rig, shared + tail, B)
    monkeypatch.setattr("kvoffload.tiering.chains.MAX_CHAINS", 1)
    rig.manager.touch(chain("z", 2), A)
    rig.manager.poll()
    assert rig.manager.tiers[0].writes.backlog.of_request(B.req_id) is None
    rig.clock.now += 2.0
    rig.settle()
    assert in_tier(rig, shared) == list(range(10))


def test_a_dropped_chain_leaves_nothing_behind_a_write_for_another_chain_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(host_blocks=64)
    shared, tail, other = chain("x", 2), chain("y", 2), chain("z", 1)
    rig.tier.fails_for, rig.tier.num_fails = shared[0], 3
    begin(rig, shared + tail, A)
    compute(rig, shared + tail)
    rig.manager.poll()
    rig.executor.drain()
    with rig.executor.hold():
        begin(rig, shared + other, B)
        compute(rig, other)
        rig.manager.poll()
        assert in_tier(rig, [*shared, *tail]) == [1, 2, 3], "the first one has failed, and is written for B"
        monkeypatch.setattr("kvoffload.tiering.chains.MAX_CHAINS", 1)
        rig.manager.touch(chain("w", 2), ReqContext("c"))
        rig.manager.poll()
        assert rig.manager.tiers[0].writes.backlog.of_request(A.req_id) is None
    for _ in range(4):
        rig.clock.now += MAX_REST_S
        rig.settle()
    assert rig.tier.num_fails == 0
    assert in_tier(rig, [*tail, *other]) == []


def test_a_chain_is_completed_while_its_request_waits_for_a_promotion() -> None:
    rig, keys = below(6, host_blocks=64)
    rig.tier.delete(keys[:2])
    compute(rig, keys[:2])
    rig.manager.touch(keys, A)
    assert rig.manager.lookup(keys, A) is None
    rig.settle(2)
    assert in_tier(rig, keys) == [0, 1, 2, 3, 4, 5]
    assert rig.manager.lookup(keys, A) == 6
