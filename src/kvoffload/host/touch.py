"""Faults in the pages of a mapping in the background."""

from __future__ import annotations

import ctypes
import logging
import threading
import time

from kvoffload.abc import ByteArray
from kvoffload.host.mapping import HUGE_PAGE
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

STEP = 16 * HUGE_PAGE
CLOSE_DEADLINE_S = 5.0
COLLAPSE_BYTES_PER_S = 1 << 30
"""If collapsing is slower than this on average, as in fragmented memory, it ends for good: it takes time from the
engine and delays registration, while huge pages make copies only a little faster."""
COLLAPSE_GRACE_S = 1.0
"""The time that collapsing may take beyond this."""
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25


class Toucher:
    """A thread that collapses the pages of ``data`` to huge pages, if ``collapse`` is set, and faults in what it cannot
    collapse, piece by piece. It collapses as long as that is fast.

    Both are optional: on a kernel that supports neither, ordinary pages are faulted in on first use.
    """

    def __init__(self, data: ByteArray, collapse: bool) -> None:
        self._address = data.ctypes.data
        self._nbytes = data.nbytes
        self._collapse = collapse
        self._touched = 0
        self._closed = False
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvoffload-touch", daemon=True)
        self._thread.start()

    def wait(self, nbytes: int | None = None) -> bool:
        """Waits until the thread is done with the first ``nbytes``, or with all, and moves them no more. Returns False
        if it is closed before."""
        least = self._nbytes if nbytes is None else nbytes
        with self._progress:
            self._progress.wait_for(lambda: self._touched >= least or self._closed)
            return self._touched >= least

    def close(self) -> None:
        """Ends the thread before its next piece. May be called twice."""
        with self._progress:
            self._closed = True
            self._progress.notify_all()
        self._thread.join(CLOSE_DEADLINE_S)

    def _run(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        allowed_s = COLLAPSE_GRACE_S
        for offset in range(0, self._nbytes, STEP):
            if self._closed:
                return
            start, size = self._address + offset, min(STEP, self._nbytes - offset)
            if self._collapse:
                began = time.monotonic()
                # This maps the huge pages too, and costs less than with ordinary pages mapped before.
                madvise(start, size, _MADV_COLLAPSE)
                allowed_s += size / COLLAPSE_BYTES_PER_S - (time.monotonic() - began)
                if allowed_s < 0:
                    self._collapse = False
                    logger.info(
                        "kvoffload: the host pool has ordinary pages from %s on: huge pages take too long here",
                        format_bytes(offset + size),
                    )
            if madvise(start, size, _MADV_POPULATE_WRITE):
                break
            self._note(offset + size)
        self._note(self._nbytes)

    def _note(self, nbytes: int) -> None:
        with self._progress:
            self._touched = nbytes
            self._progress.notify_all()
