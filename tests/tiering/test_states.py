"""Hybrid models: states beside KV, found, promoted, judged and written through."""

from __future__ import annotations

from random import Random

import pytest

from kvoffload.abc import KVGroup, LookupState, MissReason, OffloadKey, ReqContext
from kvoffload.tiering.writes import MAX_WRITES_PER_BLOCK
from tests.tiering.rig import A, Rig, chain, compute, content, in_tier, lookup_last, on_disk
from tests.tiering.test_lookup import RemoteTier

STATE = KVGroup(16, state=True)
HYBRID = (KVGroup(16), STATE, STATE)
HIT, MISS, RETRY = LookupState.HIT, LookupState.MISS, LookupState.RETRY


def hybrid_chain(n: int, name: str = "x", num_groups: int = 3) -> list[list[OffloadKey]]:
    """Returns the blocks of a chain by group: KV, then states."""
    return [[key[:-1] + bytes([g]) for key in chain(name, n)] for g in range(num_groups)]


def in_order(by_group: list[list[OffloadKey]]) -> list[OffloadKey]:
    return [key for keys in zip(*by_group, strict=True) for key in keys]


def states_at(by_group: list[list[OffloadKey]], *ends: int) -> list[OffloadKey]:
    """Returns the states after so many blocks."""
    return [states[end - 1] for end in ends for states in by_group[1:]]


def settle(rig: Rig, times: int = 4) -> None:
    for _ in range(times):
        rig.clock.now += 0.05
        rig.settle()


# Lookups.


def test_only_the_last_state_is_promoted() -> None:
    rig = Rig(groups=HYBRID)
    _, states, _ = hybrid_chain(8)
    compute(rig, states[1:2])
    rig.put(rig.tier, states[:6])
    assert lookup_last(rig.manager, states, A) == (5, RETRY)
    settle(rig)
    assert rig.tier.reads == states[5:6]
    assert lookup_last(rig.manager, states, A) == (5, HIT)
    assert rig.bytes_of(states[5:6]) == [bytes(content(states[5]))]
    assert rig.manager.release_request(A) == {"memory": states[5:6]}


def test_a_state_in_the_host_hides_earlier_ones_of_tiers() -> None:
    rig = Rig(groups=HYBRID)
    _, states, _ = hybrid_chain(8)
    compute(rig, states[4:5])
    rig.put(rig.tier, states[:3])
    rig.tier.asked.clear()
    assert lookup_last(rig.manager, states, A) == (4, HIT)
    assert rig.tier.asked == states[5:], "tiers are asked for later ones only"
    rig.manager.poll()
    assert rig.tier.reads == []


@pytest.mark.parametrize("context", [None, ReqContext("a", may_wait=False)])
def test_without_waiting_only_states_of_the_host_are_found(context: ReqContext | None) -> None:
    rig = Rig(groups=HYBRID)
    _, states, _ = hybrid_chain(4)
    rig.put(rig.tier, states)
    assert lookup_last(rig.manager, states, context) == (-1, MISS)
    compute(rig, states[1:2])
    assert lookup_last(rig.manager, states, context) == (1, HIT)
    assert lookup_last(rig.manager, [], A) == (-1, MISS)


def test_a_shared_store_is_asked_once_for_all_states() -> None:
    rig = Rig(groups=HYBRID, tier_class=RemoteTier, tier_blocks=2048, host_blocks=64)
    remote = rig.tier
    assert isinstance(remote, RemoteTier)
    _, states, _ = hybrid_chain(1000)
    rig.put(rig.tier, states[6:7])
    assert lookup_last(rig.manager, states, A) == (999, RETRY), "it may have any of them"
    assert rig.manager.poll(), "it must be asked again"
    assert lookup_last(rig.manager, states, A) == (999, RETRY)
    assert remote.questions == [states]
    assert remote.expected == [states, states]
    remote.answer()
    assert lookup_last(rig.manager, states, A) == (6, RETRY)
    settle(rig)
    assert remote.reads == states[6:7]
    assert lookup_last(rig.manager, states, A) == (6, HIT)
    assert remote.questions == [states]


