"""When a tier is suspended, tested again, and switched off."""

from __future__ import annotations

import pytest

from kvoffload.abc import (
    OffloadKey,
    ReqContext,
    TierError,
)
from kvoffload.tiers.breaker import FAILURE_PERIOD_S, MAX_FAILURES, MAX_HANGS, BreakerState, CircuitBreaker
from tests.tiers.rig import (
    A,
    B,
    Rig,
    chain,
    content,
    slot_of,
)


def hang(rig: Rig, name: str = "x") -> list[OffloadKey]:
    """A request waits for two blocks. The read of the first one hangs."""
    keys = chain(name, 2)
    rig.store_below(keys)
    rig.tier.hanging[keys[0]] = 1e9
    rig.manager.lookup(keys, ReqContext(name))
    rig.settle()
    return keys


def wait_for_probe(rig: Rig, keys: list[OffloadKey]) -> None:
    """A request looks up ``keys`` after the deadline, which may start a test read, and that ends."""
    rig.clock.now += 1.0
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


def test_no_other_request_waits_for_a_hanging_tier() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys, other = chain("x", 2), chain("y", 2)
    rig.store_below(keys + other)
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    rig.clock.now += 1.0
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(other, B) == 0
    assert rig.manager.lookup(keys, B) == 0
    rig.settle()
    assert rig.manager.lookup(other, B) is None, "the tier works again"


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
    assert len([record for record in caplog.records if "has ended no read" in record.message]) == 1


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
    assert rig.manager.tiers[0].num_overdue == 0


def test_test_reads_are_bounded_until_a_read_ends() -> None:
    rig = Rig(host_blocks=64, load_deadline_ms=1000)
    victims = [chain(f"v{i}", 2) for i in range(10)]
    rig.store_below([key for keys in victims for key in keys])
    rig.tier.hanging = dict.fromkeys((key for keys in victims for key in keys), 1e9)
    rig.tier.hanging[victims[0][0]] = 1000.0
    rig.manager.lookup(victims[0], A)
    rig.settle()
    for keys in victims[1:]:
        wait_for_probe(rig, keys)
        rig.clock.now += 10.0
    assert len(rig.tier.reads) == 2 + MAX_HANGS - 1
    rig.tier.hanging.clear()
    rig.clock.now += 1000.0
    rig.settle()
    assert rig.manager.lookup(victims[9], B) is None
    rig.settle()
    assert rig.manager.lookup(victims[9], B) == 2


def test_a_hanging_read_does_not_change_the_read_rate() -> None:
    rig = Rig(host_blocks=32, load_deadline_ms=1000, load_only_if_faster=True)
    other = chain("y", 4)
    rig.store_below(other)
    hang(rig)
    wait_for_probe(rig, other)
    before = rig.manager.tiers[0].estimator.seconds_to_read(1)
    rig.clock.now += 1e9
    rig.settle()
    assert rig.manager.tiers[0].estimator.seconds_to_read(1) == before


def test_a_slow_tier_is_not_suspended_while_reads_end() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys, other = chain("x", 2), chain("y", 2)
    rig.store_below(keys + other)
    rig.tier.hanging[keys[1]] = 10.0
    rig.manager.lookup(keys[:1], A)
    rig.manager.poll()
    rig.clock.now += 0.9
    rig.manager.lookup(keys[1:], B)
    rig.manager.poll()
    rig.executor.drain()
    rig.manager.poll()
    assert rig.manager.tiers[0].num_reading == 1
    rig.clock.now += 0.9
    assert rig.manager.lookup(other, ReqContext("c")) is None


def test_a_tier_that_fails_too_often_is_switched_off_and_the_host_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tier_blocks=100)
    keys = chain("x", 2)
    rig.store_below(keys)
    fail(rig, MAX_FAILURES - 1)
    assert rig.manager.lookup(keys, A) is None
    assert rig.counts()["disk_off"] == 0
    fail(rig, 1)
    assert rig.manager.lookup(keys, B) == 0
    assert rig.counts()["disk_off"] == 1
    fail_messages = [record for record in caplog.records if "TIER IS OFF" in record.message]
    assert len(fail_messages) == 1
    rig.store(chain("y", 2))
    assert rig.manager.lookup(chain("y", 2), B) == 2


def test_failures_far_apart_switch_nothing_off() -> None:
    rig = Rig(tier_blocks=100)
    for _ in range(MAX_FAILURES + 2):
        fail(rig, 1)
        rig.clock.now += FAILURE_PERIOD_S / (MAX_FAILURES - 2)
    assert rig.counts()["disk_off"] == 0


# The circuit breaker by itself.


def test_a_breaker_suspends_reads_that_hang_and_works_again_when_one_ends() -> None:
    breaker = CircuitBreaker(deadline_s=1.0)
    breaker.reads_begun(10.0, num_reading_before=0)
    assert not breaker.detect_hang(10.9, num_reading=2)
    assert breaker.can_read
    assert breaker.detect_hang(11.0, num_reading=2)
    assert breaker.state is BreakerState.SUSPENDED
    assert breaker.may_probe
    breaker.reads_begun(11.5, num_reading_before=0)
    assert breaker.state is BreakerState.PROBING
    assert not breaker.may_probe, "one test read at a time"
    breaker.reads_ended(11.6, num_late=0, num_hanging=2)
    assert breaker.state is BreakerState.WORKING
    assert breaker.num_hangs == 1, "the others still hang"
    breaker.reads_ended(11.7, num_late=2, num_hanging=0)
    assert breaker.num_hangs == 0


def test_a_breaker_allows_a_bounded_number_of_test_reads() -> None:
    breaker, now = CircuitBreaker(deadline_s=1.0), 0.0
    for _ in range(MAX_HANGS):
        breaker.reads_begun(now, num_reading_before=0)
        now += 1.0
        assert breaker.detect_hang(now, num_reading=1)
    assert breaker.state is BreakerState.SUSPENDED
    assert not breaker.may_probe
    breaker.reads_ended(now, num_late=1, num_hanging=MAX_HANGS - 1)
    assert breaker.can_read


def test_a_breaker_that_is_off_stays_off() -> None:
    breaker = CircuitBreaker(deadline_s=1.0)
    breaker.reads_begun(0.0, num_reading_before=0)
    breaker.switch_off()
    assert breaker.detect_hang(5.0, num_reading=1), "its reads are overdue all the same"
    breaker.reads_ended(6.0, num_late=1, num_hanging=0)
    assert breaker.state is BreakerState.OFF
    assert not breaker.add_failures(MAX_FAILURES, 7.0), "it is not reported again"


def test_failures_in_two_periods_are_too_few() -> None:
    breaker = CircuitBreaker(deadline_s=1.0)
    assert not breaker.add_failures(MAX_FAILURES - 1, 0.0)
    assert not breaker.add_failures(1, FAILURE_PERIOD_S + 1)
    assert breaker.add_failures(MAX_FAILURES - 1, FAILURE_PERIOD_S + 2)
