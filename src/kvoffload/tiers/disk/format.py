"""The disk tier's files: what is in them, and what is believed of it.

A directory holds one folder a fingerprint, named by its 64 hexadecimal digits. In it lie the payloads in *slabs*,
``slab-00000`` and so on, a file ``index`` that tells what they are, and a file ``recency`` that tells when they were
used.

A slab is ``slots_per_slab`` slots in a row, the last one perhaps fewer. A slot holds one block: rank 0's bytes, then
rank 1's, padding included, without a gap. Slot ``s`` is the ``s % slots_per_slab``-th of slab ``s // slots_per_slab``.

The index is a header of 4096 bytes, then a record of 128 bytes a slot, in the order of the slots. Numbers are
little-endian. A record of zeros, or one that fails any check, is a slot without a block.

Every byte of the header is under its checksum, every byte of a record under its own, and every byte of a slot under
the payload's, all XXH3-64. The payload's checksum is seeded with the fingerprint's id, the generation and the key, so a
payload that has come to lie in another slot, file or folder fails it. A header names the *generation* of its records,
a random number: a new one makes every record before it void at once. XXH3 finds accidents. It does not authenticate:
whoever can write to these files can forge a block that passes every check.

The recency file is one number of 64 bits per slot, the sequence of the last use that was written down. Nothing but the
order of eviction after a restart depends on it, so it has neither header nor checksum; a record's own sequence counts
if it is higher.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvoffload.abc import ByteArray, KVOffloadError, OffloadKey, Slots
from kvoffload.host.pool import SLOT_ALIGNMENT

FORMAT_VERSION = 1
INDEX_NAME = "index"
RECENCY_NAME = "recency"
RECENCY_BYTES = 8
HEADER_BYTES = 4096
RECORD_BYTES = 128
MAX_KEY_BYTES = 64
MAX_RANKS = 256
MAX_BLOCK_BYTES = (1 << 31) - SLOT_ALIGNMENT
"""What one read or write of the kernel's can move."""
MAX_SEQUENCE = 1 << 62
"""No server can count so far. A record that says more is damaged, and uses beyond it are not told apart."""
MAX_HITS = MAX_SECONDS = (1 << 32) - 1

