"""The contract of the files that the disk tier uses. Tests replace them with a device that fails."""

from __future__ import annotations

import errno
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from kvoffload.abc import ByteArray

SETTING_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
)
"""Errors of a directory that was named by mistake or belongs to another user. Any other error is the medium's."""
NO_FILE_ERRORS = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EPERM)
"""Errors of opening a symbolic link, a directory, a pipe, another user's file, or a name without a file."""
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    """Returns whether ``error`` says that the medium has no room left."""
    return isinstance(error, OSError) and error.errno in NO_SPACE_ERRORS


def reason(error: OSError) -> str:
    """Returns the problem, and the file concerned, for a message."""
    problem = error.strerror or str(error)
    return f"{error.filename}: {problem}" if isinstance(error.filename, str) else problem


def nothing(folder: str, name: str) -> bool:
    """Leaves out no file."""
    return False


def aligned_buffer(nbytes: int) -> ByteArray:
    """Returns memory into which files can be read directly."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


class StoredFile(ABC):
    """An open file. Every method may raise OSError. Several threads read and write at the same time."""

    @abstractmethod
    def read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        """Fills ``buffers``, one after the other, from ``offset`` on. Returns the bytes read: fewer at the end of the
        file, and possibly elsewhere."""

    @abstractmethod
    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        """Writes ``buffers``, one after the other, from ``offset`` on. Returns the bytes written, possibly fewer."""

    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Returns the bytes of the medium that the file takes."""

    @abstractmethod
    def resize(self, size: int) -> None:
        """Truncates the file, or extends it with zeros, for which the medium sets room aside at once. If the medium has
        too little (OSError ENOSPC), nothing has changed."""

    @abstractmethod
    def modified(self) -> float:
        """Returns when the file was last written, in seconds of the medium's clock, perhaps not this machine's."""

    @property
    def is_cached(self) -> bool:
        """Whether written bytes may stay in this machine's cache until ``sync``. By default False."""
        return False

    def is_removed(self) -> bool:
        """Whether the file has no name any more. By default False."""
        return False

    @abstractmethod
    def sync(self) -> None:
        """Returns once other machines, too, read the bytes written before."""

    @abstractmethod
    def close(self) -> None: ...


class Storage(ABC):
    """A directory with folders of files. Names are single components; ``folder`` "" is the directory itself.

    Every method may raise OSError. Only the owner can open folders and files; symbolic links are never followed.
    """

    @property
    @abstractmethod
    def read_only(self) -> bool:
        """Whether the medium is mounted read-only. Files are then open for reading only."""

    @abstractmethod
    def lock(self) -> None:
        """Makes this process the only owner of the directory until ``close`` or the end of the process, however it
        ends. Raises ConfigError, which names the owner, if another process has it."""

    @abstractmethod
    def try_lock(self) -> bool:
        """Like ``lock``, but returns False at once if another process has it. Raises OSError if the medium has no
        locks."""

    @abstractmethod
    def child(self, name: str) -> Storage:
        """Returns a folder of the directory, made if necessary, as a storage of its own, which is closed on its own."""

    @abstractmethod
    def folders(self) -> list[str]: ...

    @abstractmethod
    def files(self, folder: str) -> list[str]: ...

    @abstractmethod
    def make_folder(self, folder: str) -> None:
        """Makes the folder unless it exists."""

    @abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Removes a folder, which must be empty."""

    @abstractmethod
    def open(
        self, folder: str, name: str, create: bool = False, direct: bool = False, fresh: bool = False
    ) -> StoredFile:
        """Opens a file. With ``direct``, reads and writes must be of multiples of 4 KiB at multiples of 4 KiB, and
        bypass the page cache if the file system can do that. With ``fresh``, the file, which another machine may be
        writing, is open for reading only, and every read asks the medium: the same multiples apply to it, except that
        a read may begin in the last 4 KiB of the file, which need not be full."""

    @abstractmethod
    def remove(self, folder: str, name: str) -> None: ...

    @abstractmethod
    def held_bytes(self, is_left_out: Callable[[str, str], bool] = nothing) -> int:
        """Returns the bytes of the medium that all files below take, of any program, except the locks and the files for
        which ``is_left_out`` returns True, given the path of the folder, "" for the directory itself, and the name."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Returns the bytes that the medium could still give to this user."""

    def has_vanished(self) -> bool:
        """Whether another directory, or none, has its path now, or its lock was removed. By default False."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Gives up the lock. Open files stay open."""


def shorten(file: StoredFile, size: int) -> None:
    """Cuts off what the file has beyond ``size`` bytes. Raises OSError."""
    if file.size() > size:
        file.resize(size)


def read_at(file: StoredFile, offset: int, nbytes: int) -> ByteArray:
    """Returns bytes of a file, fewer at its end."""
    buffer = aligned_buffer(nbytes)
    return buffer[: file.read([buffer], offset)]


def read_fresh(storage: Storage, folder: str, name: str, nbytes: int, offset: int = 0) -> ByteArray:
    """Returns bytes of a file as they are on the medium now, fewer at its end; see ``fresh`` of ``Storage.open``."""
    with closing(storage.open(folder, name, fresh=True)) as file:
        return read_at(file, offset, nbytes)


def write_file(storage: Storage, folder: str, name: str, data: ByteArray) -> float:
    """Replaces the contents of a small file. Returns when it was written, by the medium's clock."""
    with closing(storage.open(folder, name, create=True)) as file:
        if file.write([data], 0) < data.size:
            raise OSError(errno.ENOSPC, f"{name} could not be written in full")
        shorten(file, data.size)
        file.sync()
        return file.modified()
