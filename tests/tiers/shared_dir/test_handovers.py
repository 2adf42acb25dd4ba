"""What a server hands over is found by others as soon as it is written, not with their next pass."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import Slots
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.shared_dir.background import Repeating
from kvoffload.tiers.shared_dir.followers import FOLLOW_S
from kvoffload.tiers.shared_dir.seats import MAX_SEATS, seat_name
from tests.clock import Clock
from tests.sim.shared_folder import SteppedRepeating
from tests.tiers.disk.rig import key
from tests.tiers.shared_dir.rig import Server

PAUSE_S = 0.005
TEST_DEADLINE_S = 60.0


class Woken(Server):
    """A server whose threads are run by ``wake_up``, if they are due. Time stands still meanwhile."""

    repeated: list[SteppedRepeating]

    def wake_up(self) -> int:
        """Returns how many of them have run."""
        due = [each for each in self.repeated if each.is_due]
        for each in due:
            each.run()
        return len(due)

    def put(self, *names: int) -> None:
        """Writes blocks as ``Server.write`` does, but others learn of them only if a thread is woken."""
        self.tier.write([key(name) for name in names], slots(len(names)))
        self.run()


def slots(n: int) -> Slots:
    return np.arange(n)


@pytest.fixture
def woken(path: Path, clock: Clock) -> Iterator[Callable[..., Woken]]:
    def open_server(**settings: Any) -> Woken:
        repeated: list[SteppedRepeating] = []

        def repeat(
            name: str, do: Callable[[], None], interval_s: float, finish: Callable[[], None]
        ) -> SteppedRepeating:
            repeated.append(SteppedRepeating(do, interval_s, finish, clock))
            return repeated[-1]

        server = Woken(path, time=clock, repeat=repeat, seed=len(opened), **settings)
        server.repeated = repeated
        opened.append(server)
        server.wake_up()
        return server

    opened: list[Woken] = []
    yield open_server
    for server in opened:
        server.tier.close()


class Counting(DirectoryStorage):
    """Counts how often it is listed."""

    counts: Counter[str] = Counter()

    def folders(self) -> list[str]:
        self.counts["listed"] += 1
        return super().folders()


PLACES = "|..|../../etc|writer-|writer-01|writer-1/../..|writer-9999|writer-99999|/tmp|writer-7\n|writer-\u0661"


@pytest.mark.parametrize("place", PLACES.split("|"))
def test_a_place_that_is_no_seat_does_no_harm(
    woken: Callable[..., Woken], clock: Clock, path: Path, place: str
) -> None:
    """Nothing is made or opened for it, and all others are followed as before."""
    one, two = woken(), woken()
    clock.now += FOLLOW_S
    two.wake_up()
    one.put(1)
    one.wake_up()
    before = sorted(path.parent.rglob("*"))
    for _ in range(3):
        clock.now += 2 * PAUSE_S
        two.tier.look_for([key(1)], place, PAUSE_S)
        two.wake_up()
    assert sorted(path.parent.rglob("*")) == before
    one.tier.writer.keep()
    clock.now += FOLLOW_S
    two.wake_up()
    assert two.finds(1) == [1]


def test_names_of_unknown_seats_have_the_directory_listed_once_per_pass(
    woken: Callable[..., Woken], clock: Clock, path: Path
) -> None:
    one = woken(storage=lambda: Counting(path))
    clock.now += FOLLOW_S
    one.wake_up()
    Counting.counts.clear()
    for number in range(10, 10 + 2 * MAX_SEATS):
        one.tier.look_for([key(1)], seat_name(number), 0.0)
        one.wake_up()
    assert Counting.counts["listed"] <= 1


@pytest.mark.parametrize("looks", [True, False])
def test_a_server_that_waits_follows_the_seat_at_once(woken: Callable[..., Woken], clock: Clock, looks: bool) -> None:
    one, two = woken(), woken()
    clock.now += FOLLOW_S
    two.wake_up()
    one.tier.hand_over([key(1)])
    one.put(1)
    one.wake_up()
    if looks:
        two.tier.look_for([key(1)], one.tier.seat.name, PAUSE_S)
    assert two.wake_up() == looks
    assert two.finds(1) == [1] * looks
    # It looks no more often than it is told.
    one.put(2)
    one.tier.hand_over([key(2)])
    one.wake_up()
    two.tier.look_for([key(2)], one.tier.seat.name, PAUSE_S)
    assert two.wake_up() == (not looks)
    clock.now += 2 * PAUSE_S
    two.tier.look_for([key(2)], one.tier.seat.name, PAUSE_S)
    two.wake_up()
    assert two.finds(1, 2) == [1, 2]


def test_blocks_that_never_come_are_forgotten(woken: Callable[..., Woken], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones of many: their journal is written with the next one only."""
    monkeypatch.setattr("kvoffload.tiers.shared_dir.tier.MAX_HANDED_OVER", 3)
    one = woken()
    one.tier.hand_over([key(1)])
    one.tier.hand_over([key(number) for number in range(10, 13)])
    one.wake_up()
    one.put(1)
    assert one.wake_up() == 0
    one.put(12)
    assert one.wake_up() == 1


# The threads.


def test_a_thread_that_is_woken_goes_on_at_once() -> None:
    calls = threading.Semaphore(0)
    thread = Repeating("test", calls.release, 1e6, lambda: None)
    try:
        for _ in range(3):
            assert calls.acquire(timeout=TEST_DEADLINE_S)
            assert not calls.acquire(blocking=False), "it has run although nobody has woken it"
            thread.wake()
        assert calls.acquire(timeout=TEST_DEADLINE_S)
    finally:
        thread.stop(TEST_DEADLINE_S)
