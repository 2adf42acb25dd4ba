"""The simulated storage loses only what a kill or power loss may take, and every fault is injected and counted."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.storage import Storage, StoredFile
from tests.clock import Clock
from tests.sim.executor import Killed, SteppedExecutor
from tests.sim.shared_storage import LOCAL, Mount, NfsClient, NfsServer, SimulatedStorage
from tests.sim.storage import PAGE, FaultRates, FaultyStorage


def pattern(nbytes: int, seed: int = 0) -> ByteArray:
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


def read(file: StoredFile, nbytes: int, offset: int = 0) -> ByteArray:
    buffer = np.zeros(nbytes, np.uint8)
    return buffer[: file.read([buffer], offset)]


def aligned(nbytes: int) -> ByteArray:
    room = np.zeros(nbytes + PAGE, np.uint8)
    return room[-room.ctypes.data % PAGE :][:nbytes]


def write(file: StoredFile, nbytes: int) -> None:
    file.write([pattern(nbytes)], 0)


def new_file(storage: Storage, size: int = 0, direct: bool = False) -> StoredFile:
    storage.make_folder("f")
    file = storage.open("f", "x", create=True, direct=direct)
    file.resize(size)
    return file


def error_of(call: object, *arguments: object) -> int | None:
    """Returns the number of the OSError that the call raises."""
    with pytest.raises(OSError) as raised:
        call(*arguments)  # type: ignore[operator]
    return raised.value.errno


# All storages.


@pytest.fixture(params=["directory", "simulated", "network", "faulty"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A directory that is not locked, as each kind of storage has it."""
    made: dict[str, Callable[[], Storage]] = {
        "directory": lambda: DirectoryStorage(tmp_path / "disk"),
        "simulated": lambda: SimulatedStorage(1 << 20),
        "network": lambda: NfsServer(1 << 20).connect(Mount(entries_s=0.0)).storage(),
        "faulty": lambda: FaultyStorage(SimulatedStorage(1 << 20)),
    }
    storage = made[request.param]()
    yield storage
    storage.close()


@pytest.mark.parametrize("direct", [False, True])
def test_several_buffers_are_written_and_read_in_order(storage: Storage, direct: bool) -> None:
    file = new_file(storage, 4 * PAGE, direct)
    pages = aligned(8 * PAGE).reshape(8, PAGE)
    pages[:4] = pattern(4 * PAGE).reshape(4, PAGE)
    assert file.write([pages[0], pages[2:4].reshape(-1)], PAGE) == 3 * PAGE
    assert file.read([pages[5], pages[4], pages[6]], PAGE) == 3 * PAGE
    assert np.array_equal(pages[[5, 4, 6]], pages[[0, 2, 3]])
    assert file.read([pages[7]], 4 * PAGE) == 0
    if not direct:
        assert file.read([pages[7]], 4 * PAGE - 20) == 20
    file.close()


def test_room_is_taken_at_once_and_given_back(storage: Storage) -> None:
    file = new_file(storage, PAGE + 1)
    assert (file.size(), file.allocated_bytes(), storage.held_bytes()) == (PAGE + 1, 2 * PAGE, 2 * PAGE)
    assert error_of(file.resize, storage.free_bytes() + (1 << 40)) == errno.ENOSPC
    assert (file.size(), file.allocated_bytes()) == (PAGE + 1, 2 * PAGE)
    file.write([pattern(PAGE)], 0)
    file.resize(5)
    assert storage.held_bytes() == PAGE
    file.resize(PAGE)
    assert not read(file, PAGE)[5:].any()
    other = storage.open("f", "y", create=True)
    other.resize(3 * PAGE)
    assert storage.held_bytes() == 4 * PAGE
    assert storage.held_bytes(lambda folder, name: (folder, name) == ("f", "x")) == 3 * PAGE
    file.close()
    other.close()


def test_folders_and_files_are_listed_and_removed(storage: Storage) -> None:
    assert storage.folders() == []
    assert error_of(storage.files, "f") == errno.ENOENT
    new_file(storage).close()
    storage.make_folder("f")
    storage.make_folder("e")
    assert (storage.folders(), storage.files("f"), storage.files("e")) == (["e", "f"], ["x"], [])
    assert error_of(storage.open, "e", "x") == errno.ENOENT
    assert error_of(storage.remove, "e", "x") == errno.ENOENT
    assert error_of(storage.remove_folder, "f") == errno.ENOTEMPTY
    storage.remove("f", "x")
    storage.remove_folder("f")
    assert storage.folders() == ["e"]


def test_a_closed_storage_is_not_locked(storage: Storage) -> None:
    storage.lock()
    storage.lock()
    assert storage.try_lock()
    storage.close()
    storage.close()


# SimulatedStorage


def test_a_removed_file_takes_room_while_it_is_open() -> None:
    storage = SimulatedStorage(10 * PAGE)
    file = new_file(storage, 3 * PAGE)
    storage.remove("f", "x")
    assert storage.files("f") == []
    assert storage.used_bytes == 3 * PAGE
    file.write([pattern(PAGE)], 0)
    file.close()
    assert storage.used_bytes == 0