def test_kv_and_states_of_a_hit_are_read_together() -> None:
    """A request waits once, although each group is looked up by itself."""
    rig = Rig(groups=HYBRID, host_blocks=64)
    by_group = hybrid_chain(6)
    kv, states, others = by_group
    rig.put(rig.tier, kv + states_at(by_group, 2, 5))

    def look_up() -> tuple[tuple[int, LookupState], list[int], int | None]:
        last = lookup_last(rig.manager, states, A)
        each = rig.manager.lookup_each([others[last[0]]], A).tolist()
        return last, each, rig.manager.lookup(kv[: last[0] + 1], A)

    assert look_up() == ((4, RETRY), [RETRY], None)
    rig.manager.poll()
    assert sorted(rig.tier.reads) == sorted(kv[:5] + states_at(by_group, 5))
    assert look_up() == ((5, RETRY), [RETRY], None), "while they are read, no more is looked up"
    settle(rig)
    assert look_up() == ((4, HIT), [HIT], 5)
    rig.manager.check_integrity()
    lease = rig.manager.prepare_load(kv[:5] + states_at(by_group, 5), A)
    rig.manager.release_request(A)
    rig.manager.complete_load(lease)
    assert rig.host.num_available_blocks == 64


def test_states_have_room_however_many_groups_there_are() -> None:
    rig = Rig(host_blocks=16, groups=[KVGroup(16), *[STATE] * 4])
    by_group = hybrid_chain(4, num_groups=5)
    rig.put(rig.tier, by_group[0] + states_at(by_group, 4))
    assert lookup_last(rig.manager, by_group[1], A) == (3, RETRY)
    assert rig.manager.lookup_each([states[3] for states in by_group[2:]], A).tolist() == [RETRY] * 3
    assert rig.manager.lookup(by_group[0], A) is None
    settle(rig)
    assert len(rig.tier.reads) == 8, "half of the host: a state of each group, and KV in the rest"
    assert rig.manager.lookup(by_group[0], A) == 4


def test_a_hit_that_is_too_large_is_a_miss() -> None:
    rig = Rig(host_blocks=4, groups=[KVGroup(16), *[STATE] * 3])
    by_group = hybrid_chain(1, num_groups=4)
    rig.put(rig.tier, states_at(by_group, 1))
    assert lookup_last(rig.manager, by_group[1], A) == (0, RETRY)
    assert rig.manager.lookup_each([states[0] for states in by_group[2:]], A).tolist() == [MISS, MISS]
    assert rig.manager.explain_miss(by_group[2][0]).reason is MissReason.TOO_LARGE


# Load or compute.


@pytest.mark.parametrize(("seconds_per_block", "loads"), [(1.9, True), (2.1, False)])
def test_a_state_is_loaded_if_that_takes_less_time_than_the_tokens_up_to_it(
    seconds_per_block: float, loads: bool
) -> None:
    """The KV of these tokens may be in the host. Both states take two blocks; they save four."""
    rig = Rig(groups=HYBRID, host_blocks=32, load_deadline_ms=1e6)
    by_group = hybrid_chain(6)
    compute(rig, by_group[0] + states_at(by_group, 1))
    rig.put(rig.tier, states_at(by_group, 5))
    rig.measure(seconds_per_block)
    found = lookup_last(rig.manager, by_group[1], A)
    assert found == ((4, RETRY) if loads else (0, HIT))
    if not loads:
        assert rig.manager.explain_miss(by_group[1][4]).reason is MissReason.FASTER_TO_COMPUTE


@pytest.mark.parametrize(("seconds_per_block", "loads"), [(0.65, True), (0.68, False)])
def test_kv_and_states_are_judged_together(seconds_per_block: float, loads: bool) -> None:
    """Four blocks of KV and two states save the tokens of four blocks."""
    rig = Rig(groups=HYBRID, host_blocks=32, load_deadline_ms=1e6)
    by_group = hybrid_chain(4)
    kv, states, others = by_group
    rig.put(rig.tier, kv + states_at(by_group, 4))
    rig.measure(seconds_per_block)
    assert lookup_last(rig.manager, states, A) == (3, RETRY)
    assert rig.manager.lookup_each(others[3:], A).tolist() == [RETRY]
    assert rig.manager.lookup(kv, A) == (None if loads else 0)
    rig.tier.reads.clear()
    rig.manager.poll()
    assert sorted(rig.tier.reads) == (sorted(kv + states_at(by_group, 4)) if loads else [])
    if not loads:
        rig.manager.check_integrity()
        rig.manager.release_request(A)
        assert rig.manager.num_promotions == 0


