"""Backends: the free slots of a medium, in an array."""

from __future__ import annotations

import numpy as np

from kvoffload.abc import Backend, ConfigError, IntegrityError, Keys, Slots
from kvoffload.native.reference import MAX_SLOTS
from kvoffload.native.structures import FreeSlots

HOST_MEDIUM = "CPU"


def check_slots(slots: FreeSlots, num_existing: int) -> None:
    """Raises IntegrityError unless each of ``num_existing`` slots is free or allocated."""
    free = np.array(slots.free, dtype=np.int64)
    if len(np.unique(free)) != len(free) or slots.allocated[free].any():
        raise IntegrityError("a free slot is allocated, or free twice")
    if int(np.count_nonzero(slots.allocated)) + len(free) != num_existing:
        raise IntegrityError("slots are neither free nor allocated")


class SlotBackend(Backend):
    """Slots of any medium, handed out lowest first.

    With ``grows`` no slot exists before ``add_free`` or ``add_allocated`` adds it.
    """

    def __init__(self, block_size: int, medium: str, num_blocks: int, grows: bool = False) -> None:
        super().__init__(block_size, medium)
        if not 1 <= num_blocks <= MAX_SLOTS:
            raise ConfigError("num_blocks", num_blocks, f"a backend needs at least 1, and has at most {MAX_SLOTS}")
        self._num_blocks = num_blocks
        self._free = FreeSlots(num_blocks)
        self._num_existing = 0
        if not grows:
            self.add_free(np.arange(num_blocks))

    def add_free(self, slots: Slots) -> None:
        """Adds slots that did not exist before."""
        self._free.add(slots)
        self._num_existing += len(slots)

    def add_allocated(self, slots: Slots) -> None:
        """Adds slots that did not exist before, and are in use already."""
        self._free.allocated[slots] = True
        self._num_existing += len(slots)

    @property
    def num_existing_blocks(self) -> int:
        return self._num_existing

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate_blocks(self, keys: Keys) -> Slots:
        return self._free.take(len(keys))

    def free(self, slots: Slots) -> None:
        self._free.give_back(slots)

    def check_integrity(self) -> None:
        check_slots(self._free, self._num_existing)


class HostBackend(SlotBackend):
    """Slots of host memory. Works without a pool too, as in tests."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, HOST_MEDIUM, num_blocks)
