"""When a tier is paused, tested, used again, and switched off."""

from __future__ import annotations

import pytest

from kvoffload.abc import Ability, Awaited, LookupState, Need, OffloadKey, ReqContext, TierError, TierResult
from kvoffload.tiering.health import (
    FAILURE_PERIOD_S,
    JITTER,
    MAX_FAILURES,
    MAX_HANGS,
    MAX_PAUSE_S,
    MAX_WRITE_PAUSE_S,
    PAUSE_S,
    TRUST_FACTOR,
    WRITE_DEADLINE_S,
    BreakerState,
    CircuitBreaker,
)
from kvoffload.tiering.rates import Ended
from tests.tiering.rig import A, B, Rig, SharedTier, below, chain, content, on_disk, slot_of


def hang(rig: Rig, name: str = "x") -> list[OffloadKey]:
    """A request waits for two blocks. The read of the first one hangs."""
    keys = chain(name, 2)
    rig.store_below(keys)
    rig.tier.hanging[keys[0]] = 1e9
    rig.manager.lookup(keys, ReqContext(name))
    rig.settle()
    rig.clock.now += 1.0
    rig.settle()
    assert rig.manager.tiers[0].read_health.state is BreakerState.OPEN
    return keys


def wait_for_probe(rig: Rig, keys: list[OffloadKey]) -> None:
    """A request looks up ``keys`` after the pause, which may start a test read, and that ends or hangs."""
    half_open(rig)
    assert rig.manager.lookup(keys, ReqContext("prober")) == 0, "it does not wait"
    rig.settle()
    rig.manager.release_request(ReqContext("prober"))


def fail(rig: Rig, times: int) -> None:
    for i in range(times):
        keys = chain(f"bad{rig.clock.now}/{i}", 1)
        rig.store_below(keys)
        rig.tier.fails = TierError.CORRUPT
        rig.manager.lookup(keys, ReqContext(f"bad{rig.clock.now}/{i}"))
        rig.settle()
        rig.tier.fails = None


def test_transfers_that_have_ended_while_the_engine_was_idle_are_no_hang() -> None:
    """An idle engine takes no steps, so the results wait until the next request comes."""
    rig, keys = below(2, load_deadline_ms=1000)
    rig.store(chain("last", 1))
    rig.manager.poll()
    assert len(rig.manager.tiers[0].writes.writing) == 1
    rig.executor.drain()
    rig.clock.now += 100.0
    assert rig.manager.lookup(keys, A) is None, "it is loaded"
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2
    assert rig.manager.tiers[0].read_health.state is BreakerState.WORKING


def test_a_tier_is_read_again_after_a_successful_test_read(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(host_blocks=32, load_deadline_ms=1000)
    other = chain("y", 6)
    rig.store_below(other)
    keys = hang(rig)
    wait_for_probe(rig, other)
    for name, n in (("b", 3), ("c", 6)):
        rig.clock.now += 5.0
        assert rig.manager.lookup(other[:n], ReqContext(name)) is None
        rig.settle()
        assert rig.manager.lookup(other[:n], ReqContext(name)) == n
    assert rig.manager.lookup(keys, B) == 0, "the block that hangs is still missing"
    assert rig.bytes_of(other) == [bytes(content(key)) for key in other]
    assert len([record for record in caplog.records if "it has ended none" in record.message]) == 1


def test_the_host_slot_of_a_hanging_read_is_not_given_to_another_block() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1000)
    keys = hang(rig)
    rig.manager.release_request(ReqContext("x"))
    slot = slot_of(rig, keys[0])
    assert slot is not None
    wait_for_probe(rig, chain("y", 1))
    for _ in range(3):
        rig.fill_host()
        assert slot_of(rig, keys[0]) == slot
    rig.manager.reset()
    rig.fill_host("other")
    assert slot not in [slot_of(rig, key) for key in chain("other", 8)], "not even after a reset"
    rig.clock.now += 1e9
    rig.settle()
    assert rig.host.num_available_blocks == rig.host.num_blocks
    assert not rig.manager.tiers[0].read_health.overdue


