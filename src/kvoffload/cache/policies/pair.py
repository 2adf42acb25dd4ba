"""ListPair: the two lists of ``AutoPolicy``, on one clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, Slots
from kvoffload.cache.policies.recency import NO_END, PlainRecencyList, Positions
from kvoffload.native import load

Flags = npt.NDArray[np.bool_]


class PlainListPair:
    """Slots used by one request (``once``) and by several (``again``), each list from the oldest to the most recent.

    Positions come from one clock, so members of both lists can be compared. Slot arrays given to the methods hold each
    slot once, the last one is the most recent. A busy member that an eviction passes over is in no order until
    ``mark_evictable``, and then at its old position.
    """

    def __init__(self, capacity: int) -> None:
        self._once, self._again = self._lists = (PlainRecencyList(capacity), PlainRecencyList(capacity))
        self._clock = 0

    @property
    def num_once(self) -> int:
        return len(self._once)

    @property
    def num_again(self) -> int:
        return len(self._again)

    def tick(self, n: int) -> Positions:
        """Returns the next ``n`` positions of the clock."""
        self._clock += n
        return np.arange(self._clock - n, self._clock)

    def use(self, slots: Slots, ready: Flags) -> None:
        """Moves members to the recent end of ``again``; of those used once only the ``ready`` ones, the others to that
        of their own list."""
        positions = self.tick(len(slots))
        again = ~self._once.holds(slots) | ready
        self._once.append(slots[~again], positions[~again])
        self._once.discard(slots[again])
        self._again.append(slots[again], positions[again])

    def insert(self, slots: Slots, again: Flags) -> None:
        """Adds slots to the recent ends: to ``again`` those that are marked so, the others to ``once``."""
        positions = self.tick(len(slots))
        self._again.append(slots[again], positions[again])
        self._once.append(slots[~again], positions[~again])

    def move_to_end(self, slots: Slots) -> None:
        """Makes members the most recent of the list that each is in. Ignores other slots."""
        positions = self.tick(len(slots))
        for members in self._lists:
            members.move_to_end(slots, positions)

    def discard(self, slots: Slots) -> None:
        """Removes those of ``slots`` that are members."""
        for members in self._lists:
            members.discard(slots)

    def mark_evictable(self, slots: Slots) -> None:
        """Puts members that were passed over back into the order. Ignores other slots."""
        for members in self._lists:
            members.mark_evictable(slots)

    def oldest_again(self) -> int:
        """Returns the position of the oldest member of ``again`` that is in the order, -1 if there is none."""
        return self._again.oldest_position()

    def pop_once(self, n: int, busy: Flags) -> tuple[Slots, Positions]:
        """Removes the ``n`` oldest members of ``once`` that are not busy. Returns them and their positions, oldest
        first; fewer if there are no more."""
        return self._once.pop_with_positions(n, busy)

    def pop_again(self, n: int, busy: Flags) -> tuple[Slots, Positions]:
        """Does the same as ``pop_once`` for ``again``."""
        return self._again.pop_with_positions(n, busy)

    def pop_oldest(self, n: int, busy: Flags) -> tuple[Slots, Positions]:
        """Does the same as ``pop_once`` for the members of both lists."""
        none = np.empty(0, dtype=np.int64)
        parts = [(none, none)]
        while n > 0:
            (here, end), (there, other_end) = (members.peek(busy) for members in self._lists)
            end = min(end, other_end)
            known = np.sort(np.concatenate((here, there)))
            known = known[known < end]
            if len(known) >= n:
                end = int(known[n - 1]) + 1
            popped = [members.pop_with_positions(n, busy, end) for members in self._lists]
            victims, positions = (np.concatenate(column) for column in zip(*popped, strict=True))
            order = np.argsort(positions)
            parts.append((victims[order], positions[order]))
            n -= len(victims)
            if end == NO_END:
                break
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def clear(self) -> None:
        for members in self._lists:
            members.clear()
        self._clock = 0

    def check_integrity(self, slots: Slots) -> None:
        """Raises IntegrityError unless the members are ``slots``, and each can be found at its position."""
        in_lists = np.sum([members.holds(slots) for members in self._lists], axis=0)
        if (in_lists != 1).any() or self.num_once + self.num_again != len(slots):
            raise IntegrityError("the lists do not hold the blocks that they should")
        for members in self._lists:
            members.check_integrity()


ListPair = PlainListPair if TYPE_CHECKING or (native := load("_ghosts")) is None else native.ListPair
