"""CircuitBreaker: decides when a tier is used, when it is only tested, and when it is switched off."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable

MAX_FAILURES = 16
"""If one tier fails this often within FAILURE_PERIOD_S, it is paused."""
FAILURE_PERIOD_S = 60.0
PAUSE_S = 1.0
"""How long a tier is paused at first."""
MAX_PAUSE_S = 60.0
TRUST_FACTOR = 4
"""If a tier fails again before it has worked for this many times its latest pause, or FAILURE_PERIOD_S if that is
less, the next pause is twice as long. So a tier that passes its tests and then fails costs requests a bounded share of
their time."""
JITTER = 0.25
"""A pause is longer by up to this share of it, at random, so that not all servers test a store at the same time."""
MAX_HANGS = 4
"""How often the reads of one tier may hang before no more test reads are made until one of its reads ends."""


class BreakerState(enum.Enum):
    WORKING = enum.auto()
    """The tier is asked, read and written."""
    OPEN = enum.auto()
    """It has failed too often, or its transfers hang: it is neither asked nor read nor written for a while."""
    HALF_OPEN = enum.auto()
    """The pause is over: one block is to be read or written as a test."""
    TESTING = enum.auto()
    """One block is being read or written as a test."""
    OFF = enum.auto()
    """It was switched off, and is neither asked nor read nor written again."""


class CircuitBreaker:
    """The state of one tier. ``random`` returns numbers from 0 to 1, for the jitter.

    Failures count while the tier works. In the other states a test decides: it closes the breaker or opens it again,
    for a longer pause. So does a lookup that fails, but a lookup that succeeds closes nothing.
    """

    def __init__(self, random: Callable[[], float] = random.random) -> None:
        self.state = BreakerState.WORKING
        self.pause_s = 0.0
        """The latest pause, without jitter."""
        self._random = random
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._half_open_at = 0.0
        self._closed_at = float("-inf")
        self._hangs = False
        """Whether the tier was paused because its transfers hang."""

    @property
    def is_working(self) -> bool:
        return self.state is BreakerState.WORKING

    @property
    def may_test(self) -> bool:
        """Whether one block may be read or written to test the tier."""
        return self.state is BreakerState.HALF_OPEN

    @property
    def is_off(self) -> bool:
        return self.state is BreakerState.OFF

    @property
    def is_paused(self) -> bool:
        """Whether the tier has failed and is not used, or only tested."""
        return self.state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.TESTING)

    def update(self, now: float) -> None:
        """Ends the pause if it is over."""
        if self.state is BreakerState.OPEN and now >= self._half_open_at:
            self.state = BreakerState.HALF_OPEN

    def add_failures(self, num_failures: int, now: float) -> bool:
        """Takes in failures of reads, writes and lookups that were no tests. Returns whether they are too many for a
        tier that works, which is then paused."""
        if self.state is BreakerState.WORKING:
            self._failures.extend([now] * num_failures)
            is_full = len(self._failures) == MAX_FAILURES
            if is_full and now - self._failures[0] <= FAILURE_PERIOD_S:
                self._open(now)
                return True
        return False

    def hang(self, now: float) -> bool:
        """Pauses the tier because its transfers hang. Returns whether it has worked until now."""
        was_working = self.is_working
        if not self.is_off and self.state is not BreakerState.OPEN:
            self._open(now)
            self._hangs = True
        return was_working

    def begin_test(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.TESTING

    def repeat_test(self) -> None:
        """Called when a test has decided nothing: the medium has answered, but the block was bad."""
        if self.state is BreakerState.TESTING:
            self.state = BreakerState.HALF_OPEN

    def end_test(self, ok: bool, now: float) -> bool:
        """Takes in the result of a test, or of a lookup for one. Returns whether the tier works again."""
        if not self.is_paused or self.state is BreakerState.OPEN:
            return False
        if ok:
            self._close(now)
        else:
            self._open(now)
        return ok

    def end_hang(self, now: float) -> bool:
        """Called when a transfer that had hung has succeeded. Returns whether the tier works again: if it was paused
        for nothing else."""
        if not self.is_paused or not self._hangs:
            return False
        self._close(now)
        return True

    def switch_off(self) -> None:
        self.state = BreakerState.OFF

    def _open(self, now: float) -> None:
        trusted_after_s = min(FAILURE_PERIOD_S, TRUST_FACTOR * self.pause_s)
        is_again = not self.is_working or now - self._closed_at < trusted_after_s
        self.pause_s = min(MAX_PAUSE_S, 2 * self.pause_s) if is_again else PAUSE_S
        self._half_open_at = now + self.pause_s * (1 + JITTER * self._random())
        self.state = BreakerState.OPEN
        self._hangs = False
        self._failures.clear()

    def _close(self, now: float) -> None:
        self.state = BreakerState.WORKING
        self._closed_at = now


class Progress:
    """Watches the transfers of one tier in one direction.

    They hang if some are under way and none has ended for ``deadline_s``.
    """

    def __init__(self, deadline_s: float) -> None:
        self.at = float("-inf")
        """When a transfer last ended, or when the first of those under way began."""
        self.num_hangs = 0
        """How often transfers have hung that have not ended since."""
        self._deadline_s = deadline_s

    def begun(self, now: float, num_before: int) -> None:
        """``num_before`` others were under way, without those that hang."""
        if num_before == 0:
            self.at = now

    def detect_hang(self, now: float, num_under_way: int) -> bool:
        """Returns whether the transfers under way, without those that have hung before, hang now."""
        if num_under_way == 0 or now - self.at < self._deadline_s:
            return False
        self.num_hangs += 1
        return True

    def ended(self, now: float, num_late: int, num_hanging: int) -> None:
        """Called when transfers have ended: ``num_late`` of them had been hanging, ``num_hanging`` others still are."""
        if num_late:
            self.num_hangs = max(0, self.num_hangs - 1) if num_hanging else 0
        self.at = now
