"""The contract of a bucket: the four requests that the client makes, many at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome


@dataclass(frozen=True, slots=True)
class Found:
    """An object: its size in bytes, and the note that was stored with it, or "" if there is none."""

    size: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an object: the bytes from ``start`` on, which go into ``buffers``, one after the other."""

    name: str
    start: int
    buffers: Sequence[ByteArray]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class NewObject:
    name: str
    note: str
    buffers: Sequence[ByteArray]


Answer: TypeAlias = Found | Outcome


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds of the requests to a bucket. The longest call ends before the deadlines of ``remote.link``."""

    connect_s: float = 1.5
    small_s: float = 2.0
    """The timeout of one request without bytes."""
    small_budget_s: float = 1.0
    """A call begins requests without bytes for so long."""
    transfer_s: float = 8.0
    transfer_budget_s: float = 5.0
    """The same for requests with bytes."""
    retry_within_s: float = 1.0
    """A request is repeated if it failed sooner."""
    more_within_s: float = 1.0
    """A call of the client that took longer sends no further requests; unknown values count as failed."""
    quiet_s: float = 1.0
    """After a call without any answer in time, further calls fail at once for so long: calls that queued behind it
    would outlast their own deadlines."""
    relearn_s: float = 60.0
    """A store without conditional put is asked for one again after so long."""


TIMES = Times()


class Bucket(ABC):
    """Objects by name, with notes of at most MAX_NOTE characters of ASCII.

    Each method makes one request per item, many of them at once, and returns one answer per item. It ends within a few
    seconds whatever the store does. Raises StoreError if all items have failed, with a message without secrets.
    Methods may be called from several threads.
    """

    has_notes = True
    """Whether notes are kept."""

    @abstractmethod
    def head(self, names: Sequence[str]) -> list[Answer]:
        """Returns each object, or MISSING or FAILED."""

    @abstractmethod
    def get(self, pieces: Sequence[Piece]) -> list[Answer]:
        """Fills the buffers of each piece. Returns the object that it is of, or MISSING, OTHER_SIZE if it has no bytes
        there, or FAILED. The caller compares the size: an object that ends early fills only a part of the buffers."""

    @abstractmethod
    def put(self, objects: Sequence[NewObject]) -> list[Outcome]:
        """Stores objects whose names are not taken. Returns OK, HELD, FULL or FAILED. A store without
        conditional put replaces its object, with the answer OK."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> list[Outcome]:
        """Returns OK, MISSING or FAILED. OK may also mean that there was no such object."""

    def close(self) -> None:
        """Ends the requests under way. By default does nothing."""


MAX_NOTE = 1024
