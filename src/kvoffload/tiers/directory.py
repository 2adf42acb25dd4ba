"""A directory of a local file system as the disk tier's storage."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvoffload.base import ConfigError
from kvoffload.hostpool import ByteArray
from kvoffload.tiers.storage import Storage, StoredFile

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
LOCK_DEADLINE_S = 2.0
"""A server that was killed keeps the lock until the kernel has cleared its memory away."""
ALONE_DEADLINE_S = 120.0
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: what lies under the name might be a pipe.
_FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DirectoryStorage(Storage):
    """``path`` is created if it is not there. Everything below is reached from its descriptor, so that nobody can put
    another directory in its place.

    Raises ConfigError unless it is a directory that nobody but its owner, this user or root, can write to.
    """

    def __init__(self, path: str | os.PathLike[str], parent: DirectoryStorage | None = None) -> None:
        """``parent``: is closed with this one."""
        self.path = Path(path)
        self._fd = _open_root(self.path)
        self._lock_fd = -1
        self._knows_direct = False
        self._parent = parent

    def child(self, name: str) -> DirectoryStorage:
        """A directory in this one, as a storage of its own, with which this one will be closed."""
        return DirectoryStorage(self.path / name, self)

    def lock(self, shared: bool = False) -> None:
        """``shared``: others who say so too may own it at the same time."""
        if self._lock_fd >= 0:
            return
        fd = os.open(LOCK_NAME, _FILE_FLAGS | os.O_CREAT, _FILE_MODE, dir_fd=self._fd)
        if not _try_to_lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, LOCK_DEADLINE_S):
            owner = os.pread(fd, 200, 0).decode("ascii", "replace").strip() or "another process"
            os.close(fd)
            raise ConfigError(f"disk_dir={str(self.path)!r}: in use by {owner}; give each server its own directory")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
        self._lock_fd = fd

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For a short while, others who call this wait. Raises ConfigError if that takes ALONE_DEADLINE_S."""
        if not _try_to_lock(self._fd, fcntl.LOCK_EX, ALONE_DEADLINE_S):
            raise ConfigError(
                f"disk_dir={str(self.path)!r}: another process has been starting or clearing it for "
                f"{ALONE_DEADLINE_S:.0f} s; end that process, or name another directory"
            )
        try:
            yield
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def held_bytes(self) -> int:
        """Bytes of the medium that all files below take."""
        total = 0
        for _, _, names, fd in os.fwalk(".", dir_fd=self._fd, follow_symlinks=False):
            for name in names:
                with suppress(FileNotFoundError):
                    total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
        return total

    def folders(self) -> list[str]:
        with os.scandir(self._fd) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def files(self, folder: str) -> list[str]:
        with self._folder(folder) as fd, os.scandir(fd) as entries:
            return sorted(entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))

    def make_folder(self, folder: str) -> None:
        try:
            os.mkdir(folder, _FOLDER_MODE, dir_fd=self._fd)
        except FileExistsError:
            with self._folder(folder):
                pass

    def remove_folder(self, folder: str) -> None:
        os.rmdir(folder, dir_fd=self._fd)

    def open(self, folder: str, name: str, create: bool = False, direct: bool = False) -> StoredFile:
        flags = _FILE_FLAGS | (os.O_CREAT if create else 0)
        with self._folder(folder) as folder_fd:
            if direct:
                try:
                    return _DirectoryFile(os.open(name, flags | os.O_DIRECT, _FILE_MODE, dir_fd=folder_fd), self)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.tell_not_direct()
            return _DirectoryFile(os.open(name, flags, _FILE_MODE, dir_fd=folder_fd), self)

    def remove(self, folder: str, name: str) -> None:
        with self._folder(folder) as fd:
            os.unlink(name, dir_fd=fd)

    def modified(self, folder: str, name: str) -> float:
        with self._folder(folder) as fd:
            return os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime

    def free_bytes(self) -> int:
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        if self._lock_fd >= 0:
            # A child that was forked meanwhile has the descriptor too.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1
        if self._parent is not None:
            self._parent.close()

    def tell_not_direct(self) -> None:
        """Logs, once, that the page cache is in the way."""
        if not self._knows_direct:
            self._knows_direct = True
            logger.warning(
                "kvoffload: disk_dir=%r: its file system has no O_DIRECT; using the page cache", str(self.path)
            )

    @contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        if not folder:
            yield self._fd
            return
        fd = os.open(folder, _FOLDER_FLAGS, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)


class _DirectoryFile(StoredFile):
    """Takes over ``fd``."""

    def __init__(self, fd: int, storage: DirectoryStorage) -> None:
        self._fd = fd
        self._storage = storage
        self._is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")

    def read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        try:
            return os.preadv(self._fd, [buffer.data for buffer in buffers], offset)
        except OSError as error:
            self._leave_direct(error)
            return os.preadv(self._fd, [buffer.data for buffer in buffers], offset)

    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        try:
            return os.pwritev(self._fd, [buffer.data for buffer in buffers], offset)
        except OSError as error:
            self._leave_direct(error)
            return os.pwritev(self._fd, [buffer.data for buffer in buffers], offset)

    def _leave_direct(self, error: OSError) -> None:
        """Some file systems take O_DIRECT on opening and refuse it later. Raises ``error`` if that is not it."""
        if error.errno != errno.EINVAL or not self._is_direct:
            raise error
        # Another thread may have done so, since this one's call was refused.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            self._storage.tell_not_direct()
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def allocated_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def resize(self, size: int) -> None:
        old = self.size()
        if size <= old:
            os.ftruncate(self._fd, size)
            return
        status = os.fstatvfs(self._fd)
        if size - old > status.f_bavail * status.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(self._fd, old, size - old)
        except OSError:
            os.ftruncate(self._fd, old)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _try_to_lock(fd: int, kind: int, deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def _open_root(path: Path) -> int:
    setting = f"disk_dir={str(path)!r}"
    if path.is_symlink():
        raise ConfigError(f"{setting}: is a symbolic link; write what it points to, {os.path.realpath(path)!r}")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{setting}: is not a directory; name a directory")
    try:
        path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        fd = os.open(path, _FOLDER_FLAGS)
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot be used ({error.strerror}); name a directory that this user can write to, or let root "
            f"make it: install -d -m 700 -o {os.geteuid()} {path}"
        ) from error
    status = os.fstat(fd)
    problem = None
    if status.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to user {status.st_uid}; name a directory of your own, or chown it"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}); run chmod 700 on it"
    if problem:
        os.close(fd)
        raise ConfigError(f"{setting}: {problem}")
    return fd
