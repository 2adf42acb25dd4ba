"""StoreLink: keeps the process of a store's client running, and gives each request a deadline.

StoreChannel is the contract of the channel to that process, which ``process`` fulfils.
"""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvoffload.abc import OffloadKey
from kvoffload.printable import printable
from kvoffload.tiers.limited_log import LimitedLog
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.messages import MAX_PROBLEM_BYTES, Op, Response, StoreRequest

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


class ChannelState(enum.Enum):
    DOWN = enum.auto()
    """There is no process. Nothing that was submitted before touches a host slot any more."""
    STARTING = enum.auto()
    """The process starts, or has not reached the store yet."""
    READY = enum.auto()
    """Requests are answered."""
    ENDING = enum.auto()
    """The process was killed and may still touch host slots."""


class StoreChannel(ABC):
    """Requests to the process of a store's client, and its responses.

    All methods are called on one thread. Only ``wait`` and ``close`` wait, for a bounded time. The process answers a
    lookup without finishing reads and writes first, so responses come in any order. If the process ends, by itself or
    by ``kill``, requests without a response never get one; the caller sees it in ``state``. A channel is DOWN at first.
    """

    @property
    @abstractmethod
    def state(self) -> ChannelState:
        """The state that the last ``poll`` found, or that a later call brought about."""

    @abstractmethod
    def start(self) -> None:
        """Starts the process, if the channel is DOWN. It is READY some time later, once it has reached the store, or
        DOWN again."""

    @abstractmethod
    def submit(self, request: StoreRequest) -> bool:
        """Sends a request. Returns False if the process is not READY or too much is waiting to be sent; the request is
        then dropped."""

    @abstractmethod
    def poll(self) -> list[Response]:
        """Returns the responses that have come since the last call."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Returns once there may be something to poll, after ``timeout_s`` at the latest."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process at once. The channel is ENDING until the process no longer exists, then DOWN."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Ends the process for good, within ``timeout_s``. Returns whether it no longer exists. May be called twice."""


Answer: TypeAlias = tuple[StoreRequest, Response]


class StoreLink:
    """Sends requests through ``channel`` and restarts its process after an end.

    If a request has no response at its deadline, the process is killed: nothing else makes sure that it does not touch
    the host slots later. All requests that it had then fail, once the process no longer exists.
    Pauses between restarts grow and are jittered: servers that lose the same store do not come back at the same moment.
    ``random`` returns numbers from 0 to 1.
    """

    def __init__(
        self, channel: StoreChannel, name: str, clock: Callable[[], float], random: Callable[[], float]
    ) -> None:
        self._channel = channel
        self._name = name
        self._clock = clock
        self._random = random
        self._under_way: dict[int, tuple[StoreRequest, float]] = {}
        """Requests without an answer and their deadlines, by number."""
        self._last_number = 0
        self._pause = FIRST_PAUSE_S
        self._start_at = clock()
        """When to start the process next."""
        self._start_deadline = float("inf")
        self._num_failures = 0
        """Answers in a row that are failures, and when the first and the last of them came."""
        self._failing_since = self._failed_at = float("-inf")
        self._was_ready = False
        self._is_closed = False
        self._log = LimitedLog(logger, clock)

    @property
    def is_ready(self) -> bool:
        return self._channel.state is ChannelState.READY

    def send(self, op: Op, keys: Sequence[OffloadKey], slots: Sequence[int] = ()) -> bool:
        """Returns whether the request was sent: ``poll`` returns its answer."""
        request = StoreRequest(self._last_number + 1, op, list(keys), list(slots))
        if not self._channel.submit(request):
            return False
        self._last_number += 1
        deadline = LOOKUP_DEADLINE_S if op is Op.LOOKUP else TRANSFER_DEADLINE_S
        self._under_way[request.number] = request, self._clock() + deadline
        return True

    def poll(self) -> list[Answer]:
        """Returns the answers that have come, and starts or kills the process if it is time."""
        if self._is_closed:
            return []
        answers = self._take()
        state = self._channel.state
        if state is ChannelState.READY:
            self._ready()
        elif state is ChannelState.STARTING:
            if self._clock() >= self._start_deadline:
                self._kill(f"did not reach the store within {START_DEADLINE_S:g} s")
        elif state is ChannelState.DOWN:
            answers += self._down()
        return answers

    def _take(self) -> list[Answer]:
        answers = []
        for response in self._channel.poll():
            request, _ = self._under_way.pop(response.number, (None, 0.0))
            if request is None or len(response.outcomes) != len(request.keys):
                self._kill("sent a malformed response")
                break
            answers.append((request, response))
            self._watch_failures(response)
            if response.problem:
                problem = printable(response.problem, MAX_PROBLEM_BYTES)
                effect = "are not stored" if request.op is Op.WRITE else "are misses"
                self._log.warning(
                    "%s: %s failed (%s); its blocks %s", self._name, request.op.name.lower(), problem, effect
                )
            else:
                self._pause = FIRST_PAUSE_S
        return answers

    def _watch_failures(self, response: Response) -> None:
        if any(outcome is not Outcome.FAILED for outcome in response.outcomes):
            self._num_failures = 0
            return
        now = self._clock()
        if not self._num_failures or now - self._failed_at > MAX_FAILURE_GAP_S:
            self._num_failures, self._failing_since = 0, now
        self._num_failures += 1
        self._failed_at = now

    def _ready(self) -> None:
        if not self._was_ready:
            self._was_ready = True
            self._start_deadline = float("inf")
            logger.info("kvoffload: %s: the store is connected; its blocks can be loaded", self._name)
        # Requests of one kind are in the order of their deadlines, and there are only a few.
        if self._under_way and min(deadline for _, deadline in self._under_way.values()) <= self._clock():
            self._kill("did not answer a request before its deadline")
        elif self._num_failures >= MIN_FAILURES and self._failed_at - self._failing_since >= RENEW_AFTER_S:
            self._kill(f"answered nothing but failures for {RENEW_AFTER_S:g} s")

    def _down(self) -> list[Answer]:
        now = self._clock()
        lost = self._lose()
        if self._was_ready or self._start_deadline != float("inf"):
            # The process ended since the last start.
            self._was_ready, self._start_deadline, self._num_failures = False, float("inf"), 0
            self._start_at = now + self._pause * (0.5 + self._random() / 2)
            self._log.warning(
                "%s: the process of the store's client ended; blocks of the store are misses until it restarts, in "
                "%.1f s",
                self._name,
                self._start_at - now,
            )
            self._pause = min(MAX_PAUSE_S, self._pause * 2)
        if now >= self._start_at:
            self._start_deadline = now + START_DEADLINE_S
            self._channel.start()
        return lost

    def _kill(self, why: str) -> None:
        self._log.warning(
            "%s: the store's client %s; its process was killed, and blocks of the store are misses until it restarts. "
            "If this goes on, test the store with kvoffload doctor",
            self._name,
            why,
        )
        self._channel.kill()

    def wait(self, timeout_s: float) -> None:
        self._channel.wait(timeout_s)

    def close(self, timeout_s: float) -> list[Answer]:
        """Ends the process. Returns the last answers; none for requests that may still touch host slots."""
        self._is_closed = True
        has_ended = self._channel.close(timeout_s)
        answers = self._take()
        lost = self._lose()
        return answers + lost if has_ended else answers

    def _lose(self) -> list[Answer]:
        """Returns failures in place of the answers to all requests under way."""
        now = self._clock()
        requests = [request for request, _ in self._under_way.values()]
        self._under_way.clear()
        return [(each, Response(each.number, [Outcome.FAILED] * len(each.keys), now, now)) for each in requests]
