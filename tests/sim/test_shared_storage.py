"""A simulated network file system does what a real NFS mount does, as far as the checks of both go."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.storage import Storage, StoredFile
from tests.clock import Clock
from tests.sim.shared_storage import Mount, NfsClient, NfsServer
from tests.sim.storage import PAGE

MOUNTS = [os.environ.get(f"KVOFFLOAD_NFS_{name}", "") for name in "AB"]
"""Mounts of one directory by two NFS clients, see tools/nfs_guest.py. Attributes may be old by at most 3 s there."""
ATTRIBUTES_S = 3.0


@dataclass
class Pair:
    """Two clients' views of one directory, with a folder "f"; ``sleep`` lets time pass."""

    a: Storage
    b: Storage
    sleep: Callable[[float], None]
    look: Callable[[bool], StoredFile]
    """Opens file "x" at the second client for reading, given whether directly."""
    is_real: bool = False

    def check_stale(self, seen: object, old: object, new: object) -> None:
        """Checks that the simulation shows what is out of date, which a real mount may do."""
        assert seen == old or (self.is_real and seen == new)


def simulated() -> Pair:
    clock = Clock(0.0)
    server = NfsServer(16 << 20, clock=clock)
    mount = Mount(attributes_s=ATTRIBUTES_S, entries_s=ATTRIBUTES_S)
    a, b = server.connect(mount, 1).storage(), server.connect(mount, 2)
    a.make_folder("f")
    return Pair(a, b.storage(), lambda s: advance(clock, s), lambda direct: b.reader().open("f", "x", direct=direct))


def real() -> Pair:
    name = uuid.uuid4().hex
    a, b = (DirectoryStorage(Path(mount) / name) for mount in MOUNTS)
    a.make_folder("f")
    # A client that has a file open for writing, too, takes every change for its own and keeps its cached pages.
    reader = DirectoryStorage(b.path, as_is=True)
    return Pair(a, b, time.sleep, lambda direct: reader.open("f", "x", direct=direct), is_real=True)


def advance(clock: Clock, seconds: float) -> None:
    clock.now += seconds


