"""BlockTable: which key is in which slot, and how many transfers use it. Arrays by slot, no object per block.

``find``, ``pin`` and ``unpin`` are those of ``native/reference.py``, or compiled ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.abc import BlockStatus, IntegrityError, Keys, OffloadKey, Slots, States
from kvoffload.abc.tier import HIT, MISS, PENDING
from kvoffload.native import structures


class BlockTable(structures.BlockTable):
    """The table of a manager. The methods that run per request come from ``structures``, compiled or not."""

    def __len__(self) -> int:
        """Blocks that can be found."""
        return self.num_held - self.num_dropped

    def __contains__(self, key: OffloadKey) -> bool:
        return self.status(key) is not None

    def status(self, key: OffloadKey) -> BlockStatus | None:
        slot = self.get(key)
        return None if slot < 0 or self.dropped[slot] else BlockStatus(slot, int(self.ref_cnt[slot]))

    def states(self, keys: Keys) -> States:
        """Returns the state of each key: HIT, MISS, or PENDING if it is being written."""
        slots = self.find(keys)
        states = np.full(len(keys), HIT, dtype=np.uint8)
        states[self.is_writing(slots)] = PENDING
        states[slots < 0] = MISS
        return states

    def is_loadable(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Returns which slots hold a block that is ready and was not dropped."""
        loadable: npt.NDArray[np.bool_] = self.holds(slots) & (self.ref_cnt[slots] >= 0) & ~self.dropped[slots]
        return loadable

    def loadable_keys(self, slots: Slots) -> list[OffloadKey]:
        """Returns the keys of the ``slots`` that are loadable."""
        keys: list[OffloadKey] = self.key_of[slots[self.is_loadable(slots)]].tolist()
        return keys

    def drop(self, slots: Slots) -> Slots:
        """Drops blocks. Returns the slots that are free now; blocks in transfer keep theirs for the time being."""
        in_transfer = self.busy[slots]
        self.dropped[slots[in_transfer]] = True
        self.num_dropped += int(np.count_nonzero(in_transfer))
        idle = slots[~in_transfer]
        self.remove(idle)
        return idle

    def drop_all(self) -> Slots:
        """Drops every block, as ``drop`` does. Only blocks in transfer cost time per block."""
        held = self.held()
        in_transfer = np.flatnonzero(self.busy)
        idle = held[~self.busy[held]] if len(in_transfer) else held
        self.drop_all_but(in_transfer)
        return idle

    def slots(self) -> Slots:
        """Returns the slots of all blocks that can be found, ascending."""
        held = self.held()
        return held[~self.dropped[held]] if self.num_dropped else held

    def check_integrity(self) -> None:
        """Raises IntegrityError unless keys, arrays and counters agree."""
        self.check_keys()
        held = self.held()
        free = np.ones(self.num_blocks, dtype=np.bool_)
        free[held] = False
        if self.ref_cnt[free].any() or self.busy[free].any() or self.dropped[free].any():
            raise IntegrityError("a slot without a key has pins or a writer")
        if (self.ref_cnt < -1).any():
            raise IntegrityError("a slot has fewer than no pins")
        in_transfer = self.ref_cnt[held] != 0
        if not np.array_equal(self.busy[held], in_transfer):
            raise IntegrityError("a busy mark and a reference count disagree")
        if self.num_dropped != int(np.count_nonzero(self.dropped)) or self.dropped[held][~in_transfer].any():
            raise IntegrityError("a dropped block keeps its slot although its transfer has ended")
        if self.num_evictable != int(np.count_nonzero(~in_transfer)):
            raise IntegrityError("the number of evictable blocks is wrong")
