"""Parts of the policies with queues: a sweep in which a use spares a block, and keys of blocks that left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, OffloadKey, Slots
from kvoffload.native.structures import RecencyList

_NO_LIMIT = 1 << 62


def sweep(
    queue: RecencyList,
    n: int,
    busy: npt.NDArray[np.bool_],
    uses: npt.NDArray[np.uint8] | npt.NDArray[np.bool_],
    spared_from: int = 1,
    max_spared: int = _NO_LIMIT,
) -> tuple[Slots, Slots]:
    """Removes blocks that are not busy from the old end of a queue, until ``n`` of them were not spared.

    A block is spared if ``uses[slot]`` is at least ``spared_from``. Returns the victims and the spared blocks, each
    oldest first. Ends early at the end of the queue, and at the first victim after more than ``max_spared`` blocks
    were spared.
    """
    victims, spared, look = [_NONE], [_NONE], n
    while look > 0:
        slots, positions = queue.pop_with_positions(look, busy)
        spare = uses[slots] >= spared_from
        last = ~spare & ((np.cumsum(~spare) >= n) | (np.cumsum(spare) > max_spared))
        ends = len(slots) < look or bool(last.any())
        stop = int(last.argmax()) + 1 if last.any() else len(slots)
        queue.put_back(slots[stop:], positions[stop:])
        slots, spare = slots[:stop], spare[:stop]
        victims.append(slots[~spare])
        spared.append(slots[spare])
        n -= len(victims[-1])
        max_spared -= len(spared[-1])
        look = 0 if ends else n + len(spared[-1])
    return np.concatenate(victims), np.concatenate(spared)


_NONE = np.empty(0, dtype=np.int64)


class Ghosts:
    """Keys without blocks: keys whose blocks ``left``, oldest first, and keys ``asked`` for since then, which may be
    stored at any moment. At most ``limit`` of each. Each key carries a number that the policy defines."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left: OrderedDict[OffloadKey, int] = OrderedDict()
        self.asked: OrderedDict[OffloadKey, int] = OrderedDict()

    def add(self, keys: Iterable[OffloadKey], numbers: Iterable[int] = repeat(0)) -> None:
        """Adds keys whose blocks left or were refused, the oldest first."""
        for key, number in zip(keys, numbers, strict=False):
            self.asked.pop(key, None)
            self.left[key] = number
            self.left.move_to_end(key)
        cut(self.left, self.limit)

    def ask(self, keys: Sequence[OffloadKey], above: int = -1) -> None:
        """Records a use of absent keys. Those that left with a number ``above`` the given one will count as returning
        when they are stored."""
        if self.left.keys().isdisjoint(keys):
            return
        for key in keys:
            if self.left.pop(key, -1) > above:
                self.asked[key] = 0
        cut(self.asked, self.limit)

    def returning(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.bool_]:
        """Returns which of ``keys`` were asked for since they left."""
        if not self.asked or self.asked.keys().isdisjoint(keys):
            return np.zeros(len(keys), dtype=np.bool_)
        return np.fromiter((key in self.asked for key in keys), dtype=np.bool_, count=len(keys))

    def take(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.bool_]:
        """Removes keys that are being stored. Returns which of them are ``returning``."""
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
        """Raises IntegrityError if there are too many keys, or one is counted twice."""
        if max(len(self.left), len(self.asked)) > self.limit or self.left.keys() & self.asked.keys():
            raise IntegrityError("there are too many ghosts, or one is counted twice")


def cut(ghosts: OrderedDict[OffloadKey, Any], limit: int) -> None:
    """Removes the oldest ghosts until at most ``limit`` are left."""
    for _ in range(len(ghosts) - limit):
        ghosts.popitem(last=False)
