"""The format of the disk tier's files, and the checks that they must pass: docs/formats.md has every byte.

If a record is all zeros or fails a check, its slot has no block. A payload's checksum is seeded with the id of the
fingerprint, the generation and the key, so a payload in a wrong slot, file or folder fails it. XXH3 finds accidents. It
does not authenticate: a user who can write to these files can forge a block that passes every check.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvoffload.abc import ByteArray, Keys, KVOffloadError, OffloadKey, Slots
from kvoffload.host.pool import SLOT_ALIGNMENT
from kvoffload.tiers.checksum import CHECKSUM_BYTES, block_checksum, is_sealed, sealed

FORMAT_VERSION = 2
INDEX_NAME = "index"
RECENCY_NAME = "recency"
JOURNAL_NAME = "journal"
"""Only where others follow the index; see ``journal``."""
IDENTITY_NAME = "identity"
"""The causes of the fingerprint, in words."""
RECENCY_BYTES = 16
HEADER_BYTES = 4096
RECORD_BYTES = 128
MAX_KEY_BYTES = 64
MAX_RANKS = 256
MAX_BLOCK_BYTES = (1 << 31) - SLOT_ALIGNMENT
"""The most that one read or write call of the kernel can move."""
MAX_SLAB_BYTES = 1 << 40
MAX_SEQUENCE = 1 << 62
"""No server counts that far. A record with a higher number is damaged; uses beyond it are not ordered."""
MAX_SECONDS = (1 << 32) - 1

_HEADER_MAGIC = b"kvoffidx"
_HEADER = struct.Struct("<8sII64sQQB")
"""Magic, version, ranks, fingerprint, slots per slab, generation, transient; then the slot bytes of each rank."""
_RECORD_MAGIC = int.from_bytes(b"kvob", "little")
_ID_BYTES = 12
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
ENGINE_FOLDER = re.compile(r"engine-([0-9]{1,6})")
"""The folder of one of several engines that share a directory."""
_SLAB = re.compile(r"slab-([0-9]{5,9})")

RECORD = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("key_bytes", "<u2"),
        ("fingerprint_id", f"V{_ID_BYTES}"),
        ("payload_bytes", "<u4"),
        ("generation", "<u8"),
        ("key", f"V{MAX_KEY_BYTES}"),
        ("sequence", "<u8"),
        ("stored_at", "<u4"),
        ("unused", "<u4"),
        ("payload_checksum", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""The record of one slot. ``sequence`` grows with every use of any block; ``stored_at`` is in seconds since 1970."""
assert RECORD.itemsize == RECORD_BYTES
EMPTY_RECORD = np.zeros(RECORD_BYTES, dtype=np.uint8)

Records = npt.NDArray[np.void]
"""Array of RECORD."""
FACTS = np.dtype([("sequence", "<i8"), ("stored_at", "<u4"), ("payload_checksum", "<u8")])
"""Fields of a block's record other than key and layout."""
Facts = npt.NDArray[np.void]
"""Array of FACTS."""


class FormatError(KVOffloadError):
    """An index cannot be used, for the reason that the message gives."""


def is_of_other_version(index: ByteArray) -> bool:
    """Returns whether the bytes begin like the index of a release with another format."""
    raw = index[: _HEADER.size].tobytes()
    return len(raw) == _HEADER.size and raw.startswith(_HEADER_MAGIC) and _HEADER.unpack(raw)[1] != FORMAT_VERSION


def is_block_file(name: str) -> bool:
    """Returns whether a file of this name in a fingerprint's folder belongs to the tier."""
    return name in (INDEX_NAME, RECENCY_NAME, JOURNAL_NAME, IDENTITY_NAME) or slab_number(name) is not None


def is_fingerprint(name: str) -> bool:
    """Returns whether ``name`` is that of a fingerprint's folder."""
    return _FINGERPRINT.fullmatch(name) is not None


def slab_name(number: int) -> str:
    return f"slab-{number:05}"


