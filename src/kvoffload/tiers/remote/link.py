"""StoreLink: keeps a process of a store's client running, and gives each request a deadline.

StoreProcess is the contract of such a process, which ``process`` fulfils.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffload.abc import Keys
from kvoffload.abc.tier import POLL_INTERVAL_S
from kvoffload.printable import printable
from kvoffload.tiers.limited_log import LimitedLog
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.messages import MAX_PROBLEM_BYTES, MessageError, Op, Response, StoreRequest

logger = logging.getLogger(__name__)

LOOKUP_DEADLINE_S = 5.0
TRANSFER_DEADLINE_S = 20.0
"""Time from submitting a read, write or removal to its response, including the time behind others. It must stay below
the time after which any client gives a transfer up without ending it."""
START_DEADLINE_S = 30.0
"""Time for the process to start and reach the store."""
RENEW_AFTER_S = 30.0
"""A process that answers nothing but failures for so long is replaced: a new one reads files with secrets and
certificates again, and learns the nodes of the store anew."""
MIN_FAILURES = 4
MAX_FAILURE_GAP_S = 150.0
"""Failures with a longer time between them say nothing about that time. The circuit breaker pauses for up to 60 s."""
FIRST_PAUSE_S = 1.0
"""The pause before the first restart; it doubles with each restart until the store answers."""
MAX_PAUSE_S = 60.0


class StoreProcess(ABC):
    """One process of a store's client, from its start to its end.

    All methods are called on one thread. Only ``wait`` and ``close`` wait, for a bounded time. The process answers a
    lookup without finishing reads and writes first, so responses come in any order. If it ends, by itself or by
    ``kill``, requests without a response never get one.
    """

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the process has reached the store, as the last ``poll`` found. False once it was killed."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the process no longer exists. Nothing that was submitted touches a host slot any more, and ``poll``
        returns all responses."""

    @abstractmethod
    def submit(self, request: StoreRequest) -> bool:
        """Sends a request to a process that is ready. Returns False if too much is waiting to be sent; the request is
        then dropped."""

    @abstractmethod
    def poll(self) -> list[Response]:
        """Returns the responses that have come since the last call. Raises MessageError if they make no sense."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Returns once there may be something to poll, after ``timeout_s`` at the latest."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process at once."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Lets the process finish the requests under way, and ends it within ``timeout_s``. Returns whether it has
        ended."""


Answer: TypeAlias = tuple[StoreRequest, Response]


@dataclass(slots=True)
class _Run:
    """One process, and what has become of it."""

    process: StoreProcess
    start_deadline: float
    has_connected: bool = False
    is_killed: bool = False
    num_failures: int = 0
    """Answers in a row that are failures, and when the first and the last of them came."""
    failing_since: float = 0.0
    failed_at: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.process.is_ready and not self.is_killed

    def note(self, response: Response, now: float) -> None:
        """Takes in whether an answer is nothing but failures."""
        if any(outcome is not Outcome.FAILED for outcome in response.outcomes):
            self.num_failures = 0
            return
        if not self.num_failures or now - self.failed_at > MAX_FAILURE_GAP_S:
            self.num_failures, self.failing_since = 0, now
        self.num_failures += 1
        self.failed_at = now


