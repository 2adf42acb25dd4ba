"""LIRS: Jiang and Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve Buffer
Cache Performance", SIGMETRICS 2002."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, Eviction, OffloadKey, Slots
from kvoffload.cache.policies.base import ListPolicy, admit_head
from kvoffload.lab.policies.queues import Ghosts, sweep

HIR_SHARE = 0.01

_NOT_IN_STACK = -1


class LIRSPolicy(ListPolicy):
    """LIR blocks, whose last two uses are close together, keep 99% of the cache. HIR blocks have the rest, a queue Q.

    The stack S of the paper is not kept as a list. S ends at the oldest LIR block. So S contains the blocks and
    the keys of evicted HIR blocks that were used later than this block: a clock, the last use of each block and the
    ``floor`` are enough to know them. A HIR block that is used while it is in S becomes LIR, and the
    oldest LIR block moves to the end of Q.
    """

    keys_per_block: ClassVar[int] = 2
    """The number of keys of evicted blocks to remember, for each block of the cache. The paper leaves it open."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, num_lists=2)
        self.lir, self.queue = self.lists
        self.lir_limit = capacity - max(1, int(capacity * HIR_SHARE))
        self.ghosts = Ghosts(self.keys_per_block * capacity)
        self._clock = 0
        self._last_use = np.full(capacity, _NOT_IN_STACK, dtype=np.int64)
        self.floor = _NOT_IN_STACK
        self._none_busy = np.zeros(capacity, dtype=np.bool_)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        returning = self.ghosts.take(keys)
        room = self.lir_limit - len(self.lir) - int(np.count_nonzero(returning))
        self._use(slots, to_lir=admit_head(returning, room))

    def access(self, access: Access) -> None:
        self.ghosts.ask(access.absent, above=self.floor)
        slots = access.slots
        in_lir = self.lir.holds(slots)
        rises = ~in_lir & access.ready & (self._last_use[slots] > self.floor)
        self.queue.discard(slots[rises])
        self._use(slots, to_lir=in_lir | rises)

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        self._use(slots, to_lir=self.lir.holds(slots))

    def _use(self, slots: Slots, to_lir: npt.NDArray[np.bool_]) -> None:
        """Makes blocks the most recent of LIR or of Q."""
        now = self._last_use[slots] = self._now(len(slots))
        self.lir.append(slots[to_lir], now[to_lir])
        self.queue.append(slots[~to_lir])
        self._prune()

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        returning = self.ghosts.returning(keys)
        lir_size = min(len(self.lir) + int(np.count_nonzero(returning)), self.lir_limit)
        return admit_head(returning, self.capacity - lir_size)

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self.ghosts.add(keys, self._now(len(keys)).tolist())

    def evict(self, eviction: Eviction) -> Slots:
        self._prune()
        n, busy = eviction.n, eviction.busy
        parts = [self.queue.pop_oldest(n, busy)]
        if (missing := n - len(parts[0])) > 0:
            # The oldest LIR blocks become HIR, until ``missing`` of them are not busy.
            self._demote(np.concatenate(sweep(self.lir, missing, self._none_busy, busy)))
            parts.append(self.queue.pop_oldest(missing, busy))
        victims = np.concatenate(parts)
        in_stack = victims[self._last_use[victims] > self.floor]
        self.ghosts.add(eviction.key_of[in_stack].tolist(), self._last_use[in_stack].tolist())
        self._prune()
        return victims

    def clear(self) -> None:
        super().clear()
        self.ghosts.clear()
        self.floor = _NOT_IN_STACK

    def _now(self, n: int) -> npt.NDArray[np.int64]:
        self._clock += n
        return np.arange(self._clock - n, self._clock)

    def _demote(self, slots: Slots) -> None:
        """Appends blocks that were LIR to Q, the one used longest ago first."""
        self.queue.append(slots[np.argsort(self._last_use[slots])])
        self._last_use[slots] = _NOT_IN_STACK

    def _prune(self) -> None:
        """Demotes the oldest LIR blocks while there are too many, and ends the stack at the oldest one that stays."""
        surplus = len(self.lir) - self.lir_limit
        if surplus > 0:
            self._demote(self.lir.pop_oldest(surplus, self._none_busy))
        self.floor = max(self.floor, self.lir.oldest_position())

    def check_integrity(self, slots: Slots) -> None:
        super().check_integrity(slots)
        self.ghosts.check_integrity()
