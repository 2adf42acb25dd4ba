"""The disk tier's files in service: the slots of one fingerprint, which grow within the budget."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field

from kvoffload.tiers.disk.budget import Budget
from kvoffload.tiers.disk.folder import Folder
from kvoffload.tiers.disk.format import RECENCY_BYTES
from kvoffload.tiers.disk.index import Index
from kvoffload.tiers.disk.slabs import Slabs
from kvoffload.tiers.disk.storage import StoredFile, shorten


@dataclass(eq=False)
class DiskFiles:
    """Slots ``[0, num_allocated)`` exist; ``grow`` adds those of a slab, which replaces files of other fingerprints if
    necessary.

    ``read_only``: nothing is written, but the blocks can be read. ``is_short``: at the start the medium could not give
    ``capacity_bytes``.
    """

    folder: Folder
    budget: Budget
    index: Index
    slabs: Slabs
    recency: StoredFile | None
    """The file ``recency``, None if it cannot be used."""
    num_allocated: int
    read_only: bool = False
    is_short: bool = False
    _resizing: threading.Lock = field(default_factory=threading.Lock)
    """Held while files get other sizes. No thread waits for it: its holder may hang in the medium."""

    @property
    def used_bytes(self) -> int:
        return self.budget.used_bytes(self.num_allocated)

    def grow(self) -> None:
        """Allocates the next slab, or the rest of the last one, unless ``remove_excess`` is under way. Raises OSError,
        and no slot is added then. May not be called again before it has returned."""
        if self._resizing.acquire(blocking=False):
            try:
                self.budget.with_room(self._grow)
            finally:
                self._resizing.release()

    def _grow(self) -> None:
        old, slab = self.num_allocated, self.num_allocated // self.budget.layout.slots_per_slab
        new = min((slab + 1) * self.budget.layout.slots_per_slab, self.budget.num_slots)
        self.budget.make_room(new)
        self.slabs.open_next(slab)
        self.num_allocated = new
        try:
            self._resize(new)
        except OSError:
            # If this fails too, the bytes count as allocated.
            with suppress(OSError):
                self._resize(old)
                self.num_allocated = old
            raise

    def _resize(self, num_slots: int) -> None:
        self.slabs.resize(num_slots)
        self.index.resize(num_slots)
        if self.recency is not None:
            self.recency.resize(num_slots * RECENCY_BYTES)

    def remove_excess(self) -> None:
        """Removes slots that another process has added, which has lost this folder and has not noticed it yet. May be
        called by any thread. Does nothing while the files grow. Raises OSError."""
        if self._resizing.acquire(blocking=False):
            try:
                self.index.trim(self.num_allocated)
                if self.recency is not None:
                    shorten(self.recency, self.num_allocated * RECENCY_BYTES)
                self.slabs.trim(self.num_allocated)
            finally:
                self._resizing.release()

    def close(self) -> None:
        """Closes the files and gives up the lock, unless a thread hangs in the journal. May be called twice."""
        if self.index.close():
            self.folder.close()
