"""What this process knows of the blocks in other seats, and their slab files.

**Threads.** The follower's thread changes everything here; the scheduler's thread looks up, and threads of the executor
read files. None of them waits for another, except for the moment in which SlabHandles keeps its list:

- ``ForeignBlocks`` assigns a new table and new views as wholes, so that others use the old or the new one.
- A table is changed in place while it is looked up; see ``table``. A view's arrays are too: ``locate`` confirms a place
  by the digest in the view. If the slot gets another block at that very moment, the payload checksum may be the new
  block's. The block that is then read under the old key fails its verification, since the checksum is seeded with the
  key.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvoffload.abc import IntegrityError, Slots
from kvoffload.tiers.disk.format import Header, slab_name
from kvoffload.tiers.disk.journal import UInt64s
from kvoffload.tiers.disk.storage import Storage, StoredFile
from kvoffload.tiers.shared_dir.table import BlockTable, Places

MAX_FOREIGN_BLOCKS = 8 << 20
"""Blocks of other seats that a process knows of; about 100 bytes of memory per block. Others are misses."""
MAX_OPEN_SLABS = 256
"""Slab files of other seats that are kept open."""
IDLE_S = 5.0
"""A slab file that is not used for so long is closed: on NFS, a removed file takes its room until then."""
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1

_serials = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class SeatView:
    """The blocks of one generation in the seat ``number``. ``digests`` (0: no block) and ``checksums`` have one element
    per slot. ``serial`` differs between views whose files may differ."""

    number: int
    storage: Storage
    header: Header
    digests: UInt64s
    checksums: UInt64s
    serial: int

    @classmethod
    def empty(
        cls, number: int, storage: Storage, header: Header, num_slots: int, serial: int | None = None
    ) -> SeatView:
        """Returns a view without blocks, by default with a new serial."""
        arrays = np.zeros(num_slots, dtype=np.uint64), np.zeros(num_slots, dtype=np.uint64)
        return cls(number, storage, header, *arrays, next(_serials) if serial is None else serial)

    def grown(self, num_slots: int) -> SeatView:
        """Returns a view of the same files with room for more slots."""
        arrays = []
        for old in (self.digests, self.checksums):
            new = np.zeros(num_slots, dtype=np.uint64)
            new[: len(old)] = old
            arrays.append(new)
        return SeatView(self.number, self.storage, self.header, arrays[0], arrays[1], self.serial)

    def trimmed(self) -> SeatView:
        """Returns a view without the slots after the last block: a file can claim any size."""
        num_slots = int(np.flatnonzero(self.digests).max(initial=-1)) + 1
        digests, checksums = self.digests[:num_slots].copy(), self.checksums[:num_slots].copy()
        return SeatView(self.number, self.storage, self.header, digests, checksums, self.serial)


@dataclass(frozen=True, slots=True)
class ForeignSlot:
    """Where another seat has a block, and the checksum of the block's payload."""

    view: SeatView
    slot: int
    checksum: int


