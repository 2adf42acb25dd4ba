"""Follows the indexes of the other seats."""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

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
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, Storage, StoredFile, read_at, read_fresh
from kvoffload.tiers.shared_dir.foreign import ForeignBlocks, SeatView
from kvoffload.tiers.shared_dir.seats import MAX_SEATS, seat_names, seat_number

logger = logging.getLogger(__name__)

FOLLOW_S = 1.0
"""Time between two passes."""
REST_S = 5.0
REST_FACTOR = 20
"""A whole index is not read again for REST_S, or this many times as long as it took."""
RECORDS_PER_READ = 1 << 13
MAX_RECHECKS = 1024
"""Slots whose records are read again in one pass, because a read of the block has failed."""
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
        own: str,
        clock: Callable[[], float],
    ) -> None:
        self._own = own
        """The seat that is not followed."""
        self._root = root
        self._layout = fingerprint, tuple(slot_bytes)
        self._blocks = blocks
        self._clock = clock
        self._seats: dict[str, _FollowedSeat] = {}
        self._doubtful: deque[tuple[int, int]] = deque(maxlen=MAX_RECHECKS)
        """Numbers of seats, and slots, whose records are to be read again."""
        self._wanted: dict[str, None] = {}
        """Seats that ``follow_now`` has named since the last pass."""
        self._next_pass = -float("inf")
        self._may_come_early = True
        """Whether a pass over all seats may begin before that, once, because a new one was named."""

    def recheck(self, number: int, slot: int) -> None:
        """Has the next pass read the record of a slot again. Any thread may call this."""
        self._doubtful.append((number, slot))

    def follow_now(self, name: str) -> None:
        """Has the next pass follow the seat ``name``, all others only when FOLLOW_S are over, or if it is not known
        yet. Any thread may call this."""
        if len(self._wanted) < MAX_SEATS:
            self._wanted[name] = None

    def follow(self) -> None:
        """Takes in the changes since the last call. Never raises because of the medium."""
        wanted = [self._wanted.popitem()[0] for _ in range(len(self._wanted))]
        now = self._clock()
        is_due = now >= self._next_pass
        # Names come from clients: folders are opened only if the directory lists them.
        is_early = self._may_come_early and any(name not in self._seats for name in wanted)
        if wanted and not is_due and not is_early:
            for name in wanted:
                if name in self._seats:
                    self._seats[name].follow()
            return
        self._may_come_early = is_due
        self._next_pass = now + FOLLOW_S
        try:
            names = [name for name in seat_names(self._root) if name != self._own]
        except OSError as error:
            logger.debug("kvoffload: shared directory: cannot be listed (%s)", error)
            return
        for name in self._seats.keys() - set(names):
            self._seats.pop(name).leave()
        for name in names:
            if (seat := self._seats.get(name) or self._new_seat(name)) is not None and not seat.follow():
                self._seats.pop(name).leave()
        by_number = {seat.number: seat for seat in self._seats.values()}
        for number, slot in dict.fromkeys(self._doubtful.popleft() for _ in range(len(self._doubtful))):
            if number in by_number:
                by_number[number].recheck(slot)
        self._blocks.slabs.close_idle(self._clock())

    def _new_seat(self, name: str) -> _FollowedSeat | None:
        number = seat_number(name)
        assert number is not None
        try:
            storage = self._root.child(name)
        except (OSError, ConfigError) as error:
            logger.debug("kvoffload: shared directory: %s cannot be used (%s)", name, error)
            return None
        self._seats[name] = _FollowedSeat(number, storage, self._layout, self._blocks, self._clock)
        return self._seats[name]

    def close(self) -> None:
        """Closes the files and folders of the seats, and the directory. No pass may be under way."""
        self._blocks.slabs.shut()
        for seat in self._seats.values():
            seat.leave()
        self._seats.clear()
        self._root.close()


