"""Makes system calls of this process on the files of one directory stall, slow down or fail, as a storage that does
so would: the demo's stand-in for a mount that hangs."""

from __future__ import annotations

import enum
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

SLOWDOWN = 10
SHORTEST_S = 1e-4
"""A call that the page cache answers counts as this long."""
READS = ("open", "read", "pread", "preadv", "posix_fadvise")
FACTS = ("stat", "fstat", "listdir", "scandir", "statvfs", "fstatvfs")
WRITES = (
    "write",
    "pwrite",
    "pwritev",
    "posix_fallocate",
    "ftruncate",
    "fsync",
    "fdatasync",
    "mkdir",
    "unlink",
    "rename",
)


class FileMode(enum.StrEnum):
    NORMAL = "normal"
    STALLED = "stalled"
    """No call returns until the mode changes."""
    SLOW = "slow"
    """Calls take SLOWDOWN times as long."""
    FULL = "full"
    """Calls that write fail with ENOSPC."""


class BrokenFiles:
    """Wraps functions of ``os`` for the files in ``directory``, until it is closed. Files that are mapped are not
    concerned."""

    def __init__(self, directory: str) -> None:
        self.num_calls = 0
        """Calls on files of the directory since the start."""
        self._directory = os.path.realpath(directory)
        self._mode = FileMode.NORMAL
        self._changed = threading.Condition()
        self._functions = {name: getattr(os, name) for name in (*READS, *FACTS, *WRITES)}
        for name, function in self._functions.items():
            setattr(os, name, self._wrap(name, function))

    def set_mode(self, mode: FileMode) -> None:
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def close(self) -> None:
        """Gives ``os`` its functions back."""
        self.set_mode(FileMode.NORMAL)
        for name, function in self._functions.items():
            setattr(os, name, function)

    def _wrap(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._mode is FileMode.NORMAL or not self._concerns(args, kwargs):
                return inner(*args, **kwargs)
            self.num_calls += 1
            with self._changed:
                self._changed.wait_for(lambda: self._mode is not FileMode.STALLED)
            if self._mode is FileMode.FULL and name in WRITES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            begun = time.monotonic()
            try:
                return inner(*args, **kwargs)
            finally:
                if self._mode is FileMode.SLOW:
                    time.sleep((SLOWDOWN - 1) * max(SHORTEST_S, time.monotonic() - begun))

        return call

    def _concerns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the file or folder of a call is in the directory."""
        places = [*args[:1], kwargs.get("dir_fd")]
        return any(self._is_inside(place) for place in places if place is not None)

    def _is_inside(self, place: Any) -> bool:
        if isinstance(place, int):
            try:
                path = os.readlink(f"/proc/self/fd/{place}")
            except OSError:
                return False
        elif isinstance(place, (str, os.PathLike)):
            path = os.path.realpath(os.fspath(place)) if os.path.isabs(os.fspath(place)) else ""
        else:
            return False
        return path == self._directory or path.startswith(self._directory + "/")