class ForeignBlocks:
    """The blocks of all other seats by the digests of their keys."""

    def __init__(self, max_blocks: int = MAX_FOREIGN_BLOCKS) -> None:
        self.handles = SlabHandles()
        self._max_blocks = max_blocks
        self._table = BlockTable(0)
        self._views: dict[int, SeatView] = {}
        """By number of the seat."""
        self._num_held = 0
        """Blocks in the views. Those that several seats have are in the table once."""
        self.is_incomplete = False
        """Whether the table may lack a block that a seat has, since it had it from another seat."""

    # Any thread.

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._table.nbytes + sum(view.digests.nbytes + view.checksums.nbytes for view in self._views.values())

    def find(self, digests: UInt64s) -> Places:
        """Returns a place per digest, -1 if no other seat has the block."""
        if not len(self._table):
            return np.full(len(digests), -1, dtype=np.int64)
        return self._table.find(digests)

    def locate(self, place: int, digest: int) -> ForeignSlot | None:
        """Returns where the block is that ``find`` has found, None if it is not there any more."""
        view, slot = self._views.get(place >> _SLOT_BITS), place & _SLOT_MASK
        if view is None or slot >= len(view.digests) or int(view.digests[slot]) != digest:
            return None
        return ForeignSlot(view, slot, int(view.checksums[slot]))

    # The follower's thread.

    def view(self, number: int) -> SeatView | None:
        return self._views.get(number)

    def max_slots(self, number: int) -> int:
        """Returns how many slots of this seat may be known, given those of the others: a bound of the memory."""
        others = sum(len(view.digests) for view in self._views.values() if view.number != number)
        return max(0, self._max_blocks - others)

    def replace(self, view: SeatView) -> None:
        """Takes ``view`` in the place of the seat's former view."""
        old = self._views.get(view.number)
        if old is not None and old.serial != view.serial:
            self.drop(view.number)
            old = None
        if old is None:
            slots = np.flatnonzero(view.digests)
            self._views[view.number] = view
            self._insert(view, slots)
            return
        # The same files, read again.
        size = max(len(old.digests), len(view.digests))
        before, after = old.grown(size), view.grown(size)
        gone = np.flatnonzero((before.digests != after.digests) & (before.digests != 0))
        new = np.flatnonzero((before.digests != after.digests) & (after.digests != 0))
        self._remove(before, gone)
        self._views[view.number] = after
        self._insert(after, new)

    def apply(self, number: int, slots: Slots, digests: UInt64s, checksums: UInt64s) -> None:
        """Distinct ``slots`` of a seat have these blocks now; digest 0 means none."""
        view = self._views.get(number)
        if view is None or not len(slots):
            return
        max_slots = self.max_slots(number)
        fitting = slots < max_slots
        slots, digests, checksums = slots[fitting], digests[fitting], checksums[fitting]
        if len(slots) and slots.max() >= len(view.digests):
            view = view.grown(int(max(slots.max() + 1, min(2 * len(view.digests), max_slots))))
            self._views[number] = view
        others = view.digests[slots] != digests
        self._remove(view, slots[others & (view.digests[slots] != 0)])
        view.checksums[slots] = checksums
        view.digests[slots] = digests
        self._insert(view, slots[others & (digests != 0)])

    def drop(self, number: int) -> None:
        """Forgets a seat's blocks and closes its files."""
        view = self._views.pop(number, None)
        if view is not None:
            self._remove(view, np.flatnonzero(view.digests))
            self.handles.close_all(view.serial)

    def _remove(self, view: SeatView, slots: Slots) -> None:
        self._table.remove(view.digests[slots], _places(view, slots))
        self._num_held -= len(slots)
        self.is_incomplete = self.is_incomplete or (len(slots) > 0 and self._num_held > len(self._table))

    def _insert(self, view: SeatView, slots: Slots) -> None:
        """Inserts the blocks in ``slots`` into the table, which grows if necessary."""
        wanted = len(self._table) + len(slots)
        self._num_held += len(slots)
        if wanted > self._max_blocks:
            slots = slots[: max(0, self._max_blocks - len(self._table))]
        if wanted > self._table.capacity and self._table.capacity < self._max_blocks:
            self._rebuild(wanted)
            return
        self._table.insert(view.digests[slots], _places(view, slots))

    def rebuild(self) -> None:
        """Makes the table anew from the views."""
        self._rebuild(self._num_held)

    def _rebuild(self, num_blocks: int) -> None:
        table = BlockTable(min(num_blocks, self._max_blocks))
        for view in list(self._views.values()):
            slots = np.flatnonzero(view.digests)[: self._max_blocks - len(table)]
            table.insert(view.digests[slots], _places(view, slots))
        self._table, self.is_incomplete = table, False

    def check_integrity(self) -> None:
        """Raises IntegrityError if the table has blocks that no view has. The follower must stand still."""
        held = sum(int(np.count_nonzero(view.digests)) for view in self._views.values())
        if len(self._table) > held or held != self._num_held:
            raise IntegrityError(f"{len(self._table)} foreign blocks in the table, {held} in the seats")


def _places(view: SeatView, slots: Slots) -> Places:
    return slots + (view.number << _SLOT_BITS)


@dataclass(slots=True, eq=False)
class _Handle:
    file: StoredFile
    users: int = 0
    used_at: float = 0.0
    is_closing: bool = False
    """Whether it is closed as soon as it has no users."""


class SlabHandles:
    """Slab files of other seats, opened when they are read, and closed when they are not used for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[tuple[int, int], _Handle] = {}
        """By serial of the view, and number of the slab; the one used last comes last."""
        self._closed = False

    @contextmanager
    def use(self, view: SeatView, slab: int, clock: Callable[[], float]) -> Iterator[StoredFile]:
        """Yields the slab's file. Raises OSError if it cannot be opened."""
        key = view.serial, slab
        with self._lock:
            handle = self._handles.get(key)
            if handle is not None:
                handle.users += 1
        if handle is None:
            file = view.storage.open(view.header.fingerprint, slab_name(slab), fresh=True)
            handle = _Handle(file, users=1, is_closing=True)
            with self._lock:
                if key not in self._handles and not self._closed:
                    handle.is_closing = False
                    self._handles[key] = handle
        try:
            yield handle.file
        finally:
            with self._lock:
                handle.users -= 1
                handle.used_at = clock()
                if not handle.is_closing:
                    self._handles[key] = self._handles.pop(key)
                    self._limit()
                elif not handle.users:
                    handle.file.close()

    def close(self, view: SeatView, slab: int) -> None:
        """Closes one file, as soon as no read uses it; the next use opens it anew."""
        with self._lock:
            self._close((view.serial, slab))

    def close_all(self, serial: int | None = None) -> None:
        """Closes the files of one view, or all."""
        with self._lock:
            for key in list(self._handles):
                if serial is None or key[0] == serial:
                    self._close(key)

    def close_idle(self, now: float) -> None:
        """Closes the files that were not used for IDLE_S."""
        with self._lock:
            for key, handle in list(self._handles.items()):
                if not handle.users and now - handle.used_at >= IDLE_S:
                    self._close(key)

    def shut(self) -> None:
        """Closes all files, and those that are opened later after their use."""
        self._closed = True
        self.close_all()

    @property
    def num_open(self) -> int:
        return len(self._handles)

    def _limit(self) -> None:
        while len(self._handles) > MAX_OPEN_SLABS:
            self._close(next(iter(self._handles)))

    def _close(self, key: tuple[int, int]) -> None:
        handle = self._handles.pop(key, None)
        if handle is not None:
            handle.is_closing = True
            if not handle.users:
                handle.file.close()
