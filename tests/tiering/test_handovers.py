"""Blocks that one server hands over to another: what waits in host memory, what lookups wait for, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.abc import Awaited, LookupState, MissReason, OffloadKey, ReqContext, TierError
from kvoffload.tiering.chains import MAX_REST_S
from kvoffload.tiering.lookup import LOOK_AGAIN_S, LOOK_AGAIN_SHARE
from kvoffload.tiering.unwritten import UNWRITTEN_SHARE, WRITE_WITHIN_S
from tests.tiering.rig import A, B, Rig, SharedTier, chain, with_shared

HOST_BLOCKS = 64
PROMISED = int(HOST_BLOCKS * UNWRITTEN_SHARE)
"""So many blocks wait in host memory at most."""
DEADLINE_S = 1.0
SHARED = "memory-2"
"""The name of the shared tier."""
HIT, MISS, RETRY = LookupState.HIT, LookupState.MISS, LookupState.RETRY


def full_tiers(**options: object) -> tuple[Rig, SharedTier]:
    """A tier of its own and a shared one below it, which take nothing on."""
    rig, shared = with_shared(host_blocks=HOST_BLOCKS, **options)
    shared.most_writes = rig.tier.most_writes = 0
    return rig, shared


def awaiting(
    keys: Sequence[OffloadKey], rig: Rig, seconds: float = DEADLINE_S, places: dict[str, str] | None = None
) -> ReqContext:
    """A request to which ``keys`` are handed over."""
    places = {SHARED: "seat-1"} if places is None else places
    now = rig.clock.now
    return ReqContext("awaiting", awaited=Awaited(frozenset(keys), places, now, now + seconds))


def states(rig: Rig, keys: list[OffloadKey], context: ReqContext | None) -> list[int]:
    found: list[int] = rig.manager.lookup_each(keys, context).tolist()
    return found


# The server that hands over.


def test_shared_tiers_are_told_and_named() -> None:
    rig, shared = full_tiers()
    keys = chain("x", 4)
    rig.store(keys)
    assert rig.manager.hand_over(keys) == ({SHARED: "seat-7"}, 4)
    assert shared.handed_over == [keys]


def test_tiers_that_no_other_server_uses_are_not_named() -> None:
    rig = Rig()
    rig.store(chain("x", 4))
    assert rig.manager.hand_over(chain("x", 4)) == ({}, 0)


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_what_is_handed_over_stays_in_host_memory_until_it_is_written(is_handed_over: bool) -> None:
    """Other blocks, which are the control, leave."""
    rig, shared = full_tiers()
    keys = chain("x", 4)
    rig.store(keys)
    if is_handed_over:
        rig.manager.hand_over(keys)
    rig.fill_host()
    assert rig.host.lookup(keys) == 4 * is_handed_over
    shared.most_writes = 1 << 30
    rig.clock.now += 1
    for _ in range(4):
        rig.settle()
    assert (shared.contains(keys) == HIT).all() == is_handed_over
    rig.fill_host("more")
    assert rig.host.lookup(keys) == 0, "it waits no longer than that"


def test_what_is_not_written_for_long_waits_no_more() -> None:
    rig, _ = full_tiers()
    keys = chain("x", 4)
    rig.store(keys)
    rig.manager.hand_over(keys)
    rig.clock.now += WRITE_WITHIN_S - 1
    rig.settle()
    rig.fill_host()
    assert rig.host.lookup(keys) == 4
    rig.clock.now += 2
    rig.settle()
    rig.fill_host("more")
    assert rig.host.lookup(keys) == 0


@pytest.mark.parametrize("error", [TierError.NO_SPACE, TierError.IO, TierError.AWAY])
def test_what_cannot_be_written_is_written_again_at_a_growing_pace(error: TierError) -> None:
    rig, shared = full_tiers()
    shared.most_writes, shared.fails = 1 << 30, error
    keys = chain("x", PROMISED)
    rig.manager.hand_over(keys)
    rig.store(keys)
    begun = rig.clock.now
    while rig.clock.now < begun + WRITE_WITHIN_S:
        rig.settle()
        rig.clock.now += 0.01
    most = 2 * (WRITE_WITHIN_S / MAX_REST_S + 8)
    assert 4 <= shared.writes.count(keys[0]) <= most
    assert len(shared.writes) <= most * len(keys)
    shared.fails = None
    for _ in range(20):
        rig.clock.now += 0.5
        rig.store(chain(f"y{rig.clock.now}", 1))
        rig.settle()
    last = chain("z", 1)
    rig.store(last)
    rig.settle()
    assert (shared.contains(last) == HIT).all()


def test_a_chain_that_is_too_long_is_not_promised_and_its_head_may_be() -> None:
    rig, shared = full_tiers()
    keys = chain("x", PROMISED + 4)
    rig.store(keys)
    assert rig.manager.hand_over(keys) == ({}, PROMISED)
    assert shared.handed_over == []
    assert rig.manager.hand_over(keys[:PROMISED]) == ({SHARED: "seat-7"}, PROMISED)
    assert shared.handed_over == [keys[:PROMISED]]
    rig.fill_host()
    assert rig.host.lookup(keys) == PROMISED


def test_all_chains_together_have_a_bound() -> None:
    rig, _ = full_tiers()
    first, second, third = chain("x", PROMISED - 2), chain("y", 4), chain("z", 4)
    for keys in (first, second, third):
        rig.store(keys)
        num_blocks = rig.manager.hand_over(keys).num_blocks
        rig.manager.hand_over(keys[:num_blocks])
    rig.fill_host()
    assert [rig.host.lookup(keys) for keys in (first, second, third)] == [PROMISED - 2, 2, 0]


def test_a_chain_that_has_grown_waits_whole_if_all_of_it_has_room() -> None:
    """What waits already counts once."""
    rig, _ = full_tiers()
    keys = chain("x", PROMISED)
    rig.store(keys)
    for size in (PROMISED - 2, PROMISED):
        rig.manager.hand_over(keys[:size])
    rig.fill_host()
    assert rig.host.lookup(keys) == PROMISED


def test_a_tier_that_is_off_is_not_named() -> None:
    rig, shared = full_tiers()
    keys = chain("x", 4)
    rig.store(keys)
    rig.manager.reset()
    assert rig.manager.tiers[1].is_off
    assert rig.manager.hand_over(keys) == ({}, 0)
    assert shared.handed_over == []


# The server that goes on.


def test_a_tier_that_is_not_open_yet_is_not_named_and_nothing_waits_for_it() -> None:
    """Its directory has not answered yet."""
    rig, shared = full_tiers()
    keys = chain("x", 4)
    rig.store(keys)
    shared.is_open = False
    assert rig.manager.hand_over(keys) == ({}, 0)
    rig.manager.check_integrity()
    assert rig.manager.host.num_available_blocks == HOST_BLOCKS
    shared.is_open = True
    assert rig.manager.hand_over(keys) == ({SHARED: "seat-7"}, 4)


def test_a_request_waits_for_what_is_handed_over_until_its_deadline() -> None:
    rig, shared = full_tiers()
    keys, others = chain("x", 3), chain("y", 1)
    context = awaiting(keys, rig)
    start = rig.clock.now
    for waited in (0.0, 0.5, 0.999):
        rig.clock.now = start + waited
        assert states(rig, keys, context)[0] == RETRY
        assert states(rig, others, context) == [MISS], "nobody hands it over"
    assert {tuple(looked) for looked, _, _ in shared.looked_for} == {tuple(keys)}
    rig.clock.now = start + DEADLINE_S
    assert states(rig, keys, context)[0] == MISS
    assert len(shared.looked_for) == 3
    miss = rig.manager.explain_miss(keys[0])
    assert miss is not None
    assert miss.reason is MissReason.NOT_IN_TIME


def test_nothing_else_waits() -> None:
    """Negative control."""
    rig, shared = full_tiers()
    assert states(rig, chain("x", 3), ReqContext("another")) == [MISS] * 3
    assert states(rig, chain("x", 3), None) == [MISS] * 3
    assert shared.looked_for == []


def test_only_shared_tiers_are_waited_for() -> None:
    rig = Rig()
    keys = chain("x", 3)
    assert states(rig, keys, awaiting(keys, rig)) == [MISS] * 3


def test_a_tier_looks_in_the_place_that_the_answer_names_for_it() -> None:
    rig, shared = full_tiers()
    keys = chain("x", 3)
    rig.store_below(keys[:1])
    for places, place in (({SHARED: "seat-3", "memory": "no"}, "seat-3"), ({}, ""), ({"unknown": "seat-9"}, "")):
        states(rig, keys, awaiting(keys, rig, places=places))
        assert shared.looked_for[-1][:2] == (keys[1:] if shared.blocks else keys, place)


def test_the_longer_a_request_waits_the_less_often_it_has_the_medium_asked() -> None:
    rig, shared = full_tiers()
    keys = chain("x", 3)
    context = awaiting(keys, rig)
    start = rig.clock.now
    for waited in (0.0, 0.01, 0.4, 0.9):
        rig.clock.now = start + waited
        states(rig, keys, context)
    pauses = [pause_s for _, _, pause_s in shared.looked_for]
    assert pauses == pytest.approx([LOOK_AGAIN_S, LOOK_AGAIN_S, 0.4 * LOOK_AGAIN_SHARE, 0.9 * LOOK_AGAIN_SHARE])


@pytest.mark.parametrize("is_awaited", [True, False])
def test_what_is_handed_over_is_loaded_although_computing_it_would_be_faster(is_awaited: bool) -> None:
    """Another server has computed it already for this request. Without it, which is the control, it is computed."""
    rig = Rig(tier_class=SharedTier, load_deadline_ms=1e6)
    keys, other = chain("x", 4), chain("y", 4)
    rig.store_below(keys + other)
    rig.tier.seconds_per_block = 1.1
    rig.manager.lookup(keys[:1], A)
    rig.settle()
    rig.manager.observe_prefill(160, 10.0)  # One block of 16 tokens per second.
    context = awaiting(other, rig) if is_awaited else B
    assert rig.manager.lookup(other, context) == (None if is_awaited else 0)
    rig.settle()
    assert rig.manager.lookup(other, context) == 4 * is_awaited
