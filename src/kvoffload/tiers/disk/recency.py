"""The order in which the disk tier's blocks were used, and until when some are retained, kept for the next process."""

from __future__ import annotations

import errno
import logging
import math

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvoffload.abc import OffloadKey, Slots
from kvoffload.tiers.disk.folder import Folder, write_all
from kvoffload.tiers.disk.format import MAX_SEQUENCE, RECENCY_BYTES, RECENCY_NAME
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, StoredFile, is_full

logger = logging.getLogger(__name__)

PAGE_SLOTS = 4096 // RECENCY_BYTES
"""Slots per page of the recency file."""
MAX_PAGES = 1024
"""Pages that one call of ``write`` writes at most, unless it is to write all."""

Sequences = npt.NDArray[np.int64]
Marks = npt.NDArray[np.uint64]
"""Per slot, until when its block is retained, see ``mark``; 0 for blocks that are not."""
_TAG_BITS = 24
_TAG_MASK = (1 << _TAG_BITS) - 1
_ENTRY = np.dtype([("sequence", "<u8"), ("mark", "<u8")])
assert _ENTRY.itemsize == RECENCY_BYTES


def mark(key: OffloadKey, until: float) -> int:
    """Returns what the file has of a block that is retained ``until`` then, in seconds since 1970: the next whole
    second, and a tag of the key, because the slot may get another block before the file is written again."""
    return math.ceil(until) << _TAG_BITS | xxh3_64_intdigest(key) & _TAG_MASK


def retained_until(key: OffloadKey, found: int) -> int:
    """Returns until when ``key`` is retained by the mark of its slot, 0 if that is not its own."""
    return found >> _TAG_BITS if found & _TAG_MASK == xxh3_64_intdigest(key) & _TAG_MASK else 0


def open_recency(folder: Folder, num_slots: int) -> StoredFile | None:
    """Opens or makes the file for ``num_slots`` slots. Raises OSError if the medium fails; what else is wrong is only
    logged, since blocks are found without the file."""
    try:
        file = folder.open(RECENCY_NAME, create=True)
        file.resize(num_slots * RECENCY_BYTES)
        return file
    except OSError as error:
        if error.errno in (*NO_FILE_ERRORS, errno.EACCES):
            logger.warning(
                "kvoffload: disk tier: %s/%s cannot be used (%s), so the next start does not know in which order "
                "blocks were used; remove it",
                folder.name,
                RECENCY_NAME,
                error.strerror,
            )
        elif not is_full(error) or not num_slots:
            raise
        return None


class Recency:
    """The sequence number of each slot's last use, the marks, and the pages of ``file`` that are out of date.

    Every write, read and touch of a block takes a sequence number, higher than all before it. A record on disk has the
    number of the block's write; the recency file has those of reads and touches. ``write`` may run on another thread
    than the other methods, one call at a time. Without a file nothing is written, and nothing was found.
    """

    def __init__(self, num_slots: int, file: StoredFile | None) -> None:
        self._file = file
        self._next = 0
        self._last_use = np.zeros(num_slots, dtype=np.int64)
        self._marks = np.zeros(num_slots, dtype=np.uint64)
        self._changed = np.zeros(-(-num_slots // PAGE_SLOTS), dtype=np.bool_)
        """Per page: whether the file lacks some of ``_last_use``."""
        self._has_new_marks = np.zeros_like(self._changed)
        """Per page: whether the file lacks some of ``_marks``, and the page has not failed since."""
        self._turn = 0
        """The page whose turn it is among those without new marks."""
        self.has_changes = False
        """Whether there is something to write."""
        self.is_urgent = False
        """Whether some of that are marks, which a kill must not lose, and whose pages have not failed."""

    def load(self, num_slots: int) -> tuple[Sequences, Marks]:
        """Reads the file. Returns the last use of each of ``num_slots`` slots, 0 if none was written, and its mark."""
        data = np.zeros(num_slots * RECENCY_BYTES, dtype=np.uint8)
        try:
            if self._file is not None:
                self._file.read([data], 0)
        except OSError as error:
            logger.warning(
                "kvoffload: disk tier: the file of the order of eviction cannot be read (%s), so blocks are evicted in "
                "the order of their writes; check the medium",
                error,
            )
        entries = data.view(_ENTRY)
        sequences = entries["sequence"]
        found = np.where(sequences <= MAX_SEQUENCE, sequences, 0).astype(np.int64)
        # Also above the numbers of slots that are free now: the next blocks in them must be newer.
        self._next = int(found.max(initial=-1)) + 1
        return found, entries["mark"].astype(np.uint64)

    def restore(self, slots: Slots, sequences: Sequences) -> None:
        """Sets the last use of ``slots`` at the start."""
        self._last_use[slots] = sequences
        self._next = max(self._next, int(sequences.max(initial=-1)) + 1)

    def take(self, count: int) -> Sequences:
        """Returns ``count`` new sequence numbers, highest first: the head of a chain counts as used last."""
        self._next += count
        return np.arange(self._next - 1, self._next - 1 - count, -1)

    def note_use(self, slots: Slots) -> None:
        """Notes a use of the blocks of a chain, head first. The file gets it in the next ``write``."""
        self._last_use[slots] = self.take(len(slots))
        self._changed[slots // PAGE_SLOTS] = True
        self.has_changes = True

    def note_marks(self, slots: Slots, marks: Marks) -> None:
        """Notes the marks of blocks. The file gets them in the next ``write``."""
        self._marks[slots] = marks
        self._changed[slots // PAGE_SLOTS] = True
        self._has_new_marks[slots // PAGE_SLOTS] = True
        self.has_changes = self.is_urgent = True

    def write(self, num_slots: int, everything: bool) -> None:
        """Writes pages that have changed, at most MAX_PAGES of them unless ``everything`` is True: those with new marks
        first, the others in turn. ``num_slots``: slots that exist. Raises OSError; the page that has failed waits for
        its turn like one without marks, so that it holds up no other."""
        # Before the pages are looked at: a use that is noted from here on sets it again.
        self.has_changes = self.is_urgent = False
        marked = np.flatnonzero(self._has_new_marks)
        others = np.flatnonzero(self._changed & ~self._has_new_marks)
        in_turn = np.roll(others, -np.searchsorted(others, self._turn))
        most = len(self._changed) if everything else MAX_PAGES
        try:
            for page in marked[:most].tolist():
                self._write_page(page, num_slots)
            for page in in_turn[: max(0, most - len(marked))].tolist():
                self._turn = page + 1
                self._write_page(page, num_slots)
        finally:
            if self._has_new_marks.any():
                self.has_changes = self.is_urgent = True
            elif self._changed.any():
                self.has_changes = True

    def _write_page(self, page: int, num_slots: int) -> None:
        first, stop = page * PAGE_SLOTS, min((page + 1) * PAGE_SLOTS, num_slots)
        self._changed[page] = self._has_new_marks[page] = False
        last_use = self._last_use[first:stop]
        entries = np.zeros(len(last_use), dtype=_ENTRY)
        entries["sequence"] = np.minimum(last_use, MAX_SEQUENCE)
        entries["mark"] = self._marks[first:stop]
        try:
            if self._file is not None:
                write_all(self._file, [entries.view(np.uint8)], first * RECENCY_BYTES)
        except OSError:
            self._changed[page] = True
            raise
