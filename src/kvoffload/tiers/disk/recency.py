"""The order in which the disk tier's blocks were used, kept for the next process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Slots
from kvoffload.tiers.disk.format import RECENCY_BYTES
from kvoffload.tiers.disk.slabs import SlabFiles

PAGE_SLOTS = 4096 // RECENCY_BYTES
"""Slots per page of the recency file."""
MAX_PAGES = 1024
"""Pages that one call of ``write`` writes at most, unless it is to write all."""

Sequences = npt.NDArray[np.int64]


class Recency:
    """The sequence number of each slot's last use, and the pages of the recency file that are out of date.

    Every write, read and touch of a block takes a sequence number, higher than all before it. A record on disk has the
    number of the block's last write or read; the recency file has those of touches. ``write`` may run on another thread
    than the other methods, one call at a time.
    """

    def __init__(self, num_slots: int) -> None:
        self._next = 0
        self._last_use = np.zeros(num_slots, dtype=np.int64)
        self._changed = np.zeros(-(-num_slots // PAGE_SLOTS), dtype=np.bool_)
        """Per page: whether the file lacks some of ``_last_use``."""
        self.has_changes = False
        """Whether there is something to write."""

    def load(self, files: SlabFiles) -> Sequences:
        """Reads the recency file. Returns the last use of every slot that exists, 0 if none was written."""
        found = files.load_recency()
        # Also above the numbers of slots that are free now: the next blocks in them must be newer.
        self._next = int(found.max(initial=-1)) + 1
        return found

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

    def write(self, files: SlabFiles, everything: bool) -> None:
        """Writes pages that have changed, at most MAX_PAGES of them unless ``everything`` is True. Raises OSError."""
        # Before the pages are looked at: a use that is noted from here on sets it again.
        self.has_changes = False
        pages = np.flatnonzero(self._changed)
        try:
            for page in (pages if everything else pages[:MAX_PAGES]).tolist():
                self._write_page(files, page)
        finally:
            if self._changed.any():
                self.has_changes = True

    def _write_page(self, files: SlabFiles, page: int) -> None:
        first = page * PAGE_SLOTS
        self._changed[page] = False
        try:
            files.write_recency(first, self._last_use[first : first + PAGE_SLOTS])
        except OSError:
            self._changed[page] = True
            raise
