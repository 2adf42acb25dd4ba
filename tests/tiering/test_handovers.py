"""Blocks that one server hands over to another: what waits in host memory, what lookups wait for, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.abc import Awaited, KVGroup, LookupState, MissReason, OffloadKey, ReqContext
from kvoffload.tiering.lookup import LOOK_AGAIN_S, LOOK_AGAIN_SHARE
from kvoffload.tiering.writes import MAX_WRITES_PER_BLOCK, REFUSAL_S
from tests.tiering.rig import B, Rig, SharedTier, chain, with_shared

HOST_BLOCKS = 64
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
    return ReqContext("awaiting", awaited=Awaited(dict.fromkeys(keys), places, now, now + seconds))


def states(rig: Rig, keys: list[OffloadKey], context: ReqContext | None) -> list[int]:
    return list(map(int, rig.manager.lookup_each(keys, context)))


# The server that hands over.


def test_shared_tiers_are_told_and_named() -> None:
    rig, shared = full_tiers()
    keys = chain("x", 4)
    rig.store(keys)
    assert rig.manager.hand_over(keys) == ({SHARED: "seat-7"}, 4)
    assert shared.handed_over == [keys]
    rig.manager.reset()
    assert rig.manager.tiers[1].is_off
    assert rig.manager.hand_over(keys) == ({}, 0), "and those that are off are not"


@pytest.mark.parametrize("room", [None, 16])
def test_what_a_tier_has_no_room_for_is_not_promised_nor_written_in_a_circle(room: int | None) -> None:
    """Each write beyond the tier's room evicts a block of the same hand-over. One that bounds itself cannot say so."""
    rig, shared = with_shared(host_blocks=512, tier_blocks=16)
    shared.room, shared.most_writes = room, 4
    keys, others = chain("x", 40), chain("y", 4)
    if room:
        assert rig.manager.hand_over(keys) == ({}, room)
        keys = keys[: room - 1]
    assert rig.manager.hand_over(keys).places
    assert rig.manager.hand_over(others).num_blocks == (1 if room else 4), "beside what is promised before"
    rig.store(keys)
    for _ in range(100):
        rig.settle()
        rig.clock.now += REFUSAL_S
    assert len(keys) <= len(shared.writes) <= MAX_WRITES_PER_BLOCK * len(keys) + shared.most_writes


def test_what_is_promised_has_room_with_all_that_is_written_for_it() -> None:
    """A tier is given the windows of all positions, and not only that at the end."""
    rig, shared = with_shared(host_blocks=256, groups=[KVGroup(16), KVGroup(16, sliding_window=20)])
    shared.room, full = 12, chain("x", 10)
    window = [key[:-1] + b"\1" for key in full]
    assert rig.manager.hand_over([*full, *window[-2:]]) == ({}, 7)
    assert rig.manager.hand_over([*full[:6], *window[4:6]]).places, "12 blocks"


# The server that goes on.


def test_a_tier_that_is_not_open_yet_is_not_named_and_nothing_waits_for_it() -> None:
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
    context, start = awaiting(keys, rig), rig.clock.now
    for waited in (0.0, 0.5, 0.999):
        rig.clock.now = start + waited
        assert states(rig, keys, context)[0] == RETRY
        assert states(rig, others, context) == [MISS], "nobody hands it over"
    assert {tuple(looked) for looked, _, _ in shared.looked_for} == {tuple(keys)}
    assert shared.chain == keys
    rig.clock.now = start + DEADLINE_S
    assert states(rig, keys, context)[0] == MISS
    assert len(shared.looked_for) == 3
    assert rig.manager.explain_miss(keys[0]).reason is MissReason.NOT_IN_TIME


def test_only_shared_tiers_are_waited_for() -> None:
    rig, keys = Rig(), chain("x", 3)
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
    context, start = awaiting(keys, rig), rig.clock.now
    for waited in (0.0, 0.01, 0.4, 0.9):
        rig.clock.now = start + waited
        states(rig, keys, context)
    pauses = [pause_s for _, _, pause_s in shared.looked_for]
    assert pauses == pytest.approx([LOOK_AGAIN_S, LOOK_AGAIN_S, 0.4 * LOOK_AGAIN_SHARE, 0.9 * LOOK_AGAIN_SHARE])


@pytest.mark.parametrize("is_awaited", [True, False])
def test_what_is_handed_over_is_loaded_although_computing_it_would_be_faster(is_awaited: bool) -> None:
    """Another server has computed it already for this request. Without it, which is the control, it is computed."""
    rig = Rig(tier_class=SharedTier, load_deadline_ms=1e6)
    other = chain("y", 4)
    rig.store_below(other)
    rig.measure(1.1)
    context = awaiting(other, rig) if is_awaited else B
    assert rig.manager.lookup(other, context) == (None if is_awaited else 0)
    rig.settle()
    assert rig.manager.lookup(other, context) == 4 * is_awaited
