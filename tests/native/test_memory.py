"""Native code neither loses nor leaks references, and bad input raises instead of reaching memory."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffload.cache.keys import hash_keys
from kvoffload.cache.table import BlockTable
from kvoffload.native import load
from tests.native.twins import COLLIDING

native: Any = load("_cache")
lists: Any = load("_ghosts")
pytestmark = pytest.mark.skipif(None in (native, lists), reason="there is no native code here")

FREE = np.zeros(8, dtype=np.bool_)
SLOTS = np.arange(4)


def table() -> Any:
    table = native.BlockTable(8)
    table.insert([b"a", b"b"], np.array([0, 1]))
    return table


def members() -> Any:
    members = lists.RecencyList(8)
    members.append(SLOTS)
    return members


BAD_CALLS: dict[str, Callable[[], Any]] = {
    "keys that are no sequence": lambda: table().find(7),
    "a key that is no bytes": lambda: table().find([b"a", "b"]),
    "a negative slot": lambda: table().remove(np.array([-1])),
    "slots that do not exist": lambda: table().insert([b"x"], np.array([8])),
    "a slot of the largest number": lambda: table().remove(np.array([2**64 - 1], dtype=np.uint64)),
    "slots in two dimensions": lambda: table().remove(np.zeros((2, 2), dtype=np.int64)),
    "slots in no dimension": lambda: table().remove(np.array(1)),
    "fractions": lambda: table().remove(np.array([0.5])),
    "flags for slots": lambda: table().remove(np.array([True])),
    "fewer slots than keys": lambda: table().insert([b"x", b"y"], np.array([2])),
    "no busy marks": lambda: members().pop_oldest(1, None),
    "too few busy marks": lambda: members().pop_oldest(1, FREE[:7]),
    "busy marks of another kind": lambda: members().pop_oldest(1, FREE.astype(np.int64)),
    "busy marks in no dimension": lambda: members().pop_oldest(1, np.array(True)),
    "keys that are too short": lambda: native.ranks(np.zeros(3, dtype=np.uint64), [b"1234567"]),
    "keys that are no bytes": lambda: native.ranks(np.zeros(3, dtype=np.uint64), ["12345678"]),
    "every second digest": lambda: native.ranks(np.zeros(6, dtype=np.uint64)[::2], [b"12345678"]),
    "digests of another type": lambda: native.ranks(np.zeros(3, dtype=np.int64), [b"12345678"]),
    "no digests": lambda: native.ranks(None, [b"12345678"]),
    "a slot that does not exist is free": lambda: native.FreeSlots(4).add(np.array([4])),
    "more free slots than there are": lambda: native.FreeSlots(2).add(np.array([0, 1, 1])),
    "no slots at all": lambda: native.BlockTable(-1),
    "more slots than numbers": lambda: native.BlockTable(2**28 + 1),
    "a list without an end": lambda: lists.RecencyList(2**62),
    "no capacity": lambda: native.BlockTable(),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_input_is_an_error(call: str) -> None:
    with pytest.raises((IndexError, TypeError, ValueError)):
        BAD_CALLS[call]()


def rounds(n: int, keys: list[Any]) -> None:
    """Every way of a key in and out, with errors half way."""
    table = BlockTable(len(keys))
    recent = lists.RecencyList(len(keys))
    slots, busy = np.arange(len(keys)), np.zeros(len(keys), dtype=np.bool_)
    for _ in range(n):
        table.insert(table.split([*keys, *keys])[1], slots)
        table.split(keys)
        table.find([*keys, b"absent"])
        table.remove(slots)
        for wrong in ([*keys[:-1], []], keys[:-1]):
            with pytest.raises((IndexError, TypeError)):
                table.insert(wrong, slots)
        table.insert(keys, slots)
        assert len(table.drop_all()) == 0
        table.set_ready(slots)
        hash_keys(keys)
        recent.append(slots)
        busy[::2] = True
        recent.pop_oldest(len(keys), busy)
        busy[:] = False
        recent.mark_evictable(slots)
        recent.pop_oldest(len(keys), busy)


def test_references_are_neither_lost_nor_kept() -> None:
    keys = [i.to_bytes(3, "little") for i in range(250)] + COLLIDING[:50]
    rounds(2, keys)
    gc.collect()
    before = [sys.getrefcount(key) for key in keys]
    none = sys.getrefcount(None)
    tracemalloc.start()
    try:
        rounds(1, keys)
        taken, _ = tracemalloc.get_traced_memory()
        rounds(20, keys)
        gc.collect()
        more, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(key) for key in keys] == before
    assert abs(sys.getrefcount(None) - none) < 100
    assert more < taken + 20_000, "memory is lost in every round"
