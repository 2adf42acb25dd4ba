"""TieredOffloadingManager over a plain tier: lookups, steps, uses, resets, counts."""

from __future__ import annotations

import pytest

from kvoffload.abc import Hints, LookupState, MissReason, OffloadKey, ReqContext, TierError, TierStats
from kvoffload.observe.metrics import METRICS, Metrics
from kvoffload.tiering import steps
from kvoffload.tiering.manager import TieredOffloadingManager
from tests.suites.reference import ReferenceLRUManager
from tests.suites.stateful import WALK_SEEDS, manager_machine, walk
from tests.tiering.rig import SLOT_BYTES, A, B, Rig, SpyTier, arrived, below, chain, compute, content


def make_above_a_full_tier(num_blocks: int) -> TieredOffloadingManager:
    return Rig(num_blocks, tier_blocks=0, enable_events=True).manager


@pytest.mark.parametrize("seed", WALK_SEEDS)
def test_above_a_tier_that_has_no_room_the_manager_behaves_as_any_other(seed: int) -> None:
    walk(manager_machine(make_above_a_full_tier, ReferenceLRUManager), seed)


def test_a_block_is_written_through_and_promoted_with_its_bytes() -> None:
    rig, keys = below(4)
    assert rig.manager.lookup(keys, A) is None
    assert rig.tier.reads == [], "poll starts the reads for all lookups of a step together"
    rig.manager.poll()
    assert rig.tier.reads == keys
    rig.settle()
    assert rig.manager.lookup(keys, A) == 4
    assert rig.bytes_of(keys) == [bytes(content(key)) for key in keys]


@pytest.mark.parametrize("hints", [None, Hints(2), Hints(2, drop=True), Hints(drop=True)])
def test_the_blocks_of_the_last_request_of_a_session_are_not_written(hints: Hints | None) -> None:
    rig = Rig()
    keys = chain("x", 4)
    ends = hints is not None and hints.drop
    for context in (ReqContext("last", hints=hints), ReqContext("other")):
        rig.manager.touch(keys, context)
        output = rig.manager.prepare_store(keys, context)
        assert output is not None
        rig.manager.complete_store(output.store_spec, context)
        rig.manager.end_chain(keys, output.keys_to_store, context)
        rig.settle()
        is_last = context.req_id == "last"
        assert rig.tier.writes == ([] if ends and is_last else keys)


def test_poll_returns_whether_a_lookup_may_find_more() -> None:
    rig, keys = below(2)
    rig.manager.poll()
    assert not rig.manager.poll(), "nothing has happened"
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    assert not rig.manager.poll(), "nothing has arrived"
    rig.executor.drain()
    assert rig.manager.poll()


def test_blocks_between_those_of_the_host_are_promoted() -> None:
    rig = Rig()
    keys = chain("x", 6)
    rig.store_below([keys[2], keys[4]])
    rig.store([keys[0], keys[1], keys[3]])
    rig.settle()
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == 5
    assert sorted(rig.tier.reads) == [keys[2], keys[4]]


def test_blocks_behind_a_missing_block_are_not_promoted() -> None:
    rig = Rig()
    keys = chain("x", 6)
    rig.store_below(keys[:2] + keys[3:])
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2
    assert rig.tier.reads == keys[:2]


def test_a_key_is_read_once_however_many_requests_want_it() -> None:
    rig, keys = below(4)
    assert rig.manager.lookup(keys, A) is None
    assert rig.manager.lookup(keys[:3], B) is None
    rig.manager.poll()
    assert rig.manager.lookup(keys, ReqContext("c")) is None
    rig.settle()
    assert rig.tier.reads == keys
    assert [sum(arrived(rig.manager, context).values()) for context in (A, B, ReqContext("c"))] == [4, 3, 4]


def test_windows_that_cannot_be_complete_promote_nothing() -> None:
    rig = Rig()
    keys = chain("x", 3)
    rig.store_below(keys[:1])
    assert rig.manager.lookup_each(keys, A).tolist() == [LookupState.RETRY, LookupState.MISS, LookupState.MISS]
    rig.settle()
    assert rig.tier.reads == []


@pytest.mark.parametrize(("n", "promoted"), [(8, True), (9, False)])
def test_a_window_too_large_to_be_promoted_is_a_miss_at_once(n: int, promoted: bool) -> None:
    rig, keys = below(n, host_blocks=16)
    state = LookupState.RETRY if promoted else LookupState.MISS
    assert rig.manager.lookup_each(keys, A).tolist() == [state] * n
    rig.settle()
    assert rig.tier.reads == (keys if promoted else [])
    if not promoted:
        assert rig.manager.explain_miss(keys[0]).reason is MissReason.TOO_LARGE
        rig.host.prepare_store(keys[:1])
        rig.host.complete_store(keys[:1])
        hit, retry = LookupState.HIT, LookupState.RETRY
        assert rig.manager.lookup_each(keys, A).tolist() == [hit, *[retry] * 8], "blocks of the host need no promotion"


@pytest.mark.parametrize(
    ("error", "reason", "counter"),
    [
        (TierError.CORRUPT, MissReason.CORRUPT, "tier_bad_blocks:memory"),
        (TierError.IO, MissReason.READ_FAILED, "tier_read_failures:memory"),
        (TierError.GONE, MissReason.EVICTED, None),
    ],
)
def test_a_block_that_cannot_be_read_is_a_miss(error: TierError, reason: MissReason, counter: str | None) -> None:
    rig, keys = below(2)
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    rig.tier.fails = error
    rig.settle()
    rig.tier.delete(keys)
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.explain_miss(keys[0]).reason is reason
    counts = rig.counts()
    for name in ("tier_bad_blocks:memory", "tier_read_failures:memory"):
        assert counts.get(name, 0) == (2 if name == counter else 0)
    assert rig.host.num_used_blocks == 0


