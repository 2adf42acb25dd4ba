"""Locks with a deadline: of files, and one between threads that is fair."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

RETRY_S = 0.01


def try_to_lock(fd: int, deadline_s: float, shared: bool = False) -> bool:
    """Takes the lock (``flock``) of the open file ``fd``. Returns False if others still hold it after ``deadline_s``
    seconds. Raises OSError if the file system has no locks."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(RETRY_S)


class FairLock:
    """A lock between threads. A thread that waits gets it next: whoever releases it cannot take it again before."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        """Held by the thread that is next."""
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, timeout_s: float = -1) -> Iterator[bool]:
        """Returns a context in which the lock is held: False, and it is not held, if others have kept it for
        ``timeout_s``. A negative one waits for ever."""
        is_held, deadline = False, time.monotonic() + timeout_s
        if self._turn.acquire(timeout=timeout_s):
            try:
                left_s = timeout_s if timeout_s < 0 else max(0.0, deadline - time.monotonic())
                is_held = self._lock.acquire(timeout=left_s)
            finally:
                self._turn.release()
        try:
            yield is_held
        finally:
            if is_held:
                self._lock.release()
