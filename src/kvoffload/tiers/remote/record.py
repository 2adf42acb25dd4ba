"""The format of a block in a store that others use too.

The value of a block is a record of RECORD_BYTES, then the bytes of rank 0, those of rank 1 and so on, padding included,
without gaps. Its name is ``<prefix>/<fingerprint>/<key>``, where the fingerprint has 64 hexadecimal digits and the key
is in hexadecimal. Numbers are little-endian.

The record's checksum covers every other byte of the record, the payload's checksum every byte after the record; both
are XXH3-64. The payload's checksum is seeded with fingerprint, generation and key like that of the disk tier, so the
value of another key fails it. The generation is 0 here. A version of the format with a record of another length must
use other names.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

from kvoffload.abc import ByteArray, OffloadKey
from kvoffload.tiers.checksum import CHECKSUM_BYTES, block_checksum, is_sealed, sealed

FORMAT_VERSION = 1
RECORD_BYTES = 128
MAX_KEY_BYTES = 64
GENERATION = 0

_MAGIC = b"kvor"
_ID_BYTES = 12
_RECORD = struct.Struct(f"<4sHHI{_ID_BYTES}sQ{MAX_KEY_BYTES}sQ16x")
"""Magic, version, bytes of the key, ranks, first bytes of the fingerprint, bytes of the payload, key, checksum of the
payload."""
assert _RECORD.size == RECORD_BYTES - CHECKSUM_BYTES


class Verdict(enum.Enum):
    """What is known about a value after its bytes have been compared with its record."""

    GOOD = enum.auto()
    FOREIGN = enum.auto()
    """An intact record of another version, or of blocks with another number of ranks or bytes."""
    BAD = enum.auto()
    """These are not the bytes that were stored under this name."""


def value_name(prefix: str, fingerprint: str, key: OffloadKey) -> str:
    """Returns the name of a block's value."""
    return f"{prefix}/{fingerprint}/{key.hex()}"


def payload_checksum(fingerprint: str, key: OffloadKey, parts: Sequence[ByteArray]) -> int:
    """Returns the checksum of a block, given one buffer per rank."""
    return block_checksum(bytes.fromhex(fingerprint) + struct.pack("<Q", GENERATION) + key, parts)


def pack_record(fingerprint: str, key: OffloadKey, parts: Sequence[ByteArray]) -> ByteArray:
    """Returns the record of a block with these ``parts``, one per rank, as RECORD_BYTES bytes."""
    body = _RECORD.pack(
        _MAGIC,
        FORMAT_VERSION,
        len(key),
        len(parts),
        bytes.fromhex(fingerprint)[:_ID_BYTES],
        sum(part.nbytes for part in parts),
        key,
        payload_checksum(fingerprint, key, parts),
    )
    return sealed(body)


def verify(fingerprint: str, key: OffloadKey, record: ByteArray, parts: Sequence[ByteArray]) -> Verdict:
    """Returns whether ``record`` and ``parts`` are what was stored under ``key``."""
    raw = record.tobytes()
    if len(raw) != RECORD_BYTES or not is_sealed(raw):
        return Verdict.BAD
    magic, version, key_bytes, ranks, fingerprint_id, payload_bytes, stored_key, payload = _RECORD.unpack_from(raw)
    if magic != _MAGIC:
        return Verdict.BAD
    if version != FORMAT_VERSION:
        return Verdict.FOREIGN
    if (
        fingerprint_id != bytes.fromhex(fingerprint)[:_ID_BYTES]
        or stored_key[:key_bytes] != key
        or key_bytes != len(key)
    ):
        return Verdict.BAD
    if ranks != len(parts) or payload_bytes != sum(part.nbytes for part in parts):
        return Verdict.FOREIGN
    return Verdict.GOOD if payload_checksum(fingerprint, key, parts) == payload else Verdict.BAD
