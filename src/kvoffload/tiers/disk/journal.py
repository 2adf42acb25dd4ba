"""The journal of an index: which slots have changed, so that other processes need not read the whole index again.

The file ``journal`` is a header and a ring of entries: docs/formats.md has every byte. An entry says which block a slot
has now, or that it has none. It names the block by the digest of its key, since a follower needs no more: a block that
was read is verified with its key.

Entries of one *epoch*, a random number in the header, make a complete history. A process that opens the index begins an
epoch, and so does one that could not write all changes down. A follower of another epoch, or one that has fallen behind
by more entries than the ring has, reads the index instead. So does one that finds another generation in the header.

An entry is checked by a mix of its numbers and the epoch, which numpy can compute.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, Keys, Slots
from kvoffload.tiers.checksum import CHECKSUM_BYTES, is_sealed, sealed
from kvoffload.tiers.disk.format import MAX_KEY_BYTES, RECORD, RECORD_BYTES, FormatError, Header, Records, claims_block
from kvoffload.tiers.disk.storage import StoredFile

JOURNAL_VERSION = 1
JOURNAL_HEADER_BYTES = 4096
ENTRY_BYTES = 64
MIN_ENTRIES = 512
MAX_ENTRIES = 1 << 16
SLOTS_PER_ENTRY = 8
"""The ring has an entry for so many slots, within its bounds."""
MAX_PENDING = 1 << 16
"""Notes that wait for being written. If there are more, a new epoch begins."""
WRITING_DEADLINE_S = 2.0
"""How long a thread waits for another thread that writes the journal."""

_MAGIC = b"kvoffjnl"
_HEADER = struct.Struct("<8sIIQQQ")
"""Magic, version, entries, epoch, generation, head."""
_PAGE_ENTRIES = 4096 // ENTRY_BYTES

ENTRY = np.dtype(
    {
        "names": ["number", "digest", "payload_checksum", "slot", "has_block", "check"],
        "formats": ["<u8", "<u8", "<u8", "<u4", "<u4", "<u8"],
        "itemsize": ENTRY_BYTES,
    }
)
"""``digest`` and ``payload_checksum`` are 0 without a block."""

UInt64s = npt.NDArray[np.uint64]
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def num_entries_for(num_slots: int) -> int:
    """Returns how many entries the journal of an index of so many slots has."""
    return min(MAX_ENTRIES, max(MIN_ENTRIES, num_slots // SLOTS_PER_ENTRY // _PAGE_ENTRIES * _PAGE_ENTRIES))


def journal_bytes(num_entries: int) -> int:
    return JOURNAL_HEADER_BYTES + num_entries * ENTRY_BYTES


# Digests of keys.


def digests_of(keys: Keys) -> UInt64s:
    """Returns a 64-bit digest of each key, never 0. It depends on nothing but the key."""
    lengths = set(map(len, keys))
    if len(lengths) == 1:
        (length,) = lengths
        return _digests(np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, length), length)
    digests = np.zeros(len(keys), dtype=np.uint64)
    for length in lengths:
        places = [i for i, key in enumerate(keys) if len(key) == length]
        rows = np.frombuffer(b"".join(keys[i] for i in places), dtype=np.uint8).reshape(len(places), length)
        digests[places] = _digests(rows, length)
    return digests


def record_digests(records: Records) -> UInt64s:
    """Returns the digests of the records' keys."""
    lengths = records["key_bytes"]
    rows = np.ascontiguousarray(records["key"]).view(np.uint8).reshape(-1, MAX_KEY_BYTES)
    digests = np.zeros(len(records), dtype=np.uint64)
    for length in np.unique(lengths).tolist():
        chosen = lengths == length
        digests[chosen] = _digests(rows[chosen, :length], length)
    return digests


