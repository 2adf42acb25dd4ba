"""S3-FIFO: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, OffloadKey, Slots
from kvoffload.cache.policies.queues import Ghosts, SweptQueue, admit_head

SMALL_SHARE = 0.1
GHOST_SHARE = 0.9
PROMOTED_FROM = 2
"""Uses since it was stored by which a block moves from the small queue to the main one."""
MOST_USES = 3
"""What two bits can count."""


class S3FIFOPolicy(CachePolicy):
    """Three queues: ``small`` for new blocks, a tenth of the cache; ``main`` for those used twice while they were
    there, or asked for while their key was still in ``ghost``, which holds keys lately gone from small.

    In main, a use spares a block one turn. While nothing has been evicted, what small has no room for goes to main.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small = SweptQueue(capacity)
        self._main = SweptQueue(capacity)
        self._small_limit = max(1, int(capacity * SMALL_SHARE))
        self._ghost = Ghosts(max(1, int(capacity * GHOST_SHARE)))
        self._uses = np.zeros(capacity, dtype=np.uint8)
        self._has_evicted = False

    @property
    def _main_room(self) -> int:
        return self.capacity - self._small_limit - len(self._main)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self._uses[slots] = 0
        to_main = self._ghost.take(keys)
        if not self._has_evicted:
            # The tail fills small, so that of a chain that lies in both it goes first.
            to_main |= np.cumsum(~to_main[::-1])[::-1] > self._small_limit - len(self._small)
        self._main.append(slots[to_main])
        self._small.append(slots[~to_main])

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        used = slots[ready]
        self._uses[used] = np.minimum(self._uses[used] + 1, MOST_USES)

    def touch_absent(self, keys: Sequence[OffloadKey]) -> None:
        self._ghost.ask(keys)

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        mine = slots[new]
        to_main = self._main.holds(mine)
        if not self._has_evicted:
            self.remove(mine)
            to_main.sort()  # False is less: as many as are in small now, from the tail on
        self._main.append(mine[to_main])
        self._small.append(mine[~to_main])

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        if not self.may_refuse:
            return None
        returning = self._ghost.returning(keys)
        spare = max(0, self._main_room - int(np.count_nonzero(returning)))
        admitted = admit_head(returning, self._small_limit + spare)
        self.refuse(list(compress(keys, ~admitted)))
        return admitted

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self._ghost.add(reversed(keys))

    def settle(self, slots: Slots) -> None:
        in_main = self._main.holds(slots)
        self._main.settle(slots[in_main])
        self._small.settle(slots[~in_main])

    def pin(self, slots: Slots) -> None:
        pass

    def unpin(self, slots: Slots) -> None:
        self.settle(slots)

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        self._has_evicted |= n > 0
        parts = []
        while n > 0:
            room = self._main_room
            if room >= 0:
                victims = self._evict_small(n, room, busy, key_of)
                parts += [victims] if len(victims) else [self._evict_main(n, busy)]
            else:
                victims = self._evict_main(min(n, -room), busy)
                parts += [victims] if len(victims) else [self._evict_small(n, 0, busy, key_of)]
            if not len(parts[-1]):
                break
            n -= len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _evict_small(
        self, n: int, most_promoted: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]
    ) -> Slots:
        """``n`` at most, until more than ``most_promoted`` have moved to main."""
        victims, promoted = self._small.sweep(n, busy, self._uses, PROMOTED_FROM, most_promoted)
        self._ghost.add(key_of[victims].tolist())
        self._uses[promoted] = 0
        self._main.append(promoted)
        return victims

    def _evict_main(self, n: int, busy: npt.NDArray[np.bool_]) -> Slots:
        parts = []
        for _ in range(MOST_USES + 1):
            victims, spared = self._main.sweep(n, busy, self._uses, spared_from=1)
            self._uses[spared] -= 1
            self._main.append(spared)
            parts.append(victims)
            n -= len(victims)
            if n == 0:
                break
        return np.concatenate(parts)

    def remove(self, slots: Slots) -> None:
        in_main = self._main.holds(slots)
        self._main.discard(slots[in_main])
        self._small.discard(slots[~in_main])

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._ghost.clear()
        self._has_evicted = False

    def check_integrity(self, slots: Slots) -> None:
        in_main = self._main.holds(slots)
        self._main.check_integrity(slots[in_main].tolist())
        self._small.check_integrity(slots[~in_main].tolist())
        self._ghost.check_integrity()
