"""Backends: the free slots of a medium, in an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.abc import Backend, ConfigError, IntegrityError, OffloadKey, Slots
from kvoffload.cache.index import MAX_SLOTS
from kvoffload.native import load

HOST_MEDIUM = "CPU"


class PlainFreeSlots:
    """A stack of free slots below ``capacity``, and which slots are allocated. At first no slot exists."""

    def __init__(self, capacity: int) -> None:
        self._free = np.zeros(capacity, dtype=np.int64)
        self._num_free = 0
        self._allocated = np.zeros(capacity, dtype=np.bool_)

    def __len__(self) -> int:
        return self._num_free

    def take(self, n: int) -> Slots:
        """Allocates the ``n`` slots that are on top and returns them, the topmost first. Raises IntegrityError if there
        are fewer."""
        if not 0 <= n <= self._num_free:
            raise IntegrityError(f"{n} slots were asked for, {self._num_free} are free")
        slots = self._free[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self._allocated[slots] = True
        return slots

    def give_back(self, slots: Slots) -> None:
        """Puts distinct allocated slots on top, the last one topmost. Raises IntegrityError, and changes nothing, if
        one is not allocated."""
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(self._free):
            raise IntegrityError("a slot was freed that does not exist")
        if np.count_nonzero(self._allocated[slots]) != len(slots) or self._num_free + len(slots) > len(self._free):
            raise IntegrityError("a slot was freed that is not allocated")
        self._allocated[slots] = False
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def add(self, slots: Slots) -> None:
        """Puts new slots on top, the first one topmost. Raises IndexError if there is no room for them."""
        n = len(slots)
        if (n and not 0 <= slots.min() <= slots.max() < len(self._free)) or self._num_free + n > len(self._free):
            raise IndexError(f"{n} slots do not fit into {len(self._free)}, of which {self._num_free} are free")
        self._free[self._num_free : self._num_free + n] = slots[::-1]
        self._num_free += n

    def allocate(self, slots: Slots) -> None:
        """Makes new slots allocated ones."""
        self._allocated[slots] = True

    def check_integrity(self, num_existing: int) -> None:
        """Raises IntegrityError unless each of ``num_existing`` slots is free or allocated."""
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free) or self._allocated[free].any():
            raise IntegrityError("a free slot is allocated, or free twice")
        if int(np.count_nonzero(self._allocated)) + self._num_free != num_existing:
            raise IntegrityError("slots are neither free nor allocated")


if TYPE_CHECKING or (native := load("_cache")) is None:
    FreeSlots = PlainFreeSlots
else:

    class FreeSlots(native.FreeSlots, PlainFreeSlots):
        """The methods that run per request are native, the others are those of the plain version."""

        def __init__(self, capacity: int) -> None:
            """Keeps the plain version's from running: native objects are complete once they exist."""


class SlotBackend(Backend):
    """Slots of any medium, handed out lowest first.

    With ``grows`` no slot exists before ``add_free`` or ``add_allocated`` adds it.
    """

    def __init__(self, block_size: int, medium: str, num_blocks: int, grows: bool = False) -> None:
        super().__init__(block_size, medium)
        if not 1 <= num_blocks <= MAX_SLOTS:
            raise ConfigError(f"num_blocks={num_blocks}: a backend needs at least 1, and has at most {MAX_SLOTS}")
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
        self._free.allocate(slots)
        self._num_existing += len(slots)

    @property
    def num_existing_blocks(self) -> int:
        return self._num_existing

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate_blocks(self, keys: Sequence[OffloadKey]) -> Slots:
        return self._free.take(len(keys))

    def free(self, slots: Slots) -> None:
        self._free.give_back(slots)

    def check_integrity(self) -> None:
        self._free.check_integrity(self._num_existing)


class HostBackend(SlotBackend):
    """Slots of host memory. Works without a pool too, as in tests."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, HOST_MEDIUM, num_blocks)