def test_a_hanging_read_does_not_change_the_read_rate() -> None:
    rig = Rig(load_deadline_ms=1000)
    rig.tier.seconds_per_block = 0.01
    hang(rig)
    rig.tier.seconds_per_block, tier = None, rig.manager.tiers[0]
    before = tier.estimator.seconds_to_read(1)
    assert before == pytest.approx(0.01)
    rig.clock.now += 1e9
    rig.settle()
    assert not tier.reads
    assert tier.estimator.seconds_to_read(1) == before


def fail_writes(rig: Rig, error: TierError = TierError.IO, times: int = MAX_FAILURES) -> None:
    rig.tier.fails = error
    for i in range(times):
        rig.store(chain(f"refused{rig.clock.now}/{i}", 1))
        rig.settle()
    rig.tier.fails = None


def health(rig: Rig, ability: Ability) -> CircuitBreaker:
    state = rig.manager.tiers[0]
    return state.read_health if ability is Ability.READ else state.write_health


def pause(rig: Rig, ability: Ability = Ability.READ) -> None:
    """An ability of the tier fails until it is paused."""
    if ability is Ability.READ:
        fail(rig, MAX_FAILURES)
    else:
        fail_writes(rig)
        # None of their chains is left for a test.
        rig.manager.tiers[0].writes.clear()
    assert health(rig, ability).state is BreakerState.OPEN


def half_open(rig: Rig, ability: Ability = Ability.READ) -> None:
    rig.clock.now += health(rig, ability).pause_s
    rig.settle()


@pytest.mark.parametrize("ability", Ability)
def test_while_one_ability_is_paused_the_other_goes_on(ability: Ability, caplog: pytest.LogCaptureFixture) -> None:
    rig, keys = below(2, host_blocks=128, tier_blocks=100)
    pause(rig, ability)
    rig.tier.expected.clear()
    rig.tier.reads.clear()
    rig.tier.writes.clear()
    for i in range(20):
        rig.clock.now += PAUSE_S / 25
        found = rig.manager.lookup(keys, ReqContext(f"r{i}"))
        rig.manager.touch(keys, ReqContext(f"r{i}"))
        rig.store(chain(f"y{i}", 2))
        rig.settle()
        rig.manager.release_request(ReqContext(f"r{i}"))
        rig.host.drop(keys)
        if ability is Ability.READ:
            assert found == 0, "no request waits"
        else:
            assert found is None, "it is read"
    is_read = ability is Ability.READ
    assert (len(rig.tier.expected), len(rig.tier.reads)) == (0, 0) if is_read else len(rig.tier.reads) == 40
    assert len(rig.tier.writes) == (40 if is_read else 0)
    gauges = [rig.counts()[f"tier_paused:{each},memory"] for each in Ability]
    assert gauges == [ability is each for each in Ability]
    (line,) = [record.message for record in caplog.records if "PAUSED" in record.message]
    assert f"{ability.upper()}S " in line
    assert ("writes go on" if is_read else "reads go on") in line


def test_a_full_tier_is_no_fault_and_is_tested_at_a_growing_pace(caplog: pytest.LogCaptureFixture) -> None:
    rig, keys = below(2, host_blocks=64, tier_blocks=400)
    rig.tier.writes.clear()
    for _ in range(60):
        rig.clock.now += 1.0
        fail_writes(rig, TierError.NO_SPACE, times=2)
    assert len(rig.tier.writes) <= MAX_FAILURES + 60 / MAX_WRITE_PAUSE_S + 5
    assert rig.counts()["tier_paused:write,memory"] == 0
    assert rig.manager.lookup(keys, A) is None, "what it has is read"
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "THE MEMORY TIER IS FULL" in line
    for i in range(10):
        rig.clock.now += 1.0
        rig.store(chain(f"y{i}", 2))
        rig.settle()
    assert on_disk(rig, chain("y9", 2)) == 2


