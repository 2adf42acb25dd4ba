"""The host pool: one rank's memory for offloaded blocks, and the handle by which other processes open it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.abc import NOT_SET, ByteArray, ConfigError
from kvoffload.host.limits import Reservation, available_memory, memory_grows, other_reservations, reserve
from kvoffload.host.mapping import map_file
from kvoffload.host.numa import allocated_on
from kvoffload.host.touch import Toucher
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)


SLOT_ALIGNMENT = 4096
RESERVATION_DEADLINE_S = 1.0
"""If several processes reserve memory at the same time and not all fit, one of them waits this long for the others to
give up."""
ALLOCATION_STEP = 1 << 30
"""Bytes allocated between two checks of the memory left."""
GROWTH_DEADLINE_S = 15.0
"""Where memory grows with use, each step waits this long for it."""
LOG_EVERY_S = 10.0


def padded_slot_bytes(block_bytes: int) -> int:
    """Returns the bytes per slot for blocks of ``block_bytes``: padded to 4 KiB, so that direct I/O can use slots."""
    return -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Lets other processes on the same machine open a process's pool while that process lives."""

    boot_id: str
    """Identifies the running machine."""
    pid: int
    fd: int
    inode: int
    num_blocks: int
    slot_bytes: int
    node: int = 0
    """Number of its node, if an engine has several. Each node has a budget of its own."""

    @property
    def place(self) -> tuple[str, int]:
        """Equal for all pools that one budget counts."""
        return self.boot_id, self.node

    def check_reachable(self) -> None:
        """Raises ConfigError unless this process runs on the pool's machine."""
        if self.boot_id != boot_id():
            raise ConfigError(
                fault="a worker runs on another node than the scheduler, whose tiers below host memory "
                "cannot reach that worker's host pool",
                fix="remove these tiers, or run one engine per node",
            )

    def open(self) -> npt.NDArray[np.uint8]:
        """Returns the pool's bytes, shape (num_blocks, slot_bytes), shared with its owner. They outlive the owner.

        Raises ConfigError if the pool cannot be opened or no longer exists.
        """
        self.check_reachable()
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the host pool of worker process {self.pid} cannot be opened ({error.strerror}): run scheduler and "
                "workers as the same user in the same container"
            ) from error
        try:
            if os.fstat(fd).st_ino != self.inode:
                raise ConfigError(f"the host pool of worker process {self.pid} is gone: that process has ended")
            return map_file(fd, self.num_blocks * self.slot_bytes).reshape(self.num_blocks, self.slot_bytes)
        finally:
            os.close(fd)


