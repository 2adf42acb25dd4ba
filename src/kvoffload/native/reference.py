"""The hot structures in plain dicts and lists: the answers that native code must give, and what runs without it.

Arrays of slots hold each slot once and belong to the caller, unless a method says otherwise. A slot that does not exist
is an IndexError, something that is no whole number a TypeError.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, OffloadKey, Slots

MAX_SLOTS = 1 << 28
"""Native code keeps slots in 32-bit numbers."""
NO_END = 1 << 58
"""Greater than any position."""
TICKS_PER_S = 1 << 12
"""Positions are times: ticks of the clock of requests, or later if more blocks are used than there are ticks."""
MAX_TICKS = 1 << 56
GAP_BOUNDS = tuple(TICKS_PER_S * 10**i // 4 for i in range(1, 6))
"""Ticks at which the classes of gaps begin: the time between the last two uses of a block, by powers of ten. Class 0
has the blocks that were used once, class 1 gaps below 2.5 s, the last one those from 7 hours on."""
GAP_CLASSES = 2 + len(GAP_BOUNDS)
AGE_BOUNDS = tuple(int((2 ** (i / 2) - 1) * TICKS_PER_S / 16) for i in range(49))
"""Ticks at which the bins of ages begin, and the last one ends, after 12 days."""
NUM_AGES = len(AGE_BOUNDS) - 1
PRIOR = 0.5
"""Returns, as those of all classes together, that each class is believed to have had before any was seen."""
RATES_HALF_LIFE = 300
"""Half-life of what the rates of return are learned from, in accesses, as a multiple of a shadow's capacity."""
GHOST_WAYS = 16
"""Ghosts per bucket. A table for up to twice as many is one bucket."""
WRITING = -1

Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]


def check_capacity(capacity: int) -> None:
    """Raises ValueError if a table or a list cannot have so many slots."""
    if not 0 <= capacity <= MAX_SLOTS:
        raise ValueError(f"capacity={capacity}: must be at most {MAX_SLOTS} slots, and not negative")


def whole(numbers: Any) -> Slots:
    array = np.asarray(numbers)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise TypeError(f"slots must be whole numbers in one dimension, not {array.dtype} in {array.ndim}")
    return array.astype(np.int64, copy=False)


def checked(numbers: Any, capacity: int) -> Slots:
    slots = whole(numbers)
    if len(slots) and not 0 <= slots.min() <= slots.max() < capacity:
        raise IndexError(f"a slot is not in [0, {capacity})")
    return slots


def array(slots: Any) -> Slots:
    return np.array(slots, dtype=np.int64)


