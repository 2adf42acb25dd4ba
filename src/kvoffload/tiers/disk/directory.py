"""A directory of a local file system as storage of the disk tier."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.locks import try_to_lock
from kvoffload.printable import printable
from kvoffload.tiers.disk.storage import SETTING_ERRORS, Storage, StoredFile, nothing

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
START_LOCK_NAME = "lock-start"
"""Held for a short while by each of several owners in turn; see ``DirectoryStorage.alone``."""
LOCK_NAMES = (LOCK_NAME, START_LOCK_NAME)
LOCK_DEADLINE_S = 2.0
"""A server that was killed keeps the lock until the kernel has freed its memory."""
ALONE_DEADLINE_S = 120.0
MAX_DEPTH = 64
"""Folders inside each other in which the files of others are counted."""
NO_INODES = "no inodes are left on the file system, so no file can be made there; remove files that are many and small"
_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_OTHERS = 0o077
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ZEROS_BYTES = 1 << 20
_NO_FALLOCATE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: there might be a pipe under the name.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_inherited: weakref.WeakSet[DirectoryStorage | _DirectoryFile] = weakref.WeakSet()
"""Objects whose descriptors a forked child inherits."""


def _close_in_child() -> None:
    """Closes inherited descriptors. A lock taken by ``flock``, and the space of a removed file, last until the last
    process has closed its descriptor: a child that outlives its parent must not keep them."""
    for holder in list(_inherited):
        holder.abandon()


os.register_at_fork(after_in_child=_close_in_child)


def has_no_inodes(status: os.statvfs_result) -> bool:
    """Returns whether a file system has no inode left for this user. Some have no fixed number of them."""
    return status.f_files > 0 and status.f_favail == 0


class LockOwner(NamedTuple):
    """Who has the lock of a directory."""

    name: str
    pid: int | None
    """As it has written into the lock file; None if there is none to read."""
    remedy: str | None
    """How to end it, if its parent, such as an API server that was killed, has ended without it. Otherwise None."""


_OWNER = re.compile(r"process ([0-9]{1,10}) since (?:[^,]*, started by process ([0-9]{1,10}))?")


def _owner(lock_fd: int) -> LockOwner:
    """Returns the owner of a lock file, which others have locked."""
    text = os.pread(lock_fd, 200, 0).decode("ascii", "replace")
    name, match = printable(text.strip()) or "another process", _OWNER.match(text)
    if match is None:
        return LockOwner(name, None, None)
    pid, started_by, remedy = match[1], match[2], None
    with suppress(OSError):
        process = Path("/proc", pid)
        parent = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        # On another machine, or in another container, the number is of another process.
        has_lock = any(os.path.samestat(file.stat(), os.fstat(lock_fd)) for file in (process / "fd").iterdir())
        if has_lock and started_by not in (None, parent):
            remedy = (
                "the process that started it has ended: if it is left over from a server that was killed, end it too "
                f"(kill {pid})"
            )
    return LockOwner(name, int(pid), remedy)


class DirectoryStorage(Storage):
    """The files in ``path``, which is created if it does not exist.

    Everything below is reached from the directory's descriptor, so that no other directory can be put in its place.
    Other users may be able to list the directory, but not to open what is below: files and folders of this user or root
    that are open to others are closed to them, with one warning, and those of another user are refused with
    PermissionError. Raises ConfigError unless ``path`` is a directory that belongs to this user or root, and that no
    other user can write to. With ``as_is`` the directory may be anybody's: it is not made, no permission is looked at
    or changed, and files can be read and removed; raises OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        parent: DirectoryStorage | None = None,
        *,
        within: DirectoryStorage | None = None,
        as_is: bool = False,
    ) -> None:
        """``parent`` is closed together with this storage. The directory is a folder of ``within``, whatever has
        the path of that now."""
        self.path = Path(path)
        self._as_is = as_is
        at = self.path if within is None else Path(f"/proc/self/fd/{within._fd}", self.path.name)
        self._fd: int = os.open(at, _FOLDER_FLAGS) if as_is else _open_root(self.path, at)
        self._lock_fd = self._start_lock_fd = -1
        self._read_only = as_is or bool(os.fstatvfs(self._fd).f_flag & os.ST_RDONLY)
        self._knows_direct, self._knows_repair = as_is, False
        self._parent = parent
        _inherited.add(self)

    @property
    def read_only(self) -> bool:
        return self._read_only

    def child(self, name: str) -> DirectoryStorage:
        return DirectoryStorage(self.path / name, within=self, as_is=self._as_is)

    def lock(self, shared: bool = False, deadline_s: float | None = None) -> None:
        """Locks the directory, see Storage. With ``shared``, other processes that lock it as shared may own it at the
        same time. ``deadline_s``: time for an owner that ends, by default LOCK_DEADLINE_S."""
        if self._lock_fd >= 0:
            return
        owner = self.take_lock(LOCK_DEADLINE_S if deadline_s is None else deadline_s, shared)
        if owner is not None:
            remedy = owner.remedy or "give each server its own directory"
            raise ConfigError("dir", str(self.path), f"in use by {owner.name}", remedy)

    def try_lock(self) -> bool:
        return self._lock_fd >= 0 or self.take_lock() is None

    def take_lock(self, deadline_s: float = 0.0, shared: bool = False) -> LockOwner | None:
        """Takes the lock. Returns its owner if others still have it after ``deadline_s``."""
        fd = self._open_lock(LOCK_NAME)
        if fd < 0:
            return None
        try:
            if not try_to_lock(fd, deadline_s, shared):
                owner = _owner(fd)
                os.close(fd)
                return owner
            if not self._read_only:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                text = f"process {os.getpid()} since {now}, started by process {os.getppid()}\n".encode()
                # On a full medium the old text may stay. The lock counts, not the text.
                with suppress(OSError):
                    os.pwrite(fd, text, 0)
                    os.ftruncate(fd, len(text))
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        return None

    @contextmanager
    def alone(self, deadline_s: float = ALONE_DEADLINE_S) -> Iterator[None]:
        """Excludes other processes that call this too. Raises ConfigError if one of them takes ``deadline_s``."""
        fd = self._start_lock_fd = self._open_lock(START_LOCK_NAME)
        try:
            if fd >= 0 and not try_to_lock(fd, deadline_s):
                raise ConfigError(
                    "dir",
                    str(self.path),
                    f"another process has been starting or clearing it for {deadline_s:.0f} s",
                    "end that process, or name another directory",
                )
            yield
        finally:
            self._start_lock_fd = _unlock(self._start_lock_fd)

    def _open_lock(self, name: str) -> int:
        """Returns a descriptor of a file that no other user can open, and therefore none can lock; -1 if the medium is
        read-only and has no such file: no process that could write there has ever owned it."""
        flags = os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT
        try:
            with _naming_inodes(self._fd):
                fd = os.open(name, _FILE_FLAGS | flags, _FILE_MODE, dir_fd=self._fd)
        except FileNotFoundError:
            return -1
        try:
            self.close_to_others(fd, name, _FILE_MODE)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close_to_others(self, fd: int, name: str, mode: int) -> None:
        """Sets the permissions of an open file or folder to ``mode`` if other users have any. Raises PermissionError if
        it belongs to another user, or if others can write to it and that cannot be changed."""
        if self._as_is:
            return
        status = os.fstat(fd)
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, f"{name} belongs to user {status.st_uid}; chown or remove it")
        found = stat.S_IMODE(status.st_mode)
        if not found & _OTHERS:
            return
        try:
            os.fchmod(fd, mode)
        except OSError as error:
            if found & _OTHERS_WRITE:
                problem = f"others can write to {name} (mode {found:o}); run chmod {mode:o} on it"
                raise PermissionError(errno.EPERM, problem) from error
            return
        if not self._knows_repair:
            self._knows_repair = True
            logger.warning(
                "kvoffload: %r: %s was open to other users (mode %o) and is closed to them now, as is every "
                "other file found open. Checksums do not show forged blocks: if you do not trust those users, stop the "
                "server and run kvoffload disk clear",
                str(self.path),
                name,
                found,
            )

    def held_bytes(self, is_left_out: Callable[[str, str], bool] = nothing) -> int:
        # This directory must be readable. Unreadable files and folders in it are left out.
        os.scandir(self._fd).close()
        total = 0
        for path, folders, names, fd in os.fwalk(".", dir_fd=self._fd):
            folder = path.removeprefix(".").lstrip("/")
            if folder.count("/") >= MAX_DEPTH:
                folders.clear()
            for name in names:
                if (folder or name not in LOCK_NAMES) and not is_left_out(folder, name):
                    with suppress(OSError):
                        total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
        return total

    def folders(self) -> list[str]:
        with os.scandir(self._fd) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def files(self, folder: str) -> list[str]:
        with self._folder(folder) as fd, os.scandir(fd) as entries:
            return sorted(entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))

    def entries(self, folder: str) -> dict[str, os.stat_result]:
        """Returns the status of everything in a folder, by name. Links are not followed."""
        found = {}
        with self._folder(folder) as fd:
            for name in sorted(os.listdir(fd)):
                with suppress(FileNotFoundError):
                    found[name] = os.stat(name, dir_fd=fd, follow_symlinks=False)
        return found

    def make_folder(self, folder: str) -> None:
        try:
            with _naming_inodes(self._fd):
                os.mkdir(folder, _FOLDER_MODE, dir_fd=self._fd)
        except FileExistsError:
            with self._folder(folder):
                pass

    def remove_folder(self, folder: str) -> None:
        os.rmdir(folder, dir_fd=self._fd)

    def open(
        self, folder: str, name: str, create: bool = False, direct: bool = False, fresh: bool = False
    ) -> StoredFile:
        only_read = self._read_only or fresh
        flags = _FILE_FLAGS | (os.O_RDONLY if only_read else os.O_RDWR) | (os.O_CREAT if create else 0)
        with self._folder(folder) as folder_fd, _naming_inodes(folder_fd):
            if direct or fresh:
                try:
                    fd = os.open(name, flags | os.O_DIRECT, _FILE_MODE, dir_fd=folder_fd)
                    return _DirectoryFile(fd, name, self, fresh)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.log_not_direct()
            return _DirectoryFile(os.open(name, flags, _FILE_MODE, dir_fd=folder_fd), name, self, fresh)

    def remove(self, folder: str, name: str) -> None:
        with self._folder(folder) as fd:
            os.unlink(name, dir_fd=fd)

    def free_bytes(self) -> int:
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def has_vanished(self) -> bool:
        try:
            is_same = os.path.samestat(os.fstat(self._fd), os.stat(self.path))
            if self._lock_fd >= 0:
                named = os.stat(LOCK_NAME, dir_fd=self._fd, follow_symlinks=False)
                is_same = is_same and os.path.samestat(os.fstat(self._lock_fd), named)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not is_same or (self._parent is not None and self._parent.has_vanished())

    def close(self) -> None:
        self._lock_fd = _unlock(self._lock_fd)
        self._start_lock_fd = _unlock(self._start_lock_fd)
        self.abandon()
        if self._parent is not None:
            self._parent.close()

    def abandon(self) -> None:
        """Closes the descriptors but leaves the locks to the process that this one was forked from."""
        for fd in (self._fd, self._lock_fd, self._start_lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = self._start_lock_fd = -1

    def log_not_direct(self) -> None:
        """Logs, once, that the page cache is used."""
        if not self._knows_direct:
            self._knows_direct = True
            logger.warning("kvoffload: %r: its file system has no O_DIRECT; using the page cache", str(self.path))

    @contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        if not folder:
            yield self._fd
            return
        fd = os.open(folder, _FOLDER_FLAGS, dir_fd=self._fd)
        try:
            self.close_to_others(fd, folder, _FOLDER_MODE)
            yield fd
        finally:
            os.close(fd)


class _DirectoryFile(StoredFile):
    """The file that was opened as ``name``, with descriptor ``fd``, which it closes."""

    def __init__(self, fd: int, name: str, storage: DirectoryStorage, fresh: bool) -> None:
        self._fd = fd
        self._storage = storage
        self._fresh = fresh
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.ENXIO, "not a regular file")
            self._has_links = status.st_nlink > 0
            """Whether the file system counts the names of a file."""
            storage.close_to_others(fd, name, _FILE_MODE)
            self._is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            """Whether the file was opened so."""
            self._is_cached = not self._is_direct
        except BaseException:
            os.close(fd)
            raise
        _inherited.add(self)

    def read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        try:
            return self._read(buffers, offset)
        except OSError as error:
            self._leave_direct(error)
            return self._read(buffers, offset)

    def _read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        if self._fresh and self._is_cached:
            size = sum(buffer.size for buffer in buffers)
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)
        return os.preadv(self._fd, [buffer.data for buffer in buffers], offset)

    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        try:
            return os.pwritev(self._fd, [buffer.data for buffer in buffers], offset)
        except OSError as error:
            self._leave_direct(error)
            return os.pwritev(self._fd, [buffer.data for buffer in buffers], offset)

    def _leave_direct(self, error: OSError) -> None:
        """Turns O_DIRECT off: some file systems accept it on opening and refuse it later. Raises ``error`` if it has
        another reason."""
        if error.errno != errno.EINVAL or not self._is_direct:
            raise error
        # Another thread may have done it since this one's call was refused.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            self._storage.log_not_direct()
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_cached = True

    def modified(self) -> float:
        return os.fstat(self._fd).st_mtime

    @property
    def is_cached(self) -> bool:
        return self._is_cached

    def is_removed(self) -> bool:
        return self._has_links and os.fstat(self._fd).st_nlink == 0

    def sync(self) -> None:
        os.fdatasync(self._fd)

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
        # If a file system has no fallocate, the C library writes zeros, in pieces that O_DIRECT does not allow.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            _allocate(fd, old, size)
        except OSError:
            os.ftruncate(fd, old)
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _allocate(fd: int, begin: int, end: int) -> None:
    try:
        os.posix_fallocate(fd, begin, end - begin)
    except OSError as error:
        # Not every C library has a substitute.
        if error.errno not in _NO_FALLOCATE:
            raise
        zeros = bytes(_ZEROS_BYTES)
        while begin < end:
            begin += os.pwrite(fd, zeros[: end - begin], begin)


