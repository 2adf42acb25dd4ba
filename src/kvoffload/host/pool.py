"""Host memory for offloaded blocks: the pool itself, and the backend that hands out its slots."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.host.limits import Reservation, available_memory, other_reservations, reserve
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)


SLOT_ALIGNMENT = 4096


HUGE_PAGE = 2 << 20


RESERVATION_DEADLINE_S = 1.0
"""How long a process that would have room, but for others that reserve memory at the same time, waits for them to give
up."""


ALLOCATION_STEP = 1 << 30
"""Bytes that are allocated between two looks at what memory is left."""


LOG_EVERY_S = 10.0


_TOUCH_STEP = 16 * HUGE_PAGE


_MADV_POPULATE_WRITE = 23


_MADV_COLLAPSE = 25


def padded_slot_bytes(block_bytes: int) -> int:
    """Bytes of a slot for blocks of ``block_bytes``: padded to 4 KiB, so that disks can read into it."""
    return -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Where a process's pool is: good for other processes of the same machine while that process lives."""

    boot_id: str
    """Names the running machine."""
    pid: int
    fd: int
    inode: int
    num_blocks: int
    slot_bytes: int

    def check_reachable(self) -> None:
        """Raises ConfigError unless this process is on the machine of the pool."""
        if self.boot_id != _boot_id():
            raise ConfigError(
                "a worker runs on another node than the scheduler: kvoffload serves engines whose workers are all on "
                "one node; run an engine on each node"
            )

    def open(self) -> npt.NDArray[np.uint8]:
        """The pool's bytes, shape (num_blocks, slot_bytes), shared with its owner. They stay valid when that ends.

        Raises ConfigError if it cannot be reached, or has gone.
        """
        self.check_reachable()
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the host pool of worker process {self.pid} cannot be opened ({error.strerror}): run scheduler and "
                "workers as one user in one container"
            ) from error
        try:
            if os.fstat(fd).st_ino != self.inode:
                raise ConfigError(f"the host pool of worker process {self.pid} is gone: that process has ended")
            shared = mmap.mmap(fd, self.num_blocks * self.slot_bytes)
        finally:
            os.close(fd)
        return np.frombuffer(shared, dtype=np.uint8).reshape(self.num_blocks, self.slot_bytes)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _beside(others: Sequence[Reservation]) -> str:
    if not others:
        return ""
    nbytes = format_bytes(sum(other.outstanding() for other in others))
    pids = ", ".join(str(pid) for pid in dict.fromkeys(other.pid for other in others))
    return f" beside {nbytes} that other pools have reserved and not allocated yet (process {pids})"


class HostPool:
    """One rank's host memory: ``num_blocks`` slots of ``slot_bytes`` in an unnamed memory file.

    Fully allocated when the constructor returns: if the machine cannot give that much, it raises
    ConfigError and nothing is left. The file has no name, so nothing remains of it when the process ends,
    whatever ends it. Pages are touched and collapsed to huge pages by a background thread.

    ``data`` is the pool as bytes, shape (num_blocks, slot_bytes).
    """

    def __init__(self, num_blocks: int, slot_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.slot_bytes = slot_bytes
        self.nbytes = num_blocks * slot_bytes
        self._allocate()
        self.data: ByteArray = np.frombuffer(self._map, dtype=np.uint8).reshape(num_blocks, slot_bytes)
        self._closing = threading.Event()
        self._toucher = threading.Thread(target=self._touch_all, name="kvoffload-touch", daemon=True)
        self._toucher.start()

    def _allocate(self) -> None:
        """Reserves the memory and makes sure that there is room for it beside what others have reserved, then takes it.

        No lock is held: every process reserves before it looks, so of two that reserve at the same time one sees the
        other at least.
        """
        try:
            self.fd = reserve(self.nbytes)
            try:
                self._find_room()
                self._take()
                self._map = mmap.mmap(self.fd, self.nbytes)
            except BaseException:
                os.close(self.fd)
                raise
        except OSError as error:
            raise ConfigError(
                f"host_bytes: the kernel refused {format_bytes(self.nbytes)} ({error.strerror}); "
                "set host_bytes lower, or raise the container's memory limit"
            ) from error

    def _find_room(self) -> None:
        """Raises ConfigError if there is no room. If several processes reserve at the same time and do not all have
        room, the first by number waits for the others to give up."""
        deadline = time.monotonic() + RESERVATION_DEADLINE_S
        waits = False
        while True:
            others = other_reservations(self.fd)
            available = available_memory(others)
            if self.nbytes <= available:
                return
            mine = (os.getpid(), os.fstat(self.fd).st_ino)
            is_first = all(mine < (other.pid, other.inode) for other in others)
            if not others or not is_first or time.monotonic() >= deadline:
                raise ConfigError(
                    f"host_bytes: {format_bytes(self.nbytes)} asked for, but only {format_bytes(available)} can be "
                    f"allocated here{_beside(others)}; set host_bytes to {format_bytes(available * 8 // 10)} or less"
                )
            if not waits:
                waits = True
                logger.info(
                    "kvoffload: host pool of %s%s: waiting for at most %g s",
                    format_bytes(self.nbytes),
                    _beside(others),
                    RESERVATION_DEADLINE_S,
                )
            time.sleep(0.01)

    def _take(self) -> None:
        """Allocates step by step. Raises ConfigError when others, who reserve nothing or cannot be seen, leave too
        little."""
        logged = time.monotonic()
        for offset in range(0, self.nbytes, ALLOCATION_STEP):
            left, available = self.nbytes - offset, available_memory()
            if left > available:
                raise ConfigError(
                    f"host_bytes: {format_bytes(self.nbytes)} asked for, but other processes took memory at the same "
                    f"time: {format_bytes(available)} can be allocated now, and {format_bytes(left)} are still to "
                    f"come; set host_bytes to {format_bytes((offset + available) * 8 // 10)} or less"
                )
            step = min(ALLOCATION_STEP, left)
            os.posix_fallocate(self.fd, offset, step)
            if left > step and time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                done = format_bytes(offset + step)
                logger.info("kvoffload: host pool: %s of %s allocated", done, format_bytes(self.nbytes))

    def handle(self) -> PoolHandle:
        """What another process of this machine needs in order to open the pool."""
        return PoolHandle(_boot_id(), os.getpid(), self.fd, os.fstat(self.fd).st_ino, self.num_blocks, self.slot_bytes)

    def _touch_all(self) -> None:
        """Faults every page in and asks for huge pages, a piece at a time, off the engine's thread.

        Both are wishes: a kernel that knows neither leaves ordinary pages that are touched on first use.
        """
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        start = self.data.ctypes.data
        for offset in range(0, self.nbytes, _TOUCH_STEP):
            size = min(_TOUCH_STEP, self.nbytes - offset)
            if self._closing.is_set() or madvise(start + offset, size, _MADV_POPULATE_WRITE):
                return
            madvise(start + offset, size, _MADV_COLLAPSE)

    def close(self) -> None:
        """Gives the memory back. Arrays made from ``data`` keep it alive until they are gone."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._toucher.join(timeout=5.0)
        self.data = np.empty((0, self.slot_bytes), dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)
