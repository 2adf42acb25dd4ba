"""The threads that do a tier's work."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvoffload.tiers.executor import Executor

logger = logging.getLogger(__name__)

NUM_THREADS = 8
MAX_QUEUED_READS = 4096
MAX_QUEUED_WRITES = 4096
GRACE_S = 1.0
"""Beyond the deadline of ``close``, for what has begun."""


class IOThreads(Executor):
    """Daemon threads with a queue of reads and one of writes. Half of the threads never write, so that reads do not
    wait until writes that were begun before them have ended."""

    def __init__(self, num_threads: int = NUM_THREADS, name: str = "kvoffload-io") -> None:
        self._reads: deque[Callable[[], None]] = deque()
        self._writes: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_running = 0
        self._num_writing = 0
        self._max_writing = max(1, num_threads // 2)
        self._closing = False
        self._ended = threading.Event()
        for number in range(num_threads):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit_read(self, job: Callable[[], None]) -> bool:
        return self._submit(job, self._reads, MAX_QUEUED_READS)

    def submit_write(self, job: Callable[[], None]) -> bool:
        return self._submit(job, self._writes, MAX_QUEUED_WRITES)

    def _submit(self, job: Callable[[], None], queue: deque[Callable[[], None]], most: int) -> bool:
        with self._changed:
            if self._closing or len(queue) >= most:
                return False
            queue.append(job)
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
            while self._reads or self._writes or self._num_running:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
            # What merely runs ends soon; what hangs does not.
            self._changed.wait_for(lambda: not self._num_running, GRACE_S)
            return not self._num_running

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._reads:
                    job, writes = self._reads.popleft(), 0
                elif self._writes:
                    job, writes = self._writes.popleft(), 1
                else:
                    return
                self._num_running += 1
                self._num_writing += writes
            try:
                job()
            except Exception:
                logger.exception("kvoffload: a job of a tier failed")
            del job
            with self._changed:
                self._num_running -= 1
                self._num_writing -= writes
                if self._closing or (writes and self._writes):
                    self._changed.notify_all()
            self._ended.set()

    def _has_work(self) -> bool:
        if self._reads or (self._writes and self._num_writing < self._max_writing):
            return True
        return self._closing and not self._writes