@contextmanager
def _naming_inodes(at: int | Path) -> Iterator[None]:
    """Says of a file system that is full, and has space left, what it lacks. ``at``: a folder in it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC and has_no_inodes(os.statvfs(at)):
            raise OSError(errno.ENOSPC, NO_INODES) from error
        raise


def _unlock(fd: int) -> int:
    """Gives up the lock of ``fd``, even if a forked child has inherited it, and closes ``fd``. Returns -1."""
    if fd >= 0:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
    return -1


def _open_root(path: Path, at: Path) -> int:
    """Returns a descriptor of the directory ``at``, which is made if necessary. ``path``: its name in errors."""
    named = "dir", str(path)
    if at.is_symlink():
        raise ConfigError(*named, "is a symbolic link", f"name its target, {os.path.realpath(at)!r}")
    if at.exists() and not at.is_dir():
        raise ConfigError(*named, "is not a directory", "name a directory")
    try:
        with _naming_inodes(next(each for each in at.parents if each.exists())):
            at.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        fd = os.open(at, _FOLDER_FLAGS)
    except OSError as error:
        # A path that does not exist on a read-only file system is a mistake; one that does can be read.
        if error.errno not in (*SETTING_ERRORS, errno.EROFS):
            raise
        raise ConfigError(
            *named,
            f"cannot be used ({error.strerror})",
            "name a directory that this user can write to, or let root make it: install -d -m 700 "
            f"-o {os.geteuid()} {path}",
        ) from error
    status = os.fstat(fd)
    problem = None
    if status.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to user {status.st_uid}", "name a directory of your own, or chown it"
    elif status.st_mode & _OTHERS_WRITE:
        problem = f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})", "run chmod 700 on it"
    if problem:
        os.close(fd)
        raise ConfigError(*named, *problem)
    return fd
