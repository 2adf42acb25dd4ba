"""Exact recency order over slots, in arrays: what policies are built from."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, Slots

MAX_SEGMENT = 8192
COMPACTION_WORK = 4
"""Log entries looked at per appended entry while the log is too long."""

MIN_SCAN = 64
"""Log entries looked at beyond those wanted, at first; doubled while they do not suffice."""

NO_END = 1 << 62
"""Beyond any position."""
_PARKED = -2
_ABSENT = -1


class RecencyList:
    """A list of slots from oldest to most recent, in constant amortized time an operation.

    An append-only log in segments. Every append gets the next position; an entry is live while its
    slot's stamp equals its position, so a touch just appends and leaves the earlier entry dead.
    ``pop_oldest`` consumes the log from its head. A live entry that is busy is passed over and leaves the
    log; ``settle`` puts it into a small heap of such entries, all older than the head. A *parked* member
    has no entry (a pinned block: its place no longer matters) but counts in the length. When the log is
    half as long again as the capacity, each append filters a bounded number of entries, a few segments on
    from where the last append stopped; positions do not change by that.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._stamp = np.full(capacity, _ABSENT, dtype=np.int64)
        self._segment = min(MAX_SEGMENT, max(16, capacity))
        self._reset_log()

    def _reset_log(self) -> None:
        self._filtered: deque[tuple[Slots, Slots]] = deque()
        self._unfiltered: deque[tuple[Slots, Slots]] = deque()
        """Sealed segments, older in ``_filtered``: (slots, positions), positions ascending."""
        self._tail = np.empty(self._segment, dtype=np.int64)
        self._tail_positions = np.empty(self._segment, dtype=np.int64)
        self._tail_fill = 0
        self._num_entries = 0
        self._next = 0
        self._head = 0
        """Entries at positions before this have been consumed or passed over."""
        self._heap: list[int] = []
        self._passed: dict[int, int] = {}
        """Position to slot of the entries in the heap."""
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def holds(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of ``slots`` are members."""
        held: npt.NDArray[np.bool_] = self._stamp[slots] != _ABSENT
        return held

    def append(self, slots: Slots, positions: npt.NDArray[np.int64] | None = None) -> None:
        """Distinct slots become the most recent, the last one most; members move, others join.

        ``positions``, ascending and above all earlier ones, are for lists that share a clock: by them members of
        one list are older or younger than those of another.
        """
        n = len(slots)
        if n == 0:
            return
        self._len += int(np.count_nonzero(self._stamp[slots] == _ABSENT))
        if positions is None:
            positions = np.arange(self._next, self._next + n)
        self._stamp[slots] = positions
        self._next = int(positions[-1]) + 1
        done = 0
        while done < n:
            if self._tail_fill == self._segment:
                self._seal_tail()
            begin, part = self._tail_fill, min(n - done, self._segment - self._tail_fill)
            self._tail[begin : begin + part] = slots[done : done + part]
            self._tail_positions[begin : begin + part] = positions[done : done + part]
            self._tail_fill += part
            done += part
        self._num_entries += n
        if self._num_entries > self._capacity + self._capacity // 2 + 2 * self._segment:
            self._filter(COMPACTION_WORK * n)

    def park(self, slots: Slots) -> None:
        """Members leave the order but stay counted."""
        self._stamp[slots] = _PARKED

    def join_parked(self, slots: Slots) -> None:
        """Distinct slots that are not members become parked members."""
        self._stamp[slots] = _PARKED
        self._len += len(slots)

    def discard(self, slots: Slots) -> None:
        """Distinct members leave."""
        self._stamp[slots] = _ABSENT
        self._len -= len(slots)

    def settle(self, slots: Slots) -> None:
        """Members that ``pop_oldest`` may have passed over take part again, from their place."""
        stamps = self._stamp[slots]
        passed = (stamps >= 0) & (stamps < self._head)
        if not np.count_nonzero(passed):
            return
        for position, slot in zip(stamps[passed].tolist(), slots[passed].tolist(), strict=True):
            if position not in self._passed:
                heapq.heappush(self._heap, position)
                self._passed[position] = slot

    def pop_oldest(self, n: int, busy: npt.NDArray[np.bool_]) -> Slots:
        """The ``n`` oldest members that are not busy leave, oldest first; fewer if there are no more."""
        return self.pop_with_positions(n, busy)[0]

    def pop_with_positions(
        self, n: int, busy: npt.NDArray[np.bool_], before: int = NO_END
    ) -> tuple[Slots, npt.NDArray[np.int64]]:
        """As ``pop_oldest``, of those members whose position lies ``before`` one; and what their positions were."""
        parts: list[tuple[Slots, npt.NDArray[np.int64]]] = []
        while n > 0 and self._heap and self._heap[0] < before:
            position = heapq.heappop(self._heap)
            slot = self._passed.pop(position)
            if self._stamp[slot] == position and not busy[slot]:
                parts.append((np.array([slot], dtype=np.int64), np.array([position], dtype=np.int64)))
                n -= 1
        window = n + MIN_SCAN
        while n > 0:
            segments = self._filtered or self._unfiltered
            if not segments:
                if self._tail_fill == 0:
                    break
                self._seal_tail()
                continue
            all_slots, all_positions = segments[0]
            slots, positions = all_slots[:window], all_positions[:window]
            if positions[-1] >= before:
                stop = int(np.searchsorted(positions, before))
                if stop == 0:
                    break
                slots, positions = slots[:stop], positions[:stop]
            window *= 2
            found = np.flatnonzero((self._stamp[slots] == positions) & ~busy[slots])[:n]
            n -= len(found)
            parts.append((slots[found], positions[found]))
            stop = int(found[-1]) + 1 if n == 0 else len(slots)
            self._head = int(positions[stop - 1]) + 1
            self._num_entries -= stop
            if stop == len(all_slots):
                segments.popleft()
            else:
                segments[0] = (all_slots[stop:], all_positions[stop:])
        none = np.empty(0, dtype=np.int64)
        popped, at = parts[0] if len(parts) == 1 else map(np.concatenate, zip((none, none), *parts, strict=True))
        self.discard(popped)
        return popped, at

    def oldest_position(self) -> int:
        """Of the members that are not parked; -1 if there is none."""
        while self._heap and self._stamp[self._passed[self._heap[0]]] != self._heap[0]:
            del self._passed[heapq.heappop(self._heap)]
        if self._heap:
            return self._heap[0]
        while True:
            segments = self._filtered or self._unfiltered
            if not segments:
                if self._tail_fill == 0:
                    return -1
                self._seal_tail()
                continue
            slots, positions = segments[0]
            live = self._stamp[slots] == positions
            dead = int(live.argmax()) if live.any() else len(slots)
            if dead:
                self._head = int(positions[dead - 1]) + 1
                self._num_entries -= dead
                if dead == len(slots):
                    segments.popleft()
                    continue
                segments[0] = (slots[dead:], positions[dead:])
            return int(positions[dead])

    def peek(self, busy: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], int]:
        """Positions, not sorted, of some members that are neither parked nor busy, the oldest among them; and up to
        where these are all, NO_END if there are no more."""
        if self._tail_fill and not (self._filtered or self._unfiltered):
            self._seal_tail()
        passed = [p for p, slot in self._passed.items() if self._stamp[slot] == p and not busy[slot]]
        segments = self._filtered or self._unfiltered
        if not segments:
            return np.array(passed, dtype=np.int64), NO_END
        slots, positions = segments[0]
        live = positions[(self._stamp[slots] == positions) & ~busy[slots]]
        return np.concatenate((np.array(passed, dtype=np.int64), live)), int(positions[-1]) + 1

    def clear(self) -> None:
        self._stamp.fill(_ABSENT)
        self._reset_log()

    def _seal_tail(self) -> None:
        fill = self._tail_fill
        self._unfiltered.append((self._tail[:fill].copy(), self._tail_positions[:fill].copy()))
        self._tail_fill = 0

    def _filter(self, work: int) -> None:
        """Drops dead entries from the next segments, about ``work`` entries in all."""
        while work > 0 and (self._unfiltered or self._filtered):
            if not self._unfiltered:
                self._unfiltered, self._filtered = self._filtered, self._unfiltered
            slots, positions = self._unfiltered.popleft()
            work -= len(slots)
            live = self._stamp[slots] == positions
            kept_slots, kept_positions = slots[live], positions[live]
            self._num_entries -= len(slots) - len(kept_slots)
            if self._filtered and len(self._filtered[-1][0]) + len(kept_slots) <= self._segment:
                before_slots, before_positions = self._filtered.pop()
                kept_slots = np.concatenate((before_slots, kept_slots))
                kept_positions = np.concatenate((before_positions, kept_positions))
            if len(kept_slots):
                self._filtered.append((kept_slots, kept_positions))

    def check_integrity(self, members: Iterable[int]) -> None:
        """Raises IntegrityError unless the members are exactly ``members`` and each is where it should be."""
        held = set(np.flatnonzero(self._stamp != _ABSENT).tolist())
        if held != set(members) or len(held) != self._len:
            raise IntegrityError("a recency list does not hold the blocks it should")
        tail, tail_positions = self._tail[: self._tail_fill], self._tail_positions[: self._tail_fill]
        segments = [*self._filtered, *self._unfiltered, (tail, tail_positions)]
        slots = np.concatenate([s for s, _ in segments])
        positions = np.concatenate([p for _, p in segments])
        if len(positions) != self._num_entries or (np.diff(positions) <= 0).any():
            raise IntegrityError("a recency list's log is out of order")
        live = slots[self._stamp[slots] == positions]
        waiting = np.flatnonzero(self._stamp >= self._head)
        if sorted(live.tolist()) != waiting.tolist():
            raise IntegrityError("a recency list has lost an entry")
