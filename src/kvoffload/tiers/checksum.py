"""Checksums of headers, records and blocks, all XXH3-64: they find accidents, not forgery."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvoffload.abc import ByteArray

CHECKSUM_BYTES = 8


def sealed(body: bytes) -> ByteArray:
    """Returns ``body`` with its checksum behind it, CHECKSUM_BYTES bytes, little-endian."""
    return np.frombuffer(body + struct.pack("<Q", xxh3_64_intdigest(body)), dtype=np.uint8)


def is_sealed(data: bytes) -> bool:
    """Returns whether the last CHECKSUM_BYTES bytes are the checksum of those before them."""
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    return struct.pack("<Q", xxh3_64_intdigest(body)) == checksum


def block_checksum(seed: bytes, parts: Sequence[ByteArray]) -> int:
    """Returns the checksum of a block, given one buffer per rank. ``seed`` says which block it is, so that the bytes of
    another one fail. Large buffers are hashed without the GIL."""
    checksum = xxh3_64_intdigest(seed)
    for part in parts:
        checksum = xxh3_64_intdigest(part.data, checksum)
    return checksum
