"""File locks with a deadline."""

from __future__ import annotations

import fcntl
import time

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