class _FollowedSeat:
    """One seat, whose blocks count if they have the fingerprint and slot sizes of ``layout``."""

    def __init__(
        self,
        number: int,
        storage: Storage,
        layout: tuple[str, tuple[int, ...]],
        blocks: ForeignBlocks,
        clock: Callable[[], float],
    ) -> None:
        self.number = number
        self._storage = storage
        self._layout = layout
        self._blocks = blocks
        self._clock = clock
        self._rests_until = -float("inf")
        self._journal: JournalHeader | None = None
        """The header up to which the journal was followed; None: the index must be read."""

    def leave(self) -> None:
        self._blocks.drop(self.number)
        self._storage.close()

    def follow(self) -> bool:
        """Takes in the changes of the seat. Returns whether it is still the folder of its name."""
        try:
            if self._storage.has_vanished():
                return False
            self._take_changes()
        except OSError as error:
            logger.debug("kvoffload: shared directory: writer-%d: %s", self.number, error)
            if error.errno in GONE_ERRORS:
                self._forget()
            return error.errno != errno.ESTALE
        except Exception as error:
            # Headers may be changing just now, and nonsense in the files of a seat must not hide the others.
            logger.debug("kvoffload: shared directory: writer-%d: %s", self.number, error)
            self._forget()
        return True

    def _forget(self) -> None:
        self._journal = None
        self._blocks.drop(self.number)

    def _take_changes(self) -> None:
        old = self._journal
        with closing(self._storage.open(self._layout[0], JOURNAL_NAME, fresh=True)) as file:
            journal = JournalHeader.unpack(read_at(file, 0, JOURNAL_HEADER_BYTES))
            if old == journal:
                return
            entries = None
            if old is not None and (old.epoch, old.generation) == (journal.epoch, journal.generation):
                entries = read_entries(journal, old.head, partial(read_at, file))
        if entries is None:
            self._read_index(journal)
            return
        view = self._blocks.view(self.number)
        if view is not None:
            entries = entries[len(entries) - 1 - np.unique(entries["slot"][::-1], return_index=True)[1]]
            digests = np.where(entries["has_block"] != 0, entries["digest"], np.uint64(0))
            self._blocks.update(view, entries["slot"].astype(np.int64), digests, entries["payload_checksum"])
        self._journal = journal

    def _read_index(self, journal: JournalHeader) -> None:
        """Takes the blocks from the index. ``journal``: read before, so that no later change is missed."""
        with closing(self._storage.open(self._layout[0], INDEX_NAME, fresh=True)) as index:
            header = Header.unpack(read_at(index, 0, HEADER_BYTES))
            if (header.fingerprint, header.slot_bytes) != self._layout:
                raise FormatError("its blocks have another fingerprint or layout")
            view = self._blocks.view(self.number)
            if view is not None and (header.transient or view.header != header):
                self._blocks.drop(self.number)
                view = None
            # The weights of a transient one were changed while it ran. Its journal changes with the seat's next owner.
            if not header.transient:
                begun = self._clock()
                if begun < self._rests_until:
                    return
                if view is None:
                    view = SeatView(self.number, self._storage, header)
                    self._blocks.open(view)
                try:
                    self._scan(index, view)
                finally:
                    ended = self._clock()
                    self._rests_until = ended + max(REST_S, REST_FACTOR * (ended - begun))
        # The header that was read is as new as the journal or newer. If it is newer, the journal changes soon.
        self._journal = journal

    def _scan(self, index: StoredFile, view: SeatView) -> None:
        most = self._blocks.max_slots(self.number)
        for first in range(0, most, RECORDS_PER_READ):
            count = min(RECORDS_PER_READ, most - first)
            nbytes = -(-count * RECORD_BYTES // PAGE) * PAGE
            records = read_at(index, record_offset(first), nbytes)
            self._take(view, first, count, records[: count * RECORD_BYTES])
            if len(records) < nbytes and len(view.digests) <= first + count:
                return

    def _take(self, view: SeatView, first_slot: int, count: int, records: ByteArray) -> None:
        """Takes the blocks of ``count`` slots from their records. Slots without a record have none."""
        slots, found, found_checksums = changed_blocks(view.header, records, first_slot)
        digests, checksums = np.zeros((2, count), dtype=np.uint64)
        digests[slots - first_slot] = found
        checksums[slots - first_slot] = found_checksums
        self._blocks.update(view, np.arange(first_slot, first_slot + count), digests, checksums)

    def recheck(self, slot: int) -> None:
        """Reads the record of a slot again."""
        view = self._blocks.view(self.number)
        if view is None:
            return
        try:
            self._take(view, slot, 1, read_record(self._storage, view.header.fingerprint, slot))
        except OSError as error:
            if error.errno in GONE_ERRORS:
                self._forget()


def read_header(storage: Storage, fingerprint: str) -> Header:
    """Returns the header of an index as it is on the medium now. Raises FormatError and OSError."""
    return Header.unpack(read_fresh(storage, fingerprint, INDEX_NAME, HEADER_BYTES))


def read_record(storage: Storage, fingerprint: str, slot: int) -> ByteArray:
    """Returns the record of a slot as it is on the medium now, fewer bytes if there is none. Raises OSError."""
    at = record_offset(slot)
    return read_fresh(storage, fingerprint, INDEX_NAME, PAGE, at // PAGE * PAGE)[at % PAGE :][:RECORD_BYTES]
