"""DirectoryStorage: other users can neither write to the directory nor read its files, and it has one owner."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.host.pool import HostPool
from kvoffload.tiers.disk.directory import LOCK_NAME, DirectoryStorage

PAGE = 4096


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[DirectoryStorage]:
    storage = DirectoryStorage(tmp_path / "disk")
    storage.make_folder("a")
    yield storage
    storage.close()


@pytest.fixture
def pages() -> Iterator[ByteArray]:
    """Returns eight aligned pages with different bytes."""
    pool = HostPool(8, PAGE)
    pool.data[:] = np.random.default_rng(0).integers(0, 256, pool.data.shape, dtype=np.uint8)
    yield pool.data
    pool.close()


def read(storage: DirectoryStorage, name: str, size: int, offset: int = 0) -> bytes:
    file, data = storage.open("a", name), np.zeros(size, dtype=np.uint8)
    n = file.read([data], offset)
    file.close()
    return data[:n].tobytes()


def test_direct_files_bypass_the_page_cache_if_possible(
    storage: DirectoryStorage, pages: ByteArray, caplog: pytest.LogCaptureFixture
) -> None:
    file = storage.open("a", "f", create=True, direct=True)
    file.write([pages[0]], 0)
    flags = open_flags(storage.path / "a" / "f")
    assert bool(flags & os.O_DIRECT) != ("has no O_DIRECT" in caplog.text)
    file.close()


def test_the_page_cache_is_used_if_direct_access_fails(
    storage: DirectoryStorage, pages: ByteArray, caplog: pytest.LogCaptureFixture
) -> None:
    # An unaligned address is refused, as a file system without O_DIRECT refuses any transfer.
    odd = pages.reshape(-1)[1 : PAGE + 1]
    file, other = (storage.open("a", name, create=True, direct=True) for name in "fg")
    assert file.write([odd], 0) == PAGE
    assert not open_flags(storage.path / "a" / "f") & os.O_DIRECT
    assert file.read([pages[5]], 0) == PAGE
    assert np.array_equal(pages[5], odd)
    assert other.write([odd], 0) == PAGE
    assert caplog.text.count("has no O_DIRECT") == 1
    file.close()
    other.close()


def open_flags(path: Path) -> int:
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}") == str(path):
            (line,) = (x for x in Path(f"/proc/self/fdinfo/{name}").read_text().splitlines() if x.startswith("flags"))
            return int(line.split()[1], 8)
    raise AssertionError(f"{path} is not open")


# Room.


def test_resize_beyond_the_medium_changes_nothing(storage: DirectoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    file = storage.open("a", "f", create=True)
    file.resize(PAGE)
    with pytest.raises(OSError, match="No space") as raised:
        file.resize(storage.free_bytes() + (1 << 40))
    assert raised.value.errno == errno.ENOSPC
    allocate = os.posix_fallocate

    def half(fd: int, offset: int, size: int) -> None:
        allocate(fd, offset, size // 2)
        raise OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(OSError, match="No space"):
        file.resize(101 * PAGE)
    assert (file.size(), file.allocated_bytes()) == (PAGE, PAGE)
    file.close()


def test_a_direct_file_is_allocated_if_the_file_system_has_no_fallocate(
    storage: DirectoryStorage, pages: ByteArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ext2, for example, the C library writes one byte per block, which O_DIRECT does not allow."""
    allocate = os.posix_fallocate

    def by_bytes(fd: int, offset: int, size: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", by_bytes)
    file = storage.open("a", "f", create=True, direct=True)
    file.resize(100 * PAGE)
    assert (file.size(), file.allocated_bytes()) == (100 * PAGE, 100 * PAGE)
    file.write([pages[0]], 50 * PAGE)
    assert read(storage, "f", PAGE, 50 * PAGE) == pages[0].tobytes()
    file.close()


def test_zeros_are_written_if_nothing_can_allocate(
    storage: DirectoryStorage, pages: ByteArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = storage.open("a", "f", create=True, direct=True)
    file.resize(PAGE)
    file.write([pages[0]], 0)
    size = (2 << 20) + PAGE
    file.resize(size)
    assert (file.size(), file.allocated_bytes()) == (size, size)
    assert read(storage, "f", size) == pages[0].tobytes() + bytes(size - PAGE)
    file.close()


def test_held_bytes_leave_out_only_locks_and_what_cannot_be_read(
    storage: DirectoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.lock()
    for folder, name in (("x", "a"), ("x", "bad"), ("x", "c"), ("x/y", "d"), ("", "bad"), ("", "e")):
        (storage.path / folder).mkdir(parents=True, exist_ok=True)
        (storage.path / folder / name).write_bytes(bytes(PAGE))
    found = os.stat

    def fail(name: str, **options: Any) -> os.stat_result:
        if name == "bad":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return found(name, **options)

    monkeypatch.setattr(os, "stat", fail)
    assert storage.held_bytes() == 4 * PAGE
    assert storage.held_bytes(lambda folder, name: (folder, name) == ("x/y", "d")) == 3 * PAGE


# Permissions.


def test_only_the_owner_can_open_files_and_folders(storage: DirectoryStorage) -> None:
    storage.open("a", "f", create=True).close()
    storage.lock()
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in storage.path.rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert len(modes) == 3
    assert stat.S_IMODE(storage.path.stat().st_mode) == stat.S_IMODE((storage.path / "a").stat().st_mode) == 0o700


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user and gives files away")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.symlink_to(path.rename(path.with_name("real"))), r"^dir=.*disk.*symbolic link"),
        *((lambda path, mode=mode: path.chmod(mode), "others can write.*chmod 700") for mode in (0o770, 0o702, 0o1777)),
        pytest.param(lambda path: os.chown(path, 12345, 12345), "belongs to user 12345", marks=only_root),
    ],
)
def test_a_root_that_others_can_change_is_refused(tmp_path: Path, spoil: Callable[[Path], object], said: str) -> None:
    DirectoryStorage(tmp_path / "disk").close()
    spoil(tmp_path / "disk")
    with pytest.raises(ConfigError, match=said):
        DirectoryStorage(tmp_path / "disk")


def test_files_open_to_others_are_closed_to_them(storage: DirectoryStorage, caplog: pytest.LogCaptureFixture) -> None:
    storage.path.chmod(0o755)
    storage.open("a", "f", create=True).close()
    storage.lock()
    paths = [storage.path / "a", storage.path / "a" / "f", storage.path / "lock"]
    for path, mode in zip(paths, (0o777, 0o666, 0o644), strict=True):
        path.chmod(mode)
    other = DirectoryStorage(storage.path)
    other.open("a", "f").close()
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths[:2]] == [0o700, 0o600]
    with pytest.raises(ConfigError, match="in use"):
        other.lock(deadline_s=0.0)
    assert stat.S_IMODE(paths[2].stat().st_mode) == 0o600
    assert caplog.text.count("was open to other users (mode 777)") == 1
    assert len(caplog.records) == 1
    assert stat.S_IMODE(storage.path.stat().st_mode) == 0o755, "others may list the directory"
    other.close()


