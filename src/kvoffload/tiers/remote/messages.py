"""What a tier and the process of its store's client say to each other, and how that is packed.

A message is a header, its keys (one byte for the length, then the bytes), then eight bytes per slot in a request, or
one byte per key and a text in a response. Numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.abc import KVOffloadError, OffloadKey

MAX_KEYS = 8192
"""Keys in one message."""
MAX_PROBLEM_BYTES = 1024
"""The text of a problem is cut there."""

_REQUEST = struct.Struct("<QBI")
"""Number, operation, how many keys."""
_RESPONSE = struct.Struct("<QIddH")
"""Number, how many statuses, begun, ended, bytes of the problem's text."""


class Op(enum.IntEnum):
    """What is asked of the store."""

    LOOKUP = 0
    READ = 1
    WRITE = 2
    REMOVE = 3


class Status(enum.IntEnum):
    """The answer for one key."""

    OK = 0
    """Lookup: the store has the value. Otherwise: done, and what was read is verified."""
    MISSING = 1
    """The store does not have the block, or has it in another format."""
    HELD = 2
    """Write: the store had the value already."""
    FULL = 3
    CORRUPT = 4
    """Read: other bytes than were stored, twice in a row."""
    FAILED = 5


class MessageError(KVOffloadError):
    """A message cannot be read."""


@dataclass(frozen=True, slots=True)
class Request:
    """``slots``: one host slot per key for reads and writes, else empty. ``number``: the response repeats it."""

    number: int
    op: Op
    keys: Sequence[OffloadKey]
    slots: Sequence[int] = ()

    def pack(self) -> bytes:
        keys = [bytes([len(key)]) + key for key in self.keys]
        slots = np.asarray(self.slots, dtype="<i8").tobytes()
        return b"".join([_REQUEST.pack(self.number, self.op, len(self.keys)), *keys, slots])

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        """Raises MessageError."""
        try:
            number, op, count = _REQUEST.unpack_from(data)
            at, keys = _REQUEST.size, []
            for _ in range(count):
                end = at + 1 + data[at]
                keys.append(data[at + 1 : end])
                at = end
            slots = np.frombuffer(data, dtype="<i8", offset=at).tolist() if at < len(data) else []
            request = cls(number, Op(op), keys, slots)
        except (struct.error, ValueError, IndexError) as error:
            raise MessageError(f"a request cannot be read: {error}") from error
        if len(slots) != (count if request.op in (Op.READ, Op.WRITE) else 0):
            raise MessageError(f"a request has {len(slots)} slots for {count} keys")
        return request


@dataclass(frozen=True, slots=True)
class Response:
    """``statuses``: one per key of the request. ``begun`` and ``ended``: times of the monotonic clock, which all
    processes of a machine share. ``problem``: what went wrong, for the log; empty if nothing did."""

    number: int
    statuses: Sequence[Status]
    begun: float
    ended: float
    problem: str = ""

    def pack(self) -> bytes:
        problem = self.problem.encode(errors="backslashreplace")[:MAX_PROBLEM_BYTES]
        header = _RESPONSE.pack(self.number, len(self.statuses), self.begun, self.ended, len(problem))
        return header + bytes(self.statuses) + problem

    @classmethod
    def unpack(cls, data: bytes) -> Response:
        """Raises MessageError."""
        try:
            number, count, begun, ended, size = _RESPONSE.unpack_from(data)
            statuses = [Status(code) for code in data[_RESPONSE.size : _RESPONSE.size + count]]
        except (struct.error, ValueError) as error:
            raise MessageError(f"a response cannot be read: {error}") from error
        problem = data[_RESPONSE.size + count :]
        if len(statuses) != count or len(problem) != size:
            raise MessageError(f"a response has {len(data)} bytes, not {_RESPONSE.size + count + size}")
        return cls(number, statuses, begun, ended, problem.decode(errors="replace"))