class BlockTable:
    """Which key is in which of ``num_blocks`` slots, and a reference count per slot.

    ``ref_cnt`` is -1 while a block is being written, else its number of pins. A block is *in transfer* while it is
    written or pinned, and *idle* otherwise; only idle blocks are evictable, and ``num_evictable`` is their number at
    all times. ``busy[slot]`` is True for a slot in transfer. A block that is dropped while it is in transfer is not
    found any more, but keeps its slot, and its key cannot be inserted again, until the transfer has ended. Keys are
    bytes.
    """

    def __init__(self, num_blocks: int) -> None:
        check_capacity(num_blocks)
        self.num_blocks = num_blocks
        self.num_evictable = self.num_dropped = 0
        self.key_of: npt.NDArray[np.object_] = np.full(num_blocks, None, dtype=object)
        """The key in each slot. Free slots may have any. Read only."""
        self.ref_cnt = np.zeros(num_blocks, dtype=np.int32)
        self.busy = np.zeros(num_blocks, dtype=np.bool_)
        self.dropped = np.zeros(num_blocks, dtype=np.bool_)
        self._slots: dict[OffloadKey, int] = {}

    @property
    def num_held(self) -> int:
        """Slots that are taken, including slots of dropped blocks."""
        return len(self._slots)

    def get(self, key: OffloadKey) -> int:
        """Returns the slot of ``key``, of a dropped block too, or -1."""
        return self._slots.get(key, -1)

    def find_in_transfer(self, keys: Sequence[OffloadKey]) -> Slots:
        """Does the same as ``find``, but finds dropped blocks too."""
        return np.fromiter(map(self._slots.get, keys, repeat(-1)), dtype=np.int64, count=len(keys))

    def find(self, keys: Sequence[OffloadKey]) -> Slots:
        """Returns one slot per key, -1 where the key is absent. Duplicates are kept."""
        slots = self.find_in_transfer(keys)
        if self.num_dropped:
            slots[(slots >= 0) & self.dropped[slots]] = -1
        return slots

    def split(self, keys: Sequence[OffloadKey]) -> tuple[Slots, list[OffloadKey]]:
        """Returns the slots of the keys that are present, and the absent keys, in order and without repetitions. The
        key of a dropped block is in neither."""
        found = self._slots
        slots = array([found[key] for key in keys if key in found])
        absent = list(dict.fromkeys(key for key in keys if key not in found))
        return slots[~self.dropped[slots]], absent

    def held(self) -> Slots:
        """Returns the slots that have a key, ascending."""
        return array(sorted(self._slots.values()))

    def holds(self, slots: Slots) -> Flags:
        """Returns which of ``slots`` have a key."""
        slots = checked(slots, self.num_blocks)
        keys = self.key_of[slots].tolist()
        return np.array([self._slots.get(key) == slot for key, slot in zip(keys, slots.tolist(), strict=True)], bool)

    def distinct(self, slots: Slots) -> Slots:
        """Returns ``slots`` without repetitions; the last of equal ones is kept, in order."""
        return array(list(dict.fromkeys(checked(slots, self.num_blocks)[::-1].tolist()))[::-1])

    def leading_ready(self, keys: Sequence[OffloadKey]) -> int:
        """Returns the length of the longest run of leading keys that are all ready."""
        slots = self.find(keys)
        missing = np.flatnonzero((slots < 0) | (self.ref_cnt[slots] < 0))
        return int(missing[0]) if len(missing) else len(keys)

    def insert(self, keys: Sequence[OffloadKey], slots: Slots) -> None:
        """Puts distinct absent keys into free slots, in state being written."""
        if len(slots) != len(keys):
            raise IndexError(f"{len(keys)} keys need as many slots, not {len(slots)}")
        slots = whole(slots)
        new = dict(zip(keys, slots.tolist(), strict=True))
        checked(slots, self.num_blocks)
        self._slots.update(new)
        self.key_of[slots] = np.fromiter(keys, dtype=object, count=len(keys))
        self.ref_cnt[slots] = WRITING
        self.busy[slots] = True

    def remove(self, slots: Slots) -> list[OffloadKey]:
        """Removes the keys of ``slots``, whatever their state, and returns them in order."""
        slots = checked(slots, self.num_blocks)
        self.num_evictable -= len(slots) - int(np.count_nonzero(self.busy[slots]))
        self.num_dropped -= int(np.count_nonzero(self.dropped[slots]))
        self.ref_cnt[slots] = self.dropped[slots] = self.busy[slots] = 0
        keys: list[OffloadKey] = self.key_of[slots].tolist()
        self.key_of[slots] = None
        for key in keys:
            self._slots.pop(key, None)
        return keys

    def drop_all_but(self, slots: Slots) -> None:
        """Forgets every key, and marks the blocks in ``slots``, which are in transfer, as dropped. Only these cost time
        each."""
        self._slots = dict(zip(self.key_of[slots].tolist(), slots.tolist(), strict=True))
        self.dropped[slots] = True
        self.num_dropped, self.num_evictable = len(slots), 0

    def is_writing(self, slots: Slots) -> Flags:
        """Returns which of ``slots`` are being written. Negative slots count as the last ones."""
        writing: Flags = self.ref_cnt[whole(slots)] == WRITING
        return writing

    def being_written(self, slots: Slots) -> Slots:
        """Returns which of ``slots`` are being written, in order. Of equal ones the first is kept; negative ones are
        not."""
        chosen = self._tail_first(slots)
        written: Slots = chosen[self.ref_cnt[chosen] == WRITING]
        return written[::-1]

    def used(self, found: Slots) -> tuple[Slots, Flags]:
        """Returns the slots of a chain that are not negative, each once, tail first, and which of them are ready. Of
        equal ones the first of ``found`` counts."""
        slots = self._tail_first(found)
        return slots, self.ref_cnt[slots] != WRITING

    def chain(self, found: Slots, stored: Sequence[OffloadKey]) -> tuple[Slots, Flags]:
        """Returns the same slots, and which of them have one of the keys ``stored``."""
        new, slots = set(self.find(stored).tolist()), self._tail_first(found)
        return slots, np.array([slot in new for slot in slots.tolist()], dtype=np.bool_)

    def _tail_first(self, found: Slots) -> Slots:
        found = whole(found)
        tail_first: Slots = array(list(dict.fromkeys(found[found >= 0].tolist()))[::-1])
        return checked(tail_first, self.num_blocks)

    def idle(self, slots: Slots) -> Slots:
        """Returns the ``slots`` that are not busy, each once: the last of equal ones, in order."""
        slots = self.distinct(slots)
        return slots[~self.busy[slots]]

    def evict(self, slots: Slots) -> list[OffloadKey] | None:
        """Removes the keys of ``slots`` and returns them in order. Returns None, and changes nothing, unless these are
        distinct slots of idle blocks."""
        slots = whole(slots)
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_blocks:
            return None
        is_evictable = len(set(slots.tolist())) == len(slots) and not self.busy[slots].any() and self.holds(slots).all()
        return self.remove(slots) if is_evictable else None

    def pin(self, slots: Slots) -> None:
        """Adds one pin per slot. All blocks must be ready."""
        slots = checked(slots, self.num_blocks)
        self.ref_cnt[slots] += 1
        self.num_evictable -= int(np.count_nonzero(~self.busy[slots]))
        self.busy[slots] = True

    def set_ready(self, slots: Slots) -> tuple[Slots, Slots]:
        """Makes the ``slots`` that are ``being_written`` ready. Returns them, and the slots of dropped blocks, free
        from now on."""
        return self._end_transfer(self.being_written(slots))

    def unpin(self, slots: Slots) -> tuple[Slots, Slots]:
        """Removes one pin per slot. Returns the blocks that are idle now, and the slots of dropped ones that are free
        now. All must be pinned."""
        return self._end_transfer(checked(slots, self.num_blocks))

    def _end_transfer(self, slots: Slots) -> tuple[Slots, Slots]:
        counts = self.ref_cnt[slots]
        self.ref_cnt[slots] = counts - np.where(counts == WRITING, WRITING, 1)
        idle: Slots = slots[self.ref_cnt[slots] == 0]
        idle, freed = idle[~self.dropped[idle]], idle[self.dropped[idle]]
        self.busy[idle] = False
        self.num_evictable += len(idle)
        self.remove(freed)
        return idle, freed

    def check_keys(self) -> None:
        """Raises IntegrityError unless every key is found in its slot and nothing else is held."""
        slots = list(self._slots.values())
        if self.key_of[slots].tolist() != list(self._slots) or len(set(slots)) != len(slots):
            raise IntegrityError("a key is not found in its slot")


