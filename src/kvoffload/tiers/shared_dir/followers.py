"""Follows the indexes of the other seats."""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.tiers.disk.format import (
    HEADER_BYTES,
    INDEX_NAME,
    JOURNAL_NAME,
    RECORD_BYTES,
    FormatError,
    Header,
    record_offset,
)
from kvoffload.tiers.disk.journal import JOURNAL_HEADER_BYTES, JournalHeader, changed_blocks, read_entries
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, Storage, StoredFile
from kvoffload.tiers.shared_dir.background import Rest
from kvoffload.tiers.shared_dir.foreign import ForeignBlocks, SeatView
from kvoffload.tiers.shared_dir.seats import aligned_buffer, seat_names, seat_number

logger = logging.getLogger(__name__)

FOLLOW_S = 1.0
"""Time between two passes."""
RECORDS_PER_READ = 1 << 13
MAX_RECHECKS = 1024
"""Slots that are looked at again in one pass, because a read has failed there."""
PAGE = 4096
GONE_ERRORS = (*NO_FILE_ERRORS, errno.ESTALE, errno.ENOTDIR)
"""Errors of files that their owner has removed."""


class Follower:
    """Keeps ``blocks`` up to date with the seats of ``root``, except ``own``. ``follow`` waits for the medium, and must
    be called by one thread at a time."""

    def __init__(
        self,
        root: Storage,
        fingerprint: str,
        slot_bytes: Sequence[int],
        blocks: ForeignBlocks,
        own: str | None,
        clock: Callable[[], float],
    ) -> None:
        self.own = own
        """The seat that is not followed."""
        self._root = root
        self._fingerprint = fingerprint
        self._slot_bytes = tuple(slot_bytes)
        self._blocks = blocks
        self._clock = clock
        self._seats: dict[str, _FollowedSeat] = {}
        self._doubtful: deque[tuple[int, int]] = deque(maxlen=MAX_RECHECKS)
        """Numbers of seats, and slots, to be looked at again."""
        self._rebuild_rest = Rest(clock)
        self._moved: tuple[Storage, str] | None = None
        """The directory, and the seat that is not followed, from the next pass on."""

    def move(self, root: Storage, own: str) -> None:
        """The process has another seat, in ``root``, from now on. The next pass closes the directory of before."""
        self._moved = root, own

    def recheck(self, number: int, slot: int) -> None:
        """A block was not found in this slot: the next pass reads the slot's record. Any thread may call this."""
        self._doubtful.append((number, slot))

    def follow(self) -> None:
        """Takes in what has changed since the last call. Never raises because of the medium."""
        if self._moved is not None:
            self._take_move(*self._moved)
        try:
            names = [name for name in seat_names(self._root) if name != self.own]
        except OSError as error:
            logger.debug("kvoffload: shared directory: cannot be listed (%s)", error)
            return
        for name in [name for name in self._seats if name not in names]:
            self._seats.pop(name).leave()
        for name in names:
            self._follow(name)
        doubtful = [self._doubtful.popleft() for _ in range(len(self._doubtful))]
        for number, slot in dict.fromkeys(doubtful):
            seat = next((seat for seat in self._seats.values() if seat.number == number), None)
            if seat is not None:
                seat.recheck(slot)
        if self._blocks.is_incomplete and self._rebuild_rest.is_over:
            with self._rebuild_rest.after():
                self._blocks.rebuild()
        self._blocks.handles.close_idle(self._clock())

    def _take_move(self, root: Storage, own: str) -> None:
        self._moved = None
        for seat in self._seats.values():
            seat.leave()
        self._seats.clear()
        self._root.close()
        self._root, self.own = root, own

    def _follow(self, name: str) -> None:
        seat = self._seats.get(name)
        if seat is None:
            try:
                storage = self._root.child(name)
            except (OSError, ConfigError) as error:
                logger.debug("kvoffload: shared directory: %s cannot be used (%s)", name, error)
                return
            number = seat_number(name)
            assert number is not None
            seat = self._seats[name] = _FollowedSeat(
                number, storage, self._fingerprint, self._slot_bytes, self._blocks, Rest(self._clock)
            )
        seat.follow()

    def close(self) -> None:
        """Closes the files and folders of the seats, and the directory. No pass may be under way."""
        self._blocks.handles.shut()
        for seat in self._seats.values():
            seat.leave()
        self._seats.clear()
        self._root.close()
        if self._moved is not None:
            self._moved[0].close()


