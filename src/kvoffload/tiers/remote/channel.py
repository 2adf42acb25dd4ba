"""The contract of a channel: how a tier reaches the process of its store's client."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from kvoffload.tiers.remote.messages import Request, Response


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
    def submit(self, request: Request) -> bool:
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