class FreeSlots:
    """A stack of free slots below ``capacity``, and which slots are allocated. At first no slot exists."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free: list[int] = []
        self.allocated = np.zeros(capacity, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.free)

    def take(self, n: int) -> Slots:
        """Allocates the ``n`` slots that are on top and returns them, the topmost first. Raises IntegrityError if there
        are fewer."""
        if not 0 <= n <= len(self.free):
            raise IntegrityError(f"{n} slots were asked for, {len(self.free)} are free")
        slots = array(self.free[len(self.free) - n :][::-1])
        del self.free[len(self.free) - n :]
        self.allocated[slots] = True
        return slots

    def give_back(self, slots: Slots) -> None:
        """Puts distinct allocated slots on top, the last one topmost. Raises IntegrityError, and changes nothing, if
        one is not allocated."""
        slots = whole(slots)
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.capacity:
            raise IntegrityError("a slot was freed that does not exist")
        if not self.allocated[slots].all() or len(self.free) + len(slots) > self.capacity:
            raise IntegrityError("a slot was freed that is not allocated")
        self.allocated[slots] = False
        self.free += slots.tolist()

    def add(self, slots: Slots) -> None:
        """Puts new slots on top, the first one topmost. Raises IndexError if there is no room for them."""
        slots = checked(slots, self.capacity)
        if len(self.free) + len(slots) > self.capacity:
            raise IndexError(f"{len(slots)} slots do not fit into {self.capacity}, of which {len(self.free)} are free")
        self.free += slots[::-1].tolist()


class RecencyList:
    """Slots ordered from the oldest to the most recent. Every append takes the next position.

    A busy member that a pop passes over is in no order until ``mark_evictable``, and then at its old position.
    """

    def __init__(self, capacity: int) -> None:
        check_capacity(capacity)
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Removes all members."""
        self._order: OrderedDict[int, int] = OrderedDict()
        """Position of each member that was never passed over."""
        self._skipped: dict[int, int] = {}
        self._marked: dict[int, int] = {}
        """Members that were passed over and are evictable again. They are older than those in order."""
        self._heap: list[tuple[int, int]] = []
        """Of ``_marked``, with others that have moved or left since."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._order) + len(self._skipped) + len(self._marked)

    def holds(self, slots: Slots) -> Flags:
        """Returns which of ``slots`` are members."""
        chosen, order = checked(slots, self._capacity).tolist(), self._order
        is_aside = self._is_member if self._skipped or self._marked else order.__contains__
        return np.fromiter(map(is_aside, chosen), dtype=np.bool_, count=len(chosen))

    def _is_member(self, slot: int) -> bool:
        return slot in self._order or slot in self._skipped or slot in self._marked

    def _leave(self, slot: int) -> bool:
        if self._order.pop(slot, None) is not None:
            return True
        return self._skipped.pop(slot, None) is not None or self._marked.pop(slot, None) is not None

    def move_to_end(self, slots: Slots) -> None:
        """Same as ``append`` for the ``slots`` that are members."""
        self.append(slots[self.holds(slots)])

    def append(self, slots: Slots, positions: Positions | None = None) -> None:
        """Makes ``slots`` the most recent members, the last one the most recent. Members move, others join. Lists that
        share a clock give ``positions``, so that their members can be compared."""
        chosen = checked(slots, self._capacity).tolist()
        if not chosen:
            return
        at = range(self._next, self._next + len(chosen)) if positions is None else positions.tolist()
        order = self._order
        for slot in chosen if self._skipped or self._marked else ():
            self._leave(slot)
        for slot, position in zip(chosen, at, strict=True):
            order[slot] = position
            order.move_to_end(slot)
        self._next = at[-1] + 1

    def discard(self, slots: Slots) -> None:
        """Removes the ``slots`` that are members."""
        chosen = checked(slots, self._capacity)
        for slot in chosen.tolist() if len(self) else ():
            self._leave(slot)

    def mark_evictable(self, slots: Slots) -> None:
        """Makes members that ``pop_oldest`` has skipped candidates again, at their old positions. Ignores other
        slots."""
        chosen = checked(slots, self._capacity)
        for slot in chosen.tolist() if self._skipped else ():
            if slot in self._skipped:
                self._mark(slot, self._skipped.pop(slot))

    def _mark(self, slot: int, position: int) -> None:
        if len(self._heap) > 2 * len(self._marked) + 64:
            self._heap = sorted((position, slot) for slot, position in self._marked.items())
        self._marked[slot] = position
        heapq.heappush(self._heap, (position, slot))

    def front(self) -> int:
        """Returns the position of the oldest member that is in the order, NO_END if there is none."""
        while self._heap and self._marked.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else next(iter(self._order.values()), NO_END)

    def position(self, slot: int) -> int:
        """Returns the position of a slot, -1 if it is no member."""
        for members in (self._order, self._skipped, self._marked):
            if slot in members:
                return members[slot]
        return -1

    def positions(self) -> Iterable[int]:
        """Returns the positions of the members that were never passed over, the oldest first."""
        return self._order.values()

    def take_front(self, busy: Flags) -> int:
        """Removes the member at ``front`` and returns its slot. Passes it over, and returns -1, if it is busy."""
        if self._heap:
            position, slot = heapq.heappop(self._heap)
            del self._marked[slot]
        else:
            slot, position = self._order.popitem(last=False)
        if busy[slot]:
            self._skipped[slot] = position
            return -1
        return slot

    def pop_oldest(self, n: int, busy: Flags) -> Slots:
        """Removes the ``n`` oldest members that are not busy and returns them, oldest first; fewer if there are no
        more."""
        return pop((self,), n, busy)[0]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each member can be found at its position, and nothing else is counted."""
        positions = list(self._order.values())
        if positions != sorted(set(positions)) or not set(self._marked.items()) <= {(s, p) for p, s in self._heap}:
            raise IntegrityError("a recency list is out of order")
        if len(self._order.keys() | self._skipped.keys() | self._marked.keys()) != len(self):
            raise IntegrityError("a recency list does not count its members right")


