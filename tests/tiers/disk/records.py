"""A record of the disk tier, packed field by field as its format says."""

from __future__ import annotations

import struct

from kvoffload.abc import ByteArray, OffloadKey
from kvoffload.tiers.checksum import sealed
from kvoffload.tiers.disk.format import FORMAT_VERSION, Header

RECORD = struct.Struct("<IHH12sIQ64sQIIQ")
MAGIC = int.from_bytes(b"kvob", "little")


def pack_record(header: Header, key: OffloadKey, *, sequence: int, stored_at: int, payload_checksum: int) -> ByteArray:
    """Returns the record of a slot with a block, RECORD_BYTES bytes."""
    body = RECORD.pack(
        MAGIC,
        FORMAT_VERSION,
        len(key),
        header.fingerprint_id,
        header.block_bytes,
        header.generation,
        key,
        sequence,
        stored_at,
        0,
        payload_checksum,
    )
    return sealed(body)
