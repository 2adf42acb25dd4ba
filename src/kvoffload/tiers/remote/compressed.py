"""The format of compressed blocks in a store.

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
from kvoffload.tiers.remote.record import FORMAT_VERSION, RECORD_BYTES, Fields, RowFormat, Value

COMPRESSED = "-zstd"
COMPRESSED_VERSION = 2
REQUEST_BYTES = 16 << 20
"""Bytes of blocks of one request. With several requests under way one thread decompresses while another one waits for
the network."""
_HEADER = struct.Struct("<QQ")


class CompressedFormat(RowFormat):
    """The names and records of compressed values. One thread uses it at a time."""

    versions = (FORMAT_VERSION, COMPRESSED_VERSION)

    def __init__(self, fingerprint: str, prefix: str = "kvoffload", hmac_key: bytes = b"") -> None:
        super().__init__(fingerprint, prefix, hmac_key)
        self._folder += COMPRESSED
        self._codec = ByteCodec()
        self._memory: ByteArray = np.zeros(0, dtype=np.uint8)

    def seal(self, key: OffloadKey, value: Value) -> Sequence[ByteArray]:
        row = value.buffers[0]
        stored = self._private(row.size)[RECORD_BYTES:]
        size = self._codec.compress(value.parts, stored[_HEADER.size :])
        if not size:
            return super().seal(key, value)
        stored = stored[: _HEADER.size + size]
        _HEADER.pack_into(stored.data, 0, 0, size)
        _HEADER.pack_into(stored.data, 0, self.checksum(key, [stored[8:]]), size)
        value.record[:] = self.record(key, value.parts, COMPRESSED_VERSION, [stored])
        row = row[: RECORD_BYTES + stored.size]
        row[RECORD_BYTES:] = stored
        return [row]

    def _unpack(
        self, key: OffloadKey, fields: Fields, stored: ByteArray, parts: Sequence[ByteArray], is_whole: bool
    ) -> bool:
        if fields.version == FORMAT_VERSION:
            return super()._unpack(key, fields, stored, parts, is_whole)
        header = stored[: _HEADER.size].tobytes()
        checksum, size = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if stored.size < _HEADER.size + size:
            return False
        copy = self._private(_HEADER.size + size)
        copy[: _HEADER.size] = np.frombuffer(header, dtype=np.uint8)
        copy[_HEADER.size :] = stored[_HEADER.size : copy.size]
        return (
            self.checksum(key, [copy[8:]]) == checksum
            and self.has_tag(fields, [copy])
            and self._codec.decompress(copy[_HEADER.size :], parts)
        )

    def _private(self, nbytes: int) -> ByteArray:
        """Returns memory that no peer can write to, until the next call."""
        if self._memory.size < nbytes:
            self._memory = np.zeros(nbytes, dtype=np.uint8)
        return self._memory[:nbytes]
