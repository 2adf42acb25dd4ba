"""A storage that adds faults to any other, and what simulated storages have in common."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.storage import Storage, StoredFile
from tests.sim.executor import Killed

PAGE = 4096


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


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
    0, ends half done with Killed, as does every later one. ``stall`` is called to hang. ``injected`` counts the faults
    by name, ``operations`` all operations.
    """

    def __init__(
        self,
        inner: Storage,
        seed: int = 0,
        rates: FaultRates = FaultRates(),
        stall: Callable[[], None] = lambda: None,
    ) -> None:
        self.inner = inner
        self.rates = rates
        self._read_only = False
        self.kill_at: int | None = None
        self.operations = 0
        self.injected: Counter[str] = Counter()
        self.random = Random(seed)
        self.stall = stall
        self.active = True

    @property
    def read_only(self) -> bool:
        return self._read_only or self.inner.read_only

    @read_only.setter
    def read_only(self, read_only: bool) -> None:
        self._read_only = read_only

    try_lock, child = _forwarded("try_lock"), _forwarded("child")
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
