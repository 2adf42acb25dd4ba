"""CircuitBreaker: decides when a tier is not read for a while, and when it is switched off."""

from __future__ import annotations

import enum
from collections import deque

MAX_FAILURES = 16
"""If one tier fails this often within FAILURE_PERIOD_S, it is switched off."""
FAILURE_PERIOD_S = 60.0
MAX_HANGS = 4
"""How often the reads of one tier may hang before no more test reads are made until one of its reads ends."""


class BreakerState(enum.Enum):
    WORKING = enum.auto()
    """The tier is read and written."""
    SUSPENDED = enum.auto()
    """Its reads hang: nothing is read but, now and then, one block as a test."""
    PROBING = enum.auto()
    """Its reads hang, and one block is being read as a test."""
    OFF = enum.auto()
    """It has failed too often, or was switched off from outside: it is neither read nor written again."""


class CircuitBreaker:
    """Watches the reads and failures of one tier.

    Reads hang if some are under way and none has ended for ``deadline_s``. Then the tier is suspended until any read
    ends. A test read that hangs too counts as another hang; MAX_HANGS bounds them, since the host slot of a hanging
    read cannot be used.
    """

    def __init__(self, deadline_s: float) -> None:
        self.state = BreakerState.WORKING
        self.progress_at = float("-inf")
        """When a read last ended, or when the first of those under way began."""
        self.num_hangs = 0
        """How often reads have hung that have not ended since."""
        self._deadline_s = deadline_s
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)

    @property
    def can_read(self) -> bool:
        return self.state is BreakerState.WORKING

    @property
    def is_off(self) -> bool:
        return self.state is BreakerState.OFF

    @property
    def may_probe(self) -> bool:
        """Whether one block may be read to test the tier."""
        return self.state is BreakerState.SUSPENDED and self.num_hangs < MAX_HANGS

    def reads_begun(self, now: float, num_reading_before: int) -> None:
        if num_reading_before == 0:
            self.progress_at = now
        if self.state is BreakerState.SUSPENDED:
            self.state = BreakerState.PROBING

    def detect_hang(self, now: float, num_reading: int) -> bool:
        """Returns whether the ``num_reading`` reads under way hang, and suspends the tier if so."""
        if num_reading == 0 or now - self.progress_at < self._deadline_s:
            return False
        if not self.is_off:
            self.state = BreakerState.SUSPENDED
        self.num_hangs += 1
        return True

    def reads_ended(self, now: float, num_late: int, num_hanging: int) -> None:
        """Called when reads have ended, so the tier works: ``num_late`` of them had been hanging, ``num_hanging``
        others still are."""
        if num_late:
            self.num_hangs = max(0, self.num_hangs - 1) if num_hanging else 0
        self.progress_at = now
        if not self.is_off:
            self.state = BreakerState.WORKING

    def add_failures(self, num_failures: int, now: float) -> bool:
        """Returns whether the tier has failed too often with these failures, and is still on."""
        self._failures.extend([now] * num_failures)
        is_full = len(self._failures) == MAX_FAILURES
        return is_full and now - self._failures[0] <= FAILURE_PERIOD_S and not self.is_off

    def switch_off(self) -> None:
        self.state = BreakerState.OFF
