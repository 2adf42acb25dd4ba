"""Messages between a tier and the process of its store's client, on a stream socket.

A message is the length and the kind of its body in five bytes, then the body. The body of a request is a header, one
byte per key with its length, the keys, and eight bytes per slot; that of a response a header, one byte per key, and a
text. Numbers are little-endian. Nothing is pickled.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from kvoffload.abc import Keys, KVOffloadError
from kvoffload.host.pool import PoolHandle
from kvoffload.tiers.remote.client import Outcome

MAX_MESSAGE_BYTES = 4 << 20
MAX_KEYS = 8192
"""Keys in one message."""
MAX_PROBLEM_BYTES = 1024
"""The text of a problem is cut there."""

_FRAME = struct.Struct("<IB")
"""Bytes of the body, kind."""
_REQUEST = struct.Struct("<QBI")
"""Number, operation, how many keys."""
_RESPONSE = struct.Struct("<QIddH")
"""Number, how many outcomes, begun, ended, bytes of the problem's text."""


class Op(enum.IntEnum):
    """Operations of the store."""

    LOOKUP = 0
    READ = 1
    WRITE = 2
    REMOVE = 3


class MessageError(KVOffloadError):
    """A message cannot be read."""


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """``slots``: one host slot per key for reads and writes, else empty. ``number``: the response repeats it."""

    number: int
    op: Op
    keys: Keys
    slots: Sequence[int] = ()

    def pack(self) -> bytes:
        header = _REQUEST.pack(self.number, self.op, len(self.keys))
        slots = np.asarray(self.slots, dtype="<i8").tobytes()
        return b"".join([header, bytes(map(len, self.keys)), *self.keys, slots])

    @classmethod
    def unpack(cls, data: bytes) -> StoreRequest:
        """Raises MessageError."""
        try:
            number, op, count = _REQUEST.unpack_from(data)
            begin = _REQUEST.size + count
            ends = list(accumulate(data[_REQUEST.size : begin], initial=begin))
            keys = [data[at:end] for at, end in pairwise(ends)]
            slots = np.frombuffer(data[ends[-1] :], dtype="<i8").tolist()
            request = cls(number, Op(op), keys, slots)
        except (struct.error, ValueError) as error:
            raise MessageError(f"a request cannot be read: {error}") from error
        if len(keys) != count or len(slots) != (count if request.op in (Op.READ, Op.WRITE) else 0):
            raise MessageError(f"a request has {len(slots)} slots for {count} keys")
        return request


@dataclass(frozen=True, slots=True)
class Response:
    """``outcomes``: one per key of the request. ``begun`` and ``ended``: times of the monotonic clock, which all
    processes of a machine share. ``problem``: the cause of a failure, for the log; else empty."""

    number: int
    outcomes: Sequence[Outcome]
    begun: float
    ended: float
    problem: str = ""

    def pack(self) -> bytes:
        problem = self.problem.encode(errors="backslashreplace")[:MAX_PROBLEM_BYTES]
        header = _RESPONSE.pack(self.number, len(self.outcomes), self.begun, self.ended, len(problem))
        return header + bytes(self.outcomes) + problem

    @classmethod
    def unpack(cls, data: bytes) -> Response:
        """Raises MessageError."""
        try:
            number, count, begun, ended, size = _RESPONSE.unpack_from(data)
            outcomes = [Outcome(code) for code in data[_RESPONSE.size : _RESPONSE.size + count]]
        except (struct.error, ValueError) as error:
            raise MessageError(f"a response cannot be read: {error}") from error
        problem = data[_RESPONSE.size + count :]
        if len(outcomes) != count or len(problem) != size:
            raise MessageError(f"a response has {len(data)} bytes, not {_RESPONSE.size + count + size}")
        return cls(number, outcomes, begun, ended, problem.decode(errors="replace"))


# The stream.


class Kind(enum.IntEnum):
    SETUP = 0
    """The first message to the process: a Setup."""
    READY = 1
    """From the process: it has reached the store."""
    REQUEST = 2
    RESPONSE = 3
    NOTE = 4
    """From the process: a text for the log."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of the process. ``client`` is the import path "package.module:function" of a function that returns the
    StoreClient for ``settings``, or raises StoreError. ``num_slots``: slots that every pool has. Secrets are given as
    the names of their files, so that no message or log has one. ``client_bytes``: see ``RemoteTierConfig``."""

    client: str
    settings: Mapping[str, Any]
    handles: tuple[PoolHandle, ...]
    num_slots: int
    fingerprint: str
    prefix: str
    identity: Mapping[str, str] = field(default_factory=dict)
    hmac_key_file: str | None = None
    client_bytes: int = 0

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Setup:
        fields = json.loads(data)
        handles = tuple(PoolHandle(**each) for each in fields.pop("handles"))
        return cls(handles=handles, **fields)


def frame(kind: Kind, body: bytes = b"") -> bytes:
    """Returns a message as it is sent."""
    return _FRAME.pack(len(body), kind) + body


class Unframer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yields the messages that are complete now. Raises MessageError if the stream makes no sense."""
        self._data += data
        at = 0
        while len(self._data) - at >= _FRAME.size:
            size, kind = _FRAME.unpack_from(self._data, at)
            if size > MAX_MESSAGE_BYTES or kind not in Kind.__members__.values():
                raise MessageError(f"a message of kind {kind} with {size} bytes")
            end = at + _FRAME.size + size
            if end > len(self._data):
                break
            body = bytes(self._data[at + _FRAME.size : end])
            at = end
            yield Kind(kind), body
        del self._data[:at]
