"""Calls that may hang, in a file system for example, under a deadline."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

FILES_DEADLINE_S = 10.0
"""Time for the files that a configuration names, other than those of tiers, and for caches."""

_T = TypeVar("_T")


def within(timeout_s: float, do: Callable[[], _T]) -> _T:
    """Returns what ``do`` returns, or raises what it raises. Raises TimeoutError, an OSError, if that takes longer than
    ``timeout_s``: the daemon thread that calls it goes on then."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvoffload-deadline", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise OSError(errno.ETIMEDOUT, f"its file system has not answered for {timeout_s:.0f} s")
    return results[0]