def pop(
    lists: Sequence[RecencyList], n: int, busy: Flags, choose: Callable[[], RecencyList] | None = None
) -> tuple[Slots, Positions]:
    """Removes the oldest members of several lists that are not busy, up to ``n``, each from the list with the oldest
    one, unless ``choose`` names another."""
    slots: list[int] = []
    positions: list[int] = []
    while len(slots) < n:
        oldest = choose() if choose is not None else min(lists, key=RecencyList.front)
        position = oldest.front()
        if position == NO_END:
            break
        slot = oldest.take_front(busy)
        if slot >= 0:
            slots.append(slot)
            positions.append(position)
    return array(slots), array(positions)


def next_update(num_accesses: int, capacity: int) -> int:
    """Returns after how many accesses of a shadow the rates of return are learned again."""
    return num_accesses + max(64, min(num_accesses // 16, 4 * capacity))


def gap_class(ticks: int) -> int:
    """Returns the class of a gap of so many ticks."""
    return 1 + bisect_right(GAP_BOUNDS, ticks)


class ReturnRates:
    """What it is worth to keep a block, by the class of its last gap and by its age, the time since its last use.

    The *value* is the most returns per second of room that can be had from now on, if a block that has not returned is
    dropped at the best age. It is a Gittins index, learned from blocks that returned or were forgotten.
    """

    def __init__(self) -> None:
        self._returned = [[0.0] * NUM_AGES for _ in range(GAP_CLASSES)]
        self._ended = [[0.0] * NUM_AGES for _ in range(GAP_CLASSES)]
        self._waiting = [[0.0] * NUM_AGES for _ in range(GAP_CLASSES)]
        self._values = [[0.0] * NUM_AGES for _ in range(GAP_CLASSES)]

    def add(self, gap: int, age: int, returned: bool) -> None:
        """Counts a block of class ``gap`` that returned, or was forgotten, at an age in ticks."""
        at = self._bin(age)
        self._ended[gap][at] += 1
        self._returned[gap][at] += returned

    def wait(self, gap: int, age: int) -> None:
        """Counts a block of class ``gap`` that has reached an age in ticks, for the next update only."""
        self._waiting[gap][self._bin(age)] += 1

    def update(self, decay: float) -> None:
        """Learns the values from what was counted. Ends then count ``decay`` times as much."""
        spent = [[0.0] * NUM_AGES for _ in range(GAP_CLASSES)]
        pooled_returned, pooled_spent = [0.0] * NUM_AGES, [0.0] * NUM_AGES
        all_returned = 0.0
        for gap in range(GAP_CLASSES):
            older = 0.0
            for at in reversed(range(NUM_AGES)):
                width = float(AGE_BOUNDS[at + 1] - AGE_BOUNDS[at])
                here = self._ended[gap][at] + self._waiting[gap][at]
                spent[gap][at] = width * (older + 0.5 * here)
                older += here
                all_returned += self._returned[gap][at]
                pooled_returned[at] += self._returned[gap][at]
                pooled_spent[at] += spent[gap][at]
        for counts in self._waiting:
            counts[:] = [0.0] * NUM_AGES
        if not all_returned:
            return
        weight = PRIOR / all_returned
        for gap in range(GAP_CLASSES):
            for at in range(NUM_AGES):
                best = returned = room = 0.0
                for until in range(at, NUM_AGES):
                    returned += self._returned[gap][until] + weight * pooled_returned[until]
                    room += spent[gap][until] + weight * pooled_spent[until]
                    best = max(best, returned / room if room else 0.0)
                self._values[gap][at] = best
        for counts in (*self._returned, *self._ended):
            counts[:] = [count * decay for count in counts]

    def value(self, gap: int, age: int) -> float:
        """Returns the value of a block of class ``gap`` at an age in ticks."""
        return self._values[gap][self._bin(age)]

    def _bin(self, age: int) -> int:
        return bisect_right(AGE_BOUNDS, age, 1, NUM_AGES) - 1


class GapLists:
    """Slots used by one request (``once``), and those used by several (``again``) by the class of the gap between their
    last two uses; each list from the oldest to the most recent.

    Positions come from one clock, so members of all lists can be compared.
    """

    def __init__(self, capacity: int) -> None:
        self._lists = tuple(RecencyList(capacity) for _ in range(GAP_CLASSES))
        self._once, self._again = self._lists[0], self._lists[1:]
        self._clock = 0

    @property
    def num_once(self) -> int:
        return len(self._once)

    @property
    def num_again(self) -> int:
        return sum(map(len, self._again))

    def begin(self, time_s: float) -> int:
        """Begins with a request at this time. Returns the position that the clock has now: the time in ticks, or later
        if that was reached already."""
        ticks = time_s * TICKS_PER_S
        if self._clock < ticks < MAX_TICKS:
            self._clock = int(ticks)
        return self._clock

    def tick(self, n: int) -> Positions:
        """Returns the next ``n`` positions of the clock."""
        self._clock += n
        return np.arange(self._clock - n, self._clock)

    def use(self, slots: Slots, ready: Flags) -> None:
        """Moves members to the recent end of ``again``. Members of ``once`` that are not ``ready`` stay in it, at its
        recent end."""
        stays = self._once.holds(slots) & ~ready
        before = (max(members.position(slot) for members in self._lists) for slot in slots.tolist())
        since = array([gap_class(self._clock - position) for position in before])
        self.insert(slots, np.where(stays, 0, since))

    def insert(self, slots: Slots, classes: Positions) -> None:
        """Moves slots to the recent ends of the lists of ``classes``."""
        positions = self.tick(len(slots))
        for gap, members in enumerate(self._lists):
            chosen = classes == gap
            members.discard(slots[~chosen])
            members.append(slots[chosen], positions[chosen])

    def classes(self, slots: Slots) -> Positions:
        """Returns the class of each of ``slots``, which are members."""
        return array(np.argmax([members.holds(slots) for members in self._lists], axis=0))

    def move_to_end(self, slots: Slots) -> None:
        """Makes members the most recent of the list that each is in. Ignores other slots."""
        positions = self.tick(len(slots))
        for members in self._lists:
            held = members.holds(slots)
            members.append(slots[held], positions[held])

    def discard(self, slots: Slots) -> None:
        """Removes the ``slots`` that are members."""
        for members in self._lists:
            members.discard(slots)

    def mark_evictable(self, slots: Slots) -> None:
        """Puts members that were passed over back into the order. Ignores other slots."""
        for members in self._lists:
            members.mark_evictable(slots)

    def pop_oldest(self, n: int, busy: Flags) -> tuple[Slots, Positions]:
        """Removes the ``n`` oldest members of all lists that are not busy. Returns them and their positions, oldest
        first; fewer if there are no more."""
        return pop(self._lists, n, busy)

    def pop_shared(self, n: int, num_once: int, busy: Flags) -> tuple[Slots, Positions]:
        """Does the same, but takes up to ``num_once`` of ``once``, then members of ``again``, then others of
        ``once``."""
        slots, positions = pop((self._once,), min(n, num_once), busy)
        for lists in (self._again, (self._once,)):
            more, at = pop(lists, n - len(slots), busy)
            slots, positions = np.concatenate((slots, more)), np.concatenate((positions, at))
        return slots, positions

    def pop_least(self, n: int, busy: Flags, rates: ReturnRates) -> tuple[Slots, Positions]:
        """Does the same, but takes each one from the list whose oldest member has the lowest value."""

        def worth(gap: int) -> tuple[float, int]:
            position = self._lists[gap].front()
            return (inf if position == NO_END else rates.value(gap, self._clock - position)), position

        return pop(self._lists, n, busy, choose=lambda: self._lists[min(range(GAP_CLASSES), key=worth)])

    def num_refused(self, classes: Positions, stamps: Positions, shortage: int, rates: ReturnRates) -> int:
        """Returns how many of the first of new blocks, of ``classes`` and last used at ``stamps``, are worth less than
        the members that would leave for them, if ``shortage`` of them or of the members must go. Members that were
        passed over do not count."""
        oldest = [iter(members.positions()) for members in self._lists]
        front = [next(each, NO_END) for each in oldest]
        num = 0
        for _ in range(shortage):
            worth = [
                (inf if position == NO_END else rates.value(gap, self._clock - position), position)
                for gap, position in enumerate(front)
            ]
            least = min(range(GAP_CLASSES), key=worth.__getitem__)
            value = rates.value(int(classes[num]), self._clock - int(stamps[num])) if num < len(classes) else inf
            if value < worth[least][0]:
                num += 1
            elif front[least] == NO_END:
                break
            else:
                front[least] = next(oldest[least], NO_END)
        return num

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


_NO_GHOSTS: OrderedDict[int, list[int]] = OrderedDict()


class GhostTable:
    """The ``capacity`` hashes that were added last, each with a stamp and the class of its last gap.

    An older hash is never found, so a chain that is half forgotten has lost one end, and has no holes. There are twice
    as many places as remembered hashes, in buckets. A new hash takes a free place or the earliest one of its bucket, so
    a bucket to which too many hashes belong forgets some too soon. Two hashes are confused if their buckets and 32 bits
    of them agree.
    """

    def __init__(self, capacity: int) -> None:
        if not 0 < capacity < 1 << 30:
            raise ValueError(f"capacity={capacity}: must be from 1 to {(1 << 30) - 1}")
        self._capacity = capacity
        self._ways = GHOST_WAYS if capacity > 2 * GHOST_WAYS else capacity
        self._num_buckets = round(2 * capacity / GHOST_WAYS) if capacity > 2 * GHOST_WAYS else 1
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._buckets: defaultdict[int, OrderedDict[int, list[int]]] = defaultdict(OrderedDict)
        """By tag: how many hashes were added before, stamp and class; the earliest first."""
        self._num_added = 0

    def _homes(self, hashes: Hashes) -> Iterator[tuple[int, int]]:
        """Returns the bucket and the tag of each hash."""
        buckets = (hashes >> np.uint64(32)) * np.uint64(self._num_buckets) >> np.uint64(32)
        return zip(buckets.tolist(), (hashes.astype(np.uint32) | np.uint32(1)).tolist(), strict=True)

    def _entries(self, hashes: Hashes) -> list[list[int] | None]:
        oldest, none = self._num_added - self._capacity, _NO_GHOSTS
        found = [self._buckets.get(bucket, none).get(tag) for bucket, tag in self._homes(hashes)]
        return [None if entry is None or entry[0] < oldest else entry for entry in found]

    def stamps(self, hashes: Hashes) -> Positions:
        """Returns the stamp of each hash, -1 if it is not remembered."""
        return array([-1 if entry is None else entry[1] for entry in self._entries(hashes)])

    def classes(self, hashes: Hashes) -> Positions:
        """Returns the class of each hash, 0 if it is not remembered."""
        return array([0 if entry is None else entry[2] for entry in self._entries(hashes)])

    def use(self, hashes: Hashes, now: int) -> None:
        """Takes note that the remembered ones of ``hashes`` are used now. How long they are remembered is as before."""
        for entry in self._entries(hashes):
            if entry is not None:
                entry[1:] = now, gap_class(now - entry[1])

    def take(self, hashes: Hashes) -> Positions:
        """Forgets hashes. Returns what ``classes`` did."""
        found = self.classes(hashes)
        for bucket, tag in self._homes(hashes):
            self._buckets.get(bucket, _NO_GHOSTS).pop(tag, None)
        return found

    def add(self, hashes: Hashes, stamps: Positions, classes: Positions | None = None) -> None:
        """Adds distinct hashes in this order. Those that are remembered are added again. Without ``classes`` they keep
        theirs; that of the others is 0."""
        last = slice(-self._capacity, None)
        given = [None] * len(hashes) if classes is None else classes.tolist()
        for (home, tag), stamp, gap in zip(self._homes(hashes[last]), stamps[last].tolist(), given[last], strict=True):
            bucket = self._buckets[home]
            before = bucket.pop(tag, None)
            if len(bucket) == self._ways:
                bucket.popitem(last=False)
            if gap is None:
                is_known = before is not None and before[0] >= self._num_added - self._capacity
                gap = before[2] if before is not None and is_known else 0
            bucket[tag] = [self._num_added, stamp, gap]
            self._num_added += 1


class KeyQueue:
    """The ``limit`` keys that were added last, oldest first. Keys are bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._keys: OrderedDict[OffloadKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def holds(self, keys: Sequence[OffloadKey]) -> Flags:
        """Returns which of ``keys`` are members."""
        return np.fromiter(map(self._keys.__contains__, keys), dtype=np.bool_, count=len(keys))

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Makes keys, members or not, the most recent ones, the last one the most recent."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        self.cut(self.limit)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Removes the ``keys`` that are members."""
        for key in keys:
            self._keys.pop(key, None)

    def cut(self, limit: int) -> None:
        """Removes the oldest keys until at most ``limit`` are left."""
        while len(self._keys) > max(0, limit):
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()
