"""RecencyList: an exact recency order over slots, in arrays. Policies are built from it."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, Slots
from kvoffload.cache.index import check_capacity
from kvoffload.native import load

MAX_SEGMENT = 8192
COMPACTION_WORK = 4
"""Log entries examined per appended entry while the log is too long."""

MIN_SCAN = 64
"""Log entries examined at first, beyond those wanted. Doubled while they do not suffice."""

NO_END = 1 << 62
"""Greater than any position."""
_ABSENT = -1

Positions = npt.NDArray[np.int64]


class PlainRecencyList:
    """Slots ordered from the oldest to the most recent, in amortized constant time per slot.

    Implementation: an append-only log in segments. Every append takes the next position. An entry is live while the
    stamp of its slot equals its position, so a move is another append, which leaves the earlier entry dead.
    ``pop_oldest`` consumes the log from its head. A live entry that is busy is skipped: it leaves the log, and
    ``mark_evictable`` adds it to a heap of skipped entries, all of which are older than the head. When the log exceeds
    one and a half times the capacity, each append compacts a bounded number of entries, continuing where the previous
    one stopped. Compaction does not change positions.
    """

    def __init__(self, capacity: int) -> None:
        check_capacity(capacity)
        self._capacity = capacity
        self._stamp = np.full(capacity, _ABSENT, dtype=np.int64)
        self._segment = min(MAX_SEGMENT, max(16, capacity))
        self._reset_log()

    def _reset_log(self) -> None:
        self._compacted: deque[tuple[Slots, Positions]] = deque()
        self._uncompacted: deque[tuple[Slots, Positions]] = deque()
        """Sealed segments (slots, ascending positions). Those in ``_compacted`` are older."""
        self._tail = np.empty(self._segment, dtype=np.int64)
        self._tail_positions = np.empty(self._segment, dtype=np.int64)
        self._tail_fill = 0
        self._num_entries = 0
        self._next = 0
        self._head = 0
        """Entries before this position have been consumed or skipped."""
        self._heap: list[int] = []
        self._skipped: dict[int, int] = {}
        """Position to slot, of the entries in the heap."""
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def holds(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Returns which of ``slots`` are members."""
        held: npt.NDArray[np.bool_] = self._stamp[slots] != _ABSENT
        return held

    def append(self, slots: Slots, positions: Positions | None = None) -> None:
        """Makes distinct ``slots`` the most recent members, the last one the most recent. Members move, others join.

        Lists that share a clock give ``positions``, ascending and above all earlier ones, so that members of
        different lists can be compared.
        """
        self._check_positions(positions, len(slots))
        self._append(slots, positions)

    def _check_positions(self, positions: Positions | None, n: int) -> None:
        if positions is None:
            return
        if len(positions) != n:
            raise ValueError(f"{n} slots need as many positions, not {len(positions)}")
        if n and not (self._next <= positions[0] and positions[-1] < NO_END and (positions[1:] > positions[:-1]).all()):
            raise ValueError("positions must ascend, from above all earlier ones")

    def _append(self, slots: Slots, positions: Positions | None) -> None:
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
            self._compact(COMPACTION_WORK * n)

    def move_to_end(self, slots: Slots, positions: Positions | None = None) -> None:
        """Same as ``append`` for those of ``slots`` that are members."""
        held = self.holds(slots)
        self._check_positions(positions, len(slots))
        self._append(slots[held], None if positions is None else positions[held])

    def discard(self, slots: Slots) -> None:
        """Removes those of distinct ``slots`` that are members."""
        self._len -= int(np.count_nonzero(self.holds(slots)))
        self._stamp[slots] = _ABSENT

    def mark_evictable(self, slots: Slots) -> None:
        """Makes members that ``pop_oldest`` has skipped candidates again, at their old positions. Ignores other
        slots."""
        if self._head == 0:
            return
        stamps = self._stamp[slots]
        skipped = (stamps >= 0) & (stamps < self._head)
        if not np.count_nonzero(skipped):
            return
        for position, slot in zip(stamps[skipped].tolist(), slots[skipped].tolist(), strict=True):
            if position not in self._skipped:
                heapq.heappush(self._heap, position)
                self._skipped[position] = slot

    def pop_oldest(self, n: int, busy: npt.NDArray[np.bool_]) -> Slots:
        """Removes the ``n`` oldest members that are not busy and returns them, oldest first; fewer if there are no
        more."""
        return self.pop_with_positions(n, busy)[0]

    def pop_with_positions(self, n: int, busy: npt.NDArray[np.bool_], before: int = NO_END) -> tuple[Slots, Positions]:
        """Same as ``pop_oldest`` for the members at positions below ``before``. Returns their positions too."""
        parts: list[tuple[Slots, Positions]] = []
        while n > 0 and self._heap and self._heap[0] < before:
            position = heapq.heappop(self._heap)
            slot = self._skipped.pop(position)
            if self._stamp[slot] == position and not busy[slot]:
                parts.append((np.array([slot], dtype=np.int64), np.array([position], dtype=np.int64)))
                n -= 1
        window = n + MIN_SCAN
        while n > 0:
            segments = self._sealed_segments()
            if not segments:
                break
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
            self._consume(int(found[-1]) + 1 if n == 0 else len(slots))
        none = np.empty(0, dtype=np.int64)
        popped, at = parts[0] if len(parts) == 1 else map(np.concatenate, zip((none, none), *parts, strict=True))
        self._stamp[popped] = _ABSENT
        self._len -= len(popped)
        return popped, at

    def put_back(self, slots: Slots, positions: Positions) -> None:
        """Undoes ``pop_with_positions`` for these slots, which must not be members."""
        if len(positions) != len(slots):
            raise ValueError(f"{len(slots)} slots need as many positions, not {len(positions)}")
        if self.holds(slots).any() or (positions < 0).any() or (positions >= NO_END).any():
            raise ValueError("a slot is a member already, or was never at that position")
        self._stamp[slots] = positions
        self._len += len(slots)
        self.mark_evictable(slots)

    def oldest_position(self) -> int:
        """Returns the position of the oldest member, -1 if there is none. Skipped members do not count until they are
        marked evictable."""
        while self._heap and self._stamp[self._skipped[self._heap[0]]] != self._heap[0]:
            del self._skipped[heapq.heappop(self._heap)]
        if self._heap:
            return self._heap[0]
        while segments := self._sealed_segments():
            slots, positions = segments[0]
            live = self._stamp[slots[:MIN_SCAN]] == positions[:MIN_SCAN]
            if not live.any():
                live = self._stamp[slots] == positions
            dead = int(live.argmax()) if live.any() else len(slots)
            position = int(positions[dead]) if dead < len(slots) else -1
            if dead:
                self._consume(dead)
            if position >= 0:
                return position
        return -1

    def peek(self, busy: npt.NDArray[np.bool_]) -> tuple[Positions, int]:
        """Returns the positions, unsorted, of the oldest members that are not busy, and a position below which these
        are all; NO_END if they are all there are. Members as in ``oldest_position``."""
        skipped = [p for p, slot in self._skipped.items() if self._stamp[slot] == p and not busy[slot]]
        segments = self._sealed_segments()
        if not segments:
            return np.array(skipped, dtype=np.int64), NO_END
        slots, positions = segments[0]
        live = positions[(self._stamp[slots] == positions) & ~busy[slots]]
        return np.concatenate((np.array(skipped, dtype=np.int64), live)), int(positions[-1]) + 1

    def clear(self) -> None:
        """Removes all members."""
        self._stamp.fill(_ABSENT)
        self._reset_log()

    def _sealed_segments(self) -> deque[tuple[Slots, Positions]]:
        """Returns the deque whose first segment is the oldest; an empty one if the log is empty."""
        if self._tail_fill and not (self._compacted or self._uncompacted):
            self._seal_tail()
        return self._compacted or self._uncompacted

    def _seal_tail(self) -> None:
        fill = self._tail_fill
        self._uncompacted.append((self._tail[:fill].copy(), self._tail_positions[:fill].copy()))
        self._tail_fill = 0

    def _consume(self, n: int) -> None:
        """Drops the first ``n`` entries, at least one, of the oldest segment."""
        segments = self._sealed_segments()
        slots, positions = segments[0]
        self._head = int(positions[n - 1]) + 1
        self._num_entries -= n
        if n == len(slots):
            segments.popleft()
        else:
            segments[0] = (slots[n:], positions[n:])

    def _compact(self, work: int) -> None:
        """Drops the dead entries of the next segments, about ``work`` entries in all."""
        while work > 0 and (self._uncompacted or self._compacted):
            if not self._uncompacted:
                self._uncompacted, self._compacted = self._compacted, self._uncompacted
            slots, positions = self._uncompacted.popleft()
            work -= len(slots)
            live = self._stamp[slots] == positions
            kept_slots, kept_positions = slots[live], positions[live]
            self._num_entries -= len(slots) - len(kept_slots)
            if self._compacted and len(self._compacted[-1][0]) + len(kept_slots) <= self._segment:
                before_slots, before_positions = self._compacted.pop()
                kept_slots = np.concatenate((before_slots, kept_slots))
                kept_positions = np.concatenate((before_positions, kept_positions))
            if len(kept_slots):
                self._compacted.append((kept_slots, kept_positions))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each member can be found at its position, and nothing else is counted."""
        if int(np.count_nonzero(self._stamp != _ABSENT)) != self._len:
            raise IntegrityError("a recency list does not count its members right")
        tail, tail_positions = self._tail[: self._tail_fill], self._tail_positions[: self._tail_fill]
        segments = [*self._compacted, *self._uncompacted, (tail, tail_positions)]
        slots = np.concatenate([s for s, _ in segments])
        positions = np.concatenate([p for _, p in segments])
        if len(positions) != self._num_entries or (np.diff(positions) <= 0).any():
            raise IntegrityError("the log of a recency list is out of order")
        live = slots[self._stamp[slots] == positions]
        expected = np.flatnonzero(self._stamp >= self._head)
        if sorted(live.tolist()) != expected.tolist():
            raise IntegrityError("a recency list has lost an entry")


if TYPE_CHECKING or (native := load("_cache")) is None:  # noqa: SIM108  (mypy does not know ``native``)
    RecencyList = PlainRecencyList
else:
    RecencyList = native.RecencyList
