"""ListPolicy: the common part of policies that keep their blocks in recency lists, and a rule of admission."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, IntegrityError, Slots
from kvoffload.native.structures import RecencyList


class ListPolicy(CachePolicy):
    """A policy that keeps each block in one of its ``lists``.

    A subclass says where blocks enter (``insert``), how uses move them (``access``) and where they leave (``evict``).
    """

    def __init__(self, capacity: int, num_lists: int = 1) -> None:
        super().__init__(capacity)
        self.lists = tuple(RecencyList(capacity) for _ in range(num_lists))

    def move_to_end(self, slots: Slots) -> None:
        """Makes blocks the most recent of the list that each is in."""
        for members in self.lists:
            members.move_to_end(slots)

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        """Moves the whole chain, as in policies where a use moves a block."""
        self.move_to_end(slots)

    def mark_evictable(self, slots: Slots) -> None:
        for members in self.lists:
            members.mark_evictable(slots)

    def remove(self, slots: Slots) -> None:
        for members in self.lists:
            members.discard(slots)

    def clear(self) -> None:
        for members in self.lists:
            members.clear()

    def check_integrity(self, slots: Slots) -> None:
        num_lists = np.sum([members.holds(slots) for members in self.lists], axis=0)
        if (num_lists != 1).any() or sum(map(len, self.lists)) != len(slots):
            raise IntegrityError(f"{type(self).__name__} does not hold the blocks that it should")
        for members in self.lists:
            members.check_integrity()


def admit_head(returning: npt.NDArray[np.bool_], room: int) -> npt.NDArray[np.bool_]:
    """Returns which blocks of a chain, given tail first, should enter: all that return, and the first ``room`` others.

    A policy that takes one block after the other would evict the tail of a long chain for its head, because the head
    is used last. A policy that sees the whole chain need not store the tail at all.
    """
    admitted: npt.NDArray[np.bool_] = returning | (np.cumsum(~returning[::-1])[::-1] <= room)
    return admitted