@pytest.mark.parametrize(("slow_blocks", "loads"), [(2, True), (3, False)])
def test_a_hit_with_states_is_loaded_whole_or_not_at_all(slow_blocks: int, loads: bool) -> None:
    """Its tail comes from a slow tier. Without states the head alone would be loaded."""
    rig = Rig(groups=[KVGroup(16), STATE], host_blocks=64, num_tiers=2, load_deadline_ms=1e6)
    kv, states = hybrid_chain(6, num_groups=2)
    for tier, seconds_per_block in zip(rig.tiers, (0.1, 2.0), strict=True):
        rig.measure(seconds_per_block, tier)
    rig.put(rig.tiers[0], kv[:-slow_blocks])
    rig.put(rig.tiers[1], kv[-slow_blocks:] + states[5:])
    assert lookup_last(rig.manager, states, A) == (5, RETRY)
    # Six blocks save six seconds. The slow tier takes two for each of its blocks and for the state.
    assert rig.manager.lookup(kv, A) == (None if loads else 0)
    rig.manager.poll()
    assert len(rig.tiers[0].reads) == 1 + (len(kv) - slow_blocks if loads else 0)


@pytest.mark.parametrize(("num_full", "seconds_per_block"), [(1, 0.88), (2, 0.46)])
def test_groups_with_full_attention_share_the_states(num_full: int, seconds_per_block: float) -> None:
    """Each is asked by itself; none counts what the others want."""
    rig = Rig(groups=[*[KVGroup(16)] * num_full, STATE], host_blocks=64, load_deadline_ms=1e6)
    by_group = hybrid_chain(8, num_groups=num_full + 1)
    rig.put(rig.tier, [key for keys in by_group[:-1] for key in keys] + by_group[-1][7:])
    rig.measure(seconds_per_block)
    assert lookup_last(rig.manager, by_group[-1], A) == (7, RETRY)
    # Of each group 8 blocks and a part of one state, for its part of the tokens: 9 * 0.88 s for 8 s, 8.5 * 0.46 for 4.
    assert [rig.manager.lookup(keys, A) for keys in by_group[:-1]] == [None] * num_full
    rig.manager.poll()
    assert len(rig.tier.reads) == 1 + 8 * num_full + 1


# Write-through.


def test_a_chain_is_written_up_to_its_last_state() -> None:
    rig = Rig(groups=HYBRID, host_blocks=128)
    by_group = hybrid_chain(8)
    compute(rig, by_group[0] + states_at(by_group, 2, 5))
    rig.manager.end_chain(in_order(by_group), [], A)
    settle(rig)
    assert on_disk(rig, by_group[0]) == 5
    assert in_tier(rig, by_group[1]) == in_tier(rig, by_group[2]) == [1, 4]
    order = {key: i for i, key in enumerate(rig.tier.writes)}
    for end in (2, 5):
        before = max(order[key] for key in by_group[0][:end])
        assert min(order[key] for key in states_at(by_group, end)) > before, "a state comes after the KV before it"
    assert "tier_dropped_writes:memory" not in rig.counts()
    assert rig.tier.num_deleted == 0
    assert not rig.manager.has_pending_writes


def test_a_superseded_state_is_not_written_and_leaves_no_hole(caplog: pytest.LogCaptureFixture) -> None:
    """The connector drops the earlier states of an output when a later one is stored."""
    rig = Rig(groups=HYBRID, host_blocks=128)
    by_group = hybrid_chain(10)
    rig.manager.touch(in_order([keys[:4] for keys in by_group]), A)
    compute(rig, by_group[0][:4] + states_at(by_group, 4))
    for end in (6, 8, 9):
        compute(rig, by_group[0][4:end] + states_at(by_group, end))
        settle(rig)
        if end < 9:
            rig.manager.drop(states_at(by_group, end), only_host=True)
    assert on_disk(rig, by_group[0]) == 4
    rig.manager.end_chain(in_order(by_group), [], A)
    settle(rig)
    assert on_disk(rig, by_group[0]) == 9
    assert in_tier(rig, by_group[1]) == in_tier(rig, by_group[2]) == [3, 8]
    assert "tier_dropped_writes:memory" not in rig.counts()
    assert not caplog.records