class StoreLink:
    """Sends requests to a process that ``start`` returns, and starts another one after its end.

    If a request has no response at its deadline, the process is killed: nothing else makes sure that it does not touch
    the host slots later. All requests that it had then fail, once the process no longer exists.
    Pauses between restarts grow and are jittered: servers that lose the same store do not come back at the same moment.
    ``random`` returns numbers from 0 to 1.
    """

    def __init__(
        self, start: Callable[[], StoreProcess], name: str, clock: Callable[[], float], random: Callable[[], float]
    ) -> None:
        self._start_process = start
        self._name = name
        self._clock = clock
        self._random = random
        self._run: _Run | None = None
        self._under_way: dict[int, tuple[StoreRequest, float]] = {}
        """Requests without an answer and their deadlines, by number."""
        self._last_number = 0
        self._pause = FIRST_PAUSE_S
        self._start_at = clock()
        """When to start the next process."""
        self._is_closed = False
        self._log = LimitedLog(logger, clock)

    @property
    def is_ready(self) -> bool:
        return self._run is not None and self._run.is_ready

    @property
    def is_starting(self) -> bool:
        """Whether the process runs and has not reached the store yet."""
        return self._run is not None and not self._run.has_connected

    def send(self, op: Op, keys: Keys, slots: Sequence[int] = ()) -> bool:
        """Returns whether the request was sent: ``poll`` returns its answer."""
        request = StoreRequest(self._last_number + 1, op, list(keys), list(slots))
        if self._run is None or not self._run.is_ready or not self._run.process.submit(request):
            return False
        self._last_number += 1
        deadline = LOOKUP_DEADLINE_S if op is Op.LOOKUP else TRANSFER_DEADLINE_S
        self._under_way[request.number] = request, self._clock() + deadline
        return True

    def poll(self) -> list[Answer]:
        """Returns the answers that have come, and starts or kills the process if it is time."""
        run = self._run
        if run is None:
            if self._clock() >= self._start_at and not self._is_closed:
                self._start()
            return []
        # In this order: an ended process has sent all of its responses.
        has_ended = run.process.has_ended
        answers = self._take(run)
        if has_ended:
            self._run = None
            answers += self._lose()
            self._start_later("the process of the store's client ended")
        elif not run.is_killed:
            self._check(run)
        return answers

    def _start(self) -> None:
        try:
            self._run = _Run(self._start_process(), self._clock() + START_DEADLINE_S)
        except (OSError, RuntimeError) as error:
            self._start_later(f"the store's client cannot be started ({error})")

    def _start_later(self, why: str) -> None:
        seconds = self._pause * (0.5 + self._random() / 2)
        self._start_at = self._clock() + seconds
        self._pause = min(MAX_PAUSE_S, self._pause * 2)
        self._log.warning(
            "%s: %s; blocks of the store are misses until it restarts, in %.1f s", self._name, why, seconds
        )

    def _take(self, run: _Run) -> list[Answer]:
        answers: list[Answer] = []
        try:
            responses = run.process.poll()
        except MessageError as error:
            self._kill(run, f"sent a malformed message ({error})")
            return answers
        for response in responses:
            request, _ = self._under_way.pop(response.number, (None, 0.0))
            if request is None or len(response.outcomes) != len(request.keys):
                self._kill(run, "sent a malformed response")
                break
            answers.append((request, response))
            run.note(response, self._clock())
            if response.problem:
                problem = printable(response.problem, MAX_PROBLEM_BYTES)
                effect = "are not stored" if request.op is Op.WRITE else "are misses"
                self._log.warning(
                    "%s: %s failed (%s); its blocks %s", self._name, request.op.name.lower(), problem, effect
                )
            else:
                self._pause = FIRST_PAUSE_S
        return answers

    def _check(self, run: _Run) -> None:
        now = self._clock()
        if not run.is_ready:
            if not run.has_connected and now >= run.start_deadline:
                self._kill(run, f"did not reach the store within {START_DEADLINE_S:g} s")
            return
        if not run.has_connected:
            run.has_connected = True
            logger.info("kvoffload: %s: the store is connected; its blocks can be loaded", self._name)
        # Requests of one kind are in the order of their deadlines, and there are only a few.
        if self._under_way and min(deadline for _, deadline in self._under_way.values()) <= now:
            self._kill(run, "did not answer a request before its deadline")
        elif run.num_failures >= MIN_FAILURES and run.failed_at - run.failing_since >= RENEW_AFTER_S:
            self._kill(run, f"answered nothing but failures for {RENEW_AFTER_S:g} s")

    def _kill(self, run: _Run, why: str) -> None:
        self._log.warning(
            "%s: the store's client %s; its process was killed, and blocks of the store are misses until it restarts. "
            "If this goes on, test the store with kvoffload doctor",
            self._name,
            why,
        )
        run.is_killed = True
        run.process.kill()

    def wait(self, timeout_s: float) -> None:
        if self._run is None:
            time.sleep(min(timeout_s, POLL_INTERVAL_S))
        else:
            self._run.process.wait(timeout_s)

    def close(self, timeout_s: float) -> list[Answer]:
        """Ends the process. Returns the last answers; none for requests that may still touch host slots."""
        self._is_closed = True
        run, self._run = self._run, None
        if run is None:
            return []
        has_ended = run.process.close(timeout_s)
        answers, lost = self._take(run), self._lose()
        return answers + lost if has_ended else answers

    def _lose(self) -> list[Answer]:
        """Returns failures in place of the answers to all requests under way."""
        now = self._clock()
        requests = [request for request, _ in self._under_way.values()]
        self._under_way.clear()
        return [(each, Response(each.number, [Outcome.FAILED] * len(each.keys), now, now)) for each in requests]
