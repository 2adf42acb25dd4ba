"""BlockTable: which key is in which slot, and how many transfers use it. Arrays by slot, no object per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.abc import BlockStatus, IntegrityError, OffloadKey, Slots
from kvoffload.cache.index import Homes, KeyIndex
from kvoffload.native import load

_WRITING = -1
_LOOKUP_CHUNK = 256


class PlainBlockTable:
    """Which key is in which of ``num_blocks`` slots, and a reference count per slot.

    ``ref_cnt`` is -1 while a block is being written, else its number of pins. A block is *in transfer* while it is
    written or pinned, and *idle* otherwise; only idle blocks are evictable, and ``num_evictable`` is their number at
    all times. ``busy[slot]`` is True for a slot in transfer. A block that is dropped while it is in transfer is not
    found any more, but keeps its slot, and its key cannot be inserted again, until the transfer has ended.
    Slot arrays given to the methods hold each slot once, unless said otherwise.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictable = 0
        self._index = KeyIndex(num_blocks)
        self.key_of = self._index.key_of
        """The key in each slot. Free slots may have any. Read only."""
        self.ref_cnt = np.zeros(num_blocks, dtype=np.int32)
        self.busy = np.zeros(num_blocks, dtype=np.bool_)
        self._dropped = np.zeros(num_blocks, dtype=np.bool_)
        self._num_dropped = 0
        self._scratch = np.zeros(num_blocks, dtype=np.int64)

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._index) - self._num_dropped

    def __contains__(self, key: OffloadKey) -> bool:
        slot = self._index.get(key)
        return slot >= 0 and not self._dropped[slot]

    def find(self, keys: Sequence[OffloadKey]) -> Slots:
        """Returns one slot per key, -1 where the key is absent. Duplicates are kept."""
        slots = self._index.find(keys)
        if self._num_dropped:
            slots = np.where((slots >= 0) & self._dropped[slots], -1, slots)
        return slots

    def find_in_transfer(self, keys: Sequence[OffloadKey]) -> Slots:
        """Does the same as ``find``, but finds dropped blocks too."""
        return self._index.find(keys)

    def distinct(self, slots: Slots) -> Slots:
        """Returns ``slots`` (none negative) without repetitions; the last of equal ones is kept, in order."""
        if len(slots) < 2:
            return slots
        order = np.arange(len(slots))
        self._scratch[slots] = order
        keep = self._scratch[slots] == order
        return slots if np.count_nonzero(keep) == len(slots) else slots[keep]

    def leading_ready(self, keys: Sequence[OffloadKey]) -> int:
        """Returns the length of the longest run of leading keys that are all ready."""
        n = len(keys)
        start, size = 0, _LOOKUP_CHUNK
        while start < n:
            slots = self.find(keys[start : start + size])
            ready = (slots >= 0) & (self.ref_cnt[slots] >= 0)
            found = int(ready.argmin())
            if not ready[found]:
                return start + found
            start += len(slots)
            size *= 2
        return n

    def last_ready(self, keys: Sequence[OffloadKey]) -> int:
        """Returns the index of the last key that is ready, -1 if none is."""
        end, size = len(keys), _LOOKUP_CHUNK
        while end > 0:
            start = max(0, end - size)
            slots = self.find(keys[start:end])
            ready = np.flatnonzero((slots >= 0) & (self.ref_cnt[slots] >= 0))
            if len(ready):
                return start + int(ready[-1])
            end, size = start, 2 * size
        return -1

    def split(self, keys: Sequence[OffloadKey]) -> tuple[Slots, list[OffloadKey], Homes | None]:
        """Returns the slots of the keys that are present; the absent keys, in order and without repetitions; and
        hashing work that ``insert`` can use if it gets exactly those. The key of a dropped block is in neither."""
        slots, absent, homes = self._index.split(keys)
        if self._num_dropped:
            slots = slots[~self._dropped[slots]]
        return slots, absent, homes

    def insert(self, keys: Sequence[OffloadKey], slots: Slots, homes: Homes | None = None) -> None:
        """Puts absent keys into free slots, in state being written."""
        self._index.insert(keys, slots, homes)
        self.ref_cnt[slots] = _WRITING
        self.busy[slots] = True

    def remove(self, slots: Slots) -> list[OffloadKey]:
        """Removes the keys of ``slots``, whatever their state, and returns them in order."""
        self.num_evictable -= len(slots) - int(np.count_nonzero(self.busy[slots]))
        if self._num_dropped:
            self._num_dropped -= int(np.count_nonzero(self._dropped[slots]))
            self._dropped[slots] = False
        self.ref_cnt[slots] = 0
        self.busy[slots] = False
        return self._index.remove(slots)

    def drop(self, slots: Slots) -> Slots:
        """Drops blocks. Returns the slots that are free now; blocks in transfer keep theirs for the time being."""
        in_transfer = self.busy[slots]
        self._dropped[slots[in_transfer]] = True
        self._num_dropped += int(np.count_nonzero(in_transfer))
        idle = slots[~in_transfer]
        self.remove(idle)
        return idle

    def drop_all(self) -> Slots:
        """Drops every block. Only blocks in transfer cost time per block."""
        held = self._index.slots()
        in_transfer = np.flatnonzero(self.busy)
        idle = held[~self.busy[held]] if len(in_transfer) else held
        keys = self.key_of[in_transfer].tolist()
        self._index.clear()
        self._index.insert(keys, in_transfer)
        self._dropped[in_transfer] = True
        self._num_dropped = len(in_transfer)
        self.num_evictable = 0
        return idle

    def is_dropped(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Returns which blocks were dropped while in transfer and still keep their slots."""
        return self._dropped[slots]

    def is_loadable(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Returns which slots hold a block that is ready and was not dropped."""
        loadable: npt.NDArray[np.bool_] = self._index.holds(slots) & (self.ref_cnt[slots] >= 0) & ~self._dropped[slots]
        return loadable

    def set_ready(self, slots: Slots) -> tuple[Slots, Slots]:
        """Makes those of ``slots`` that are ``being_written`` ready. Returns these, and the slots of dropped ones,
        which are free now."""
        return self._end_transfer(self.being_written(slots), 0)

    def pin(self, slots: Slots) -> None:
        """Adds one pin per slot. All blocks must be ready."""
        self.ref_cnt[slots] += 1
        self.num_evictable -= int(np.count_nonzero(~self.busy[slots]))
        self.busy[slots] = True

    def unpin(self, slots: Slots) -> tuple[Slots, Slots]:
        """Removes one pin per slot. Returns the blocks that are idle now, and the slots of dropped ones that are free
        now. All must be pinned."""
        counts = self.ref_cnt[slots] - 1
        return self._end_transfer(slots, counts)

    def _end_transfer(self, slots: Slots, counts: npt.NDArray[np.int32] | int) -> tuple[Slots, Slots]:
        self.ref_cnt[slots] = counts
        idle: Slots = slots[self.ref_cnt[slots] == 0]
        freed = idle[:0]
        if self._num_dropped:
            dropped = self._dropped[idle]
            idle, freed = idle[~dropped], idle[dropped]
            self.remove(freed)
        self.busy[idle] = False
        self.num_evictable += len(idle)
        return idle, freed

    def is_writing(self, slots: Slots) -> npt.NDArray[np.bool_]:
        writing: npt.NDArray[np.bool_] = self.ref_cnt[slots] == _WRITING
        return writing

    def being_written(self, slots: Slots) -> Slots:
        """Returns which of ``slots`` are being written, in order. Of equal ones the first is kept; negative ones are
        not."""
        slots = slots[slots >= 0]
        return self.distinct(slots[self.is_writing(slots)][::-1])[::-1]

    def used(self, found: Slots) -> tuple[Slots, npt.NDArray[np.bool_]]:
        """Returns the slots of a chain that are not negative, each once, tail first, and which of them are ready. Of
        equal ones the first of ``found`` counts. Raises IndexError if there is no such slot."""
        slots = self._tail_first(found)
        return slots, ~self.is_writing(slots)

    def chain(self, found: Slots, stored: Sequence[OffloadKey]) -> tuple[Slots, npt.NDArray[np.bool_]]:
        """Returns the same slots, and which of them have one of the keys ``stored``."""
        slots, others = self._tail_first(found), self.find(stored)
        self._scratch[slots] = 0
        self._scratch[others[others >= 0]] = 1
        return slots, self._scratch[slots] == 1

    def _tail_first(self, slots: Slots) -> Slots:
        slots = slots[slots >= 0]
        if len(slots) and slots.max() >= self.num_blocks:
            raise IndexError(f"a slot is not below {self.num_blocks}")
        return self.distinct(slots[::-1])

    def idle(self, slots: Slots) -> Slots:
        """Returns those of ``slots``, none negative, that are not busy, each once: the last of equal ones, in order."""
        slots = self.distinct(slots)
        return slots[~self.busy[slots]]

    def mark_busy(self, slots: Slots, is_busy: bool) -> None:
        """Sets the busy marks of idle blocks, which must not be evicted for the time being, or removes them."""
        self.busy[slots] = is_busy

    def evict(self, slots: Slots) -> list[OffloadKey] | None:
        """Removes the keys of ``slots`` and returns them in order. Returns None, and changes nothing, unless these are
        distinct slots of idle blocks."""
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_blocks:
            return None
        is_idle = self._index.holds(slots) & ~self.busy[slots]
        if not is_idle.all() or len(self.distinct(slots)) < len(slots):
            return None
        return self.remove(slots)

    def status(self, key: OffloadKey) -> BlockStatus | None:
        slot = self._index.get(key)
        return None if slot < 0 or self._dropped[slot] else BlockStatus(slot, int(self.ref_cnt[slot]))

    def slots(self) -> Slots:
        """Returns the slots of all blocks that can be found, ascending."""
        held = self._index.slots()
        return held[~self._dropped[held]] if self._num_dropped else held

    @property
    def num_held(self) -> int:
        """Slots that are taken, including those of dropped blocks."""
        return len(self._index)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless index, arrays and counters agree."""
        self._index.check_integrity()
        held = self._index.slots()
        free = np.ones(self.num_blocks, dtype=np.bool_)
        free[held] = False
        if self.ref_cnt[free].any() or self.busy[free].any() or self._dropped[free].any():
            raise IntegrityError("a slot without a key has pins or a writer")
        if (self.ref_cnt < _WRITING).any():
            raise IntegrityError("a slot has fewer than no pins")
        in_transfer = self.ref_cnt[held] != 0
        if not np.array_equal(self.busy[held], in_transfer):
            raise IntegrityError("a busy mark and a reference count disagree")
        if self._num_dropped != int(np.count_nonzero(self._dropped)) or self._dropped[held][~in_transfer].any():
            raise IntegrityError("a dropped block keeps its slot although its transfer has ended")
        if self.num_evictable != int(np.count_nonzero(~in_transfer)):
            raise IntegrityError("the number of evictable blocks is wrong")


if TYPE_CHECKING or (native := load("_cache")) is None:
    BlockTable = PlainBlockTable
else:

    class BlockTable(native.BlockTable, PlainBlockTable):
        """The methods that run per request are native, the others are those of the plain version."""

        def __init__(self, num_blocks: int) -> None:
            """Keeps the plain version's from running: native objects are complete once they exist."""
