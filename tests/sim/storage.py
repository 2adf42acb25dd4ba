"""Storages for tests: a simulated one whose process can be killed, and one that adds faults to any other."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import numpy as np

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.tiers.disk.storage import Storage, StoredFile, nothing
from tests.sim.executor import Killed

PAGE = 4096

Part: TypeAlias = list[tuple[int, int]]
"""Ranges of a transfer, in bytes, that reach the medium together."""


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class _Inode:
    """A file. It takes room while it has a name or an open handle."""

    def __init__(self) -> None:
        self.data: ByteArray = np.zeros(0, np.uint8)
        self.size = 0
        self.modified = 0.0
        self.named = True
        self.handles = 0
        self.unsynced: dict[int, ByteArray] = {}
        """Pages written since the last sync, with their contents at that time."""


def resized(data: ByteArray, size: int, free_bytes: int) -> ByteArray:
    """Returns the pages of a file that had ``data`` and has ``size`` bytes now, zeros behind them. Raises OSError if it
    grows by more than ``free_bytes``."""
    room = -(-size // PAGE) * PAGE
    grown = room - len(data)
    if grown > free_bytes:
        raise os_error(errno.ENOSPC)
    if grown > 0:
        data = np.concatenate((data, np.zeros(grown, np.uint8)))
    elif grown < 0:
        data = data[:room].copy()
    data[size:] = 0
    return data


class _Medium:
    """The part of a storage that outlives a process."""

    def __init__(self, capacity_bytes: int, seed: int, clock: Callable[[], float]) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = self.peak_bytes = 0
        self.folders: dict[str, dict[str, _Inode]] = {"": {}}
        self.owner: SimulatedStorage | None = None
        self.random = Random(seed)
        self.clock = clock

    def resize(self, inode: _Inode, size: int) -> None:
        before = len(inode.data)
        inode.data = resized(inode.data, size, self.capacity_bytes - self.used_bytes)
        inode.unsynced = {page: old for page, old in inode.unsynced.items() if page * PAGE < len(inode.data)}
        inode.size, inode.modified = size, self.clock()
        self.take(len(inode.data) - before)

    def take(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def free_if_gone(self, inode: _Inode) -> None:
        if not inode.named and not inode.handles:
            self.take(-len(inode.data))
            inode.data = inode.data[:0]

    def put(self, inode: _Inode, offset: int, raw: ByteArray) -> None:
        for page in range(offset // PAGE, -(-(offset + len(raw)) // PAGE)):
            if page not in inode.unsynced:
                inode.unsynced[page] = inode.data[page * PAGE : (page + 1) * PAGE].copy()
        inode.data[offset : offset + len(raw)] = raw
        inode.modified = self.clock()


class SimulatedStorage(Storage):
    """A storage in memory for one simulated process, with room for ``capacity_bytes``.

    ``kill`` ends the process: bytes that were written stay, as in a page cache, but its handles and its lock are gone.
    ``power_loss`` also undoes some of the pages written since the last ``sync``, which ``seed`` chooses. ``restart``
    makes the storage of the next process on the same medium. ``pause`` is called before each access to the medium and
    in the middle of reads and writes: if it does not return, the process was killed there, and a part of the bytes or
    pages has been written. ``read_only``: the medium is mounted read-only for this process.
    """

    read_only = False

    def __init__(
        self,
        capacity_bytes: int,
        seed: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self.medium = _Medium(capacity_bytes, seed, clock)
        self._pause = pause
        self._dead = False
        self.handles: set[_SimulatedFile] = set()

    @property
    def capacity_bytes(self) -> int:
        return self.medium.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity_bytes: int) -> None:
        self.medium.capacity_bytes = capacity_bytes

    @property
    def is_locked(self) -> bool:
        return self.medium.owner is not None

    @property
    def num_open(self) -> int:
        """Number of files that this process has open."""
        return len(self.handles)

    @property
    def used_bytes(self) -> int:
        """Bytes that all files take, including those that were removed but are still open."""
        return self.medium.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest ``used_bytes`` so far, or since ``reset_peak``."""
        return self.medium.peak_bytes

    def reset_peak(self) -> None:
        self.medium.peak_bytes = self.medium.used_bytes

    def sync(self) -> None:
        """Makes everything written so far safe from power losses."""
        for inode in self._inodes():
            inode.unsynced.clear()

    def kill(self) -> None:
        self.close()
        self._dead = True
        for handle in list(self.handles):
            handle.close()

    def power_loss(self) -> None:
        self.kill()
        for inode in self._inodes():
            for page, old in inode.unsynced.items():
                if self.medium.random.random() < 0.5:
                    inode.data[page * PAGE : (page + 1) * PAGE] = old
            inode.unsynced.clear()

    def restart(self, pause: Callable[[], None] | None = None) -> SimulatedStorage:
        """Kills the process. Returns the storage of the next one."""
        self.kill()
        successor = SimulatedStorage(0, pause=pause)
        successor.medium = self.medium
        return successor

    def clone(self) -> SimulatedStorage:
        """Returns a storage on another medium that has the same files."""
        other = SimulatedStorage(self.capacity_bytes, clock=self.medium.clock)
        other.medium.folders = copy.deepcopy(self.medium.folders)
        for inode in other._inodes():
            inode.handles = 0
            other.medium.take(len(inode.data))
        return other

    def lock(self) -> None:
        self._check_alive()
        if self.medium.owner not in (None, self):
            raise ConfigError("dir: another simulated process owns the storage; give each its own directory")
        self.medium.owner = self

    def try_lock(self) -> bool:
        self._check_alive()
        if self.medium.owner not in (None, self):
            return False
        self.medium.owner = self
        return True

    def child(self, name: str) -> Storage:
        raise os_error(errno.ENOSYS)

    def reopened(self) -> Storage:
        raise os_error(errno.ENOSYS)

    def folders(self) -> list[str]:
        self._check_alive()
        return sorted(name for name in self.medium.folders if name)

    def files(self, folder: str) -> list[str]:
        return sorted(self._folder(folder))

    def make_folder(self, folder: str) -> None:
        self._check_alive()
        self.check_writable()
        _check_name(folder)
        self.medium.folders.setdefault(folder, {})

    def remove_folder(self, folder: str) -> None:
        self.check_writable()
        _check_name(folder)
        if self._folder(folder):
            raise os_error(errno.ENOTEMPTY)
        del self.medium.folders[folder]

    def open(
        self, folder: str, name: str, create: bool = False, direct: bool = False, fresh: bool = False
    ) -> StoredFile:
        self.step()
        files = self._folder(folder)
        _check_name(name)
        if create and name not in files:
            self.check_writable()
            files[name] = _Inode()
            files[name].modified = self.medium.clock()
        handle = _SimulatedFile(self, self._inode(folder, name), direct)
        self.handles.add(handle)
        return handle

    def remove(self, folder: str, name: str) -> None:
        self.step()
        self.check_writable()
        inode = self._inode(folder, name)
        del self.medium.folders[folder][name]
        inode.named = False
        self.medium.free_if_gone(inode)

    def held_bytes(self, is_left_out: Callable[[str, str], bool] = nothing) -> int:
        self._check_alive()
        return sum(
            len(inode.data)
            for folder, files in self.medium.folders.items()
            for name, inode in files.items()
            if not is_left_out(folder, name)
        )

    def free_bytes(self) -> int:
        self._check_alive()
        return max(0, self.medium.capacity_bytes - self.medium.used_bytes)

    def close(self) -> None:
        if self.medium.owner is self:
            self.medium.owner = None

    def step(self) -> None:
        if self._pause is not None:
            self._pause()

    def _check_alive(self) -> None:
        if self._dead:
            raise os_error(errno.EBADF)

    def check_writable(self) -> None:
        if self.read_only:
            raise os_error(errno.EROFS)

    def _folder(self, folder: str) -> dict[str, _Inode]:
        self._check_alive()
        if folder not in self.medium.folders:
            raise os_error(errno.ENOENT)
        return self.medium.folders[folder]

    def _inode(self, folder: str, name: str) -> _Inode:
        files = self._folder(folder)
        if name not in files:
            raise os_error(errno.ENOENT)
        return files[name]

    def _inodes(self) -> list[_Inode]:
        return [inode for files in self.medium.folders.values() for inode in files.values()]

    def parts(self, offset: int, nbytes: int) -> Iterator[Part]:
        """Yields the one or two parts in which a transfer reaches the medium, each after a pause."""
        if self._pause is None:
            yield [(0, nbytes)]
            return
        for part in self._split(offset, nbytes):
            self.step()
            yield part

    def _split(self, offset: int, nbytes: int) -> list[Part]:
        rng = self.medium.random
        if nbytes < 2 or rng.random() < 0.5:
            return [[(0, nbytes)]]
        if rng.random() < 0.5:
            cut = rng.randrange(1, nbytes)
            return [[(0, cut)], [(cut, nbytes)]]
        bounds = [0, *range(PAGE - offset % PAGE, nbytes, PAGE), nbytes]
        parts: list[Part] = [[], []]
        for stretch in itertools.pairwise(bounds):
            parts[rng.random() < 0.5].append(stretch)
        return parts


