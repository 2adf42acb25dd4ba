"""The format of a block in a store that others use too: docs/formats.md has every byte.

The payload's checksum is seeded with fingerprint and key, so the value of another key fails it. A version of the format
with a record of another length must use other names. With an HMAC key, a tag covers record and payload, and the
namespace is derived from fingerprint and HMAC key, so that servers with other keys, or with none, have other names, and
do not take each other's blocks for forged ones.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.abc import ByteArray, OffloadKey
from kvoffload.tiers.checksum import CHECKSUM_BYTES, block_checksum, is_sealed, sealed
from kvoffload.tiers.remote.client import Outcome

FORMAT_VERSION = 1
RECORD_BYTES = 128
MAX_KEY_BYTES = 64
GENERATION = 0
TAG_BYTES = 16

_MAGIC = b"kvor"
_ID_BYTES = 12
_RECORD = struct.Struct(f"<4sHHI{_ID_BYTES}sQ{MAX_KEY_BYTES}sQ{TAG_BYTES}s")
"""Magic, version, bytes of the key, ranks, first bytes of the fingerprint, bytes of the payload, key, checksum of the
payload, tag."""
_NO_TAG = bytes(TAG_BYTES)
assert _RECORD.size == RECORD_BYTES - CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class Value:
    """The memory of one value: its ``record``, and the block, one part per rank. ``row``: all bytes of the value while
    a client moves them, ``record`` the first of them. Peers of the client may write there at any time: whatever is
    verified was copied before, and is used from there. Without a row the record and the parts are moved."""

    record: ByteArray
    parts: Sequence[ByteArray]
    row: ByteArray | None = None

    @property
    def buffers(self) -> Sequence[ByteArray]:
        """The bytes that are moved, in order."""
        return [self.record, *self.parts] if self.row is None else [self.row]


class ValueFormat:
    """The names and records of the values of blocks with this ``fingerprint``, 64 hexadecimal digits.

    ``prefix``: the beginning of all names. With an ``hmac_key``, only blocks of servers with the same key are good.
    """

    def __init__(self, fingerprint: str, prefix: str = "kvoffload", hmac_key: bytes = b"") -> None:
        self.fingerprint = fingerprint
        self.prefix = prefix
        self.hmac_key = hmac_key
        self._fingerprint = bytes.fromhex(fingerprint)
        digest = hmac.digest(hmac_key, b"namespace" + self._fingerprint, "sha256").hex() if hmac_key else fingerprint
        self._folder = f"{prefix}/{digest}"

    def name(self, key: OffloadKey) -> str:
        """Returns the name of a block's value."""
        return f"{self._folder}/{key.hex()}"

    def checksum(self, key: OffloadKey, parts: Sequence[ByteArray]) -> int:
        """Returns the checksum of a block, given one buffer per rank."""
        return block_checksum(self._fingerprint + struct.pack("<Q", GENERATION) + key, parts)

    def seal(self, key: OffloadKey, value: Value) -> Sequence[ByteArray]:
        """Completes the value of the block in ``value``. Returns its buffers."""
        value.record[:] = self.record(key, value.parts)
        if value.row is not None:
            np.concatenate(value.parts, out=value.row[RECORD_BYTES:])
        return value.buffers

    def check(self, key: OffloadKey, value: Value, is_whole: bool) -> Outcome:
        """Returns whether the value that was read has the block of ``key``, see ``verify``. The block is then in the
        parts of ``value``. ``is_whole``: whether all buffers were filled."""
        if value.row is not None:
            stored = value.row[RECORD_BYTES:]
            for part in value.parts:
                part[:], stored = stored[: part.size], stored[part.size :]
        verdict = self.verify(key, value.record, value.parts)
        return Outcome.CORRUPT if verdict is Outcome.OK and not is_whole else verdict

    def record(self, key: OffloadKey, parts: Sequence[ByteArray]) -> ByteArray:
        """Returns the record of a block with these ``parts``, one per rank, as RECORD_BYTES bytes."""
        body = _RECORD.pack(
            _MAGIC,
            FORMAT_VERSION,
            len(key),
            len(parts),
            self._fingerprint[:_ID_BYTES],
            sum(part.nbytes for part in parts),
            key,
            self.checksum(key, parts),
            _NO_TAG,
        )
        return sealed(body[:-TAG_BYTES] + self._tag(body, parts))

    def _tag(self, body: bytes, parts: Sequence[ByteArray]) -> bytes:
        """Returns the tag of a block. ``body`` is the record without its checksum; its own tag is left out. Large
        buffers are hashed without the GIL."""
        if not self.hmac_key:
            return _NO_TAG
        tag = hmac.new(self.hmac_key, body[:-TAG_BYTES], "sha256")
        for part in parts:
            tag.update(part.data)
        return tag.digest()[:TAG_BYTES]

    def verify(self, key: OffloadKey, record: ByteArray, parts: Sequence[ByteArray]) -> Outcome:
        """Returns OK if ``record`` and ``parts`` were stored under ``key``, by a server with the same HMAC key if there
        is one; MISSING for an intact record of another version, or of blocks with another number of ranks or bytes;
        otherwise CORRUPT."""
        raw = record.tobytes()
        if len(raw) != RECORD_BYTES or not is_sealed(raw):
            return Outcome.CORRUPT
        fields = _RECORD.unpack_from(raw)
        magic, version, key_bytes, ranks, fingerprint_id, payload_bytes, stored_key, checksum, tag = fields
        if magic != _MAGIC:
            return Outcome.CORRUPT
        if version != FORMAT_VERSION:
            return Outcome.MISSING
        if fingerprint_id != self._fingerprint[:_ID_BYTES] or stored_key[:key_bytes] != key or key_bytes != len(key):
            return Outcome.CORRUPT
        if ranks != len(parts) or payload_bytes != sum(part.nbytes for part in parts):
            return Outcome.MISSING
        if self.checksum(key, parts) != checksum:
            return Outcome.CORRUPT
        is_good = hmac.compare_digest(tag, self._tag(raw[: _RECORD.size], parts))
        return Outcome.OK if is_good else Outcome.CORRUPT