def test_a_state_dropped_while_it_is_written_is_no_failure() -> None:
    rig = Rig(groups=HYBRID, host_blocks=128)
    by_group = hybrid_chain(6)
    compute(rig, by_group[0] + states_at(by_group, 3, 6))
    rig.manager.end_chain(in_order(by_group), [], A)
    rig.manager.drop(states_at(by_group, 3))
    settle(rig, 6)
    assert on_disk(rig, by_group[0]) == 6
    assert in_tier(rig, by_group[1]) == in_tier(rig, by_group[2]) == [5]
    assert "tier_write_failures:memory" not in rig.counts()


def test_a_chain_with_states_may_fill_the_tier() -> None:
    """Hardly any of the states that a chain names exist, so they do not count."""
    rig = Rig(groups=HYBRID, host_blocks=128, tier_blocks=12)
    by_group = hybrid_chain(20)
    compute(rig, by_group[0] + states_at(by_group, 10))
    rig.manager.end_chain(in_order(by_group), [], A)
    settle(rig)
    assert on_disk(rig, by_group[0]) == 10
    assert rig.tier.stats().num_evicted == 0


@pytest.mark.parametrize("seed", range(150))
def test_what_is_written_ends_with_the_last_state(seed: int) -> None:
    """Random KV and states become ready in random order, some of it while the request runs, and some never."""
    rng = Random(seed)
    sizes = rng.choice([(16, 16, 16), (16, 32, 32), (32, 16, 64), (16, 64, 16)])
    groups = [KVGroup(sizes[0]), *(KVGroup(size, state=True) for size in sizes[1 : rng.choice((2, 3))])]
    rig = Rig(groups=groups, host_blocks=512, tier_blocks=512)
    align, tokens = max(sizes[: len(groups)]), 64 * rng.randint(2, 5)
    by_group = [[key[:-1] + bytes([g]) for key in chain("x", tokens // sizes[g])] for g in range(len(groups))]
    ends = sorted((sizes[g] * (i + 1), g, key) for g, keys in enumerate(by_group) for i, key in enumerate(keys))
    keys_in_order = [key for _, _, key in ends]
    hole = rng.choice((tokens, tokens, 64))
    kept = {end for end in range(align, tokens + 1, align) if rng.random() < 0.3}
    one_lacks = {end for end in kept if rng.random() < 0.2}
    ready = [
        key
        for end, g, key in ends
        if (g == 0 and end <= hole) or (g > 0 and end in kept and not (g == 1 and end in one_lacks))
    ]
    rng.shuffle(ready)
    rig.manager.touch(keys_in_order[: len(keys_in_order) // 2], A)
    while ready:
        n = rng.randint(1, 4)
        compute(rig, ready[:n])
        ready = ready[n:]
        if rng.random() < 0.5:
            rig.settle()
    rig.manager.end_chain(keys_in_order, [], A)
    settle(rig, 12)
    last = max((end for end in kept - one_lacks if end <= hole), default=0)
    assert on_disk(rig, by_group[0]) == last // sizes[0]
    for g, keys in enumerate(by_group[1:], 1):
        usable = [end // sizes[g] - 1 for end in sorted(kept - one_lacks) if end <= hole]
        assert in_tier(rig, keys) == usable
    assert not rig.manager.has_pending_writes


@pytest.mark.parametrize("ends", [(6,), (2, 6), (1, 2, 3, 4, 5, 6)])
def test_writing_a_chain_that_the_tier_keeps_evicting_ends_soon(ends: tuple[int, ...]) -> None:
    """A chain names a state for every unit, and blocks behind what the tier may be given. These do not count."""
    rig = Rig(groups=HYBRID, host_blocks=128, tier_blocks=2)
    rig.tier.claimed_blocks = 8
    by_group = hybrid_chain(20)
    rig.store(by_group[0] + states_at(by_group, *ends))
    rig.manager.end_chain(in_order(by_group), [], A)
    settle(rig, 200)
    assert not rig.manager.has_pending_writes
    # Six blocks of KV, and the states.
    assert 0 < rig.counts()["tier_write_blocks:memory"] <= MAX_WRITES_PER_BLOCK * (6 + 2 * len(ends)) + 8


def test_a_chain_with_many_states_is_written_whole() -> None:
    rig = Rig(groups=HYBRID, host_blocks=256, tier_blocks=256)
    by_group = hybrid_chain(20)
    rig.tier.most_writes = 1
    rig.store(in_order(by_group))
    rig.manager.end_chain(in_order(by_group), [], A)
    settle(rig, 200)
    assert on_disk(rig, in_order(by_group)) == 60
