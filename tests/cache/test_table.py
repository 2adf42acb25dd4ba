"""BlockTable: states, counters, and the check that notices when they disagree."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvoffload.abc import IntegrityError
from kvoffload.cache.table import BlockTable
from tests.native.twins import PlainBlockTable


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


def test_pins_nest_and_count_once_per_call(table: BlockTable) -> None:
    assert table.num_evictable == 2
    table.pin(slots(2))
    table.pin(slots(2, 0))
    assert (table.num_evictable, table.busy[[2, 0]].tolist()) == (0, [True, True])
    status = table.status(b"a")
    assert status is not None
    assert status.ref_cnt == 2
    assert [part.tolist() for part in table.unpin(slots(2, 0))] == [[0], []]
    assert [part.tolist() for part in table.unpin(slots(2))] == [[2], []]
    assert table.num_evictable == 2
    table.check_integrity()


@pytest.mark.parametrize("everything", [False, True])
def test_a_dropped_block_keeps_its_slot_until_its_transfer_ends(table: BlockTable, everything: bool) -> None:
    table.pin(slots(2))
    freed = table.drop_all() if everything else table.drop(slots(0, 1, 2))
    assert freed.tolist() == [0]
    table.check_integrity()
    assert table.find(keys("a", "b", "c")).tolist() == [-1, -1, -1]
    assert table.find_in_transfer(keys("a", "b", "c")).tolist() == [2, -1, 1]
    assert (len(table), table.num_held, table.slots().tolist()) == (0, 2, [])
    assert (b"a" in table, table.status(b"a"), table.split(keys("a", "b"))[1]) == (False, None, keys("b"))
    assert table.is_dropped(slots(2, 1)).tolist() == [True, True]
    assert [part.tolist() for part in table.unpin(slots(2))] == [[], [2]]
    assert [part.tolist() for part in table.set_ready(slots(1))] == [[], [1]]
    assert (table.num_held, table.num_evictable, bool(table.is_dropped(slots(2, 1)).any())) == (0, 0, False)
    table.check_integrity()


def test_only_ready_blocks_that_were_not_dropped_are_loadable(table: BlockTable) -> None:
    assert table.is_loadable(slots(2, 0, 1, 3)).tolist() == [True, True, False, False]
    table.pin(slots(0))
    table.drop(slots(0))
    assert table.is_loadable(slots(2, 0)).tolist() == [True, False]


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
        lambda table: table.key_of.__setitem__(2, b"b"),
        lambda table: table.drop_all() is None or table.ref_cnt.__setitem__(1, 0),
    ],
)
def test_check_integrity_notices(table: BlockTable, harm: Callable[[BlockTable], object]) -> None:
    table.check_integrity()
    harm(table)
    with pytest.raises(IntegrityError):
        table.check_integrity()


def test_counters_agree_after_a_long_life() -> None:
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


def answer(found: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    return [each.tolist() for each in found]


@pytest.mark.parametrize("kind", [PlainBlockTable, BlockTable])
def test_slots_of_a_request(kind: type[BlockTable]) -> None:
    table = kind(8)
    table.insert(keys("a", "b", "c", "d"), slots(5, 1, 7, 2))
    assert answer(table.set_ready(slots(1, -1, 2, 1))) == [[1, 2], []]
    assert answer(table.set_ready(slots(1, -1, 2))) == [[], []]
    assert answer(table.used(slots(5, -1, 1, 5, 7, 1))) == [[7, 1, 5], [False, True, False]]
    assert answer(table.chain(slots(5, -1, 1, 5, 7, 1), keys("d", "a", "x", "c"))) == [[7, 1, 5], [True, False, True]]
    assert table.being_written(slots(7, -1, 1, 5, 7, 3)).tolist() == [7, 5]
    assert table.idle(slots(1, 7, 2, 1)).tolist() == [2, 1]
    assert answer(table.used(slots())) == answer(table.chain(slots(), [])) == [[], []]
    assert table.being_written(slots()).tolist() == table.idle(slots()).tolist() == []
    for method in (table.used, table.being_written, table.set_ready, table.idle, lambda each: table.chain(each, [])):
        with pytest.raises(IndexError):
            method(slots(8))


@pytest.mark.parametrize("kind", [PlainBlockTable, BlockTable])
def test_only_idle_blocks_are_evicted(kind: type[BlockTable]) -> None:
    table = kind(8)
    table.insert(keys("a", "b", "c", "d"), slots(5, 1, 7, 2))
    table.set_ready(slots(1, 2, 7))
    table.pin(slots(7))
    for wrong in (slots(1, 5), slots(1, 7), slots(1, 1), slots(1, -1), slots(1, 8), slots(1, 0)):
        assert table.evict(wrong) is None
        table.check_integrity()
    assert table.evict(slots()) == []
    assert table.evict(slots(2, 1)) == keys("d", "b")
    assert table.num_evictable == 0
    assert table.find(keys("a", "b", "c", "d")).tolist() == [5, -1, 7, -1]
    table.check_integrity()
