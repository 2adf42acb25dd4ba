"""LIRS: Jiang and Zhang, "LIRS: An Efficient Low Inter-reference Recency Set Replacement Policy to Improve Buffer
Cache Performance", SIGMETRICS 2002."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, OffloadKey, Slots
from kvoffload.cache.policies.base import RecencyList
from kvoffload.cache.policies.queues import Ghosts, admit_head

HIR_SHARE = 0.01

_NOT_IN_STACK = -1


class LIRSPolicy(CachePolicy):
    """LIR blocks, whose last two uses lie close together, keep 99% of the cache; HIR blocks have the rest, a queue Q.

    The stack S of the paper is not kept as a list. S ends at the oldest LIR block, so what is in it - LIR, HIR, or
    keys of HIR blocks that left - is what was used later than that block: a clock, a last use each and the ``_floor``
    say as much. A HIR block used while in S becomes LIR, and the oldest LIR block goes to the end of Q.
    """

    keys_per_block: ClassVar[int] = 2
    """How many keys of blocks that left are kept, for each block of the cache. The paper leaves it open."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._lir = RecencyList(capacity)
        self._queue = RecencyList(capacity)
        self._lir_limit = capacity - max(1, int(capacity * HIR_SHARE))
        self._ghosts = Ghosts(self.keys_per_block * capacity)
        self._clock = 0
        self._last_use = np.full(capacity, _NOT_IN_STACK, dtype=np.int64)
        self._floor = _NOT_IN_STACK
        self._no_one = np.zeros(capacity, dtype=np.bool_)

    def _now(self, n: int) -> npt.NDArray[np.int64]:
        self._clock += n
        return np.arange(self._clock - n, self._clock)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        returning = self._ghosts.take(keys)
        room = self._lir_limit - len(self._lir) - int(np.count_nonzero(returning))
        to_lir = admit_head(returning, room)
        now = self._last_use[slots] = self._now(len(slots))
        self._lir.append(slots[to_lir], now[to_lir])
        self._queue.append(slots[~to_lir])
        self._prune()

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        in_lir = self._lir.holds(slots)
        rises = ~in_lir & ready & (self._last_use[slots] > self._floor)
        now = self._last_use[slots] = self._now(len(slots))
        self._queue.discard(slots[rises])
        self._lir.join_parked(slots[rises & pinned])
        moves = (in_lir | rises) & ~pinned
        self._lir.append(slots[moves], now[moves])
        self._queue.append(slots[~(in_lir | rises | pinned)])
        self._prune()

    def touch_absent(self, keys: Sequence[OffloadKey]) -> None:
        self._ghosts.ask(keys, above=self._floor)

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        self._append(slots[~pinned])

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        if not self.may_refuse:
            return None
        returning = self._ghosts.returning(keys)
        of_lir = min(len(self._lir) + int(np.count_nonzero(returning)), self._lir_limit)
        admitted = admit_head(returning, self.capacity - of_lir)
        self.refuse(list(compress(keys, ~admitted)))
        return admitted

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self._ghosts.add(reversed(keys), self._now(len(keys)).tolist())

    def settle(self, slots: Slots) -> None:
        in_lir = self._lir.holds(slots)
        self._lir.settle(slots[in_lir])
        self._queue.settle(slots[~in_lir])

    def pin(self, slots: Slots) -> None:
        in_lir = self._lir.holds(slots)
        self._lir.park(slots[in_lir])
        self._queue.park(slots[~in_lir])

    def unpin(self, slots: Slots) -> None:
        self._append(slots)

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        self._prune()
        parts = [self._queue.pop_oldest(n, busy)]
        while (n := n - len(parts[-1])) > 0 and self._demote(n):
            parts.append(self._queue.pop_oldest(n, busy))
        victims = np.concatenate(parts)
        in_stack = victims[self._last_use[victims] > self._floor]
        self._ghosts.add(key_of[in_stack].tolist(), self._last_use[in_stack].tolist())
        self._prune()
        return victims

    def remove(self, slots: Slots) -> None:
        in_lir = self._lir.holds(slots)
        self._lir.discard(slots[in_lir])
        self._queue.discard(slots[~in_lir])

    def clear(self) -> None:
        self._lir.clear()
        self._queue.clear()
        self._ghosts.clear()
        self._floor = _NOT_IN_STACK

    def _append(self, slots: Slots) -> None:
        """Moves blocks to the recent end of the list that each is in."""
        if not len(slots):
            return
        in_lir = self._lir.holds(slots)
        now = self._last_use[slots] = self._now(len(slots))
        self._lir.append(slots[in_lir], now[in_lir])
        self._queue.append(slots[~in_lir])
        self._prune()

    def _demote(self, n: int) -> int:
        """The ``n`` oldest LIR blocks that are not being read become HIR; how many there were."""
        demoted = self._lir.pop_oldest(n, self._no_one)
        self._last_use[demoted] = _NOT_IN_STACK
        self._queue.append(demoted)
        return len(demoted)

    def _prune(self) -> None:
        """What is too much for LIR becomes HIR, and the stack ends at the oldest of what stays."""
        self._demote(max(0, len(self._lir) - self._lir_limit))
        self._floor = max(self._floor, self._lir.oldest_position())

    def check_integrity(self, slots: Slots) -> None:
        in_lir = self._lir.holds(slots)
        self._lir.check_integrity(slots[in_lir].tolist())
        self._queue.check_integrity(slots[~in_lir].tolist())
        self._ghosts.check_integrity()
