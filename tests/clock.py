"""The clocks of the tests."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Clock:
    """Simulated time in seconds, which advances by ``tick`` whenever it is read."""

    now: float = 100.0
    tick: float = 0.0

    def __call__(self) -> float:
        if self.tick:
            self.now += self.tick
        return self.now


class RealClock(Clock):
    """Real time, which tests put forward by ``shift`` seconds. It cannot be set: it passes by itself."""

    shift = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() + self.shift

    @now.setter
    def now(self, value: float) -> None:
        pass
