"""Tiers that other servers use too: resets, deletions, and writes of blocks that others hold."""

from __future__ import annotations

import pytest

from kvoffload.abc import OffloadKey, ReqContext
from kvoffload.cache.admission import ReuseFilter
from kvoffload.tiering.chains import MAX_REST_S
from kvoffload.tiering.manager import TierSettings
from tests.tiering.rig import A, B, Rig, begin, chain, compute, on_disk, with_shared


def test_a_reset_forgets_a_shared_tier_and_deletes_nothing_there(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps its blocks and is not used again."""
    rig, shared = with_shared()
    keys = chain("x", 2)
    rig.store(keys)
    rig.settle(5)
    shared.num_deleted = 0
    rig.manager.reset()
    rig.manager.reset()
    assert shared.was_reset
    assert shared.num_deleted == 0
    assert len(shared.blocks) == 2, "others still find them"
    assert rig.manager.tiers[1].is_off
    assert rig.manager.tiers[0].can_read, "the tier of its own is empty, and goes on"
    assert rig.manager.lookup(keys, A) == 0
    rig.clock.now += 1e6
    for tier in rig.tiers:
        tier.asked.clear()
        tier.writes.clear()
    rig.store(chain("y", 2))
    rig.settle(5)
    assert rig.manager.lookup(keys, B) == 0
    assert (shared.asked, shared.reads, shared.writes) == ([], [], [])
    assert rig.tiers[0].writes == chain("y", 2)
    messages = [record.message for record in caplog.records if "TIER IS OFF" in record.message]
    assert len(messages) == 1
    assert "MEMORY-2 TIER" in messages[0]
    assert "restart this server" in messages[0]


def test_a_reset_of_what_is_its_own_keeps_what_others_use() -> None:
    rig, shared = with_shared()
    keys = chain("x", 2)
    rig.store(keys)
    rig.settle(5)
    assert rig.manager.reset(keep_shared=True)
    assert rig.host.num_used_blocks == 0
    assert not rig.tiers[0].blocks
    assert not shared.was_reset
    assert rig.manager.lookup(keys, A) is None
    rig.settle(5)
    assert shared.reads == keys
    assert rig.manager.lookup(keys, A) == 2
    rig.manager.reset()
    assert not rig.manager.reset(keep_shared=True), "the shared tier is off"


def test_a_corrupt_block_is_deleted_from_all_tiers() -> None:
    rig, shared = with_shared()
    keys = chain("x", 2)
    rig.store(keys)
    rig.settle(5)
    rig.manager.drop(keys[:1])
    assert [key in shared.blocks for key in keys] == [False, True]
    assert [key in rig.tiers[0].blocks for key in keys] == [False, True]


def test_a_block_that_the_tier_does_not_know_of_is_written_and_the_write_finds_it() -> None:
    rig, shared = with_shared()
    keys = chain("x", 4)
    shared.knows = False
    shared.held_by_others = set(keys[:3])
    rig.store(keys)
    rig.settle(5)
    assert shared.writes == keys
    assert not rig.manager.has_pending_writes
    counts = rig.counts()
    assert counts["tier_write_blocks:memory-2"] == 1, "the others were there already"
    assert counts["tier_write_bytes:memory-2"] == 4096
    assert "tier_write_failures:memory-2" not in counts
    assert shared.num_deleted == 0
    rig.manager.check_integrity()


def test_nothing_is_deleted_because_the_tier_does_not_know_whether_it_holds_a_block() -> None:
    rig, shared = with_shared(host_blocks=8)
    keys = chain("x", 4)
    rig.store(keys)
    rig.settle(5)
    rig.fill_host()
    shared.knows = False
    rig.store(keys[2:])
    rig.manager.end_chain(keys, [], A)
    rig.settle(5)
    assert shared.num_deleted == 0


def test_only_what_this_chain_has_written_is_deleted_behind_a_hole() -> None:
    rig, shared = with_shared(host_blocks=32)
    keys = chain("x", 6)
    rig.store(keys[:2])
    rig.settle(5)
    other = keys[4:]
    rig.store([*keys[:2], *other])  # Another server has written these, behind blocks that are gone since.
    rig.settle(5)
    shared.num_deleted = 0
    shared.fails_for, shared.num_fails = keys[2], 5
    rig.store(keys)
    rig.settle(5)
    rig.clock.now += MAX_REST_S
    rig.settle(5)
    assert all(key in shared.blocks for key in other)
    assert keys[3] not in shared.blocks, "it was written behind the hole"


def test_what_a_write_has_found_is_not_deleted_behind_a_hole() -> None:
    rig, shared = with_shared(host_blocks=64)
    keys = chain("x", 6)
    shared.knows = False
    shared.held_by_others = set(keys[4:])
    shared.fails_for, shared.num_fails = keys[2], 5
    rig.store(keys)
    rig.settle(5)
    rig.clock.now += MAX_REST_S
    rig.settle(5)
    assert [key in shared.blocks for key in keys] == [True, True, False, False, True, True]


# Admission.


def with_admission() -> Rig:
    return Rig(num_tiers=2, tiers=[TierSettings(), TierSettings(admission=ReuseFilter(2))])


def request(rig: Rig, keys: list[OffloadKey], name: str) -> None:
    context = ReqContext(name)
    begin(rig, keys, context)
    rig.settle(5)
    compute(rig, keys)
    rig.manager.end_chain(keys, keys, context)
    rig.manager.release_request(context)
    rig.settle(5)


def test_a_tier_with_an_admission_gets_what_several_requests_have_asked_for() -> None:
    rig = with_admission()
    own, remote = rig.tiers
    keys = chain("x", 4)
    request(rig, keys, "a")
    assert on_disk(rig, keys) == 4
    assert remote.writes == []
    request(rig, [*keys[:2], *chain("y", 2)], "b")
    assert remote.writes == keys[:2], "the chain is cut where the admission ends"
    request(rig, keys, "c")
    assert remote.writes == keys
    assert own.writes == keys + chain("y", 2)
    assert "tier_dropped_writes:memory-2" not in rig.counts(), "what is not admitted is not dropped"


def test_promoted_blocks_are_written_to_the_tiers_before_it() -> None:
    rig, keys = Rig(num_tiers=2), chain("x", 4)
    rig.store(keys)
    rig.settle(5)
    rig.host.reset()
    rig.tiers[0].delete(keys)
    for tier in rig.tiers:
        tier.writes.clear()
    rig.manager.touch(keys, B)
    assert rig.manager.lookup(keys, B) is None
    rig.settle(5)
    assert rig.manager.lookup(keys, B) == 4
    rig.manager.release_request(B)
    rig.settle(5)
    assert rig.tiers[0].writes == keys, "before the request ends"
    assert rig.tiers[1].writes == [], "it holds them"
    rig.manager.end_chain(keys, [], B)
    rig.settle(5)
    assert rig.tiers[0].writes == keys
    rig.manager.check_integrity()
