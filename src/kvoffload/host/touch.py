"""Faults in the pages of a mapping in the background."""

from __future__ import annotations

import ctypes
import threading

from kvoffload.abc import ByteArray
from kvoffload.host.mapping import HUGE_PAGE

STEP = 16 * HUGE_PAGE
CLOSE_DEADLINE_S = 5.0
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25


class Toucher:
    """A thread that collapses the pages of ``data`` to huge pages, if ``collapse`` is set, and faults in what it cannot
    collapse, piece by piece.

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
        for offset in range(0, self._nbytes, STEP):
            if self._closed:
                return
            start, size = self._address + offset, min(STEP, self._nbytes - offset)
            if self._collapse:
                # This maps the huge pages too. It costs twice as much if ordinary pages are mapped before.
                madvise(start, size, _MADV_COLLAPSE)
            if madvise(start, size, _MADV_POPULATE_WRITE):
                break
            self._note(offset + size)
        self._note(self._nbytes)

    def _note(self, nbytes: int) -> None:
        with self._progress:
            self._touched = nbytes
            self._progress.notify_all()
