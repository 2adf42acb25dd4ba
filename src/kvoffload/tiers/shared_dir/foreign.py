"""What this process knows of the blocks in other seats, and their slab files.

**Threads.** The follower's thread changes everything here; the scheduler's thread looks up, and threads of the executor
read files. None of them waits for another, except for the moment in which OpenSlabs keeps its list. Places and views
change while they are looked up, so ``locate`` confirms a place by the digest in the view. If the slot gets another
block at that very moment, the payload checksum may be the new block's. The block that is then read under the old key
fails its verification, since the checksum is seeded with the key.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvoffload.abc import IntegrityError, Slots
from kvoffload.tiers.disk.format import Header, slab_name
from kvoffload.tiers.disk.journal import UInt64s
from kvoffload.tiers.disk.storage import Storage, StoredFile
from kvoffload.tiers.shared_dir.table import ForeignTable, Places

MAX_FOREIGN_BLOCKS = 8 << 20
"""Blocks of other seats that a process knows of; about 100 bytes of memory per block. Others are misses."""
MAX_OPEN_SLABS = 256
"""Slab files of other seats that are kept open."""
IDLE_S = 5.0
"""A slab file that is not used for so long is closed: on NFS, a removed file takes its room until then."""
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class SeatView:
    """The blocks of one generation in the seat ``number``. ``digests`` (0: no block) and ``checksums`` have one element
    per slot."""

    def __init__(self, number: int, storage: Storage, header: Header) -> None:
        self.number = number
        self.storage = storage
        self.header = header
        self.digests = np.zeros(0, dtype=np.uint64)
        self.checksums = np.zeros(0, dtype=np.uint64)

    def grow(self, num_slots: int) -> None:
        more = np.zeros(num_slots - len(self.digests), dtype=np.uint64)
        self.checksums = np.concatenate((self.checksums, more))
        self.digests = np.concatenate((self.digests, more))


class ForeignSlot(NamedTuple):
    """Where another seat has a block, and the checksum of the block's payload."""

    view: SeatView
    slot: int
    checksum: int


class ForeignBlocks:
    """The blocks of all other seats by the digests of their keys, at most ``max_blocks``."""

    def __init__(self, max_blocks: int = MAX_FOREIGN_BLOCKS) -> None:
        self.slabs = OpenSlabs()
        self._max_blocks = max_blocks
        self._views: dict[int, SeatView] = {}
        """By number of the seat."""
        self._table = ForeignTable(0)
        """One place per digest: number of the seat and slot in one number."""
        self._copies: dict[int, list[int]] = {}
        """Further places of the digests that have several."""

    # Any thread.

    def __len__(self) -> int:
        return len(self._table)

    def find(self, digests: UInt64s) -> Places:
        """Returns a place per digest, -1 if no other seat has the block."""
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

    def open(self, view: SeatView) -> None:
        """Takes a view without blocks in the place of the seat's former view."""
        self.drop(view.number)
        self._views[view.number] = view

    def max_slots(self, number: int) -> int:
        """Returns how many slots of this seat may be known, given the slots of the others: this bounds the memory."""
        others = sum(len(view.digests) for view in self._views.values() if view.number != number)
        return max(0, self._max_blocks - others)

    def update(self, view: SeatView, slots: Slots, digests: UInt64s, checksums: UInt64s) -> None:
        """Distinct ``slots`` of a seat have these blocks now; digest 0 means none."""
        needed = int(slots[digests != 0].max(initial=-1)) + 1
        if needed > len(view.digests):
            most = self.max_slots(view.number)
            view.grow(max(len(view.digests), min(most, max(needed, 2 * len(view.digests)))))
        fitting = slots < len(view.digests)
        slots, digests, checksums = slots[fitting], digests[fitting], checksums[fitting]
        changed = slots[view.digests[slots] != digests]
        self._remove(view, changed)
        view.checksums[slots] = checksums
        view.digests[slots] = digests
        if len(self._table) + len(changed) > self._table.capacity:
            self._rebuild()
        else:
            self._insert(self._table, view, changed)

    def drop(self, number: int) -> None:
        """Forgets a seat's blocks and closes its files."""
        view = self._views.pop(number, None)
        if view is not None:
            self._remove(view, np.arange(len(view.digests)))
            self.slabs.close(view)

    def _insert(self, table: ForeignTable, view: SeatView, slots: Slots) -> None:
        slots = slots[view.digests[slots] != 0]
        digests, places = view.digests[slots], _places(view, slots)
        table.insert(digests, places)
        for i in np.flatnonzero(table.find(digests) != places).tolist():
            self._copies.setdefault(int(digests[i]), []).append(int(places[i]))

    def _remove(self, view: SeatView, slots: Slots) -> None:
        """Removes the blocks in ``slots``. Where another seat has the same block, that one is found from now on."""
        slots = slots[view.digests[slots] != 0]
        digests, places = view.digests[slots], _places(view, slots)
        self._table.remove(digests, places)
        for digest, place in zip(digests.tolist(), places.tolist(), strict=True) if self._copies else ():
            copies = self._copies.get(digest)
            if copies is None:
                continue
            if place in copies:
                copies.remove(place)
            else:
                self._table.insert(np.array([digest], dtype=np.uint64), np.array([copies.pop()]))
            if not copies:
                del self._copies[digest]

    def _rebuild(self) -> None:
        table = ForeignTable(sum(int(np.count_nonzero(view.digests)) for view in self._views.values()))
        self._copies.clear()
        for view in self._views.values():
            self._insert(table, view, np.arange(len(view.digests)))
        self._table = table

    def check_integrity(self) -> None:
        """Raises IntegrityError if blocks are found that no seat has, or the reverse. The follower must stand still."""
        digests = {int(digest) for view in self._views.values() for digest in view.digests if digest}
        num_held = sum(int(np.count_nonzero(view.digests)) for view in self._views.values())
        num_copies = sum(map(len, self._copies.values()))
        if len(self) != len(digests) or len(self) + num_copies != num_held or num_held > self._max_blocks:
            raise IntegrityError(f"{len(self)} foreign blocks and {num_copies} copies, {num_held} in the seats")


