"""Who does a tier's work: threads, or in a simulation whoever holds the clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Executor(ABC):
    """Runs jobs, reads before writes, each kind in the order of submission. A job raises nothing."""

    @abstractmethod
    def submit_read(self, job: Callable[[], None]) -> bool:
        """False: there is too much to do already, and the job is not run."""

    @abstractmethod
    def submit_write(self, job: Callable[[], None]) -> bool:
        """False: there is too much to do already, and the job is not run."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Gives the processor away until a job has ended since the last call, at most ``timeout_s``."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Takes no more jobs, and waits for those it has, at most ``timeout_s``. Returns whether all are done; what was
        not begun by then is not run."""
