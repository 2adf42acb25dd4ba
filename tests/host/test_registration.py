"""Registration: whole slots in order, only after they were touched; never given back while copies are in progress."""

from __future__ import annotations

import gc
import logging
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.host import registration as module
from kvoffload.host import touch
from kvoffload.host.pool import HostPool
from kvoffload.host.registration import Registration

PAGE = 4096
CHUNK, SMALLEST = 16, 4
"""Slots of one page per chunk."""
SIZES = {"chunk_bytes": CHUNK * PAGE, "min_chunk_bytes": SMALLEST * PAGE}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 600.0)
    monkeypatch.setattr(touch, "STEP", 3 * PAGE)


class Driver:
    """A driver that records what is registered and refuses what ``refuses`` says."""

    def __init__(self, refuses: Callable[[int, int], bool] = lambda address, nbytes: False) -> None:
        self.refuses = refuses
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.prepared: set[int] = set()
        self.during: Callable[[int, int], None] = lambda address, nbytes: None
        self.unregistered: list[int] = []
        self.threads: set[int] = set()
        self.problems: list[str] = []

    def enter_thread(self) -> None:
        self.prepared.add(threading.get_ident())

    def _enter(self) -> None:
        self.threads.add(threading.get_ident())
        if threading.get_ident() not in self.prepared:
            self.problems.append("a thread that has not called enter_thread")

    def register(self, address: int, nbytes: int) -> None:
        self._enter()
        self.calls.append((address, nbytes))
        self.during(address, nbytes)
        if any(first < address + nbytes and address < first + size for first, size in self.ranges.items()):
            self.problems.append(f"{nbytes} bytes at {address} are registered already")
        if self.refuses(address, nbytes):
            raise MemoryError("CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        self._enter()
        del self.ranges[address]
        self.unregistered.append(address)


registrations: list[Registration] = []


def register(pool: HostPool, driver: Driver, kind: type[Registration] = Registration) -> Registration:
    """Returns the registration of ``pool``, as an engine's worker makes it."""
    registration = kind(pool.data, driver, pool.wait_until_touched, **SIZES)
    pool.before_close(registration.close)
    registrations.append(registration)
    return registration


@pytest.fixture
def make_pool() -> Iterator[Callable[..., HostPool]]:
    pools = []

    def make(num_blocks: int, pages: int = 1) -> HostPool:
        pools.append(HostPool(num_blocks, pages * PAGE))
        return pools[-1]

    yield make
    while registrations:
        registrations.pop().release()
    for pool in pools:
        pool.close()


def faults(pool: HostPool, driver: Driver, registration: Any) -> list[str]:
    """Returns what is wrong with the state of ``registration``, which no call is changing."""
    found, start = list(driver.problems), pool.data.ctypes.data
    end = start
    for address, nbytes in sorted(driver.ranges.items()):
        if address != end:
            found.append(f"a gap before {address - start}")
        if (address - start) % pool.slot_bytes or nbytes % pool.slot_bytes:
            found.append(f"the chunk of {nbytes} bytes at {address - start} does not end where a slot ends")
        end = address + nbytes
        if end < start + pool.nbytes and (end - start) // pool.slot_bytes % registration.boundary_slots:
            found.append(f"the chunk ends in slot {(end - start) // pool.slot_bytes}, which is no boundary")
    if registration.num_ready_slots * pool.slot_bytes > end - start:
        found.append(f"{registration.num_ready_slots} slots are ready, but only {end - start} bytes are registered")
    return found


@pytest.mark.parametrize("seed", range(40))
def test_slots_are_registered_whole_and_in_order_whatever_the_driver_refuses(
    seed: int, make_pool: Callable[..., HostPool]
) -> None:
    rng = random.Random(seed)
    pool = make_pool(rng.randint(1, 100), rng.choice([1, 2, 3, 5, 40]))
    most = rng.randint(0, 2 * CHUNK) * PAGE
    total = rng.choice([pool.nbytes, rng.randint(0, pool.nbytes)])
    chance = rng.choice([0.0, 0.3])
    driver = Driver(
        lambda _, nbytes: nbytes > most or sum(driver.ranges.values()) + nbytes > total or rng.random() < chance
    )
    seen: list[int] = []

    def check(address: int, nbytes: int) -> None:
        started.wait()
        seen.append(registration.num_ready_slots)
        problems.extend(faults(pool, driver, registration))

    problems: list[str] = []
    started = threading.Event()
    driver.during = check
    registration = register(pool, driver)
    started.set()
    registration._thread.join()
    assert problems + faults(pool, driver, registration) == []
    assert seen == sorted(seen)
    assert registration.num_ready_slots * pool.slot_bytes == sum(driver.ranges.values())
    assert max((nbytes for nbytes in driver.ranges.values()), default=0) <= max(CHUNK * PAGE, pool.slot_bytes)
    if most >= CHUNK * PAGE and most >= pool.slot_bytes and total == pool.nbytes and not chance:
        assert registration.num_ready_slots == pool.num_blocks
    # Each refusal shrinks the chunk, or is the last.
    assert len(driver.calls) - len(driver.ranges) <= (CHUNK // SMALLEST).bit_length() + CHUNK.bit_length()
    before = list(driver.ranges)
    registration.release()
    assert list(driver.ranges) == before, "the pool stays registered until it is closed"
    pool.close()
    assert registration.close()
    assert driver.unregistered == before[::-1], "the last chunk first"
    assert not driver.problems
    assert not driver.ranges
    assert registration.num_ready_slots == 0
    assert threading.get_ident() not in driver.threads


def test_a_planted_count_that_is_raised_before_the_call_returns_is_noticed(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(40)

    class Early(Registration):
        @property
        def num_ready_slots(self) -> int:
            count = len(driver.calls) * CHUNK
            return min(count, pool.num_blocks)

    found: list[str] = []
    made = threading.Event()
    driver = Driver()

    def look(address: int, nbytes: int) -> None:
        made.wait()
        found.extend(faults(pool, driver, registration))

    driver.during = look
    registration = register(pool, driver, Early)
    made.set()
    registration._thread.join()
    assert any("slots are ready, but only" in fault for fault in found)


def test_nothing_is_registered_while_its_pages_may_move(make_pool: Callable[..., HostPool]) -> None:
    """The thread waits until the pool has touched and collapsed the whole chunk."""
    pool, driver = make_pool(40), Driver()
    start, log = pool.data.ctypes.data, list[tuple[str, int]]()

    def wait(nbytes: int) -> bool:
        log.append(("touched", nbytes // PAGE))
        return pool.wait_until_touched(nbytes)

    driver.during = lambda address, nbytes: log.append(("registers", (address + nbytes - start) // PAGE))
    registration = Registration(pool.data, driver, wait, **SIZES)
    registration._thread.join()
    expected = [("touched", 16), ("registers", 16), ("touched", 32), ("registers", 32), ("touched", 40)]
    assert log == [*expected, ("registers", 40)]


def test_a_refusal_is_one_warning_that_names_cause_and_fix(
    make_pool: Callable[..., HostPool], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    version = tmp_path / "version"
    version.write_text("Linux version 6.8.0")
    monkeypatch.setattr(module, "_VERSION", version)
    pool = make_pool(64)
    driver = Driver(lambda address, nbytes: address + nbytes > pool.data.ctypes.data + 24 * PAGE)
    with caplog.at_level(logging.WARNING):
        registration = register(pool, driver)
        registration._thread.join()
    assert registration.num_ready_slots == 24
    (line,) = caplog.messages
    assert "registered only 96 KiB of 256 KiB of the host pool (CUDA_ERROR_OUT_OF_MEMORY (2))" in line
    assert "set host_bytes lower" in line
    assert "dmesg" in line
    calls = len(driver.calls)
    version.write_text("Linux version 5.15.167.4-microsoft-standard-WSL2")
    with caplog.at_level(logging.WARNING):
        register(pool, Driver(lambda *_: True))._thread.join()
    assert "WSL" in caplog.messages[-1]
    assert len(driver.calls) == calls, "it stopped for good"


# The end.


def end_of_unregistering() -> None:
    """Waits until no registration is being closed any more."""
    for thread in threading.enumerate():
        if thread.name == "kvoffload-unregister":
            thread.join()


class Forgetful(Registration):
    """A planted bug: it does not wait for the end of copies."""

    def close(self) -> bool:
        self.release()
        return super().close()


@pytest.mark.parametrize(("kind", "is_early"), [(Registration, False), (Forgetful, True)])
def test_nothing_is_unregistered_while_copies_are_in_progress(
    kind: type[Registration], is_early: bool, make_pool: Callable[..., HostPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 0.2)
    pool, driver = make_pool(40), Driver()
    registration = register(pool, driver, kind)
    registration._thread.join()
    assert len(driver.ranges) == 3
    pool.close()
    end_of_unregistering()
    assert bool(driver.unregistered) == is_early


def test_copies_that_do_not_end_keep_the_memory_registered(
    make_pool: Callable[..., HostPool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 0.2)
    driver = Driver()
    registration = register(make_pool(40), driver)
    registration._thread.join()
    registration.close()
    end_of_unregistering()
    registration.release()
    assert not registration.close(), "a second call does not try again"
    assert len(driver.ranges) == 3
    assert "stays registered until the process ends: copies, or a call of the driver, have not ended" in caplog.text


def test_a_driver_that_hangs_holds_up_neither_the_start_nor_close(
    make_pool: Callable[..., HostPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 0.2)
    entered, release = threading.Event(), threading.Event()
    driver = Driver()

    def hang(address: int, nbytes: int) -> None:
        entered.set()
        release.wait()

    driver.during = hang
    pool = make_pool(40)
    registration = register(pool, driver)
    entered.wait()
    assert registration.num_ready_slots == 0
    registration.release()
    assert not registration.close()
    release.set()
    registration._thread.join()
    assert len(driver.calls) == 1, "nothing is registered after close"


@pytest.mark.parametrize("ends", [True, False])
def test_memory_that_is_still_registered_stays_mapped_and_no_other(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 600.0 if ends else 0.05)
    pool, driver = HostPool(40, PAGE), Driver()
    registration = Registration(pool.data, driver, pool.wait_until_touched, **SIZES)
    pool.before_close(registration.close)
    registration._thread.join()
    memory = weakref.ref(pool.data)
    if ends:
        registration.release()
    pool.close()
    end_of_unregistering()
    if not ends:
        del pool, registration
    gc.collect()
    assert (memory() is None) is (not driver.ranges) is ends


def test_closing_a_pool_that_is_not_touched_yet_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(40, PAGE)
    wait, asked, go = pool.wait_until_touched, threading.Event(), threading.Event()

    def never_touched(nbytes: int | None = None) -> bool:
        asked.set()
        go.wait()
        return wait(pool.nbytes + 1)

    monkeypatch.setattr(pool, "wait_until_touched", never_touched)
    driver = Driver()
    registration = register(pool, driver)
    asked.wait()
    go.set()
    registration.release()
    pool.close()
    registration._thread.join()
    assert not driver.calls
    assert registration.close()


@pytest.mark.parametrize("slot_mib", [1, 3, 20])
def test_a_call_registers_so_little_that_no_launch_waits_for_long(slot_mib: int) -> None:
    """The driver takes about 0.1 s per GiB: between 3 and 7 ms per call, so that calls are not too many either."""
    driver = Driver()
    # Never touched, so this takes no memory.
    slots = np.zeros((300 // slot_mib, slot_mib << 20), np.uint8)
    registration = Registration(slots, driver, lambda nbytes: True)
    registration._thread.join()
    seconds = [0.1 * nbytes / (1 << 30) for _, nbytes in driver.calls]
    assert all(0.003 < each < 0.007 for each in seconds[:-1])
    assert sum(nbytes for _, nbytes in driver.calls) == slots.nbytes
    registration.release()
    assert registration.close()


def test_after_each_call_the_thread_pauses_for_as_long_as_it_took(
    monkeypatch: pytest.MonkeyPatch, make_pool: Callable[..., HostPool]
) -> None:
    """Then work that the driver has delayed can run."""
    now, pauses, driver = [0.0], list[float | None](), Driver()

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return super().wait(0.0)

    def takes_three_seconds(address: int, nbytes: int) -> None:
        now[0] += 3.0

    driver.during = takes_three_seconds
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    registration = register(make_pool(2 * CHUNK), driver)
    registration._thread.join()
    assert pauses == [3.0, 3.0]