class _FollowedSeat:
    """One seat."""

    def __init__(
        self,
        number: int,
        storage: Storage,
        fingerprint: str,
        slot_bytes: tuple[int, ...],
        blocks: ForeignBlocks,
        rest: Rest,
    ) -> None:
        self.number = number
        self._storage = storage
        self._fingerprint = fingerprint
        self._slot_bytes = slot_bytes
        self._blocks = blocks
        self._rest = rest
        self._journal: JournalHeader | None = None
        """The header up to which the journal was followed; None: the index must be read."""

    def leave(self) -> None:
        self._blocks.drop(self.number)
        self._storage.close()

    def follow(self) -> None:
        try:
            self._take_changes()
        except FormatError as error:
            # It may be changing just now.
            logger.debug("kvoffload: shared directory: writer-%d: %s", self.number, error)
            self._forget()
        except OSError as error:
            logger.debug("kvoffload: shared directory: writer-%d: %s", self.number, error)
            if error.errno in GONE_ERRORS:
                self._forget()
        except Exception as error:
            # Nonsense in its files must not hide the other seats.
            logger.debug("kvoffload: shared directory: writer-%d", self.number, exc_info=error)
            self._forget()

    def _forget(self) -> None:
        self._journal = None
        self._blocks.drop(self.number)

    def _take_changes(self) -> None:
        file = self._open(JOURNAL_NAME)
        try:
            journal = JournalHeader.unpack(_read(file, 0, JOURNAL_HEADER_BYTES))
            old = self._journal
            if old == journal:
                return
            if old is not None and (old.epoch, old.generation) == (journal.epoch, journal.generation):
                entries = read_entries(journal, old.head, lambda offset, nbytes: _read(file, offset, nbytes))
                if entries is not None:
                    last = len(entries) - 1 - np.unique(entries["slot"][::-1], return_index=True)[1]
                    entries = entries[last]
                    slots = entries["slot"].astype(np.int64)
                    digests = np.where(entries["has_block"] != 0, entries["digest"], np.uint64(0))
                    self._blocks.apply(self.number, slots, digests, entries["payload_checksum"])
                    self._journal = journal
                    return
        finally:
            file.close()
        self._read_index(journal)

    def _read_index(self, journal: JournalHeader) -> None:
        """Takes the blocks from the index. ``journal``: read before, so that no later change is missed."""
        index = self._open(INDEX_NAME)
        try:
            header = Header.unpack(_read(index, 0, HEADER_BYTES))
            if header.fingerprint != self._fingerprint or header.slot_bytes != self._slot_bytes:
                raise FormatError("its blocks have another fingerprint or layout")
            if header.transient:
                # Its weights were changed while it ran. The journal changes when the next process has the seat.
                self._blocks.drop(self.number)
                self._journal = journal
                return
            if not self._is_same(header):
                self._blocks.drop(self.number)
            if not self._rest.is_over:
                return
            with self._rest.after():
                num_slots = max(0, index.size() - HEADER_BYTES) // RECORD_BYTES
                num_slots = min(num_slots, self._blocks.max_slots(self.number))
                old = self._blocks.view(self.number)
                view = SeatView.empty(
                    self.number, self._storage, header, num_slots, None if old is None else old.serial
                )
                self._scan(index, view, num_slots)
                self._blocks.replace(view.trimmed())
        finally:
            index.close()
        # The header that was read is as new as the journal or newer. If it is newer, the journal changes soon.
        self._journal = journal

    def _is_same(self, header: Header) -> bool:
        """Returns whether the blocks that are known are those of this header."""
        view = self._blocks.view(self.number)
        return view is not None and view.header == header

    def _scan(self, index: StoredFile, view: SeatView, num_slots: int) -> None:
        """Fills ``view`` with the blocks that the index has."""
        buffer = aligned_buffer(min(RECORDS_PER_READ * RECORD_BYTES, -(-record_offset(num_slots) // PAGE) * PAGE))
        offset = HEADER_BYTES
        while offset < record_offset(num_slots):
            done = index.read([buffer], offset)
            first = (offset - HEADER_BYTES) // RECORD_BYTES
            data = buffer[: min(done, record_offset(num_slots) - offset)]
            slots, digests, checksums = changed_blocks(view.header, data, first)
            view.digests[slots] = digests
            view.checksums[slots] = checksums
            if done < buffer.size:
                return
            offset += buffer.size

    def recheck(self, slot: int) -> None:
        """Reads one slot's record."""
        view = self._blocks.view(self.number)
        if view is None:
            return
        try:
            record = read_record(self._storage, self._fingerprint, slot)
        except OSError as error:
            if error.errno in GONE_ERRORS:
                self._forget()
            return
        digests = checksums = np.zeros(1, dtype=np.uint64)
        found, found_digests, found_checksums = changed_blocks(view.header, record, slot)
        if len(found):
            digests, checksums = found_digests, found_checksums
        self._blocks.apply(self.number, np.array([slot]), digests, checksums)

    def _open(self, name: str) -> StoredFile:
        return self._storage.open(self._fingerprint, name, fresh=True)


def read_header(storage: Storage, fingerprint: str) -> Header:
    """Returns the header of an index as it is on the medium now. Raises FormatError and OSError."""
    file = storage.open(fingerprint, INDEX_NAME, fresh=True)
    try:
        return Header.unpack(_read(file, 0, HEADER_BYTES))
    finally:
        file.close()


def has_good_headers(storage: Storage, expected: Header) -> bool:
    """Returns whether an index has the ``expected`` header on the medium, and its journal a valid one. Raises
    OSError."""
    try:
        if read_header(storage, expected.fingerprint) != expected:
            return False
        file = storage.open(expected.fingerprint, JOURNAL_NAME, fresh=True)
        try:
            JournalHeader.unpack(_read(file, 0, JOURNAL_HEADER_BYTES))
        finally:
            file.close()
    except FormatError:
        return False
    return True


def read_record(storage: Storage, fingerprint: str, slot: int) -> ByteArray:
    """Returns the record of a slot as it is on the medium now, fewer bytes if there is none. Raises OSError."""
    file = storage.open(fingerprint, INDEX_NAME, fresh=True)
    try:
        at = record_offset(slot)
        page = _read(file, at // PAGE * PAGE, PAGE)
        return page[at % PAGE : at % PAGE + RECORD_BYTES]
    finally:
        file.close()


def _read(file: StoredFile, offset: int, nbytes: int) -> ByteArray:
    """Returns fewer bytes at the end of the file."""
    buffer = aligned_buffer(nbytes)
    return buffer[: file.read([buffer], offset)]