def test_a_request_that_waits_when_its_tier_is_paused_waits_no_longer() -> None:
    rig = Rig(host_blocks=64, tier_blocks=100, load_deadline_ms=1e6)
    keys, queued = chain("x", 2), chain("z", 2)
    rig.store_below(keys + queued)
    rig.tier.hanging = dict.fromkeys(keys, 1e9)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.tier.refuses = True
    rig.manager.lookup(queued, ReqContext("queued"))
    rig.manager.poll()
    rig.tier.refuses = False
    rig.tier.num_failed_lookups += MAX_FAILURES
    assert rig.manager.poll()
    assert rig.manager.tiers[0].read_health.state is BreakerState.OPEN
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(queued, ReqContext("queued")) == 0
    rig.manager.check_integrity()


@pytest.mark.parametrize("succeeds", [True, False])
def test_half_open_reads_one_block_for_no_request(succeeds: bool) -> None:
    rig = Rig(host_blocks=64, tier_blocks=100)
    keys, other = chain("x", 4), chain("z", 4)
    rig.store_below(keys + other)
    pause(rig)
    rig.tier.reads.clear()
    half_open(rig)
    rig.fill_host()
    rig.counts()
    if not succeeds:
        rig.tier.fails = TierError.IO
    for i in range(3):
        assert rig.manager.lookup(keys[1:], ReqContext(f"a{i}")) == 0, "a request does not wait for a test"
        assert rig.manager.lookup(other, ReqContext(f"b{i}")) == 0
    rig.settle()
    assert rig.tier.reads == keys[1:2], "one test at a time"
    assert rig.counts()["evicted_blocks"] == 1
    if succeeds:
        assert rig.manager.lookup(other, ReqContext("c")) is None
        assert rig.host.lookup(keys[1:2]) == 1, "the bytes of the test are not lost"
    else:
        assert rig.manager.tiers[0].read_health.state is BreakerState.OPEN
        assert rig.manager.tiers[0].read_health.pause_s == 2 * PAUSE_S
    rig.manager.check_integrity()


def test_a_tier_is_tested_with_what_is_handed_over_since_there_may_be_nothing_else() -> None:
    rig = Rig(host_blocks=64, tier_blocks=100, tier_class=SharedTier)
    pause(rig)
    half_open(rig)
    keys = chain("x", 2)
    awaited = Awaited(frozenset(keys), {}, rig.clock.now, rig.clock.now + 1.0)
    context = ReqContext("goes on", awaited=awaited)
    assert rig.manager.lookup(keys, context) is None, "another server is writing it"
    rig.settle()
    rig.store_below(keys)
    assert rig.manager.lookup(keys, context) is None
    rig.settle()
    assert health(rig, Ability.READ).state is BreakerState.WORKING
    assert rig.manager.lookup(keys, context) is None
    rig.settle()
    assert rig.manager.lookup(keys, context) == 2


def test_a_tier_is_tested_with_any_block_of_a_lookup_that_it_holds() -> None:
    """Of the states that lookups name, few were kept."""
    rig = Rig(host_blocks=64, tier_blocks=100)
    keys = chain("x", 4)
    rig.store_below(keys[2:3])
    pause(rig)
    rig.tier.reads.clear()
    half_open(rig)
    assert not rig.manager.lookup_each(keys, A, Need.LAST).any(), "it does not wait"
    rig.settle()
    assert rig.tier.reads == keys[2:3]
    assert health(rig, Ability.READ).state is BreakerState.WORKING