@pytest.fixture(params=["simulated", "real"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "real" and not all(MOUNTS):
        pytest.skip("needs two NFS mounts; tools/nfs_guest.py makes them, see tests/tools/test_nfs_guest.py")
    pair = simulated() if request.param == "simulated" else real()
    yield pair
    pair.a.close()
    pair.b.close()


def page(letter: str) -> ByteArray:
    buffer = aligned()
    buffer[:] = ord(letter)
    return buffer


def aligned() -> ByteArray:
    room = np.zeros(2 * PAGE, np.uint8)
    return room[-room.ctypes.data % PAGE :][:PAGE]


def text(file: StoredFile, offset: int = 0) -> str:
    """Returns the letter that the page at ``offset`` has, or "short" if not all of it can be read."""
    buffer = aligned()
    if file.read([buffer], offset) < PAGE:
        return "short"
    assert len(set(buffer.tolist())) == 1
    return chr(buffer[0])


def put(storage: Storage, letter: str, offset: int = 0) -> None:
    """Writes a page, which is at the server when this returns."""
    file = storage.open("f", "x", create=True)
    assert file.write([page(letter)], offset) == PAGE
    file.close()


def test_what_was_closed_is_seen_by_who_opens_later(pair: Pair) -> None:
    put(pair.a, "a")
    assert text(pair.look(False)) == "a"
    put(pair.a, "b")
    assert text(pair.look(False)) == "b"


def test_a_buffered_write_is_not_seen_before_it_is_sent(pair: Pair) -> None:
    put(pair.a, "a")
    file = pair.a.open("f", "x")
    file.write([page("b")], 0)
    assert text(file) == "b"
    pair.check_stale(text(pair.look(False)), "a", "b")
    file.close()
    assert text(pair.look(False)) == "b"


def test_a_cached_page_stays_as_it_was_until_the_attributes_are_old(pair: Pair) -> None:
    put(pair.a, "a")
    file = pair.look(False)
    assert text(file) == "a"
    put(pair.a, "b")
    pair.check_stale(text(file), "a", "b")
    pair.sleep(ATTRIBUTES_S + 1.5)
    assert text(file) == "b"


def test_a_direct_read_sees_the_server(pair: Pair) -> None:
    put(pair.a, "a")
    cached, direct = pair.look(False), pair.look(True)
    assert text(cached) == text(direct) == "a"
    writer = pair.a.open("f", "x", direct=True)
    writer.write([page("b")], 0)
    assert text(direct) == "b"


def test_a_client_that_may_write_a_file_keeps_its_cached_pages(pair: Pair) -> None:
    put(pair.a, "a")
    file = pair.b.open("f", "x")
    assert text(file) == "a"
    put(pair.a, "b")
    pair.sleep(ATTRIBUTES_S + 1.5)
    assert text(file) == "a"
    assert text(pair.look(True)) == "b"


def test_a_file_that_grows_elsewhere_seems_short(pair: Pair) -> None:
    put(pair.a, "a")
    cached, direct = pair.look(False), pair.look(True)
    assert text(cached) == "a"
    put(pair.a, "b", PAGE)
    pair.check_stale(cached.size(), PAGE, 2 * PAGE)
    pair.check_stale(text(cached, PAGE), "short", "b")
    assert text(direct, PAGE) == "b"
    assert text(cached, PAGE) == "b"


def test_a_file_that_another_client_removed_is_stale(pair: Pair) -> None:
    put(pair.a, "a")
    direct = pair.look(True)
    assert text(direct) == "a"
    pair.a.remove("f", "x")
    try:
        seen = text(direct)
    except OSError as error:
        seen = str(error.errno)
    pair.check_stale(seen, str(errno.ESTALE), "a")
    assert pair.a.files("f") == []


def test_a_file_removed_while_open_here_takes_room_under_another_name(pair: Pair) -> None:
    put(pair.a, "a")
    file = pair.a.open("f", "x")
    pair.a.remove("f", "x")
    (hidden,) = pair.a.files("f")
    assert hidden.startswith(".nfs")
    assert pair.a.held_bytes() == PAGE
    assert text(file) == "a"
    file.close()
    pair.check_stale(pair.a.files("f"), [], [hidden])


def test_a_lock_excludes_the_other_client(pair: Pair) -> None:
    pair.a.lock()
    with pytest.raises(ConfigError):
        pair.b.lock()
    pair.a.close()
    pair.b.lock()


def test_a_lock_excludes_other_open_files_of_its_client(pair: Pair) -> None:
    first, again, other = pair.a.child("f"), pair.a.child("f"), pair.b.child("f")
    first.lock()
    assert not again.try_lock()
    again.close()
    assert not other.try_lock(), "what did not get the lock has freed it"
    first.close()
    assert other.try_lock()
    other.close()


def test_resized_bytes_are_set_aside_at_once(pair: Pair) -> None:
    file = pair.a.open("f", "x", create=True, direct=True)
    before = pair.b.free_bytes()
    file.resize(8 << 20)
    assert pair.b.free_bytes() <= before - (7 << 20)
    assert file.size() == 8 << 20 <= file.allocated_bytes()
    assert text(pair.look(True), 7 << 20) == "\0"


# What a real mount cannot be made to do here.


def clients(server: NfsServer, **options: float) -> tuple[NfsClient, NfsClient]:
    mount = Mount(**options)  # type: ignore[arg-type]
    server.root.entries.clear()
    return server.connect(mount, 1), server.connect(mount, 2)


def test_folders_and_names_may_be_out_of_date() -> None:
    clock = Clock(0.0)
    a, b = (client.storage() for client in clients(NfsServer(1 << 20, clock=clock), entries_s=30.0))
    assert b.folders() == []
    a.make_folder("f")
    assert b.folders() == []
    with pytest.raises(FileNotFoundError):
        a.open("f", "x")
    b.child("f").open("", "x", create=True).close()
    with pytest.raises(FileNotFoundError):
        a.open("f", "x")
    clock.now += 30.0
    assert b.folders() == ["f"]
    a.open("f", "x")


def test_a_reader_may_see_half_of_a_direct_write() -> None:
    server = NfsServer(1 << 20)
    a, b = clients(server)
    a.storage().make_folder("f")
    file = a.storage().open("f", "x", create=True, direct=True)
    file.write([np.zeros(4 * PAGE, np.uint8)], 0)
    seen: list[int] = []
    reader = b.storage().open("f", "x", direct=True)

    def look() -> None:
        buffer = np.zeros(4 * PAGE, np.uint8)
        reader.read([buffer], 0)
        seen.extend(set(buffer.tolist()))

    calls = iter([False, False, True])
    a.on_pause(lambda: look() if next(calls, False) else None)
    file.write([np.ones(4 * PAGE, np.uint8)], 0)
    assert sorted(seen) == [0, 1]


def test_a_killed_client_loses_some_writes_and_keeps_its_lock_and_hidden_files_for_a_while() -> None:
    clock = Clock(0.0)
    server = NfsServer(1 << 20, clock=clock)
    a, b = clients(server, lease_s=90.0)
    mine, other = a.storage(), b.storage()
    mine.make_folder("f")
    mine.lock()
    file = mine.open("f", "x", create=True)
    file.resize(40 * PAGE)
    file.write([np.ones(40 * PAGE, np.uint8)], 0)
    hidden = mine.open("f", "y", create=True)
    hidden.resize(PAGE)
    mine.remove("f", "y")
    a.kill()
    with pytest.raises(OSError):
        file.size()
    buffer = np.zeros(40 * PAGE, np.uint8)
    other.open("f", "x").read([buffer], 0)
    assert set(buffer[::PAGE].tolist()) == {0, 1}
    assert len(other.files("f")) == 2
    with pytest.raises(ConfigError):
        other.lock()
    clock.now += 90.0
    other.lock()


def test_a_client_that_is_cut_off_for_long_loses_its_lock_and_goes_on() -> None:
    clock = Clock(0.0)
    server = NfsServer(1 << 20, clock=clock)
    a, b = clients(server, lease_s=20.0)
    mine, other = a.storage(), b.storage()
    mine.lock()
    a.cut_off(60.0)
    clock.now += 21.0
    other.lock()
    clock.now += 60.0
    mine.make_folder("f")
    mine.close()
    with pytest.raises(ConfigError):
        mine.lock()


def test_a_server_that_hangs_holds_every_access_up() -> None:
    clock = Clock(0.0)
    server = NfsServer(1 << 20, clock=clock)
    client = server.connect(Mount(), 1, stall=lambda seconds: advance(clock, seconds))
    server.stalled_until = 30.0
    client.storage().make_folder("f")
    assert clock.now == 30.0


def test_others_fill_the_medium() -> None:
    server = NfsServer(4 * PAGE)
    a, b = clients(server)
    a.storage().make_folder("f")
    file = a.storage().open("f", "x", create=True)
    file.resize(PAGE)
    b.storage().make_folder("g")
    b.storage().open("g", "x", create=True).resize(2 * PAGE)
    with pytest.raises(OSError) as caught:
        file.resize(3 * PAGE)
    assert caught.value.errno == errno.ENOSPC
    file.write([np.ones(2 * PAGE, np.uint8)], PAGE)
    with pytest.raises(OSError) as caught:
        file.sync()
    assert caught.value.errno == errno.ENOSPC
    assert server.used_bytes == server.held_bytes() <= 4 * PAGE
