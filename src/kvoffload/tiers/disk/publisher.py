"""What other machines see of an index that they follow: its journal, and records of blocks that are about to go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffload.abc import ByteArray, Slots
from kvoffload.tiers.disk.format import RECORD_BYTES, Header
from kvoffload.tiers.disk.journal import Journal, journal_bytes, num_entries_for
from kvoffload.tiers.disk.storage import StoredFile


class IndexPublisher:
    """Lets others follow an index of about ``num_slots`` slots. ``open`` comes first.

    ``before_change``, ``after_change`` and ``withdraw`` are called by the thread that owns the slots, ``write`` by any
    thread.
    """

    def __init__(self, num_slots: int, new_epoch: Callable[[], int]) -> None:
        self._num_entries = num_entries_for(num_slots)
        self._new_epoch = new_epoch
        self._journal: Journal | None = None
        self._is_seen = np.zeros(0, dtype=np.bool_)
        """Per slot: whether other machines may find a block in its record."""

    @property
    def nbytes(self) -> int:
        """Bytes of the journal."""
        return journal_bytes(self._num_entries)

    def open(self, file: StoredFile, num_slots: int, num_found: int) -> None:
        """Uses ``file`` for the journal, which is given its size. ``num_found``: slots of the index that a former
        process has left. Raises OSError."""
        file.resize(self.nbytes)
        self._journal = Journal(file, self._num_entries, self._new_epoch)
        self._is_seen = np.zeros(num_slots, dtype=np.bool_)
        self._is_seen[:num_found] = True

    def before_change(self, first_slot: int, records: ByteArray) -> None:
        """Records are about to be written."""
        self._is_seen[first_slot : first_slot + len(records) // RECORD_BYTES] = True

    def after_change(self, first_slot: int, records: ByteArray) -> None:
        """Records were written that name other blocks than before, or none."""
        if self._journal is not None:
            self._journal.note(first_slot, records)

    def withdraw(self, index: StoredFile, slots: slice | Slots) -> None:
        """Records were emptied. Returns once other machines do not see their blocks any more. Raises OSError."""
        if self._is_seen[slots].any():
            index.sync()
            self._is_seen[slots] = False

    def restart(self) -> None:
        """Makes others read the index again, after the next ``write``. May be called by any thread."""
        if self._journal is not None:
            self._journal.restart()

    def write(self, header: Header, index: StoredFile) -> None:
        """Writes the journal of what has changed since the last call. Raises OSError."""
        if self._journal is not None:
            self._journal.write(header, index.sync)

    def close(self) -> bool:
        """Writes nothing from now on. Returns False if a thread still writes, because it hangs."""
        return self._journal is None or self._journal.close()
