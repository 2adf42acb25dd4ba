"""LimitedLog: warnings about a medium, at most one per interval."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class LimitedLog:
    """Logs a warning at most every ``interval_s``, and how many were left out before it."""

    def __init__(self, clock: Callable[[], float], interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._not_before = -float("inf")
        self._num_left_out = 0

    def warning(self, message: str, *values: object) -> None:
        if self._clock() < self._not_before:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more warnings were left out before)" if self._num_left_out else ""
        logger.warning("kvoffload: " + message + "%s", *values, more)
        self._num_left_out = 0
        self._not_before = self._clock() + self._interval_s