def _places(view: SeatView, slots: Slots) -> Places:
    return slots + (view.number << _SLOT_BITS)


class OpenSlab:
    """An open slab file. It is closed as soon as nobody has it any more."""

    def __init__(self, file: StoredFile) -> None:
        self.file = file
        self.used_at = 0.0

    def __del__(self) -> None:
        with suppress(OSError):
            self.file.close()


class OpenSlabs:
    """Slab files of other seats, at most MAX_OPEN_SLABS: opened when they are read, closed when they are not used for a
    while."""

    def __init__(self) -> None:
        self._max_open = MAX_OPEN_SLABS
        self._lock = threading.Lock()
        self._slabs: OrderedDict[tuple[SeatView, int], OpenSlab] = OrderedDict()
        """By view and number of the slab; the one used last comes last."""

    @property
    def num_open(self) -> int:
        return len(self._slabs)

    def get(self, view: SeatView, number: int, now: float) -> OpenSlab:
        """Returns a slab, open until the caller has done with it. Raises OSError if it cannot be opened."""
        slab = self._keep((view, number), None, now)
        if slab is None:
            file = view.storage.open(view.header.fingerprint, slab_name(number), fresh=True)
            slab = self._keep((view, number), OpenSlab(file), now)
        assert slab is not None
        return slab

    def _keep(self, key: tuple[SeatView, int], new: OpenSlab | None, now: float) -> OpenSlab | None:
        """Keeps ``new`` or the slab that is open already, and returns it."""
        with self._lock:
            slab = new or self._slabs.pop(key, None)
            if slab is not None:
                slab.used_at = now
                self._slabs[key] = slab
            if len(self._slabs) > self._max_open:
                self._slabs.popitem(last=False)
        return slab

    def close(self, view: SeatView | None = None, number: int | None = None) -> None:
        """Closes one slab of a view, all of a view, or all. The next use opens it anew."""
        self._close(lambda key, _: view in (None, key[0]) and number in (None, key[1]))

    def close_idle(self, now: float) -> None:
        """Closes the slabs that were not used for IDLE_S."""
        self._close(lambda _, slab: now - slab.used_at >= IDLE_S)

    def shut(self) -> None:
        """Closes all slabs. A slab that is opened later is closed after its use."""
        self._max_open = 0
        self.close()

    def _close(self, is_due: Callable[[tuple[SeatView, int], OpenSlab], bool]) -> None:
        with self._lock:
            for key in [key for key, slab in self._slabs.items() if is_due(key, slab)]:
                del self._slabs[key]
