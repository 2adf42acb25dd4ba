"""The rule that goes by the time between the last two uses of a block, and the rates of return that it learns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvoffload.abc import OffloadKey
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.auto import AutoPolicy
from kvoffload.cache.policies.tournament import RULES
from kvoffload.cache.slots import HostBackend
from kvoffload.native import load
from kvoffload.native.reference import TICKS_PER_S, ReturnRates
from tests.cache.reference_auto import Fixed

BY_NAME = {rule.name: rule for rule in RULES}
native = load("_ghosts")
RATES = [ReturnRates] if native is None else [ReturnRates, native.ReturnRates]
rates_of_both = pytest.mark.parametrize("make", RATES, ids=["reference", "native"][: len(RATES)])


class Server:
    """A manager with one rule, whose clock the requests set. ``sees_time=False``: the clock stands still."""

    def __init__(self, rule: str, num_blocks: int, sees_time: bool = True) -> None:
        self.now, self.sees_time = 0.0, sees_time
        made = AutoPolicy(num_blocks, Fixed(num_blocks, BY_NAME[rule]))
        self.manager = PolicyOffloadingManager(
            HostBackend(16, num_blocks), made, clock=lambda: self.now if sees_time else 0.0
        )

    def serve(self, now: float, chain: list[OffloadKey]) -> int:
        """Serves a request at once. Returns how many leading blocks were cached."""
        self.now = now
        self.manager.touch(chain)
        found = self.manager.lookup(chain)
        output = self.manager.prepare_store(chain[: self.manager.num_blocks])
        stored = [] if output is None else output.keys_to_store
        if output is not None:
            self.manager.complete_store(output.store_spec)
        self.manager.end_chain(chain, stored)
        self.manager.check_integrity()
        return found or 0

    def holds(self, chain: list[OffloadKey]) -> int:
        return self.manager.lookup(chain) or 0


def keys(session: int, num: int) -> list[OffloadKey]:
    return [make_offload_key(b"%8d%8d" % (session, n), 0) for n in range(num)]


def agents(seed: int, num_requests: int = 1500, num_at_once: int = 24) -> Iterator[tuple[float, list[OffloadKey]]]:
    """Yields requests of sessions, some of which return every few seconds and others after an hour. One in twelve
    requests is the last of its session; the chain of the next one is a block longer."""
    rng, num_sessions = random.Random(seed), 0
    sessions: list[tuple[float, int, int, float]] = []
    for _ in range(num_requests):
        while len(sessions) < num_at_once:
            pause = rng.choice((3.0, 3.0, 4000.0))
            start = sessions[0][0] if sessions else 0.0
            sessions.append((start + rng.random() * pause, num_sessions, rng.randint(2, 6), pause))
            num_sessions += 1
        sessions.sort()
        at, session, num, pause = sessions.pop(0)
        yield at, keys(session, num)
        if rng.random() > 1 / 12:
            sessions.append((at + pause * rng.uniform(0.7, 1.4), session, num + 1, pause))


def found_by(rule: str, sees_time: bool = True) -> int:
    server = Server(rule, 60, sees_time)
    return sum(server.serve(at, chain) for at, chain in agents(1))


def test_blocks_of_sessions_that_pause_long_do_not_take_the_room_of_others() -> None:
    by_gap, others = found_by("gap"), [found_by(rule) for rule in BY_NAME if rule != "gap"]
    assert by_gap > 1.05 * max(others)
    assert by_gap > 1.05 * found_by("gap", sees_time=False), "it would do as well without time"


def test_until_it_has_learned_the_oldest_block_leaves() -> None:
    server = Server("gap", 6)
    for session in range(5):
        server.serve(session, keys(session, 2))
    assert [server.holds(keys(session, 2)) for session in range(5)] == [0, 0, 2, 2, 2]


def test_it_refuses_what_never_returns_and_keeps_what_does() -> None:
    server = Server("gap", 16)
    for turn in range(400):
        server.serve(10.0 * turn, keys(turn % 4, 3))
        server.serve(10.0 * turn + 5, keys(1000 + turn, 6))
    assert [server.holds(keys(session, 3)) for session in range(4)] == [3] * 4
    new = keys(9999, 10)
    server.serve(4000.0, new)
    assert server.holds(new) < 10
    assert [server.holds(keys(session, 3)) for session in range(4)] == [3] * 4


def test_what_is_far_behind_its_time_leaves_first() -> None:
    server = Server("gap", 40)
    for turn in range(600):
        # Each session asks four times, every ten seconds.
        for session in range(turn, turn + 4):
            server.serve(10.0 * turn + session - turn, keys(session, 4))
    server.serve(6000.0, keys(9000, 4))
    ended, alive = [server.holds(keys(session, 4)) for session in (592, 593)], server.holds(keys(602, 4))
    assert alive == 4
    assert 4 not in ended


@rates_of_both
def test_the_value_is_returns_per_time_in_the_best_time_to_come(make: Callable[[], Any]) -> None:
    rates = make()
    for _ in range(1000):
        rates.add(1, 10 * TICKS_PER_S, True)
        rates.add(2, 1000 * TICKS_PER_S, True)
        rates.add(3, 1000 * TICKS_PER_S, False)
    rates.update(1.0)
    now = [rates.value(gap, 0) * TICKS_PER_S for gap in (1, 2, 3)]
    assert now[0] == pytest.approx(1 / 10, rel=0.3)
    assert now[1] == pytest.approx(1 / 1000, rel=0.3)
    assert now[2] < now[1] / 10
    # Shortly before its time a block is worth more, and long after it nothing.
    assert rates.value(2, 800 * TICKS_PER_S) > 2 * rates.value(2, 0)
    assert rates.value(1, 100 * TICKS_PER_S) < rates.value(1, 0) / 10
    # Blocks that wait are seen until the next update.
    for _ in range(1000):
        rates.wait(1, 10_000 * TICKS_PER_S)
    rates.update(1.0)
    assert rates.value(1, 0) < now[0] / TICKS_PER_S
    rates.update(1.0)
    assert rates.value(1, 0) * TICKS_PER_S == pytest.approx(now[0])


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_clock_that_is_wrong_stops_nothing(time: float) -> None:
    server = Server("gap", 8)
    for session, now in enumerate((1.0, time, 2.0, time, 3.0)):
        server.serve(now, keys(session, 3))
