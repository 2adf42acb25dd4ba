"""LimitedLog: warnings about a medium, at most one per interval."""

from __future__ import annotations

import logging
from collections.abc import Callable

WARNING_INTERVAL_S = 10.0


class LimitedLog:
    """Logs a warning to ``logger`` at most every WARNING_INTERVAL_S of ``clock``, and how many were left out before
    it."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._not_before = -float("inf")
        self._num_left_out = 0

    def warning(self, message: str, *values: object) -> None:
        """Logs ``message % values`` behind "kvoffload: "."""
        now = self._clock()
        if now < self._not_before:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more warnings were left out before)" if self._num_left_out else ""
        self._logger.warning("kvoffload: " + message + "%s", *values, more)
        self._num_left_out = 0
        self._not_before = now + WARNING_INTERVAL_S