class _SimulatedFile(StoredFile):
    def __init__(self, storage: SimulatedStorage, inode: _Inode, direct: bool) -> None:
        self._storage = storage
        self.medium = storage.medium
        self._inode = inode
        self._direct = direct
        self._open = True
        inode.handles += 1

    def read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        self._check(buffers, offset)
        inode = self._inode
        raw = np.zeros(max(0, min(num_bytes(buffers), inode.size - offset)), np.uint8)
        with self._in_use():
            for part in self._storage.parts(offset, len(raw)):
                for start, end in part:
                    there = inode.data[offset + start : offset + end]
                    raw[start : start + len(there)] = there
        return fill(buffers, raw)

    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        self._check(buffers, offset)
        self._storage.check_writable()
        raw = np.concatenate([buffer.reshape(-1) for buffer in buffers])
        with self._in_use():
            for part in self._storage.parts(offset, len(raw)):
                if offset + len(raw) > self._inode.size:
                    self.medium.resize(self._inode, offset + len(raw))
                for start, end in part:
                    self.medium.put(self._inode, offset + start, raw[start:end])
        return len(raw)

    def size(self) -> int:
        self._check()
        return self._inode.size

    def allocated_bytes(self) -> int:
        self._check()
        return len(self._inode.data)

    def modified(self) -> float:
        self._check()
        return self._inode.modified

    def sync(self) -> None:
        self._check()
        self._inode.unsynced.clear()

    def resize(self, size: int) -> None:
        self._storage.step()
        self._check()
        self._storage.check_writable()
        self.medium.resize(self._inode, size)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._storage.handles.discard(self)
            self._inode.handles -= 1
            self.medium.free_if_gone(self._inode)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keeps the file during a transfer, even if the handle is closed meanwhile."""
        self._inode.handles += 1
        try:
            yield
        finally:
            self._inode.handles -= 1
            self.medium.free_if_gone(self._inode)

    def _check(self, buffers: Sequence[ByteArray] = (), offset: int = 0) -> None:
        if not self._open:
            raise os_error(errno.EBADF)
        if self._direct and (offset % PAGE or any(buffer.size % PAGE for buffer in buffers)):
            raise os_error(errno.EINVAL)


def num_bytes(buffers: Sequence[ByteArray]) -> int:
    return sum(buffer.size for buffer in buffers)


def head(buffers: Sequence[ByteArray], nbytes: int) -> list[ByteArray]:
    """Returns the first ``nbytes`` of ``buffers``, flattened."""
    taken: list[ByteArray] = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        taken.append(buffer.reshape(-1)[:nbytes])
        nbytes -= buffer.size
    return taken


def fill(buffers: Sequence[ByteArray], raw: ByteArray) -> int:
    """Fills the first bytes of ``buffers`` with ``raw``. Returns how many these are."""
    done = 0
    for buffer in head(buffers, len(raw)):
        buffer[:] = raw[done : done + buffer.size]
        done += buffer.size
    return done


def _check_name(name: str) -> None:
    if not name or "/" in name or name in (".", ".."):
        raise os_error(errno.EINVAL)


@dataclass(frozen=True)
class FaultRates:
    """The probability of each fault, per operation that can have it."""

    flip_on_read: float = 0.0
    """One bit of what was read is wrong, but right on the medium."""
    flip_on_write: float = 0.0
    """One bit is written wrong."""
    torn_write: float = 0.0
    """Only a part is written, possibly nothing, but the device reports that all was."""
    short_read: float = 0.0
    short_write: float = 0.0
    no_space: float = 0.0
    """ENOSPC of an operation that writes bytes or takes room."""
    io_error: float = 0.0
    """EIO of any operation."""
    stall: float = 0.0
    """A read or write hangs before it begins."""


def _forwarded(name: str, writes: bool = False) -> Any:
    """Returns a method that calls the ``inner`` storage or file, unless a fault comes first."""

    def call(self: FaultyStorage | _FaultyFile, *arguments: Any) -> Any:
        self.before_operation(writes)
        return getattr(self.inner, name)(*arguments)

    return call


class FaultyStorage(Storage):
    """Forwards every call to ``inner``, and injects faults that ``seed`` chooses while ``active`` is True.

    ``read_only``: from now on nothing can be written (EROFS). ``kill_at``: the operation of this number, counted from
    0, ends half done with Killed, as does every later one. ``stall`` is called to hang; by default it sleeps
    ``stall_s``, or until ``active`` is set to False. ``injected`` counts the faults by name, ``operations`` all
    operations.
    """

    def __init__(
        self,
        inner: Storage,
        seed: int = 0,
        rates: FaultRates = FaultRates(),
        stall: Callable[[], None] | None = None,
        stall_s: float = 1.0,
    ) -> None:
        self.inner = inner
        self.rates = rates
        self._read_only = False
        self.kill_at: int | None = None
        self.operations = 0
        self.injected: Counter[str] = Counter()
        self.random = Random(seed)
        self._calm = threading.Event()
        self.stall = stall or (lambda: bool(self._calm.wait(stall_s)))

    @property
    def read_only(self) -> bool:
        return self._read_only or self.inner.read_only

    @read_only.setter
    def read_only(self, read_only: bool) -> None:
        self._read_only = read_only

    @property
    def active(self) -> bool:
        return not self._calm.is_set()

    @active.setter
    def active(self, active: bool) -> None:
        if active:
            self._calm.clear()
        else:
            self._calm.set()

    try_lock, child, reopened = _forwarded("try_lock"), _forwarded("child"), _forwarded("reopened")
    folders, files = _forwarded("folders"), _forwarded("files")
    make_folder, remove_folder = _forwarded("make_folder", writes=True), _forwarded("remove_folder", writes=True)
    remove = _forwarded("remove", writes=True)
    held_bytes, free_bytes = _forwarded("held_bytes"), _forwarded("free_bytes")

    def lock(self) -> None:
        self.inner.lock()

    def open(
        self, folder: str, name: str, create: bool = False, direct: bool = False, fresh: bool = False
    ) -> StoredFile:
        self.before_operation(writes=create)
        return _FaultyFile(self, self.inner.open(folder, name, create, direct, fresh), direct)

    def close(self) -> None:
        self.inner.close()

    def injects(self, fault: str) -> bool:
        """Decides whether the fault of that name happens now, and counts it."""
        rate: float = getattr(self.rates, fault)
        if rate == 0 or not self.active or self.random.random() >= rate:
            return False
        self.injected[fault] += 1
        return True

    def before_operation(self, writes: bool = False) -> None:
        """Raises the faults that an operation may have before it begins."""
        if self.is_killed():
            raise Killed
        self.operations += 1
        if writes and self._read_only and self.active:
            self.injected["read_only"] += 1
            raise os_error(errno.EROFS)
        if self.injects("io_error"):
            raise os_error(errno.EIO)

    def is_killed(self) -> bool:
        """Whether the next operation is number ``kill_at`` or a later one."""
        return self.kill_at is not None and self.operations >= self.kill_at

    def cut(self, nbytes: int, direct: bool, least: int = 1) -> int:
        """Returns a random number of bytes from ``least`` to ``nbytes - 1``, of whole pages if ``direct``."""
        unit = PAGE if direct else 1
        return self.random.randrange(min(least * unit, nbytes), max(nbytes, 1), unit) if nbytes > least * unit else 0


class _FaultyFile(StoredFile):
    def __init__(self, storage: FaultyStorage, inner: StoredFile, direct: bool) -> None:
        self._storage = storage
        self.inner = inner
        self._direct = direct
        self.before_operation = storage.before_operation

    def read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        storage = self._storage
        if storage.injects("stall"):
            storage.stall()
        storage.before_operation()
        if storage.injects("short_read"):
            buffers = head(buffers, storage.cut(num_bytes(buffers), self._direct))
        n = self.inner.read(buffers, offset) if buffers else 0
        if n and storage.injects("flip_on_read"):
            self._flip(head(buffers, n))
        return n

    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        storage, total = self._storage, num_bytes(buffers)
        if storage.injects("stall"):
            storage.stall()
        if storage.is_killed() and storage.operations == storage.kill_at:
            self._write_some(buffers, storage.cut(total, self._direct, least=0), offset)
            storage.operations += 1
        storage.before_operation(writes=True)
        if storage.injects("no_space"):
            raise os_error(errno.ENOSPC)
        if storage.injects("flip_on_write"):
            buffers = [_copy(buffer) for buffer in buffers]
            self._flip(buffers)
        if storage.injects("torn_write"):
            self._write_some(buffers, storage.cut(total, self._direct, least=0), offset)
            return total
        if total > (PAGE if self._direct else 1) and storage.injects("short_write"):
            return self._write_some(buffers, storage.cut(total, self._direct), offset)
        return self.inner.write(buffers, offset)

    size, allocated_bytes, modified = _forwarded("size"), _forwarded("allocated_bytes"), _forwarded("modified")
    sync = _forwarded("sync", writes=True)

    @property
    def is_cached(self) -> bool:
        return self.inner.is_cached

    def resize(self, size: int) -> None:
        self.before_operation(writes=True)
        if self._storage.injects("no_space"):
            raise os_error(errno.ENOSPC)
        self.inner.resize(size)

    def close(self) -> None:
        self.inner.close()

    def _write_some(self, buffers: Sequence[ByteArray], nbytes: int, offset: int) -> int:
        return self.inner.write(head(buffers, nbytes), offset) if nbytes else 0

    def _flip(self, buffers: Sequence[ByteArray]) -> None:
        rng = self._storage.random
        buffer = rng.choice([buffer for buffer in buffers if buffer.size]).reshape(-1)
        buffer[rng.randrange(buffer.size)] ^= 1 << rng.randrange(8)


def _copy(buffer: ByteArray) -> ByteArray:
    """Returns a copy at an address from which direct writes are possible."""
    room = np.empty(buffer.size + PAGE, np.uint8)
    copy = room[-room.ctypes.data % PAGE :][: buffer.size]
    copy[:] = buffer.reshape(-1)
    return copy