def test_the_engine_steps_until_the_block_of_a_test_is_looked_up() -> None:
    rig, keys = below(2, host_blocks=64, tier_blocks=100)
    pause(rig)
    half_open(rig)
    rig.tier.unsure = True
    assert not rig.manager.has_pending_writes
    assert rig.manager.lookup(keys, A) == 0
    rig.manager.release_request(A)
    rig.settle()
    assert rig.manager.has_pending_writes, "no request waits for it"
    rig.tier.unsure = False
    rig.settle()
    assert not rig.manager.has_pending_writes
    assert health(rig, Ability.READ).state is BreakerState.WORKING


@pytest.mark.parametrize("succeeds", [True, False])
def test_half_open_writes_one_block(succeeds: bool) -> None:
    rig = Rig(host_blocks=64, tier_blocks=100)
    pause(rig, Ability.WRITE)
    half_open(rig, Ability.WRITE)
    rig.tier.writes.clear()
    keys = chain("y", 4)
    with rig.executor.hold():
        rig.store(keys)
        rig.manager.poll()
        rig.manager.poll()
        assert rig.tier.writes == keys[:1]
        assert not health(rig, Ability.WRITE).may_test
    rig.tier.fails = None if succeeds else TierError.IO
    rig.settle()
    rig.settle()
    if succeeds:
        assert health(rig, Ability.WRITE).state is BreakerState.WORKING
        assert on_disk(rig, keys) == 4
    else:
        assert health(rig, Ability.WRITE).state is BreakerState.OPEN
        assert rig.tier.writes == keys[:1]


def test_a_tier_that_failed_for_ten_minutes_is_used_again_without_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    rig, keys = below(2, host_blocks=64, tier_blocks=100)
    pause(rig)
    rig.tier.fails = TierError.IO
    rig.tier.reads.clear()
    for i in range(600):
        rig.clock.now += 1.0
        assert rig.manager.lookup(keys, ReqContext(f"r{i}")) == 0
        rig.settle()
        rig.host.reset()
    assert 600 / MAX_PAUSE_S - 2 <= len(rig.tier.reads) <= 600 / MAX_PAUSE_S + 10, "tested once per pause"
    rig.tier.fails = None
    for i in range(2 * int(MAX_PAUSE_S)):
        rig.clock.now += 1.0
        found = rig.manager.lookup(keys, ReqContext(f"s{i}"))
        rig.settle()
        rig.host.reset()
    assert found is None
    assert len([record for record in caplog.records if "work again" in record.message]) == 1
    assert len([record for record in caplog.records if "TIER ARE PAUSED" in record.message]) == 1


def test_corrupt_blocks_that_tests_find_do_not_keep_a_tier_paused() -> None:
    """A store with many bad blocks would be tested with one after the other, each after a longer pause."""
    rig = Rig(host_blocks=64, tier_blocks=100)
    bad = [chain(f"damaged{i}", 1) for i in range(20)]
    for keys in bad:
        rig.store_below(keys)
    pause(rig)
    half_open(rig)
    breaker = rig.manager.tiers[0].read_health
    rig.tier.fails = TierError.CORRUPT
    for i, keys in enumerate(bad):
        assert rig.manager.lookup(keys, ReqContext(f"r{i}")) == 0
        rig.settle()
        assert breaker.state is BreakerState.HALF_OPEN
    assert len(rig.tier.reads) >= len(bad)
    rig.tier.fails = None
    good = chain("good", 2)
    rig.store_below(good)
    rig.manager.lookup(good, A)
    rig.settle()
    assert breaker.state is BreakerState.WORKING


def test_lookups_that_fail_pause_a_tier() -> None:
    rig = Rig()
    rig.store_below(chain("x", 2))
    rig.tier.num_failed_lookups += MAX_FAILURES - 1
    rig.settle()
    assert rig.manager.tiers[0].can_read
    rig.tier.num_failed_lookups += 1
    rig.settle()
    assert not rig.manager.tiers[0].can_read
    half_open(rig)
    rig.tier.num_failed_lookups += 1
    rig.settle()
    assert rig.manager.tiers[0].read_health.state is BreakerState.OPEN, "while it is tested, one is enough"
    assert rig.counts()["tier_lookup_failures:memory"] == MAX_FAILURES + 1


