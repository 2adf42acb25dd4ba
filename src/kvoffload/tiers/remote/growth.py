"""GrowthWatch: ends a process whose memory grows beyond the size of the answers to its requests.

A library may keep everything that a peer sends, such as an error with a body of 100 GB. Only the end of the process
stops that; the cost is misses until the next process runs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvoffload.units import format_bytes

MAX_GROWTH_BYTES = 48 << 20
"""Memory beside the bytes that were asked for: buffers of connections, threads."""
INTERVAL_S = 0.01
"""Time between two looks while a request is under way: a peer sends a few megabytes meanwhile."""
IDLE_INTERVAL_S = 0.5
STATM_BYTES = 256


class GrowthWatch:
    """Looks, from ``with`` on, at the memory of this process that it shares with no other, and ends the process if that
    has grown by more than MAX_GROWTH_BYTES, the ``own_bytes`` of its client and the bytes that are asked for."""

    def __init__(self, own_bytes: int = 0) -> None:
        self._most = own_bytes + MAX_GROWTH_BYTES
        self._asked = self._num_calls = 0
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._ended = threading.Event()

    def __enter__(self) -> GrowthWatch:
        # It stays open: the process may run out of descriptors.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._private_bytes()
        threading.Thread(target=self._run, name="memory", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._busy.set()

    def allow(self, nbytes: int) -> None:
        """Lets the process take so many bytes more."""
        with self._lock:
            self._most += nbytes

    @contextmanager
    def asking(self, nbytes: int = 0) -> Iterator[None]:
        """Returns a context in which the store is asked for so many bytes."""
        self._count(1, nbytes)
        try:
            yield
        finally:
            self._count(-1, -nbytes)

    def _count(self, num_calls: int, nbytes: int) -> None:
        with self._lock:
            self._num_calls += num_calls
            self._asked += nbytes
            if self._num_calls:
                self._busy.set()
            else:
                self._busy.clear()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._busy.wait(IDLE_INTERVAL_S)
            with suppress(OSError):
                if self._is_beyond() and self._is_beyond(after_trim=True):
                    self._end()
        os.close(self._statm)

    def _is_beyond(self, after_trim: bool = False) -> bool:
        if after_trim:
            # Freed memory may still count.
            with suppress(AttributeError, OSError):
                ctypes.CDLL(None).malloc_trim(0)
        return self._private_bytes() > self._before + self._most + self._asked

    def _private_bytes(self) -> int:
        resident, shared = os.pread(self._statm, STATM_BYTES, 0).split()[1:3]
        return (int(resident) - int(shared)) * mmap.PAGESIZE

    def _end(self) -> None:
        most = format_bytes(self._most + self._asked)
        with suppress(OSError):
            print(
                f"this process took more than {most} of memory beside its libraries and ends, to protect the server. "
                "Either the store sends more than requested: check the server at the store's address. Or the client "
                "needs more for itself: set client_bytes in the class of the tier's configuration",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)