def test_one_owner_at_a_time() -> None:
    storage = SimulatedStorage(10 * PAGE)
    storage.lock()
    successor = storage.restart()
    successor.lock()
    other = NfsClient(successor.server, LOCAL).storage()
    with pytest.raises(ConfigError, match="dir: another"):
        other.lock()
    successor.close()
    other.lock()


def test_a_medium_that_is_mounted_read_only() -> None:
    storage = SimulatedStorage(10 * PAGE)
    new_file(storage, PAGE).write([pattern(PAGE)], 0)
    successor = storage.restart()
    successor.read_only = True
    assert (FaultyStorage(storage).read_only, FaultyStorage(successor).read_only) == (False, True)
    file = successor.open("f", "x")
    assert np.array_equal(read(file, PAGE), pattern(PAGE))
    for attempt in (
        partial(file.write, [pattern(PAGE)], 0),
        partial(file.resize, 2 * PAGE),
        partial(successor.remove, "f", "x"),
        partial(successor.open, "f", "new", create=True),
        partial(successor.make_folder, "g"),
        partial(successor.remove_folder, "f"),
    ):
        assert error_of(attempt) == errno.EROFS
    assert not successor.restart().read_only


def test_a_clone_is_independent() -> None:
    storage = SimulatedStorage(10 * PAGE)
    storage.lock()
    file = new_file(storage, PAGE)
    file.write([pattern(PAGE)], 0)
    clone = storage.clone()
    assert (storage.is_locked, clone.is_locked, storage.num_open, clone.num_open) == (True, False, 1, 0)
    assert clone.used_bytes == storage.used_bytes
    copy = clone.open("f", "x")
    copy.write([pattern(PAGE, 1)], 0)
    clone.open("f", "y", create=True).resize(PAGE)
    assert np.array_equal(read(file, PAGE), pattern(PAGE))
    assert (storage.files("f"), storage.used_bytes) == (["x"], PAGE)
    clone.remove("f", "x")
    assert clone.used_bytes == 2 * PAGE
    copy.close()
    assert clone.used_bytes == PAGE


def test_power_loss_undoes_some_unsynced_pages() -> None:
    kept: set[int] = set()
    lost: set[int] = set()
    for seed in range(20):
        storage = SimulatedStorage(100 * PAGE, seed)
        file = new_file(storage, 4 * PAGE)
        file.write([pattern(4 * PAGE, 1)], 0)
        storage.sync()
        file.write([pattern(3 * PAGE, 2)], 0)
        storage.power_loss()
        data = read(storage.restart().open("f", "x"), 4 * PAGE).reshape(4, PAGE)
        old, new = pattern(4 * PAGE, 1).reshape(4, PAGE), pattern(3 * PAGE, 2).reshape(3, PAGE)
        assert np.array_equal(data[3], old[3])
        for page in range(3):
            was_kept = np.array_equal(data[page], new[page])
            assert was_kept or np.array_equal(data[page], old[page])
            (kept if was_kept else lost).add(page)
    assert kept == lost == {0, 1, 2}


def torn_by_a_kill(seed: int) -> ByteArray:
    """Returns the file after a kill in the middle of a write of four pages over zeros."""
    executor = SteppedExecutor(seed, chance=1.0, pause_chance=0.5)
    storage = SimulatedStorage(100 * PAGE, seed, pause=executor.pause)
    file = new_file(storage, 4 * PAGE)
    executor.submit_write(partial(write, file, 4 * PAGE))
    executor.turn()
    executor.kill()
    return read(storage.restart().open("f", "x"), 4 * PAGE)


def test_a_kill_tears_a_write_under_way() -> None:
    whole = pattern(4 * PAGE)
    shapes = set()
    for seed in range(80):
        data = torn_by_a_kill(seed)
        assert (data == torn_by_a_kill(seed)).all()
        assert ((data == whole) | (data == 0)).all()
        shapes.add(tuple((data == whole).reshape(4, PAGE).mean(axis=1).tolist()))
    assert {(1, 1, 1, 1), (0, 0, 0, 0)} <= shapes
    assert any(0 < share < 1 for shape in shapes for share in shape), "no write was torn within a page"
    assert any(early < late for shape in shapes for early, late in pairwise(shape)), "no later page came first"


# FaultyStorage


def faulty(
    seed: int = 0, size: int = 16 * PAGE, direct: bool = False, **rates: float
) -> tuple[FaultyStorage, StoredFile]:
    storage = FaultyStorage(SimulatedStorage(1 << 20), seed)
    file = new_file(storage, size, direct)
    storage.rates = FaultRates(**rates)
    return storage, file


def differing_bits(a: ByteArray, b: ByteArray) -> int:
    return int(np.unpackbits(a ^ b).sum())


