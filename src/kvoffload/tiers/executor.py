"""The contract of an executor, which runs a tier's jobs: on threads, or in a simulation one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Executor(ABC):
    """Runs jobs: maintenance before reads, reads before writes, each kind in the order of submission.

    A job must not raise. A ``submit_*`` method returns False if its queue is full or the executor is closed; the job is
    then not run.
    """

    @abstractmethod
    def submit_maintenance(self, job: Callable[[], None]) -> bool:
        """Queues a job that serves no request: growing files, for example. A tier has one of them at a time."""

    @abstractmethod
    def submit_read(self, job: Callable[[], None]) -> bool:
        """Queues a job that a request may wait for."""

    @abstractmethod
    def submit_write(self, job: Callable[[], None]) -> bool:
        """Queues a job that no request waits for."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Blocks until a job has ended since the last call, at most ``timeout_s``."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Takes no more jobs and waits at most ``timeout_s`` for the queued and running ones. Returns whether all have
        ended; jobs that have not begun by then are not run."""
