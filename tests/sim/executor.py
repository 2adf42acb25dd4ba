"""An executor whose interleaving a seed chooses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TypeAlias

from kvoffload.tiers.threads import Executor

Job: TypeAlias = Callable[[], None]


class Killed(BaseException):
    """The simulated process was killed. Not an Exception, since a dead process handles none."""


class SteppedExecutor(Executor):
    """Runs jobs within ``tick`` and ``wait`` only. ``seed`` chooses when they begin, pause, continue and end.

    At most ``num_threads`` jobs have begun and not ended at a time. Each runs on a thread of its own, but only while
    the caller waits for it: nothing runs in parallel, and a run can be repeated. A job is interrupted where it calls
    ``pause`` or ``stall``: give these to the storage that it uses. An exception of a job is raised by ``tick``.
    ``chance``: the probability of each further turn within a tick.
    """

    def __init__(
        self,
        seed: int = 0,
        num_threads: int = 4,
        max_queued: int = 1 << 16,
        chance: float = 0.5,
        pause_chance: float = 0.3,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._held = False
        self._random = Random(seed)
        self._num_threads = num_threads
        self._max_queued = max_queued
        self._chance = chance
        self._pause_chance = pause_chance
        self._clock = clock
        self._now = clock()
        """The time of the latest turn."""
        self._maintenance: deque[Job] = deque()
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._idle: list[_Fiber] = []
        self._under_way: list[_Fiber] = []
        self._running: _Fiber | None = None
        self._closed = False

    def submit_maintenance(self, job: Job) -> bool:
        return self._submit(self._maintenance, job)

    def submit_read(self, job: Job) -> bool:
        return self._submit(self._reads, job)

    def submit_write(self, job: Job) -> bool:
        return self._submit(self._writes, job)

    def _submit(self, queue: deque[Job], job: Job) -> bool:
        if self._closed or len(queue) >= self._max_queued:
            return False
        queue.append(job)
        return True

    @property
    def in_job(self) -> bool:
        """Whether the caller is a job."""
        return self._running is not None

    @property
    def in_the_middle(self) -> bool:
        """Whether a job has begun and paused."""
        return bool(self._under_way)

    @property
    def idle(self) -> bool:
        """Whether no job is queued or has begun."""
        return not (self._maintenance or self._reads or self._writes or self._under_way)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Returns a context in which no job begins or continues."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def tick(self) -> None:
        """Takes a random number of turns."""
        while self._random.random() < self._chance and self.turn():
            pass

    def wait(self, timeout_s: float) -> None:
        self.tick()

    def drain(self) -> None:
        """Takes turns until no job can begin or continue."""
        while self.turn():
            pass

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        until = self._clock() + timeout_s
        while not self._held and self.turn(until):
            pass
        self._clear_queues()
        return self.idle

    def kill(self) -> None:
        """Simulates the end of the process: queued jobs never run, and those that have begun stop where they are."""
        self._closed = True
        self._clear_queues()
        for fiber in self._under_way + self._idle:
            fiber.kill()
        self._under_way.clear()
        self._idle.clear()

    def _clear_queues(self) -> None:
        for queue in (self._maintenance, self._reads, self._writes):
            queue.clear()

    def pause(self) -> None:
        """May interrupt the job that calls it. Does nothing outside a job."""
        if self._running is not None and self._random.random() < self._pause_chance:
            self._running.park()

    def stall(self, seconds: float) -> None:
        """Interrupts the job that calls it for at least ``seconds`` from the time of this turn. Does nothing outside a
        job."""
        if self._running is not None:
            self._running.until = self._now + seconds
            self._running.park()

    def turn(self, now: float | None = None) -> bool:
        """Begins a job, or continues one that has paused. Returns False if there is none. ``now``: the time to go by
        instead of the clock's."""
        if self._held:
            return False
        self._now = now = self._clock() if now is None else now
        ready = [fiber for fiber in self._under_way if fiber.until <= now]
        queue = self._maintenance or self._reads or self._writes
        may_begin = bool(queue) and len(self._under_way) < self._num_threads
        if not ready and not may_begin:
            return False
        n = self._random.randrange(len(ready) + may_begin)
        if n < len(ready):
            fiber = ready[n]
        else:
            fiber = self._idle.pop() if self._idle else _Fiber()
            fiber.job = queue.popleft()
            self._under_way.append(fiber)
        self._running = fiber
        try:
            fiber.resume()
        finally:
            self._running = None
            if fiber.job is None:
                self._under_way.remove(fiber)
                self._idle.append(fiber)
        return True

    def __del__(self) -> None:
        self.kill()


class _Fiber:
    """A thread that runs only while another one waits for it in ``resume``."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.until = float("-inf")
        """The time before which it must not continue."""
        self._error: BaseException | None = None
        self._killed = False
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name="kvoffload-simulated", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Runs the job until it ends or pauses. Raises what it raises."""
        self._go.release()
        self._back.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def park(self) -> None:
        """Gives control back to the caller of ``resume``. Called by the job."""
        self._back.release()
        self._go.acquire()
        self.until = float("-inf")
        if self._killed:
            raise Killed

    def kill(self) -> None:
        self._killed = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._killed:
                return
            try:
                assert self.job is not None
                self.job()
            except BaseException as error:
                if self._killed:
                    return
                self._error = error
            self.job = None
            self._back.release()
