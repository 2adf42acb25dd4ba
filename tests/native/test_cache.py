"""The native table and lists give the answers of the reference, whatever the calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.abc import IntegrityError
from kvoffload.cache.slots import check_slots
from kvoffload.cache.table import BlockTable
from kvoffload.native import load, reference
from tests.native.twins import COLLIDING, PlainBlockTable, Twins, array, make_key, some
from tests.scale import SCALE

native: Any = load("_cache")
lists: Any = load("_ghosts")
pytestmark = pytest.mark.skipif(None in (native, lists), reason="there is no native code here")

STEPS = 20
SEEDS = st.integers(0, 2**32)
EXAMPLES = settings(max_examples=int(30 * SCALE), deadline=None)


# The keys of the table.


def insert(rng: random.Random, twins: Twins, held: dict[Any, int], free: set[int]) -> None:
    """Inserts absent keys, or fails in one of several ways."""
    absent = [key for key in map(make_key, range(2 * (len(held) + len(free)))) if key not in held]
    new = some(rng, absent)[: len(free)]
    slots = rng.sample(sorted(free), len(new))
    wrong = rng.randrange(16)
    if wrong == 0:
        twins.call("insert", [*new, b"one more"], array(slots))
    elif wrong == 1:
        twins.call("insert", [*new, []], array([*slots, 0]))
    elif wrong == 2:
        twins.call("insert", [*new, b"far away"], array([*slots, 10**6]))
    elif wrong == 3:
        twins.call("insert", [*new, b"between"], array([*slots, 0]) + 0.5)
    else:
        twins.call("insert", tuple(new) if wrong < 10 else new, array(slots))
        held.update(zip(new, slots, strict=True))
        free.difference_update(slots)


def ask_keys(rng: random.Random, twins: Twins, num_keys: int) -> None:
    asked = rng.choices([make_key(i) for i in range(num_keys)], k=rng.randint(0, num_keys))
    twins.call("find", asked)
    twins.call("find", tuple(asked))
    twins.call("split", asked)
    twins.call("find", [*asked, []])
    twins.call("split", [*asked, {}])


def tables(capacity: int, plain: Any = PlainBlockTable) -> Twins:
    return Twins(plain(capacity), BlockTable(capacity))


def test_large_batches_of_bytes() -> None:
    """Several chunks, no Python code in between."""
    rng = random.Random(0)
    capacity = 3000
    twins = tables(capacity)
    keys = [rng.randbytes(36) for _ in range(2 * capacity)]
    for start in range(0, capacity, 1000):
        twins.call("insert", keys[start : start + 1000], np.arange(start, start + 1000)[::-1])
    for _ in range(3):
        asked = rng.choices(keys, k=2500)
        twins.call("find", asked)
        twins.call("split", asked)
        gone = np.array(rng.sample(range(capacity), 700))
        removed = twins.call("remove", gone)
        twins.call("insert", removed, gone)
    twins.call("set_ready", np.arange(capacity))
    twins.check()


def test_keys_of_one_bucket_leave_one_by_one() -> None:
    """More of them than a bucket has places, so that some are in the dict."""
    twins = tables(40)
    keys = COLLIDING[:30]
    twins.call("insert", keys, np.arange(30))
    for slot in random.Random(0).sample(range(30), 30):
        assert twins.call("remove", array([slot])) == [keys[slot]]
        twins.call("find", keys)
        twins.plain.check_keys()
        twins.native.check_keys()


def test_keys_with_the_same_tag_in_one_bucket_are_told_apart() -> None:
    seen: dict[int, bytes] = {}
    for key in (i.to_bytes(6, "big") for i in range(1 << 22)):
        # A tag has the upper half of the hash but for its last bit, and a table of four has two buckets.
        tag = hash(key) & 0xFFFF_FFFE_0000_0001
        if tag in seen:
            break
        seen[tag] = key
    twins, alike = tables(4), [seen[tag], key]
    twins.call("insert", alike, array([3, 1]))
    assert twins.call("find", [*alike, *alike]).tolist() == [3, 1, 3, 1]
    twins.call("remove", array([3]))
    assert twins.call("find", alike).tolist() == [-1, 1]


class Slots:
    """A plain and a native stack of free slots, as twins."""

    def __init__(self, capacity: int, plain: type[reference.FreeSlots] = reference.FreeSlots) -> None:
        self.twins = Twins(plain(capacity), native.FreeSlots(capacity))
        self.capacity = capacity
        self.unknown, self.taken = list(range(capacity)), set[int]()

    def step(self, rng: random.Random) -> None:
        action = rng.randrange(6)
        if action == 0:
            new = [self.unknown.pop() for _ in range(rng.randint(0, len(self.unknown)))]
            self.twins.call("add", array(new)[:: rng.choice([1, -1])])
        elif action == 1 and self.unknown:
            for each in (self.twins.plain, self.twins.native):
                each.allocated[self.unknown[-1]] = True
            self.taken.add(self.unknown.pop())
        elif action < 4:
            slots = self.twins.call("take", rng.randint(-1, len(self.twins.plain) + 1))
            self.taken.update([] if slots is None else slots.tolist())
        elif action == 4:
            slots = array(some(rng, self.taken))
            self.twins.call("give_back", slots[::-1])
            self.taken.difference_update(slots.tolist())
        else:
            wrong = rng.choice([-1, self.capacity, 2**62, *({*range(self.capacity)} - self.taken)])
            self.twins.call("give_back", array([*some(rng, self.taken), wrong]))
            self.twins.call("add", array([0, self.capacity]))
        assert len(self.twins.plain) == len(self.twins.native)
        for each in (self.twins.plain, self.twins.native):
            check_slots(each, self.capacity - len(self.unknown))


@EXAMPLES
@given(seed=SEEDS, capacity=st.integers(1, 60))
def test_free_slots(seed: int, capacity: int) -> None:
    rng, slots = random.Random(seed), Slots(capacity)
    for _ in range(2 * STEPS):
        slots.step(rng)


# The table.


def drive_table(rng: random.Random, twins: Twins, capacity: int) -> None:
    plain, other, free = twins.plain, twins.native, set(range(capacity))
    held: dict[Any, Any] = {}
    pinned: list[int] = []
    writing: set[int] = set()

    def forget(slots: np.ndarray) -> None:
        free.update(slots.tolist())
        writing.difference_update(slots.tolist())
        for key in [key for key, slot in held.items() if slot in free]:
            del held[key]

    for _ in range(2 * STEPS):
        action = rng.choice([0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7])
        if action == 0:
            before = set(held.values())
            insert(rng, twins, held, free)
            writing.update(set(held.values()) - before)
        elif action == 1:
            ready = some(rng, writing)
            forget(twins.call("set_ready", array(ready))[1])
            writing.difference_update(ready)
        elif action == 2:
            chosen = some(rng, set(held.values()) - writing)
            twins.call("pin", array(chosen))
            pinned += chosen
        elif action == 3:
            chosen = some(rng, set(pinned))
            for slot in chosen:
                pinned.remove(slot)
            forget(twins.call("unpin", array(chosen))[1])
        elif action == 4:
            found = twins.call("find", list(held))
            forget(twins.call("drop", array(some(rng, found[found >= 0].tolist()))))
        elif action == 5 and rng.random() < 0.3:
            forget(twins.call("drop_all"))
        elif action == 6:
            gone = some(rng, set(held.values()) - set(pinned))
            if rng.random() < 0.5:
                twins.call("remove", array(gone))
                forget(array(gone))
            elif twins.call("evict", array(gone)) is not None:
                forget(array(gone))
        else:
            ask_table(rng, twins, capacity)
        assert (plain.num_evictable, plain.num_held) == (other.num_evictable, other.num_held)
        assert plain.ref_cnt.tolist() == other.ref_cnt.tolist()
        assert plain.busy.tolist() == other.busy.tolist()
        twins.check()


def ask_table(rng: random.Random, twins: Twins, capacity: int) -> None:
    ask_keys(rng, twins, 2 * capacity)
    asked = rng.choices([make_key(i) for i in range(2 * capacity)], k=rng.randint(0, 2 * capacity))
    for name in ("find_in_transfer", "leading_ready"):
        twins.call(name, asked)
    for key in asked[:3]:
        twins.call("status", key)
        twins.call("__contains__", key)
    slots = array(rng.choices(range(capacity), k=rng.randint(0, capacity)))
    twins.call("slots")
    twins.call("held")
    twins.call("holds", array(some(rng, range(capacity))))
    twins.call("distinct", slots)
    twins.call("idle", slots)
    twins.call("being_written", slots - rng.choice([0, 1]))
    twins.call("used", slots - rng.choice([0, 1]))
    twins.call("chain", slots - rng.choice([0, 1]), asked[:9])
    twins.call("is_writing", slots - rng.choice([0, 1]))
    twins.call("is_loadable", slots)
    for name in ("is_writing", "pin", "unpin", "set_ready", "remove", "idle", "used", "being_written"):
        twins.call(name, array([10**6]))
        twins.call(name, np.array([0.5]))
    twins.call("chain", array([10**6]), asked)
    twins.call("chain", slots, [*asked, []])
    twins.call("distinct", array([0, 10**6]))


@EXAMPLES
@given(seed=SEEDS, capacity=st.integers(1, 120))
def test_table(seed: int, capacity: int) -> None:
    drive_table(random.Random(seed), tables(capacity), capacity)


def plant(name: str, value: int) -> Callable[[Any], None]:
    """Returns what adds ``value`` to a count."""
    return lambda table: setattr(table, name, getattr(table, name) + value)


def put(name: str, slot: int, value: object) -> Callable[[Any], None]:
    return lambda table: getattr(table, name).__setitem__(slot, value)


WRONG: dict[str, Callable[[Any], None]] = {
    "one evictable block too many": plant("num_evictable", 1),
    "one evictable block too few": plant("num_evictable", -1),
    "one dropped block too many": plant("num_dropped", 1),
    "another key in a slot": put("key_of", 0, b"another"),
    "a key in two slots": lambda table: table.insert([b"a"], array([5])),
    "two keys in a slot": lambda table: table.insert([b"e"], array([0])),
    "fewer than no pins": put("ref_cnt", 0, -2),
    "a pin without a mark": put("ref_cnt", 0, 1),
    "a mark without a pin": put("busy", 0, True),
    "a pin without a mark any more": put("busy", 1, False),
    "an idle block that was dropped": put("dropped", 0, True),
    "a pin of a free slot": put("ref_cnt", 5, 1),
    "a mark of a free slot": put("busy", 5, True),
}


@pytest.mark.parametrize("make", [PlainBlockTable, BlockTable])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_table_that_is_wrong_is_noticed(make: Callable[[int], Any], wrong: str) -> None:
    table = make(6)
    table.insert([b"a", b"b", b"c", b"d"], np.arange(4))
    table.set_ready(np.arange(3))
    table.pin(np.array([1, 2]))
    table.drop(np.array([2]))
    table.check_integrity()
    WRONG[wrong](table)
    with pytest.raises(IntegrityError):
        table.check_integrity()


# The lists.


def drive_list(rng: random.Random, twins: Twins, capacity: int) -> None:
    busy = np.zeros(capacity, dtype=np.bool_)
    for _ in range(3 * STEPS):
        slots = array(some(rng, range(capacity)))
        action = rng.randrange(7)
        if action == 0:
            twins.call("append", slots)
        elif action == 1:
            twins.call("move_to_end", slots)
        elif action == 2:
            twins.call("discard", slots)
        elif action == 3:
            busy[slots] = rng.choice([True, False])
            if rng.random() < 0.7:
                # Left out at times: a member is not a candidate again before it is marked.
                twins.call("mark_evictable", slots[~busy[slots]])
        elif action == 4:
            twins.call("pop_oldest", rng.randint(-1, rng.choice([2, capacity + 1])), busy)
        elif action == 5 and rng.random() < 0.2:
            twins.call("clear")
        elif action == 6:
            twins.call("append", array([10**6]))
            twins.call("discard", np.array([0.5]))
        twins.call("holds", slots)
        twins.check()


@EXAMPLES
@given(seed=SEEDS, capacity=st.integers(1, 40))
def test_list(seed: int, capacity: int) -> None:
    twins = Twins(reference.RecencyList(capacity), lists.RecencyList(capacity))
    drive_list(random.Random(seed), twins, capacity)


# Planted differences, which the tests above must find.


class StaleTable(PlainBlockTable):
    """Finds one key that has left."""

    def find(self, keys: Any) -> Any:
        found = super().find(keys)
        found[found == -1] = -2 if len(keys) == 17 else -1
        return found


class MisplacedTable(PlainBlockTable):
    """Counts a dropped block as evictable when its transfer ends."""

    def unpin(self, slots: Any) -> Any:
        idle, freed = super().unpin(slots)
        self.num_evictable += len(freed) > 0
        return idle, freed


class HastyList(reference.RecencyList):
    """Skips busy members beyond the last one that it removes."""

    def pop_oldest(self, n: int, busy: Any) -> Any:
        popped = super().pop_oldest(n, busy)
        slots, positions = reference.pop((self,), 1, busy)
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            self._mark(slot, position)
        return popped


class LastSlotFirst(reference.FreeSlots):
    """Hands out the lowest slot of those on top first."""

    def take(self, n: int) -> Any:
        return super().take(n)[::-1]


def drive_planted(plant: str, rng: random.Random) -> None:
    if plant == "keys":
        drive_table(rng, tables(20, StaleTable), 20)
    elif plant == "table":
        drive_table(rng, tables(20, MisplacedTable), 20)
    elif plant == "list":
        drive_list(rng, Twins(HastyList(20), lists.RecencyList(20)), 20)
    else:
        slots = Slots(20, LastSlotFirst)
        for _ in range(2 * STEPS):
            slots.step(rng)


@pytest.mark.parametrize("plant", ["keys", "table", "list", "slots"])
def test_a_planted_difference_is_found(plant: str) -> None:
    def drive_many() -> None:
        for seed in range(200):
            drive_planted(plant, random.Random(seed))

    with pytest.raises(AssertionError):
        drive_many()