_HEADER_MAGIC = b"kvoffidx"
_HEADER = struct.Struct("<8sII64sQQB")
"""Magic, version, ranks, fingerprint, slots a slab, generation, transient; then the slot bytes of each rank."""
_RECORD_MAGIC = int.from_bytes(b"kvob", "little")
_ID_BYTES = 12
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
ENGINE_FOLDER = re.compile(r"engine-([0-9]{1,6})")
"""Where several engines share a directory, the folder of each."""
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
        ("hits", "<u4"),
        ("payload_checksum", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""One slot's record. ``sequence`` grows with every write and every hit; ``stored_at`` is in seconds since 1970."""
assert RECORD.itemsize == RECORD_BYTES
_RECORD = struct.Struct(f"<IHH{_ID_BYTES}sIQ{MAX_KEY_BYTES}sQIIQ")
_ID_PLACE = slice(8, 8 + _ID_BYTES)
EMPTY_RECORD = np.zeros(RECORD_BYTES, dtype=np.uint8)

Records = npt.NDArray[np.void]
"""Array of RECORD."""


class FormatError(KVOffloadError):
    """An index cannot be used. The message says why."""


def is_block_file(name: str) -> bool:
    """Whether a file of this name in a fingerprint's folder is the tier's."""
    return name in (INDEX_NAME, RECENCY_NAME) or slab_number(name) is not None


def is_fingerprint(name: str) -> bool:
    """Whether a folder of this name is ours."""
    return _FINGERPRINT.fullmatch(name) is not None


def slab_name(number: int) -> str:
    return f"slab-{number:05}"


def slab_number(name: str) -> int | None:
    """The inverse of ``slab_name``; None for other files."""
    match = _SLAB.fullmatch(name)
    return int(match[1]) if match and slab_name(int(match[1])) == name else None


def record_offset(slot: int) -> int:
    """Where in the index the record of ``slot`` lies."""
    return HEADER_BYTES + slot * RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """What an index says of itself. ``slot_bytes``: of each rank, padded. ``transient``: the blocks were made with
    weights that were changed while the server ran, and are void once it has ended."""

    fingerprint: str
    slot_bytes: tuple[int, ...]
    slots_per_slab: int
    generation: int
    transient: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a slot on disk."""
        return sum(self.slot_bytes)

    @property
    def fingerprint_id(self) -> bytes:
        """The beginning of the fingerprint, which every record repeats."""
        return bytes.fromhex(self.fingerprint)[:_ID_BYTES]

    def place(self, slot: int) -> tuple[int, int]:
        """Slab number, and offset in the slab, of ``slot``."""
        slab, index = divmod(slot, self.slots_per_slab)
        return slab, index * self.block_bytes

    def pack(self) -> ByteArray:
        """HEADER_BYTES bytes."""
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
        body = (fields + sizes).ljust(HEADER_BYTES - 8, b"\0")
        return np.frombuffer(body + struct.pack("<Q", xxh3_64_intdigest(body)), dtype=np.uint8)

    @classmethod
    def unpack(cls, data: ByteArray) -> Header:
        """The header in the first HEADER_BYTES bytes of an index. Raises FormatError if there is none to use."""
        raw = data.tobytes()
        if len(raw) < HEADER_BYTES:
            raise FormatError(f"the index has {len(raw)} bytes, not even a header")
        body, checksum = raw[: HEADER_BYTES - 8], raw[HEADER_BYTES - 8 : HEADER_BYTES]
        magic, version, ranks, fingerprint, slots_per_slab, generation, transient = _HEADER.unpack_from(body)
        if magic != _HEADER_MAGIC:
            raise FormatError("the index does not begin like one")
        if version != FORMAT_VERSION:
            raise FormatError(f"the index has format version {version}; this release reads {FORMAT_VERSION}")
        if struct.pack("<Q", xxh3_64_intdigest(body)) != checksum:
            raise FormatError("the checksum of the index's header is wrong")
        sizes = struct.unpack_from(f"<{ranks}Q", body, _HEADER.size) if 1 <= ranks <= MAX_RANKS else ()
        name = fingerprint.decode("ascii", "replace")
        aligned = all(size > 0 and size % SLOT_ALIGNMENT == 0 for size in sizes)
        if not (sizes and aligned and sum(sizes) <= MAX_BLOCK_BYTES and slots_per_slab > 0 and is_fingerprint(name)):
            raise FormatError("the index's header holds impossible values")
        return cls(name, sizes, slots_per_slab, generation, bool(transient))


def payload_checksum(header: Header, key: OffloadKey, buffers: Sequence[ByteArray]) -> int:
    """Of a block's bytes, one buffer a rank. Runs without the GIL on buffers of some size."""
    checksum = xxh3_64_intdigest(header.fingerprint_id + struct.pack("<Q", header.generation) + key)
    for buffer in buffers:
        checksum = xxh3_64_intdigest(buffer.data, checksum)
    return checksum


def pack_record(
    header: Header, key: OffloadKey, *, sequence: int, stored_at: int, hits: int, payload_checksum: int
) -> ByteArray:
    """RECORD_BYTES bytes that make a slot's block findable."""
    body = _RECORD.pack(
        _RECORD_MAGIC,
        FORMAT_VERSION,
        len(key),
        header.fingerprint_id,
        header.block_bytes,
        header.generation,
        key,
        min(sequence, MAX_SEQUENCE),
        stored_at,
        hits,
        payload_checksum,
    )
    return np.frombuffer(body + struct.pack("<Q", xxh3_64_intdigest(body)), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Entries:
    """The blocks that an index knows: ``keys[i]`` lies in ``slots[i]``, ``records[i]`` is its record. Oldest first."""

    keys: list[OffloadKey]
    slots: Slots
    records: Records
    num_stale: int = 0
    """Sound records of another generation."""
    num_damaged: int = 0
    """Records that are neither empty nor sound."""


def parse_records(header: Header, data: ByteArray, first_slot: int = 0) -> Entries:
    """The blocks of slots ``first_slot`` on, from their records' bytes; an incomplete record at the end is ignored.
    The payloads have still to be verified, and a key may come twice, the newer one later."""
    rows = data[: len(data) // RECORD_BYTES * RECORD_BYTES].reshape(-1, RECORD_BYTES)
    slots = np.flatnonzero(_as_records(rows)["magic"])
    rows = rows.take(slots, axis=0)
    records = _as_records(rows)
    sound = (
        (records["magic"] == _RECORD_MAGIC)
        & (records["version"] == FORMAT_VERSION)
        & (records["key_bytes"] - np.uint16(1) < MAX_KEY_BYTES)
        & (rows[:, _ID_PLACE] == np.frombuffer(header.fingerprint_id, dtype=np.uint8)).all(axis=1)
        & (records["payload_bytes"] == header.block_bytes)
        & (records["sequence"] <= MAX_SEQUENCE)
        & (_checksums(rows) == records["checksum"])
    )
    current = np.flatnonzero(sound & (records["generation"] == header.generation))
    current = current[np.argsort(records["sequence"][current], kind="stable")]
    found = _as_records(rows.take(current, axis=0))
    keys = [key[:size] for key, size in zip(found["key"].tolist(), found["key_bytes"].tolist(), strict=True)]
    num_sound = int(np.count_nonzero(sound))
    return Entries(keys, slots[current] + first_slot, found, num_sound - len(keys), len(records) - num_sound)


def _as_records(rows: ByteArray) -> Records:
    return rows.reshape(-1).view(RECORD)


def _checksums(rows: ByteArray) -> npt.NDArray[np.uint64]:
    data, size = memoryview(rows.tobytes()), RECORD_BYTES - 8
    starts = range(0, len(data), RECORD_BYTES)
    sums = (xxh3_64_intdigest(data[start : start + size]) for start in starts)
    return np.fromiter(sums, dtype=np.uint64, count=len(rows))
