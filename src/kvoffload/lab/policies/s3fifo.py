"""S3-FIFO: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, Eviction, OffloadKey, Slots
from kvoffload.cache.policies.base import ListPolicy, admit_head
from kvoffload.lab.policies.queues import Ghosts, sweep

SMALL_SHARE = 0.1
GHOST_SHARE = 0.9
PROMOTED_FROM = 2
"""The number of uses since it was stored from which a block moves from the small queue to the main queue."""
MAX_USES = 3
"""The largest number that two bits can hold."""


class S3FIFOPolicy(ListPolicy):
    """Queues ``small``, for new blocks, a tenth of the cache, and ``main``, for blocks that were used twice while they
    were in small, or asked for while their key was in ``ghost``. Ghost holds keys that recently left small.

    In main, each use spares a block one turn. Until the first eviction, main takes what small has no room for.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_lists=2)
        self.small, self.main = self.lists
        self._small_limit = max(1, int(capacity * SMALL_SHARE))
        self.ghost = Ghosts(max(1, int(capacity * GHOST_SHARE)))
        self._uses = np.zeros(capacity, dtype=np.uint8)
        self._has_evicted = False

    @property
    def _main_room(self) -> int:
        return self.capacity - self._small_limit - len(self.main)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self._uses[slots] = 0
        to_main = self.ghost.take(keys)
        if not self._has_evicted:
            # The tail fills small, so that the tail of a chain that is in both queues leaves first.
            to_main |= np.cumsum(~to_main) > self._small_limit - len(self.small)
        self.main.append(slots[to_main])
        self.small.append(slots[~to_main])

    def access(self, access: Access) -> None:
        self.ghost.ask(access.absent)
        used = access.slots[access.ready]
        self._uses[used] = np.minimum(self._uses[used] + 1, MAX_USES)

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        moved = slots[new]
        to_main = self.main.holds(moved)
        if not self._has_evicted:
            self.remove(moved)
            to_main.sort()  # False comes first: small gets as many blocks as it had, beginning with the tail
        self.main.append(moved[to_main])
        self.small.append(moved[~to_main])

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        returning = self.ghost.returning(keys)
        spare = max(0, self._main_room - int(np.count_nonzero(returning)))
        return admit_head(returning, self._small_limit + spare)

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self.ghost.add(keys)

    def evict(self, eviction: Eviction) -> Slots:
        n = eviction.n
        self._has_evicted |= n > 0
        parts = [np.empty(0, dtype=np.int64)]
        while n > 0:
            room = self._main_room
            if room >= 0:
                victims = self._evict_small(n, room, eviction)
                parts.append(victims if len(victims) else self._evict_main(n, eviction))
            else:
                victims = self._evict_main(min(n, -room), eviction)
                parts.append(victims if len(victims) else self._evict_small(n, 0, eviction))
            if not len(parts[-1]):
                break
            n -= len(parts[-1])
        return np.concatenate(parts)

    def _evict_small(self, n: int, max_promoted: int, eviction: Eviction) -> Slots:
        """Evicts at most ``n`` blocks from small, until more than ``max_promoted`` others have moved to main."""
        victims, promoted = sweep(self.small, n, eviction.busy, self._uses, PROMOTED_FROM, max_promoted)
        self.ghost.add(eviction.key_of[victims].tolist())
        self._uses[promoted] = 0
        self.main.append(promoted)
        return victims

    def _evict_main(self, n: int, eviction: Eviction) -> Slots:
        parts = []
        for _ in range(MAX_USES + 1):
            victims, spared = sweep(self.main, n, eviction.busy, self._uses)
            self._uses[spared] -= 1
            self.main.append(spared)
            parts.append(victims)
            n -= len(victims)
            if n == 0:
                break
        return np.concatenate(parts)

    def clear(self) -> None:
        super().clear()
        self.ghost.clear()
        self._has_evicted = False

    def check_integrity(self, slots: Slots) -> None:
        super().check_integrity(slots)
        self.ghost.check_integrity()