@only_root
@pytest.mark.parametrize("name", ["a", "a/f"])
def test_files_of_another_user_are_refused(storage: DirectoryStorage, name: str) -> None:
    storage.open("a", "f", create=True).close()
    os.chown(storage.path / name, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        storage.open("a", "f")


def test_links_are_not_followed(storage: DirectoryStorage, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "f").write_bytes(b"theirs")
    (storage.path / "a" / "f").symlink_to(tmp_path / "elsewhere" / "f")
    (storage.path / "b").symlink_to(tmp_path / "elsewhere")
    for create in (False, True):
        with pytest.raises(OSError, match="symbolic links"):
            storage.open("a", "f", create=create)
    assert storage.folders() == ["a"]
    for attempt in (
        lambda: storage.open("b", "f"),
        lambda: storage.files("b"),
        lambda: storage.make_folder("b"),
        lambda: storage.remove("b", "f"),
    ):
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
            attempt()
    storage.remove("a", "f")
    assert (tmp_path / "elsewhere" / "f").read_bytes() == b"theirs"


def test_only_regular_files_are_opened(storage: DirectoryStorage) -> None:
    os.mkfifo(storage.path / "a" / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for direct in (False, True):
        with pytest.raises(OSError, match="not a regular file"):
            storage.open("a", "pipe", direct=direct)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_put_in_its_place_is_not_used(storage: DirectoryStorage) -> None:
    storage.open("a", "f", create=True).close()
    os.rename(storage.path, storage.path.with_name("moved"))
    storage.path.mkdir()
    assert storage.files("a") == ["f"]


# The lock.

HOLD = """
import sys, time
from kvoffload.tiers.disk.directory import DirectoryStorage
storage = DirectoryStorage(sys.argv[1])
storage.lock()
print("locked", flush=True)
time.sleep(60)
"""


START_AND_END = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=sys.stdout)
print(child.pid, flush=True)
sys.stdin.readline()
"""
"""Starts a process like a server its engine, and waits for a line, or for its own end."""


def test_an_owner_whose_parent_has_ended_is_to_be_ended(storage: DirectoryStorage) -> None:
    command = [sys.executable, "-c", START_AND_END, HOLD, str(storage.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        try:
            assert server.stdout.readline() == b"locked\n"
            with pytest.raises(ConfigError, match="give each server its own directory"):
                storage.lock(deadline_s=0)
            server.kill()
            server.wait()
            said = rf"in use by process {engine} since .*: if it is left over from .* end it too \(kill {engine}\)"
            with pytest.raises(ConfigError, match=said):
                storage.lock(deadline_s=0)
        finally:
            os.kill(engine, signal.SIGKILL)
    storage.lock()


def test_a_lock_of_a_process_on_another_machine_names_no_process_to_end(storage: DirectoryStorage) -> None:
    """The process with this number here has another parent, and has not got the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(storage.path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=rf"in use by process {other.pid} since.*its own directory"):
            storage.lock()
        (storage.path / LOCK_NAME).write_text(
            f"process {os.getppid()} since 2026-01-01 00:00:00, started by process 1\n"
        )
        with pytest.raises(ConfigError, match="give each server its own directory"):
            storage.lock(deadline_s=0)
        other.kill()


FORK = """
import os, sys, time
from kvoffload.tiers.disk.directory import DirectoryStorage
storage = DirectoryStorage(sys.argv[1])
storage.make_folder("a")
storage.lock()
file = storage.open("a", "f", create=True)
file.resize(1 << 20)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_of_a_killed_owner_owns_nothing(storage: DirectoryStorage) -> None:
    with subprocess.Popen([sys.executable, "-c", FORK, str(storage.path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        try:
            os.kill(child, 0)
            storage.lock()
            links = [os.path.realpath(entry) for entry in Path(f"/proc/{child}/fd").iterdir()]
            assert not [link for link in links if link.startswith(str(storage.path))]
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_end_of_a_forked_child_leaves_the_lock(storage: DirectoryStorage) -> None:
    storage.lock()
    storage.lock()
    child = os.fork()
    if not child:
        storage.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        DirectoryStorage(storage.path).lock(deadline_s=0.0)


@only_root
def test_others_cannot_lock_a_directory_that_they_can_read(storage: DirectoryStorage) -> None:
    """Neither while a server runs nor while it starts."""
    storage.path.chmod(0o755)
    with storage.alone():
        pass
    storage.lock()
    storage.close()
    root = os.open(storage.path, os.O_RDONLY)
    taken = []
    for name in ("lock", "lock-start", "."):
        child = os.fork()
        if not child:
            os.setgroups([])
            os.setuid(12345)
            try:
                fd = os.open(name, os.O_RDONLY, dir_fd=root)
                fcntl.flock(fd, fcntl.LOCK_EX)
                time.sleep(60)
            finally:
                os._exit(0)
        taken.append(child)
    os.close(root)
    try:
        while not held_by(taken[2]):
            time.sleep(0.01)
        other = DirectoryStorage(storage.path)
        other.lock(deadline_s=0.0)
        with other.alone(0.0):
            pass
        other.close()
    finally:
        for child in taken:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def held_by(pid: int) -> bool:
    """Returns whether the process has a lock."""
    return any(line.split()[4] == str(pid) for line in Path("/proc/locks").read_text().splitlines() if "->" not in line)


def test_shared_owners_exclude_others_and_one_of_them_at_a_time_is_alone(storage: DirectoryStorage) -> None:
    first, second = DirectoryStorage(storage.path), DirectoryStorage(storage.path)
    first.lock(shared=True)
    second.lock(shared=True)
    with pytest.raises(ConfigError, match="in use"):
        storage.lock()
    with first.alone(), pytest.raises(ConfigError, match="another process"), second.alone(0.02):
        pass
    with second.alone():
        pass
    first.close()
    second.close()
    storage.lock()
