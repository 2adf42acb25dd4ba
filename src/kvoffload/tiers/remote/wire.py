"""Messages on a stream socket between a tier and the process of its store's client.

A message is its length and its kind in five bytes, then its body. Nothing is pickled.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvoffload.host.pool import PoolHandle
from kvoffload.tiers.remote.messages import MessageError

MAX_MESSAGE_BYTES = 4 << 20
_FRAME = struct.Struct("<IB")


class Kind(enum.IntEnum):
    SETUP = 0
    """The first message to the process: a Setup."""
    READY = 1
    """From the process: it has reached the store."""
    REQUEST = 2
    RESPONSE = 3
    NOTE = 4
    """From the process: a text for the log."""


_KINDS = frozenset(map(int, Kind))


@dataclass(frozen=True, slots=True)
class Setup:
    """What the process needs to know. ``client`` is the import path "package.module:function" of a function that
    returns the StoreClient for ``settings``, or raises StoreError. ``num_slots``: slots that every pool has. Secrets
    are named by the files that they are in, so that no message or log has one. ``client_bytes``: memory that the
    client takes for itself, beyond what any client needs."""

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
            if size > MAX_MESSAGE_BYTES or kind not in _KINDS:
                raise MessageError(f"a message of kind {kind} with {size} bytes")
            end = at + _FRAME.size + size
            if end > len(self._data):
                break
            body = bytes(self._data[at + _FRAME.size : end])
            at = end
            yield Kind(kind), body
        del self._data[:at]