def boot_id() -> str:
    """Returns what identifies the running machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _beside(others: Sequence[Reservation]) -> str:
    if not others:
        return ""
    nbytes = format_bytes(sum(other.outstanding() for other in others))
    pids = ", ".join(str(pid) for pid in dict.fromkeys(other.pid for other in others))
    return f" beside {nbytes} that other pools have reserved but not allocated yet (process {pids})"


class HostPool:
    """One rank's host memory: ``num_blocks`` slots of ``slot_bytes`` in an unnamed memory file.

    The constructor allocates all of it, or raises ConfigError and leaves nothing behind if there is too little memory.
    The file has no name, so it ends with the process, however that ends. The memory is on ``numa_node`` as far as there
    is room. A background thread touches the pages and collapses them to huge pages.

    ``data`` is the pool as bytes, shape (num_blocks, slot_bytes).
    """

    def __init__(self, num_blocks: int, slot_bytes: int, numa_node: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.slot_bytes = slot_bytes
        self.nbytes = num_blocks * slot_bytes
        self._allocate(numa_node)
        self.data: ByteArray = self._map.reshape(num_blocks, slot_bytes)
        self._before_close: list[Callable[[], object]] = []
        self._is_closed = False
        self._toucher = Toucher(self.data, collapse=True)

    def _allocate(self, numa_node: int | None) -> None:
        """Reserves the memory, checks that it fits beside what others have reserved, then allocates it.

        This needs no lock: every process reserves before it checks, so if two reserve at the same time, at least one
        sees the other. What could not fit without others is not reserved: they would be refused because of it.
        """
        try:
            available = available_memory()
            if self.nbytes > available and not memory_grows():
                raise self._refused(available, ())
            self.fd = reserve(self.nbytes)
            try:
                self._find_room()
                self._map = map_file(self.fd, self.nbytes)
                try:
                    with allocated_on(numa_node, self._map.ctypes.data, self.nbytes):
                        self._take()
                except BaseException:
                    del self._map
                    raise
            except BaseException:
                os.close(self.fd)
                raise
        except OSError as error:
            raise ConfigError(
                "host_bytes",
                NOT_SET,
                f"the kernel refused {format_bytes(self.nbytes)} ({error.strerror})",
                "set host_bytes lower, or raise the container's memory limit",
            ) from error

    def _find_room(self) -> None:
        """Raises ConfigError if there is no room. If several processes reserve at the same time and not all fit, the
        first by process id waits for the others to give up."""
        deadline = time.monotonic() + RESERVATION_DEADLINE_S
        waits = False
        while True:
            others = other_reservations(self.fd)
            available = available_memory(others)
            if self.nbytes <= available or memory_grows():
                return
            mine = (os.getpid(), os.fstat(self.fd).st_ino)
            is_first = all(mine < (other.pid, other.inode) for other in others)
            if not others or not is_first or time.monotonic() >= deadline:
                raise self._refused(available, others)
            if not waits:
                waits = True
                logger.info(
                    "kvoffload: host pool of %s%s: waiting up to %g s",
                    format_bytes(self.nbytes),
                    _beside(others),
                    RESERVATION_DEADLINE_S,
                )
            time.sleep(0.01)

    def _refused(self, available: int, others: Sequence[Reservation]) -> ConfigError:
        requested, most = format_bytes(self.nbytes), format_bytes(available)
        fault = f"{requested} requested, but only {most} can be allocated here{_beside(others)}"
        return ConfigError(
            "host_bytes", NOT_SET, fault, f"set host_bytes to {format_bytes(available * 8 // 10)} or less"
        )

    def _take(self) -> None:
        """Allocates step by step, where memory grows as much as there is at a time. Raises ConfigError if it does not
        grow, or if processes whose reservations are not visible leave too little memory meanwhile."""
        logged, grows = time.monotonic(), memory_grows()
        for offset in range(0, self.nbytes, ALLOCATION_STEP):
            left = self.nbytes - offset
            step = min(ALLOCATION_STEP, left)
            available, needed = available_memory(), step if grows else left
            deadline = time.monotonic() + GROWTH_DEADLINE_S
            while grows and needed > available and time.monotonic() < deadline:
                time.sleep(0.05)
                available = available_memory()
            if needed > available:
                raise ConfigError(
                    "host_bytes",
                    NOT_SET,
                    f"{format_bytes(self.nbytes)} requested, but "
                    f"{'memory does not grow' if grows else 'other processes took memory at the same time'}: "
                    f"{format_bytes(left)} are still to be allocated, but only {format_bytes(available)} are available",
                    f"set host_bytes to {format_bytes((offset + available) * 8 // 10)} or less",
                )
            os.posix_fallocate(self.fd, offset, step)
            if left > step and time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                done = format_bytes(offset + step)
                logger.info("kvoffload: host pool: %s of %s allocated", done, format_bytes(self.nbytes))

    def handle(self, node: int = 0) -> PoolHandle:
        """Returns what another process on this machine needs to open the pool. ``node``: see ``PoolHandle.node``."""
        inode = os.fstat(self.fd).st_ino
        return PoolHandle(boot_id(), os.getpid(), self.fd, inode, self.num_blocks, self.slot_bytes, node)

    def wait_until_touched(self, nbytes: int | None = None) -> bool:
        """Waits until the background thread is done with the first ``nbytes``, or with all, and moves them no more.
        Returns False if the pool is closed before."""
        return self._toucher.wait(nbytes)

    def before_close(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` at the begin of ``close``, while the memory is still mapped."""
        self._before_close.append(callback)

    def close(self) -> None:
        """Frees the memory; arrays made from ``data`` keep it alive until they are deleted. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._toucher.close()
        for callback in self._before_close:
            callback()
        self._map = np.empty(0, dtype=np.uint8)
        self.data = np.empty((0, self.slot_bytes), dtype=np.uint8)
        os.close(self.fd)
