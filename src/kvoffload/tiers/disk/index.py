"""The file ``index``: which block is in which slot; and the journal, which tells other processes of its changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.folder import Folder, write_all
from kvoffload.tiers.disk.format import (
    HEADER_BYTES,
    INDEX_NAME,
    RECORD_BYTES,
    Entries,
    FormatError,
    Header,
    parse_records,
    record_offset,
)
from kvoffload.tiers.disk.journal import Journal
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, StoredFile, read_at, shorten

logger = logging.getLogger(__name__)

RECORDS_AT_ONCE = 1 << 13
"""Few: a server may open a tier while another of its threads needs the interpreter."""


class Index:
    """The header, and the record of each slot, in ``file``. With ``journal``, other processes follow the index.

    A ``header`` that is assigned takes effect at once, and is on disk after ``write_header``. ``is_written``: the file
    has it already.
    """

    def __init__(
        self, file: StoredFile, header: Header, journal: Journal | None = None, *, is_written: bool = False
    ) -> None:
        self.header = header
        self._file = file
        self._journal = journal
        self._written = header if is_written else None
        """The header that is on disk."""

    @property
    def header_is_due(self) -> bool:
        """Whether ``header`` is not on disk yet."""
        return self._written is not self.header

    def write_header(self) -> None:
        """Writes the header if it is due. Raises OSError."""
        while self.header_is_due:
            header = self.header
            write_all(self._file, [header.pack()], 0)
            self._written = header

    def write_records(self, first_slot: int, records: ByteArray) -> None:
        """Writes the records of ``first_slot`` and those after it. Raises OSError."""
        if self._journal:
            self._journal.expect_change(first_slot, len(records) // RECORD_BYTES)
        write_all(self._file, [records], record_offset(first_slot))
        if self._journal:
            self._journal.note(first_slot, records)

    def empty_records(self, first_slot: int, count: int) -> None:
        """Empties the records of slots whose payloads are about to be overwritten, after ``withdraw``. Raises
        OSError."""
        write_all(self._file, [np.zeros(count * RECORD_BYTES, dtype=np.uint8)], record_offset(first_slot))

    def withdraw(self, slots: slice) -> None:
        """Returns, after the records of ``slots`` were emptied, once no other machine that may have found blocks there
        does so. Raises OSError."""
        if self._journal:
            self._journal.withdraw(slots, self._file.sync)

    def write_journal(self) -> None:
        """Writes down which blocks have come and gone since the last call, if others follow this index. May be called
        by any thread. Raises OSError."""
        if self._journal:
            self._journal.write(self.header, self._file.sync)

    def load(self, num_slots: int, first_slot: int = 0) -> Iterator[Entries]:
        """Yields the blocks in the slots ``[first_slot, num_slots)``, in pieces. Records that cannot be read are left
        out."""
        for first in range(first_slot, num_slots, RECORDS_AT_ONCE):
            try:
                entries = read_piece(self._file, self.header, first, num_slots)
            except OSError as error:
                logger.warning(
                    "kvoffload: disk tier: a part of its index cannot be read (%s), so the blocks in it are misses; "
                    "check the medium",
                    error,
                )
                continue
            yield entries

    def resize(self, num_slots: int) -> None:
        self._file.resize(record_offset(num_slots))

    def trim(self, num_slots: int) -> None:
        """Cuts off the records of other slots. Raises OSError."""
        shorten(self._file, record_offset(num_slots))

    def close(self) -> bool:
        """Ends the journal. Returns False if a thread hangs in it."""
        return self._journal is None or self._journal.close()


def read_piece(file: StoredFile, header: Header, first: int, num_slots: int) -> Entries:
    """Returns the blocks in RECORDS_AT_ONCE slots of an index from ``first`` on, of ``num_slots`` in all. Raises
    OSError."""
    # Not aligned, which would be slower: the index is read through the page cache.
    data = np.zeros(min(RECORDS_AT_ONCE, num_slots - first) * RECORD_BYTES, dtype=np.uint8)
    return parse_records(header, data[: file.read([data], record_offset(first))], first)


def count_blocks(folder: Folder, header: Header, first_slot: int) -> int:
    """Returns how many blocks the index has from ``first_slot`` on. Raises OSError."""
    file = folder.open(INDEX_NAME)
    try:
        # A file can claim any size: the bytes that it takes bound the work.
        num_slots = (
            min(file.size(), record_offset(first_slot) + file.allocated_bytes()) - HEADER_BYTES
        ) // RECORD_BYTES
        return sum(len(entries.keys) for entries in Index(file, header).load(num_slots, first_slot))
    finally:
        folder.release(file)


def adopt_header(folder: Folder, wanted: Header) -> Header | None:
    """Reads the header of an index that a former process has left. Returns the header under which its files are used
    from now on; None, with a warning, if they cannot be used. Raises OSError.

    ``wanted``: the header of a new index. It is returned if the slabs can be used again, but not the blocks in them.
    """
    try:
        file = folder.open(INDEX_NAME)
        try:
            found = Header.unpack(read_at(file, 0, HEADER_BYTES))
        finally:
            folder.release(file)
    except (OSError, FormatError) as error:
        if isinstance(error, OSError) and error.errno not in NO_FILE_ERRORS:
            # The next start may be able to read it, so nothing is removed.
            raise
        logger.warning("kvoffload: disk tier: its blocks cannot be used (%s), and are removed; it starts empty", error)
        return None
    if replace(wanted, generation=found.generation, transient=found.transient) != found:
        logger.warning(
            "kvoffload: disk tier: its blocks were stored with another layout, and are removed; it starts empty"
        )
        return None
    if found.transient:
        return None if folder.storage.read_only else wanted
    return found
