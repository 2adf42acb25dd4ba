"""BlockTable: which key lies in which slot, and who is using it. Arrays by slot, no object per block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import BlockStatus, IntegrityError, OffloadKey, Slots
from kvoffload.cache.index import Homes, KeyIndex

_WRITING = -1
_LOOKUP_CHUNK = 256


class BlockTable:
    """``num_blocks`` slots: which key lies in which, and a reference count a slot.

    ``ref_cnt`` is -1 while a block is being written, else its number of readers. An evictable block is
    ready, has no reader and is not held; ``num_evictable`` is their number at all times. ``busy[slot]`` is True for a
    slot that has a key and is not evictable. Slot arrays given to the methods hold each slot once, unless said
    otherwise.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictable = 0
        self._index = KeyIndex(num_blocks)
        self.key_of = self._index.key_of
        """The key in each slot, or None. Read only."""
        self.ref_cnt = np.zeros(num_blocks, dtype=np.int32)
        self._holds = np.zeros(num_blocks, dtype=np.int32)
        """Writers to lower tiers that read a slot. Counted apart: they move nothing in the policy's order."""
        self.busy = np.zeros(num_blocks, dtype=np.bool_)
        self._scratch = np.zeros(num_blocks, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: OffloadKey) -> bool:
        return self._index.get(key) >= 0

    def find(self, keys: Sequence[OffloadKey]) -> Slots:
        """A slot a key, -1 where the key is absent. Duplicates are kept."""
        return self._index.find(keys)

    def distinct(self, slots: Slots) -> Slots:
        """``slots`` (none negative) without repetitions: of equal ones the last is kept, in order."""
        if len(slots) < 2:
            return slots
        order = np.arange(len(slots))
        self._scratch[slots] = order
        keep = self._scratch[slots] == order
        return slots if np.count_nonzero(keep) == len(slots) else slots[keep]

    def among(self, slots: Slots, chosen: Slots) -> npt.NDArray[np.bool_]:
        """Which of ``slots`` are in ``chosen``, none of either negative."""
        self._scratch[slots] = 0
        self._scratch[chosen] = 1
        found: npt.NDArray[np.bool_] = self._scratch[slots] == 1
        return found

    def leading_ready(self, keys: Sequence[OffloadKey]) -> int:
        """Length of the longest run of leading keys that are all ready."""
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

    def split(self, keys: Sequence[OffloadKey]) -> tuple[Slots, list[OffloadKey], Homes | None]:
        """The slots of those keys that are present; the others, in order and without repetitions; and what
        ``insert`` can use of this call's work if it gets just those."""
        return self._index.split(keys)

    def insert(self, keys: Sequence[OffloadKey], slots: Slots, homes: Homes | None = None) -> None:
        """Absent keys take free slots; they are being written."""
        self._index.insert(keys, slots, homes)
        self.ref_cnt[slots] = _WRITING
        self.busy[slots] = True

    def remove(self, slots: Slots) -> list[OffloadKey]:
        """Held slots, in whatever state, lose their keys, which are returned in order."""
        self.num_evictable -= len(slots) - int(np.count_nonzero(self.busy[slots]))
        self.ref_cnt[slots] = 0
        self._holds[slots] = 0
        self.busy[slots] = False
        return self._index.remove(slots)

    def clear(self) -> None:
        """Every slot loses its key, in whatever state it is."""
        self.num_evictable = 0
        self.ref_cnt.fill(0)
        self._holds.fill(0)
        self.busy.fill(False)
        self._index.clear()

    def set_ready(self, slots: Slots) -> None:
        """Blocks being written become ready, with no reader."""
        self.ref_cnt[slots] = 0
        self.busy[slots] = False
        self.num_evictable += len(slots)

    def pin(self, slots: Slots) -> Slots:
        """One more reader each. Returns those that had none. All must be ready."""
        fresh: Slots = slots[self.ref_cnt[slots] == 0]
        self.ref_cnt[slots] += 1
        self._set_busy(fresh)
        return fresh

    def unpin(self, slots: Slots) -> Slots:
        """One reader less each. Returns those that have none now. All must be pinned."""
        self.ref_cnt[slots] -= 1
        freed: Slots = slots[self.ref_cnt[slots] == 0]
        self._set_idle(freed)
        return freed

    def hold(self, slots: Slots) -> None:
        """One more writer to a lower tier reads each. All must be ready."""
        self._holds[slots] += 1
        self._set_busy(slots)

    def release(self, slots: Slots) -> Slots:
        """One such writer less each. Returns those that are evictable now. All must be held."""
        self._holds[slots] -= 1
        return self._set_idle(slots[self.ref_cnt[slots] == 0])

    def _set_busy(self, slots: Slots) -> None:
        self.num_evictable -= int(np.count_nonzero(~self.busy[slots]))
        self.busy[slots] = True

    def _set_idle(self, slots: Slots) -> Slots:
        """Those of ``slots``, which have no reader, that are not held either become evictable."""
        idle: Slots = slots[self._holds[slots] == 0]
        self.busy[idle] = False
        self.num_evictable += len(idle)
        return idle

    def num_users(self, slots: Slots) -> npt.NDArray[np.int32]:
        """Readers and writers to lower tiers of each, -1 while it is being written."""
        users: npt.NDArray[np.int32] = self.ref_cnt[slots] + self._holds[slots]
        return users

    def is_writing(self, slots: Slots) -> npt.NDArray[np.bool_]:
        writing: npt.NDArray[np.bool_] = self.ref_cnt[slots] == _WRITING
        return writing

    def status(self, key: OffloadKey) -> BlockStatus | None:
        slot = self._index.get(key)
        return None if slot < 0 else BlockStatus(slot, int(self.ref_cnt[slot] + self._holds[slot]))

    def slots(self) -> Slots:
        """Every held slot, ascending."""
        return self._index.slots()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless index, arrays and counters agree."""
        self._index.check_integrity()
        slots = self.slots()
        free = np.ones(self.num_blocks, dtype=np.bool_)
        free[slots] = False
        if self.ref_cnt[free].any() or self._holds[free].any() or self.busy[free].any():
            raise IntegrityError("a slot without a key has readers or a writer")
        if (self.ref_cnt < _WRITING).any() or (self._holds < 0).any() or self._holds[self.ref_cnt < 0].any():
            raise IntegrityError("a slot has fewer than no readers, or readers before it is written")
        used = self.num_users(slots) != 0
        if not np.array_equal(self.busy[slots], used):
            raise IntegrityError("a busy mark and a reference count disagree")
        if self.num_evictable != int(np.count_nonzero(~used)):
            raise IntegrityError("the number of evictable blocks is wrong")
