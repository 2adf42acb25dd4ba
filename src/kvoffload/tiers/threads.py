"""The contract of an executor, which runs a tier's jobs: on daemon threads, or in a simulation one at a time."""

from __future__ import annotations

import enum
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

NUM_THREADS = 8
MAX_QUEUED = 4096
"""Reads, and as many writes, that wait for a thread."""
GRACE_S = 1.0
"""Time beyond the deadline of ``close`` for jobs that have begun."""


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


class _Kind(enum.Enum):
    """Kinds of jobs, in the order of their priority."""

    MAINTENANCE = enum.auto()
    READ = enum.auto()
    WRITE = enum.auto()


class IOThreads(Executor):
    """Runs jobs on ``num_threads`` daemon threads with one queue per kind of job.

    Half of the threads never run writes, so that reads do not wait for writes that began before them.
    """

    def __init__(self, num_threads: int = NUM_THREADS, name: str = "kvoffload-io") -> None:
        self._queues: dict[_Kind, deque[Callable[[], None]]] = {kind: deque() for kind in _Kind}
        self._changed = threading.Condition()
        self._num_running = 0
        self._num_writing = 0
        self._max_writing = max(1, num_threads // 2)
        self._closing = False
        self._ended = threading.Event()
        for number in range(num_threads):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit_maintenance(self, job: Callable[[], None]) -> bool:
        return self._submit(job, _Kind.MAINTENANCE, 1)

    def submit_read(self, job: Callable[[], None]) -> bool:
        return self._submit(job, _Kind.READ, MAX_QUEUED)

    def submit_write(self, job: Callable[[], None]) -> bool:
        return self._submit(job, _Kind.WRITE, MAX_QUEUED)

    def _submit(self, job: Callable[[], None], kind: _Kind, max_queued: int) -> bool:
        with self._changed:
            if self._closing or len(self._queues[kind]) >= max_queued:
                return False
            self._queues[kind].append(job)
            self._changed.notify()
            return True

    def wait(self, timeout_s: float) -> None:
        if self._ended.wait(timeout_s):
            self._ended.clear()

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while any(self._queues.values()) or self._num_running:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()
            # A job that runs ends soon, unless it hangs in a call.
            self._changed.wait_for(lambda: not self._num_running, GRACE_S)
            return not self._num_running

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                kind = next((kind for kind, queue in self._queues.items() if queue), None)
                if kind is None:
                    return
                job = self._queues[kind].popleft()
                is_write = kind is _Kind.WRITE
                self._num_running += 1
                self._num_writing += is_write
            try:
                job()
            except Exception:
                logger.exception(
                    "kvoffload: a job of a tier raised an error, which is a bug of the tier; the thread goes on"
                )
            # Frees what the job refers to before the thread waits for the next one.
            del job
            with self._changed:
                self._num_running -= 1
                self._num_writing -= is_write
                if self._closing or (is_write and self._queues[_Kind.WRITE]):
                    self._changed.notify_all()
            self._ended.set()

    def _has_work(self) -> bool:
        writes = self._queues[_Kind.WRITE]
        if self._queues[_Kind.MAINTENANCE] or self._queues[_Kind.READ]:
            return True
        if writes and self._num_writing < self._max_writing:
            return True
        return self._closing and not writes
