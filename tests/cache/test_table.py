"""BlockTable: states, counters, and the check that notices when they disagree."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffload.abc import IntegrityError
from kvoffload.cache.table import BlockTable


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.fixture
def table() -> BlockTable:
    """a and b ready in slots 2 and 0, c being written in slot 1."""
    table = BlockTable(4)
    table.insert(keys("a", "b", "c"), slots(2, 0, 1))
    table.set_ready(slots(2, 0))
    return table


def test_a_held_block_is_not_evictable_and_its_last_holder_gives_it_back(table: BlockTable) -> None:
    table.hold(slots(2, 0))
    table.hold(slots(2))
    assert (table.num_evictable, table.busy[[2, 0]].tolist()) == (0, [True, True])
    assert table.release(slots(2, 0)).tolist() == [0]
    assert table.release(slots(2)).tolist() == [2]
    assert table.num_evictable == 2
    table.check_integrity()


@pytest.mark.parametrize("release_first", [True, False])
def test_a_block_that_is_held_and_read_is_evictable_when_both_are_done(table: BlockTable, release_first: bool) -> None:
    assert table.pin(slots(2)).tolist() == [2]
    table.hold(slots(2))
    ends = [lambda: table.release(slots(2)), lambda: table.unpin(slots(2))]
    first, second = ends if release_first else ends[::-1]
    first()
    assert table.busy[2]
    table.check_integrity()
    second()
    assert not table.busy[2]
    table.check_integrity()


def test_holders_count_as_users(table: BlockTable) -> None:
    table.pin(slots(2))
    table.hold(slots(2))
    status = table.status(b"a")
    assert status is not None
    assert status.ref_cnt == 2


def test_find_keeps_order_and_duplicates(table: BlockTable) -> None:
    assert table.find(keys("c", "x", "a", "c")).tolist() == [1, -1, 2, 1]
    assert table.find([]).tolist() == []


def test_leading_ready_stops_at_what_is_written_or_absent(table: BlockTable) -> None:
    assert table.leading_ready(keys("a", "b", "c", "a")) == 2
    assert table.leading_ready(keys("a", "x", "b")) == 1
    assert table.leading_ready(keys("x")) == 0


def test_leading_ready_beyond_one_chunk() -> None:
    table = BlockTable(5000)
    names = [i.to_bytes(4, "big") for i in range(5000)]
    table.insert(names, np.arange(5000))
    table.set_ready(np.arange(5000)[np.arange(5000) != 3777])
    assert table.leading_ready(names) == 3777
    assert table.leading_ready(names[:3777]) == 3777


def test_pins_nest_and_count_once_a_call(table: BlockTable) -> None:
    assert table.num_evictable == 2
    assert table.pin(slots(2)).tolist() == [2]
    assert table.pin(slots(2, 0)).tolist() == [0]
    assert table.num_evictable == 0
    assert table.unpin(slots(2, 0)).tolist() == [0]
    assert table.unpin(slots(2)).tolist() == [2]
    assert table.num_evictable == 2
    table.check_integrity()


def test_distinct_keeps_the_last(table: BlockTable) -> None:
    assert table.distinct(slots(1, 2, 1, 0, 2)).tolist() == [1, 0, 2]


def test_removal_from_any_state(table: BlockTable) -> None:
    table.pin(slots(0))
    assert table.remove(slots(1, 0, 2)) == keys("c", "b", "a")
    assert (len(table), table.num_evictable) == (0, 0)
    table.check_integrity()


@pytest.mark.parametrize(
    "harm",
    [
        lambda table: table.ref_cnt.__setitem__(3, 1),
        lambda table: table.ref_cnt.__setitem__(2, -2),
        lambda table: table.busy.__setitem__(2, True),
        lambda table: setattr(table, "num_evictable", 1),
        lambda table: table.key_of.__setitem__(2, b"other"),
    ],
)
def test_check_integrity_notices(table: BlockTable, harm) -> None:
    table.check_integrity()
    harm(table)
    with pytest.raises(IntegrityError):
        table.check_integrity()


def test_a_long_life_keeps_the_books() -> None:
    rng = random.Random(1)
    table = BlockTable(50)
    free, writing, ready = list(range(50)), [], []
    for i in range(500):
        if free and rng.random() < 0.5:
            slot = free.pop()
            table.insert([i.to_bytes(4, "big")], slots(slot))
            writing.append(slot)
        elif writing and rng.random() < 0.7:
            ready.append(writing.pop())
            table.set_ready(slots(ready[-1]))
        elif ready:
            free.append(ready.pop(rng.randrange(len(ready))))
            table.remove(slots(free[-1]))
        assert table.num_evictable == len(ready)
    table.check_integrity()
