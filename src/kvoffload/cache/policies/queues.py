"""What the policies with queues are built from: queues in which a use spares a block, and keys of blocks that left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, OffloadKey, Slots
from kvoffload.cache.policies.base import RecencyList

_ANY_NUMBER = 1 << 62


class SweptQueue(RecencyList):
    """A queue in which a use moves nothing: uses are counted, and spare a block when its turn to leave has come."""

    def sweep(
        self,
        n: int,
        busy: npt.NDArray[np.bool_],
        uses: npt.NDArray[np.uint8],
        spared_from: int,
        most_spared: int = _ANY_NUMBER,
    ) -> tuple[Slots, Slots]:
        """Takes blocks that are not busy from the old end, until ``n`` of them had fewer than ``spared_from`` uses.

        Returns those and the others, which are spared, each oldest first; all have left the queue. Ends early where
        the queue does, and behind a victim once more than ``most_spared`` were spared.
        """
        victims, spared, look = [_NONE], [_NONE], n
        while look > 0:
            slots, positions = self.pop_with_positions(look, busy)
            spare = uses[slots] >= spared_from
            last = ~spare & ((np.cumsum(~spare) >= n) | (np.cumsum(spare) > most_spared))
            ends = len(slots) < look or bool(last.any())
            stop = int(last.argmax()) + 1 if last.any() else len(slots)
            self._put_back(slots[stop:], positions[stop:])
            slots, spare = slots[:stop], spare[:stop]
            victims.append(slots[~spare])
            spared.append(slots[spare])
            n -= len(victims[-1])
            most_spared -= len(spared[-1])
            look = 0 if ends else n + len(spared[-1])
        return np.concatenate(victims), np.concatenate(spared)

    def _put_back(self, slots: Slots, positions: npt.NDArray[np.int64]) -> None:
        self._stamp[slots] = positions
        self._len += len(slots)
        self.settle(slots)


_NONE = np.empty(0, dtype=np.int64)


class Ghosts:
    """Keys without a block: of those that ``left``, oldest first, and of those ``asked`` for again since, which may be
    stored at any moment. At most ``limit`` of each. A key comes with a number, what for is the policy's affair."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left: OrderedDict[OffloadKey, int] = OrderedDict()
        self.asked: OrderedDict[OffloadKey, int] = OrderedDict()

    def add(self, keys: Iterable[OffloadKey], numbers: Iterable[int] = repeat(0)) -> None:
        """Blocks left, or were not let in, the oldest first."""
        for key, number in zip(keys, numbers, strict=False):
            self.asked.pop(key, None)
            self.left[key] = number
            self.left.move_to_end(key)
        cut(self.left, self.limit)

    def ask(self, keys: Sequence[OffloadKey], above: int = -1) -> None:
        """Absent keys were used: a return is due to those that left with a number ``above`` one."""
        if self.left.keys().isdisjoint(keys):
            return
        for key in keys:
            if self.left.pop(key, -1) > above:
                self.asked[key] = 0
        cut(self.asked, self.limit)

    def returning(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.bool_]:
        """Which of ``keys`` were asked for since they left."""
        if not self.asked or self.asked.keys().isdisjoint(keys):
            return np.zeros(len(keys), dtype=np.bool_)
        return np.fromiter((key in self.asked for key in keys), dtype=np.bool_, count=len(keys))

    def take(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.bool_]:
        """``returning``, as the keys are stored: they are ghosts no more."""
        returning = self.returning(keys)
        for ghosts in (self.left, self.asked):
            if ghosts and not ghosts.keys().isdisjoint(keys):
                for key in keys:
                    ghosts.pop(key, None)
        return returning

    def clear(self) -> None:
        self.left.clear()
        self.asked.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError if there are more than there may be, or one twice."""
        if max(len(self.left), len(self.asked)) > self.limit or self.left.keys() & self.asked.keys():
            raise IntegrityError("ghosts are too many, or counted twice")


def cut(ghosts: OrderedDict[OffloadKey, Any], limit: int) -> None:
    """The oldest go until ``limit`` are left."""
    for _ in range(len(ghosts) - limit):
        ghosts.popitem(last=False)


def admit_head(returning: npt.NDArray[np.bool_], room: int) -> npt.NDArray[np.bool_]:
    """Which blocks of a chain enter: all that return, and of the others the first ``room``.

    A policy that takes one block after the other would evict the tail of a long chain for its head, since the
    head is used last. Told of the whole chain, it need not store the tail at all.
    """
    return returning | (np.cumsum(~returning) <= room)
