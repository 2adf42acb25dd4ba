"""Backends: the free slots of a medium, in an array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.abc import Backend, ConfigError, IntegrityError, OffloadKey, Slots
from kvoffload.cache.index import MAX_SLOTS

HOST_MEDIUM = "CPU"


class SlotBackend(Backend):
    """Slots of any medium, handed out lowest first.

    With ``grows`` no slot exists before ``add_free`` or ``add_allocated`` adds it.
    """

    def __init__(self, block_size: int, medium: str, num_blocks: int, grows: bool = False) -> None:
        super().__init__(block_size, medium)
        if not 1 <= num_blocks <= MAX_SLOTS:
            raise ConfigError(f"num_blocks={num_blocks}: a backend needs at least 1, and has at most {MAX_SLOTS}")
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._num_free = self._num_existing = 0 if grows else num_blocks
        self._allocated = np.zeros(num_blocks, dtype=np.bool_)

    def add_free(self, slots: Slots) -> None:
        """Adds slots that did not exist before."""
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)
        self._num_existing += len(slots)

    def add_allocated(self, slots: Slots) -> None:
        """Adds slots that did not exist before, and are in use already."""
        self._allocated[slots] = True
        self._num_existing += len(slots)

    @property
    def num_existing_blocks(self) -> int:
        return self._num_existing

    @property
    def num_blocks(self) -> int:
        return len(self._free)

    def get_num_free_blocks(self) -> int:
        return self._num_free

    def allocate_blocks(self, keys: Sequence[OffloadKey]) -> Slots:
        n = len(keys)
        if n > self._num_free:
            raise IntegrityError(f"{n} slots were asked for, {self._num_free} are free")
        slots = self._free[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self._allocated[slots] = True
        return slots

    def free(self, slots: Slots) -> None:
        n = len(slots)
        if not n:
            return
        # As an unsigned number, a negative slot is too large.
        known = slots.view(np.uint64).max() < len(self._free)
        if not known or np.count_nonzero(self._allocated[slots]) != n or self._num_free + n > len(self._free):
            raise IntegrityError("a slot was freed that is not allocated")
        self._allocated[slots] = False
        self._free[self._num_free : self._num_free + n] = slots
        self._num_free += n

    def check_integrity(self) -> None:
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free) or self._allocated[free].any():
            raise IntegrityError("a free slot is allocated, or free twice")
        if int(np.count_nonzero(self._allocated)) + self._num_free != self._num_existing:
            raise IntegrityError("slots are neither free nor allocated")


class HostBackend(SlotBackend):
    """Slots of host memory. Works without a pool too, as in tests."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, HOST_MEDIUM, num_blocks)