def test_a_flip_on_read_is_not_in_the_medium() -> None:
    storage, file = faulty(flip_on_read=1.0)
    data = pattern(PAGE)
    file.write([data], 0)
    assert differing_bits(read(file, PAGE), data) == 1
    storage.active = False
    assert np.array_equal(read(file, PAGE), data)
    assert storage.injected["flip_on_read"] == 1


def test_a_flip_on_write_is_in_the_medium_and_not_in_the_callers_buffer() -> None:
    storage, file = faulty(flip_on_write=1.0)
    data = pattern(PAGE)
    file.write([data[:100], data[100:]], 0)
    assert np.array_equal(data, pattern(PAGE))
    assert differing_bits(read(file, PAGE), data) == 1
    assert storage.injected["flip_on_write"] == 1


def test_a_torn_write_reports_all_bytes_as_written() -> None:
    cuts = set()
    for seed in range(30):
        storage, file = faulty(seed, direct=True, torn_write=1.0)
        assert file.write([pattern(4 * PAGE)], 0) == 4 * PAGE
        data = read(file, 4 * PAGE)
        cut = int((data != 0).sum())
        assert np.array_equal(data[:cut], pattern(4 * PAGE)[:cut])
        assert not data[cut:].any()
        assert storage.injected["torn_write"] == 1
        cuts.add(cut)
    assert cuts == {0, PAGE, 2 * PAGE, 3 * PAGE}


@pytest.mark.parametrize("direct", [False, True])
def test_short_transfers_report_the_bytes_moved(direct: bool) -> None:
    for seed in range(20):
        storage, file = faulty(seed, direct=direct, short_write=1.0)
        n = file.write([pattern(PAGE), pattern(PAGE, 1)], 0)
        assert 0 < n < 2 * PAGE
        assert storage.injected["short_write"] == 1
        storage.rates = FaultRates(short_read=1.0)
        assert len(read(file, 2 * PAGE)) < 2 * PAGE
        assert storage.injected["short_read"] == 1


def test_injected_errors_have_system_error_numbers() -> None:
    storage, file = faulty(no_space=1.0)
    assert error_of(file.write, [pattern(10)], 0) == errno.ENOSPC
    assert error_of(file.resize, 10) == errno.ENOSPC
    assert len(read(file, 10)) == 10
    storage.rates = FaultRates(io_error=1.0)
    for call, *arguments in (
        (file.write, [pattern(10)], 0),
        (read, file, 10),
        (file.size,),
        (storage.open, "f", "x"),
        (storage.folders,),
        (storage.remove, "f", "x"),
    ):
        assert error_of(call, *arguments) == errno.EIO
    assert storage.injected == {"no_space": 2, "io_error": 6}


def test_a_kill_at_an_operation_leaves_it_half_done_and_ends_all_later_ones() -> None:
    cuts = set()
    for seed in range(20):
        storage, file = faulty(seed)
        file.write([pattern(100, 1)], 0)
        storage.kill_at = storage.operations + 1
        read(file, 10)
        with pytest.raises(Killed):
            file.write([pattern(100)], 0)
        with pytest.raises(Killed):
            read(file, 10)
        with pytest.raises(Killed):
            storage.folders()
        assert isinstance(storage.inner, SimulatedStorage)
        data = read(storage.inner.restart().open("f", "x"), 100)
        cut = int((data == pattern(100)).sum())
        assert np.array_equal(data[cut:], pattern(100, 1)[cut:]) or cut > 90
        cuts.add(cut)
    assert len(cuts) > 5


# SteppedExecutor


def order_of(seed: int) -> list[str]:
    """Runs twelve jobs of three turns each. Returns the order of all turns."""
    executor, log = SteppedExecutor(seed, num_threads=3), []

    def job(name: str) -> None:
        for turn in range(3):
            log.append(f"{name}{turn}")
            executor.pause()

    for name in "abcdef":
        executor.submit_write(partial(job, name))
        executor.submit_read(partial(job, name.upper()))
    while not executor.idle:
        executor.tick()
    return log


def test_jobs_begin_in_order_reads_first_and_the_seed_interleaves_them() -> None:
    orders = [order_of(seed) for seed in range(20)]
    assert orders == [order_of(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 15
    for order in orders:
        assert len(order) == 36
        assert "".join(entry[0] for entry in order if entry[1] == "0") == "ABCDEFabcdef"
    ends = {"".join(entry[0] for entry in order if entry[1] == "2") for order in orders}
    assert len(ends) > 10, "jobs end in the order in which they began"


def test_a_stalled_job_goes_on_after_its_time() -> None:
    clock = Clock(0.0)
    log: list[float] = []
    executor = SteppedExecutor(clock=clock)

    def job() -> None:
        executor.stall(5.0)
        log.append(clock.now)

    executor.submit_read(job)
    executor.drain()
    clock.now = 4.9
    executor.drain()
    assert log == []
    assert not executor.close(timeout_s=0.05)
    clock.now = 5.0
    executor.drain()
    assert log == [5.0]
    assert executor.idle