def test_the_reason_is_corrupt_if_a_queued_block_was_found_corrupt_meanwhile() -> None:
    rig, keys = below(4, host_blocks=8)
    rig.manager.lookup(keys[:2], A)
    rig.manager.poll()
    rig.tier.fails = TierError.CORRUPT
    rig.manager.lookup(keys, B)
    rig.executor.drain()
    rig.manager.poll()
    rig.tier.delete(keys)
    rig.tier.fails = None
    rig.settle()
    assert rig.manager.lookup(keys, B) == 0
    assert rig.manager.explain_miss(keys[0]).reason is MissReason.CORRUPT


def test_tiers_can_be_switched_off_from_outside() -> None:
    rig, keys = below(2)
    rig.manager.lookup(keys, A)
    rig.manager.switch_off_tiers("keys do not outlive the process")
    assert rig.manager.poll(), "waiting requests must ask again"
    assert rig.manager.lookup(keys, A) == 0
    rig.settle()
    assert rig.tier.reads == []


@pytest.mark.parametrize("under_way", ["read", "write", "arrived"])
def test_a_reset_makes_everything_unreachable_whatever_is_under_way(under_way: str) -> None:
    rig = Rig()
    keys = chain("x", 2)
    if under_way == "write":
        rig.store(keys)
    else:
        rig.store_below(keys)
        rig.manager.lookup(keys, A)
        rig.manager.poll()
    if under_way == "arrived":
        rig.settle()
    rig.manager.reset()
    for _ in range(2):
        assert rig.manager.lookup(keys, B) in (0, None)
        rig.settle()
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(keys, B) == 0
    assert rig.host.num_used_blocks == 0
    rig.store(keys)
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2
    assert rig.bytes_of(keys) == [bytes(content(key)) for key in keys]


# A chain that host memory holds is shown to tiers when its request ends; other chains when it arrives, too.


def a_held_head() -> tuple[Rig, list[OffloadKey]]:
    """Returns a rig and a chain of which the host holds the first four blocks."""
    rig, keys = Rig(), chain("x", 6)
    compute(rig, keys[:4])
    return rig, keys


def test_a_chain_in_host_memory_is_shown_when_the_request_ends() -> None:
    rig, keys = a_held_head()
    rig.manager.touch(keys[:4], A)
    assert rig.tier.shown == []
    rig.manager.end_chain(keys, [], A)
    # The tail first, so that it is evicted before the head.
    assert rig.tier.shown == [("reorder", keys[4:]), ("touch", keys[:4])]


@pytest.mark.parametrize("context", [A, None], ids=["request", "no request"])
def test_other_chains_are_shown_whole_when_they_arrive(context: ReqContext | None) -> None:
    """Otherwise a head that host memory holds would be older than its tail, and evicted first."""
    rig, keys = a_held_head()
    keys = keys[: 6 if context else 4]
    rig.manager.touch(keys, context)
    rig.manager.end_chain(keys, [], context)
    assert rig.tier.shown == [("touch", keys), ("reorder", keys)]


def test_of_requests_that_never_end_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_REQUESTS", 2)
    rig, keys = a_held_head()
    for context in (A, B, ReqContext("c")):
        rig.manager.touch(keys[:1], context)
    for context, is_known in ((A, False), (B, True)):
        rig.manager.end_chain(keys[:1], [], context)
        assert (("touch", keys[:1]) in rig.tier.shown) is is_known


def test_a_miss_names_the_tier_that_holds_the_block() -> None:
    rig = Rig()
    keys = chain("a", 1)
    rig.store_below(keys)
    assert rig.manager.explain_miss(keys[0]).tier == "memory"
    assert rig.manager.explain_miss(b"unknown").tier is None


# Counts by tier.


def test_what_a_tier_has_done_is_counted_under_its_name() -> None:
    rig, keys = below(3)
    rig.manager.lookup(keys, A)
    rig.settle()
    counts = rig.counts()
    assert {name.partition(":")[0] for name in counts} <= METRICS.keys()
    assert counts["tier_write_blocks:memory"] == 3
    assert counts["tier_read_bytes:memory"] == 3 * SLOT_BYTES
    assert counts["tier_blocks:memory"] == 3
    assert counts["tier_capacity_bytes:memory"] == 64 * SLOT_BYTES
    assert counts["tier_off:memory"] == counts["tier_paused:read,memory"] == 0
    assert rig.manager.release_request(A) == {"memory": keys}
    assert "tier_write_blocks:memory" not in rig.counts(), "each is reported once"


def test_counters_do_not_fall_if_a_tier_counts_from_0_again() -> None:
    rig, metrics = Rig(tier_blocks=2), Metrics()
    name = "tier_evicted_blocks:memory"
    totals = []
    for num_evicted in (5, 0, 2, 2, 3):
        rig.tier.num_evicted = num_evicted
        metrics.take_in(rig.counts())
        assert metrics.take().get(name, 0) >= 0
        totals.append(metrics.snapshot()[name])
    assert totals == [5, 5, 7, 7, 8]


class Store(SpyTier):
    """A tier in a store that cannot be reached while it ``is_away``."""

    is_away = True

    def stats(self) -> TierStats:
        return super().stats()._replace(is_connected=not self.is_away)


def test_a_store_that_was_never_reached_is_paused() -> None:
    """It has no failures, because nothing is asked of it."""
    rig = Rig(tier_class=Store)
    assert rig.counts()["tier_paused:read,memory"] == 1
    assert isinstance(rig.tier, Store)
    rig.tier.is_away = False
    assert rig.counts()["tier_paused:read,memory"] == 0