def _digests(rows: ByteArray, length: int) -> UInt64s:
    num_words = -(-length // 8)
    if length % 8:
        padded = np.zeros((len(rows), num_words * 8), dtype=np.uint8)
        padded[:, :length] = rows
        rows = padded
    words = np.ascontiguousarray(rows).view("<u8").reshape(len(rows), num_words)
    # Not the bare length: in a XOR with the first word, the difference of two lengths is that of two keys.
    digests = np.full(len(rows), length * int(_MULTIPLIER) & (1 << 64) - 1, dtype=np.uint64)
    for number in range(num_words):
        _mix(digests, words[:, number])
    _mix(digests, _HALF)
    digests[digests == 0] = 1
    return digests


def _mix(state: UInt64s, values: npt.NDArray[np.uint64] | np.uint64) -> None:
    """Mixes ``values`` into ``state``, in place."""
    state ^= values
    state *= _MULTIPLIER
    state ^= state >> _HALF


# Writing.


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """The header of a journal. ``head``: entries written since the epoch began."""

    num_entries: int
    epoch: int
    generation: int
    head: int

    def pack(self) -> ByteArray:
        """Returns the header as JOURNAL_HEADER_BYTES bytes."""
        fields = (_MAGIC, JOURNAL_VERSION, self.num_entries, self.epoch, self.generation, self.head)
        return sealed(_HEADER.pack(*fields).ljust(JOURNAL_HEADER_BYTES - CHECKSUM_BYTES, b"\0"))

    @classmethod
    def unpack(cls, data: ByteArray) -> JournalHeader:
        """Reads a header from the first JOURNAL_HEADER_BYTES bytes of a journal. Raises FormatError if it cannot be
        used."""
        raw = data.tobytes()
        if len(raw) < JOURNAL_HEADER_BYTES:
            raise FormatError(f"the journal has only {len(raw)} bytes, fewer than its header")
        magic, version, num_entries, epoch, generation, head = _HEADER.unpack_from(raw)
        if magic != _MAGIC or version != JOURNAL_VERSION:
            raise FormatError("the journal is not of a version that this release reads")
        if not is_sealed(raw[:JOURNAL_HEADER_BYTES]):
            raise FormatError("the checksum of the journal's header is wrong")
        if not MIN_ENTRIES <= num_entries <= MAX_ENTRIES or num_entries % _PAGE_ENTRIES:
            raise FormatError("the journal's header has impossible values")
        return cls(num_entries, epoch, generation, head)


class Journal:
    """Writes down which records of an index of ``num_slots`` slots have changed. A former process has left the first
    ``num_found`` of them.

    ``expect_change``, ``note`` and ``withdraw`` are called by the thread that owns the slots. ``write`` and ``close``
    may be called by any thread, and wait for each other. Only ``withdraw`` and ``write`` do I/O.
    """

    def __init__(
        self, file: StoredFile, num_entries: int, new_epoch: Callable[[], int], num_slots: int = 0, num_found: int = 0
    ) -> None:
        self._file = file
        self._is_seen = np.zeros(num_slots, dtype=np.bool_)
        """Per slot: whether other machines may find a block in its record."""
        self._is_seen[:num_found] = True
        self._new_epoch = new_epoch
        self._header = JournalHeader(num_entries, new_epoch(), 0, 0)
        self._written_generation: int | None = None
        self._pending: deque[tuple[int, ByteArray]] = deque()
        self._num_lost = self._num_known_lost = 0
        """Changes that could not be noted or written, and how many of them were made up for by a new epoch."""
        self._writing = threading.Lock()
        self._closed = False

    def expect_change(self, first_slot: int, count: int) -> None:
        """Notes that the records of ``first_slot`` and the slots after it are about to be written."""
        self._is_seen[first_slot : first_slot + count] = True

    def withdraw(self, slots: slice, sync_index: Callable[[], None]) -> None:
        """Returns, after the records of ``slots`` were emptied, once other machines see no blocks there any more.
        Raises OSError."""
        if self._is_seen[slots].any():
            sync_index()
            self._is_seen[slots] = False

    def note(self, first_slot: int, records: ByteArray) -> None:
        """Notes the new records of ``first_slot`` and the slots after it, which name other blocks than before, or
        none."""
        if len(self._pending) < MAX_PENDING:
            self._pending.append((first_slot, records))
        else:
            self._num_lost += 1

    def write(self, header: Header, sync_index: Callable[[], None]) -> None:
        """Writes the notes, after ``sync_index``, for an index that has ``header`` now. Raises OSError; a new epoch
        then makes up for the notes. Raises TimeoutError if another thread hangs in this method."""
        if not self._writing.acquire(timeout=WRITING_DEADLINE_S):
            raise TimeoutError(errno.ETIMEDOUT, "a write of the journal hangs")
        try:
            if self._closed:
                return
            noted = [self._pending.popleft() for _ in range(len(self._pending))]
            num_lost = self._num_lost
            is_complete = num_lost == self._num_known_lost
            if not noted and is_complete and self._written_generation == header.generation:
                return
            try:
                sync_index()
                self._write(header, noted, is_complete)
            except OSError:
                self._num_lost += 1
                raise
            self._num_known_lost = num_lost
        finally:
            self._writing.release()

    def _write(self, header: Header, noted: Sequence[tuple[int, ByteArray]], is_complete: bool) -> None:
        old, entries = self._header, _entries(noted)
        epoch, head = old.epoch, old.head
        if not is_complete or len(entries) > old.num_entries // 2:
            # The index, which was synced, has all of them.
            epoch, head, entries = self._new_epoch(), 0, entries[:0]
        self._append(entries, epoch, head)
        self._header = JournalHeader(old.num_entries, epoch, header.generation, head + len(entries))
        if self._file.write([self._header.pack()], 0) < JOURNAL_HEADER_BYTES:
            raise OSError("the journal's header could not be written in full")
        self._file.sync()
        self._written_generation = header.generation

    def _append(self, entries: npt.NDArray[np.void], epoch: int, head: int) -> None:
        size = self._header.num_entries
        entries["number"] = head + np.arange(len(entries), dtype=np.uint64)
        entries["check"] = _checks(entries, epoch)
        done = 0
        while done < len(entries):
            place = (head + done) % size
            part = entries[done : done + size - place]
            if self._file.write([part.view(np.uint8)], JOURNAL_HEADER_BYTES + place * ENTRY_BYTES) < part.nbytes:
                raise OSError("the journal could not be written in full")
            done += len(part)

    def close(self) -> bool:
        """Writes nothing from now on. Returns False if a thread still writes, because it hangs."""
        self._closed = True
        if not self._writing.acquire(timeout=WRITING_DEADLINE_S):
            return False
        self._writing.release()
        return True


def _entries(noted: Sequence[tuple[int, ByteArray]]) -> npt.NDArray[np.void]:
    """Returns one entry per slot that was noted, without number and check. The last note of a slot wins."""
    if not noted:
        return np.zeros(0, dtype=ENTRY)
    records = np.concatenate([data for _, data in noted]).view(RECORD)
    slots = np.concatenate([first + np.arange(len(data) // RECORD_BYTES) for first, data in noted])
    last = len(slots) - 1 - np.unique(slots[::-1], return_index=True)[1]
    entries = np.zeros(len(last), dtype=ENTRY)
    records = records[last]
    has_block = records["magic"] != 0
    entries["slot"] = slots[last]
    entries["has_block"] = has_block
    entries["digest"][has_block] = record_digests(records[has_block])
    entries["payload_checksum"][has_block] = records["payload_checksum"][has_block]
    return entries


def _checks(entries: npt.NDArray[np.void], epoch: int) -> UInt64s:
    checks = entries["number"] ^ np.uint64(epoch)
    _mix(checks, entries["digest"])
    _mix(checks, entries["payload_checksum"])
    _mix(checks, entries["slot"] | entries["has_block"].astype(np.uint64) << _HALF)
    return checks


# Reading.


def read_entries(
    header: JournalHeader, seen: int, read_pages: Callable[[int, int], ByteArray]
) -> npt.NDArray[np.void] | None:
    """Returns the entries from number ``seen`` to the header's head, None if they are not all in the ring any more.

    ``read_pages(offset, nbytes)`` reads the file, whole pages of 4 KiB.
    """
    count = header.head - seen
    if not 0 <= count <= header.num_entries:
        return None
    parts = [np.zeros(0, dtype=ENTRY)]
    while seen < header.head:
        place = seen % header.num_entries
        stop = min(header.num_entries, place + header.head - seen)
        first_page, end_page = place // _PAGE_ENTRIES, -(-stop // _PAGE_ENTRIES)
        data = read_pages(JOURNAL_HEADER_BYTES + first_page * 4096, (end_page - first_page) * 4096)
        if len(data) < (end_page - first_page) * 4096:
            return None
        skipped = place - first_page * _PAGE_ENTRIES
        parts.append(data.view(ENTRY)[skipped : skipped + stop - place])
        seen += stop - place
    entries = np.concatenate(parts)
    wanted = np.arange(header.head - count, header.head, dtype=np.uint64)
    if (entries["number"] != wanted).any() or (entries["check"] != _checks(entries, header.epoch)).any():
        return None
    return entries


def changed_blocks(header: Header, records_data: ByteArray, first_slot: int) -> tuple[Slots, UInt64s, UInt64s]:
    """Returns slots, digests and payload checksums of the blocks in the records of ``first_slot`` and the slots after
    it, as a follower takes them from an index. The records' own checksums are not verified: a damaged record names a
    block that fails its verification when it is read."""
    rows = records_data[: len(records_data) // RECORD_BYTES * RECORD_BYTES]
    records = rows.view(RECORD)
    found = np.flatnonzero(claims_block(header, records) & (records["generation"] == header.generation))
    chosen = records[found]
    return found + first_slot, record_digests(chosen), chosen["payload_checksum"].astype(np.uint64)
