"""Work in the background: a thread that does something again and again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Repeating:
    """Calls ``do`` every ``interval_s``, and after ``wake``, on a daemon thread, which may hang in it, until ``stop``;
    then ``finish``."""

    def __init__(self, name: str, do: Callable[[], None], interval_s: float, finish: Callable[[], None]) -> None:
        self._name = name
        self._do = do
        self._interval_s = interval_s
        self._finish = finish
        self._is_stopped = False
        self._woken = threading.Event()
        self._has_begun = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_for_first(self, timeout_s: float) -> None:
        """Waits until ``do`` was called once, at most ``timeout_s``."""
        self._has_begun.wait(timeout_s)

    def wake(self) -> None:
        """Has ``do`` called again now. Any thread may call this."""
        self._woken.set()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread, and waits at most ``timeout_s`` for it."""
        self._is_stopped = True
        self.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            # In this order: ``stop`` wakes when it has set the flag.
            self._woken.clear()
            if self._is_stopped:
                break
            self._try(self._do)
            self._has_begun.set()
            self._woken.wait(self._interval_s)
        self._try(self._finish)

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception:
            if not self._has_failed:
                logger.exception("kvoffload: the thread %s failed, which is a bug; its work is repeated", self._name)
            self._has_failed = True