def slab_number(name: str) -> int | None:
    """Returns the number of the slab with this file name, None for other files."""
    match = _SLAB.fullmatch(name)
    return int(match[1]) if match and slab_name(int(match[1])) == name else None


def record_offset(slot: int) -> int:
    """Returns the offset of a slot's record in the index."""
    return HEADER_BYTES + slot * RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an index. ``slot_bytes``: bytes per slot of each rank, padded. ``transient``: the blocks were
    computed with weights that were changed while the server ran, and are invalid once it has ended."""

    fingerprint: str
    slot_bytes: tuple[int, ...]
    slots_per_slab: int
    generation: int
    transient: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes per slot on disk."""
        return sum(self.slot_bytes)

    @property
    def fingerprint_id(self) -> bytes:
        """The first bytes of the fingerprint, which every record repeats."""
        return bytes.fromhex(self.fingerprint)[:_ID_BYTES]

    def place(self, slot: int) -> tuple[int, int]:
        """Returns slab number, and offset in the slab, of ``slot``."""
        slab, index = divmod(slot, self.slots_per_slab)
        return slab, index * self.block_bytes

    def pack(self) -> ByteArray:
        """Returns the header as HEADER_BYTES bytes."""
        fields = _HEADER.pack(
            _HEADER_MAGIC,
            FORMAT_VERSION,
            len(self.slot_bytes),
            self.fingerprint.encode("ascii"),
            self.slots_per_slab,
            self.generation,
            self.transient,
        )
        sizes = struct.pack(f"<{len(self.slot_bytes)}Q", *self.slot_bytes)
        return sealed((fields + sizes).ljust(HEADER_BYTES - CHECKSUM_BYTES, b"\0"))

    @classmethod
    def unpack(cls, data: ByteArray) -> Header:
        """Reads a header from the first HEADER_BYTES bytes of an index. Raises FormatError if it cannot be used."""
        raw = data.tobytes()
        if len(raw) < HEADER_BYTES:
            raise FormatError(f"the index has only {len(raw)} bytes, fewer than its header")
        body = raw[: HEADER_BYTES - CHECKSUM_BYTES]
        magic, version, ranks, fingerprint, slots_per_slab, generation, transient = _HEADER.unpack_from(body)
        if magic != _HEADER_MAGIC:
            raise FormatError("the file does not begin like an index")
        if version != FORMAT_VERSION:
            raise FormatError(f"the index has format version {version}; this release reads {FORMAT_VERSION}")
        if not is_sealed(raw[:HEADER_BYTES]):
            raise FormatError("the checksum of the index's header is wrong")
        sizes = struct.unpack_from(f"<{ranks}Q", body, _HEADER.size) if 1 <= ranks <= MAX_RANKS else ()
        name = fingerprint.decode("ascii", "replace")
        aligned = all(size > 0 and size % SLOT_ALIGNMENT == 0 for size in sizes)
        if not (sizes and aligned and sum(sizes) <= MAX_BLOCK_BYTES and is_fingerprint(name)):
            raise FormatError("the index's header has impossible values")
        if not 1 <= slots_per_slab <= max(1, MAX_SLAB_BYTES // sum(sizes)):
            raise FormatError(f"the index's header says {slots_per_slab} slots per slab, which is impossible")
        return cls(name, sizes, slots_per_slab, generation, bool(transient))


def payload_checksum(header: Header, key: OffloadKey, buffers: Sequence[ByteArray]) -> int:
    """Returns the checksum of a block, given one buffer per rank."""
    return block_checksum(header.fingerprint_id + struct.pack("<Q", header.generation) + key, buffers)


def payload_checksums(header: Header, keys: Keys, blocks: Sequence[Sequence[ByteArray]]) -> npt.NDArray[np.uint64]:
    """Returns ``payload_checksum`` of each block."""
    seed = header.fingerprint_id + struct.pack("<Q", header.generation)
    checksums = (block_checksum(seed + key, buffers) for key, buffers in zip(keys, blocks, strict=True))
    return np.fromiter(checksums, np.uint64, len(keys))


def pack_records(header: Header, keys: Keys, facts: Facts) -> ByteArray:
    """Returns the records of blocks with these ``facts``, RECORD_BYTES bytes per row."""
    records = np.zeros(len(keys), dtype=RECORD)
    records["magic"] = _RECORD_MAGIC
    records["version"] = FORMAT_VERSION
    records["key_bytes"] = np.fromiter(map(len, keys), np.uint16, len(keys))
    records["fingerprint_id"] = np.void(header.fingerprint_id)
    records["payload_bytes"] = header.block_bytes
    records["generation"] = header.generation
    records["key"] = np.array(keys, dtype=f"S{MAX_KEY_BYTES}").view(f"V{MAX_KEY_BYTES}")
    records["sequence"] = np.minimum(facts["sequence"], MAX_SEQUENCE)
    for name in ("stored_at", "payload_checksum"):
        records[name] = facts[name]
    rows = records.view(np.uint8).reshape(-1, RECORD_BYTES)
    records["checksum"] = _checksums(rows)
    return rows


@dataclass(frozen=True, slots=True)
class Entries:
    """Blocks of an index: ``keys[i]`` is in ``slots[i]`` and has ``records[i]``. Oldest first."""

    keys: list[OffloadKey]
    slots: Slots
    records: Records
    num_damaged: int = 0
    """Records that are neither empty nor valid."""


def parse_records(header: Header, data: ByteArray, first_slot: int = 0) -> Entries:
    """Returns the blocks of ``first_slot`` and the slots after it, given the bytes of their records. An incomplete
    record at the end is ignored. The payloads are not verified. A key may appear twice; the newer block comes later."""
    rows = data[: len(data) // RECORD_BYTES * RECORD_BYTES].reshape(-1, RECORD_BYTES)
    slots = np.flatnonzero(_as_records(rows)["magic"])
    rows = rows.take(slots, axis=0)
    records = _as_records(rows)
    sound = (
        claims_block(header, records)
        & (records["sequence"] <= MAX_SEQUENCE)
        & (_checksums(rows) == records["checksum"])
    )
    current = np.flatnonzero(sound & (records["generation"] == header.generation))
    current = current[np.argsort(records["sequence"][current], kind="stable")]
    found = _as_records(rows.take(current, axis=0))
    keys = [key[:size] for key, size in zip(found["key"].tolist(), found["key_bytes"].tolist(), strict=True)]
    return Entries(keys, slots[current] + first_slot, found, int(np.count_nonzero(~sound)))


def claims_block(header: Header, records: Records) -> npt.NDArray[np.bool_]:
    """Returns which records claim to have a block of the header's fingerprint and layout, of any generation. Their
    checksums are not verified."""
    ids = np.ascontiguousarray(records["fingerprint_id"]).view(np.uint8).reshape(-1, _ID_BYTES)
    claims: npt.NDArray[np.bool_] = (
        (records["magic"] == _RECORD_MAGIC)
        & (records["version"] == FORMAT_VERSION)
        & (records["key_bytes"] - np.uint16(1) < MAX_KEY_BYTES)
        & (ids == np.frombuffer(header.fingerprint_id, dtype=np.uint8)).all(axis=1)
        & (records["payload_bytes"] == header.block_bytes)
    )
    return claims


def _as_records(rows: ByteArray) -> Records:
    return rows.reshape(-1).view(RECORD)


def _checksums(rows: ByteArray) -> npt.NDArray[np.uint64]:
    data, size = memoryview(rows.tobytes()), RECORD_BYTES - CHECKSUM_BYTES
    starts = range(0, len(data), RECORD_BYTES)
    sums = (xxh3_64_intdigest(data[start : start + size]) for start in starts)
    return np.fromiter(sums, dtype=np.uint64, count=len(rows))