def test_a_tier_that_does_not_answer_the_lookup_of_a_test_is_paused_again() -> None:
    rig, keys = below(2, load_deadline_ms=1000)
    rig.tier.num_failed_lookups += MAX_FAILURES
    rig.settle()
    half_open(rig)
    rig.tier.unsure = True
    assert rig.manager.lookup(keys, A) == 0
    rig.settle()
    assert rig.manager.tiers[0].read_health.may_test
    rig.clock.now += 1.0
    rig.settle()
    assert rig.manager.tiers[0].read_health.state is BreakerState.OPEN
    half_open(rig)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.tier.unsure = False
    rig.settle()
    assert rig.manager.tiers[0].can_read, "an answer that comes in time continues the test"


def test_writes_that_hang_pause_the_tier_and_tests_of_them_are_bounded() -> None:
    rig = Rig(host_blocks=64, tier_blocks=100, load_deadline_ms=1000)
    rig.store_below(chain("x", 1))
    rig.tier.writes.clear()
    for i in range(20):
        keys = chain(f"y{i}", 4)
        rig.tier.hanging |= dict.fromkeys(keys, 1000.0)
        rig.store(keys)
        for _ in range(int(WRITE_DEADLINE_S)):
            rig.clock.now += 1.1
            rig.settle()
    assert rig.manager.tiers[0].can_read
    assert health(rig, Ability.WRITE).state not in (BreakerState.WORKING, BreakerState.OFF)
    assert len(rig.tier.writes) <= 4 + MAX_HANGS - 1
    assert rig.host.num_available_blocks >= 64 - len(rig.tier.writes), "the others are not pinned"
    rig.tier.hanging.clear()
    rig.clock.now += 1000.0
    rig.settle()
    rig.settle()
    assert health(rig, Ability.WRITE).state is BreakerState.WORKING
    rig.store(chain("z", 4))
    rig.settle(20)
    assert on_disk(rig, chain("z", 4)) == 4


def test_one_tier_that_hangs_leaves_another_its_share_of_writes() -> None:
    rig = Rig(host_blocks=64, num_tiers=2, num_threads=64, write_share=0.25)
    slow, fast = rig.tiers
    keys = [chain(f"x{i}", 8) for i in range(2)]

    def write_block(key: OffloadKey, slot: int, block: object) -> None:
        rig.executor.stall(1e9)

    slow.write_block = write_block  # type: ignore[method-assign]
    for each in keys:
        rig.store(each)
        rig.settle()
        rig.settle()
    assert all((fast.contains(each) == LookupState.HIT).all() for each in keys)


# The breaker by itself.


def lone_breaker(jitter: float = 0.0) -> CircuitBreaker:
    return CircuitBreaker("memory", Ability.READ, 1.0, lambda: jitter)


def fail_alone(breaker: CircuitBreaker, now: float, times: int = MAX_FAILURES) -> BreakerState:
    breaker.lookups_failed(times, now)
    return breaker.state


def end_test(breaker: CircuitBreaker, now: float, error: TierError | None = None) -> BreakerState:
    """A test begins, if one may, and ends."""
    breaker.update(now)
    if breaker.may_test:
        breaker.begin_test(b"test")
    ended = Ended([TierResult(b"test", True, error)])
    breaker.ended(ended, now)
    return breaker.state


def test_a_tier_that_fails_again_soon_is_paused_longer_and_one_that_has_worked_is_not() -> None:
    breaker, now, pauses = lone_breaker(), 0.0, list[float]()
    for _ in range(9):
        fail_alone(breaker, now)
        pauses.append(breaker.pause_s)
        now += breaker.pause_s
        assert end_test(breaker, now) is BreakerState.WORKING
        now += 1.0
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    fail_alone(breaker, now + FAILURE_PERIOD_S)
    assert breaker.pause_s == PAUSE_S
    for worked_s, next_pause_s in ((TRUST_FACTOR * PAUSE_S - 0.1, 2 * PAUSE_S), (TRUST_FACTOR * PAUSE_S, PAUSE_S)):
        breaker = lone_breaker()
        fail_alone(breaker, 0.0)
        end_test(breaker, PAUSE_S)
        fail_alone(breaker, PAUSE_S + worked_s)
        assert breaker.pause_s == next_pause_s


