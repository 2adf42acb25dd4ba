"""The format of compressed blocks in a store, and the memory through which they move.

A value is a record of COMPRESSED_VERSION, whose size and checksum are those of the block itself, then a header: the
checksum of everything after it, and how many bytes that is, eight bytes each; then the form that ``codec`` describes.
The value may be padded. A block that does not shrink has the record and the bytes of ``record``. Both have names in a
namespace with COMPRESSED behind it, so that servers with and without compression do not meet: those without could
neither read the values of the others nor replace them.

A header's checksum, and with an HMAC key the record's tag, are verified before anything is decompressed. The tag covers
the bytes after the record as they are stored.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kvoffload.abc import ByteArray, OffloadKey
from kvoffload.tiers.remote.codec import ByteCodec
from kvoffload.tiers.remote.memory import MAX_ROWS, ValueMemory
from kvoffload.tiers.remote.record import FORMAT_VERSION, RECORD_BYTES, Value, ValueFormat, Verdict

COMPRESSED = "-zstd"
COMPRESSED_VERSION = 2
ROWS_BYTES = 16 << 20
"""Memory for values that one call of a client moves, and bytes of one request; at least one value. With several
requests under way one thread decompresses while another one waits for the network."""
_HEADER = struct.Struct("<QQ")


class CompressedFormat(ValueFormat):
    """The names and records of compressed values. One thread uses it at a time."""

    versions = (FORMAT_VERSION, COMPRESSED_VERSION)

    def __init__(self, fingerprint: str, prefix: str = "kvoffload", hmac_key: bytes = b"") -> None:
        super().__init__(fingerprint, prefix, hmac_key)
        self._folder += COMPRESSED
        self._codec = ByteCodec()

    def seal(self, key: OffloadKey, value: Value) -> Sequence[ByteArray]:
        row = value.buffers[0]
        stored = row[RECORD_BYTES:]
        size = self._codec.compress(value.parts, stored[_HEADER.size :])
        if not size:
            value.record[:] = self.record(key, value.parts)
            np.concatenate(value.parts, out=stored)
            return [row]
        stored = stored[: _HEADER.size + size]
        _HEADER.pack_into(stored.data, 0, 0, size)
        _HEADER.pack_into(stored.data, 0, self.checksum(key, [stored[8:]]), size)
        value.record[:] = self.record(key, value.parts, COMPRESSED_VERSION, [stored])
        return [row[: RECORD_BYTES + stored.size]]

    def check(self, key: OffloadKey, value: Value, is_whole: bool) -> Verdict:
        fields = self.parse(key, value.record, value.parts)
        if isinstance(fields, Verdict):
            return fields
        stored = value.buffers[0][RECORD_BYTES:]
        if fields.version == COMPRESSED_VERSION:
            header = stored[: _HEADER.size].tobytes().ljust(_HEADER.size, b"\0")
            checksum, size = _HEADER.unpack(header)
            stored = stored[: _HEADER.size + size]
            is_good = (
                stored.size == _HEADER.size + size
                and self.checksum(key, [stored[8:]]) == checksum
                and self.has_tag(fields, [stored])
                and self._codec.decompress(stored[_HEADER.size :], value.parts)
            )
        else:
            is_good = is_whole and self.has_tag(fields, [stored])
            if is_good:
                for part in value.parts:
                    part[:], stored = stored[: part.size], stored[part.size :]
        return Verdict.GOOD if is_good and self.checksum(key, value.parts) == fields.checksum else Verdict.BAD


class Rows(ValueMemory):
    """A value is one buffer in memory of its own, not longer than the record and the slots together."""

    def __init__(self, pools: Sequence[ByteArray]) -> None:
        self._pools = pools
        payload_bytes = sum(pool.shape[1] for pool in pools)
        self.num_rows = _num_rows(payload_bytes)
        self._rows = np.zeros((self.num_rows, RECORD_BYTES + payload_bytes), dtype=np.uint8)

    def registered(self) -> Sequence[ByteArray]:
        return [self._rows.reshape(-1)]

    def value(self, row: int, slot: int) -> Value:
        whole = self._rows[row]
        return Value(whole[:RECORD_BYTES], [pool[slot] for pool in self._pools], [whole])


def rows_bytes(payload_bytes: int) -> int:
    """Returns the size of ``Rows`` for blocks of ``payload_bytes``."""
    return _num_rows(payload_bytes) * (RECORD_BYTES + payload_bytes)


def _num_rows(payload_bytes: int) -> int:
    return max(1, min(MAX_ROWS, ROWS_BYTES // (RECORD_BYTES + payload_bytes)))