def test_pauses_have_jitter() -> None:
    for jitter, half_open_after in ((0.0, 1.0), (1.0, 1.0 + JITTER)):
        breaker = lone_breaker(jitter)
        fail_alone(breaker, 0.0)
        breaker.update(half_open_after - 0.01)
        assert not breaker.may_test
        breaker.update(half_open_after)
        assert breaker.may_test


def test_transfers_hang_if_none_ends_for_a_whole_deadline() -> None:
    breaker = lone_breaker()
    breaker.begun(10.0, num_before=0)
    breaker.begun(10.5, num_before=2)
    breaker.detect_hang([b"a", b"b"], 10.9)
    breaker.detect_hang([], 11.5)
    assert breaker.num_hangs == 0
    breaker.detect_hang([b"a", b"b"], 11.0)
    assert (breaker.num_hangs, breaker.state) == (1, BreakerState.OPEN)
    breaker.detect_hang([b"a", b"b"], 13.0)
    assert breaker.num_hangs == 1, "they are overdue already"
    assert not breaker.ended(Ended([TierResult(b"c", True)]), 11.6)
    assert breaker.num_hangs == 1, "the others still hang"
    assert breaker.ended(Ended([TierResult(b"a", True), TierResult(b"b", True)]), 11.7) == {b"a", b"b"}
    assert (breaker.num_hangs, breaker.overdue) == (0, set())


def test_a_hang_ends_when_a_transfer_that_hung_succeeds() -> None:
    breaker = lone_breaker()
    for now, error, state in ((0.0, TierError.IO, BreakerState.OPEN), (100.0, None, BreakerState.WORKING)):
        breaker.update(now)
        breaker.detect_hang([b"a"], now)
        breaker.ended(Ended([TierResult(b"a", True, error)]), now + 0.2)
        assert breaker.state is state
    breaker.detect_hang([b"a"], 200.0)
    breaker.update(300.0)
    assert end_test(breaker, 300.0, TierError.IO) is BreakerState.OPEN
    breaker.ended(Ended([TierResult(b"a", True)]), 300.1)
    assert breaker.state is BreakerState.OPEN, "it is not paused for a hang any more"


def test_a_test_that_hangs_is_followed_by_another_one() -> None:
    breaker = lone_breaker()
    fail_alone(breaker, 0.0)
    breaker.update(10.0)
    breaker.begun(10.0, num_before=0)
    breaker.begin_test(b"hangs")
    breaker.detect_hang([b"hangs"], 11.0)
    assert breaker.state is BreakerState.OPEN
    assert end_test(breaker, 20.0) is BreakerState.WORKING


def test_a_breaker_that_is_off_stays_off() -> None:
    breaker = lone_breaker()
    breaker.state = BreakerState.OFF
    breaker.detect_hang([b"a"], 5.0)
    breaker.ended(Ended([TierResult(b"a", True)]), 6.0)
    assert fail_alone(breaker, 7.0) is end_test(breaker, 1e9) is BreakerState.OFF


def test_failures_in_two_periods_are_too_few() -> None:
    breaker = lone_breaker()
    for now, times in ((0.0, MAX_FAILURES - 1), (0.1, 1), (0.2, MAX_FAILURES - 2)):
        assert fail_alone(breaker, (now > 0) * FAILURE_PERIOD_S + now, times) is BreakerState.WORKING
    assert fail_alone(breaker, FAILURE_PERIOD_S + 0.3, 1) is BreakerState.OPEN
