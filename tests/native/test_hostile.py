"""Callers who change what they gave, make objects in strange ways or choose keys that collide do no harm."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.cache.keys import hash_keys
from kvoffload.cache.policies.tournament import RULES
from kvoffload.cache.table import BlockTable
from kvoffload.native import load, reference
from tests.native.twins import COLLIDING

cache: Any = load("_cache")
ghosts: Any = load("_ghosts")
copies: Any = load("_copies")
pytestmark = pytest.mark.skipif(None in (cache, ghosts, copies), reason="there is no native code here")

MOST = 2**64 - 1

MAKERS: dict[str, Callable[[], Any]] = {
    "BlockTable": lambda: cache.BlockTable(8),
    "RecencyList": lambda: ghosts.RecencyList(8),
    "GhostTable": lambda: ghosts.GhostTable(8),
    "Shadows": lambda: ghosts.Shadows(8, 4, RULES),
    "KeyQueue": lambda: ghosts.KeyQueue(8),
    "GapLists": lambda: ghosts.GapLists(8),
    "BlockCopier": lambda: copies.BlockCopier([np.zeros((2, 3), np.uint8)], np.zeros((1, 1, 3), np.uint8), [0]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_no_object_exists_without_its_memory(name: str) -> None:
    made = MAKERS[name]()
    with pytest.raises(TypeError):
        type(made).__new__(type(made))  # type: ignore[call-overload]
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            duplicate(made)


def test_an_object_is_not_made_again() -> None:
    shadows, pair = MAKERS["Shadows"](), MAKERS["GapLists"]()
    for made, arguments in ((shadows, (8, 2**40, RULES * 50)), (pair, (2**40,))):
        with contextlib.suppress(MemoryError, TypeError, ValueError):
            made.__init__(*arguments)
    with pytest.raises(IndexError):
        shadows.held(100)
    assert shadows.access(np.arange(20, dtype=np.uint64), MOST, 0) == (20, (0, 0, 0))
    with pytest.raises(IndexError):
        pair.discard(np.array([10**9]))


class Shifting:
    """A number that is another one whenever it is asked for."""

    def __init__(self) -> None:
        self.value = 1

    def __index__(self) -> int:
        self.value *= 2
        return self.value


def test_all_arrays_of_an_object_have_the_same_size() -> None:
    table, slots = cache.BlockTable(Shifting()), cache.FreeSlots(Shifting())
    assert {len(each) for each in (table.key_of, table.ref_cnt, table.busy, table.dropped)} == {table.num_blocks}
    with pytest.raises(IndexError):
        slots.add(np.arange(len(slots.allocated) + 1))
    with pytest.raises(IndexError):
        table.pin(np.array([table.num_blocks]))


def test_arrays_that_callers_see_cannot_be_resized() -> None:
    # Nothing else may refer to the array: numpy then refuses anyway.
    table = cache.BlockTable(1000)
    with pytest.raises(ValueError, match="resize"):
        table.key_of.resize(0)
    with pytest.raises(ValueError, match="resize"):
        table.ref_cnt.resize(0)
    with pytest.raises(ValueError, match="resize"):
        table.busy.resize(0)


def unaligned(numbers: np.ndarray) -> np.ndarray:
    raw = np.zeros(numbers.nbytes + 1, dtype=np.uint8)
    raw[1:] = numbers.view(np.uint8)
    return raw[1:].view(numbers.dtype)


def read_only(numbers: np.ndarray) -> np.ndarray:
    numbers = numbers.copy()
    numbers.flags.writeable = False
    return numbers


KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "big-endian": lambda numbers: numbers.astype(numbers.dtype.newbyteorder(">")),
    "small": lambda numbers: numbers.astype(np.uint8) if numbers.dtype == np.int64 else numbers,
    "signed": lambda numbers: numbers.astype(np.int32) if numbers.dtype == np.int64 else numbers,
    "unaligned": unaligned,
    "every second": lambda numbers: np.repeat(numbers, 2)[::2],
    "backwards": lambda numbers: numbers[::-1].copy()[::-1],
    "read-only": read_only,
    "of a subclass": lambda numbers: numbers.view(np.ma.MaskedArray),
}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_any_kind_mean_the_same(kind: str) -> None:
    change = KINDS[kind]
    slots, flags, none = np.array([5, 0, 7, 2]), np.array([True, False, False, True]), np.zeros(8, dtype=np.bool_)
    hashes = np.array([1 << 40, 5, 1 << 63, 77], dtype=np.uint64)
    answers = []
    for pair, table in ((reference.GapLists(8), reference.GhostTable(50)), (ghosts.GapLists(8), ghosts.GhostTable(50))):
        pair.insert(change(slots), change(flags.astype(np.int64)))
        pair.use(change(slots[:2]), change(flags[:2]))
        table.add(change(hashes), change(slots))
        table.add(change(hashes[:1]), change(slots[:1]), change(slots[:1]))
        table.use(change(hashes[1:]), 10**6)
        classes, stamps = table.classes(change(hashes)), table.stamps(change(hashes))
        answers.append([each.tolist() for each in (*pair.pop_oldest(9, change(none)), classes, stamps)])
    assert answers[0] == answers[1]
    blocks = cache.BlockTable(8)
    blocks.insert([b"a", b"b", b"c", b"d"], change(slots))
    assert blocks.find([b"d", b"a"]).tolist() == [2, 5]
    assert blocks.remove([0, 7]) == [b"b", b"c"], "a list means the same too"


class Tagged(bytes):
    """A key of an embedder's own type."""


def test_a_key_queue_takes_bytes_of_a_subclass_and_nothing_else() -> None:
    keys = [Tagged(b"abc"), b"d"]
    for queue in (reference.KeyQueue(4), ghosts.KeyQueue(4)):
        queue.add(keys)
        assert queue.holds([b"abc", Tagged(b"d"), b"e"]).tolist() == [True, True, False]
        assert Tagged(b"abc") in queue
        assert "abc" not in queue
        queue.discard([Tagged(b"d")])
        assert list(queue) == [b"abc"]
    with pytest.raises(TypeError, match="must be bytes, not str"):
        queue.add([b"x", "text"])  # type: ignore[list-item]
    assert list(queue) == [b"abc"], "a call that fails changes nothing"


# Code that runs in the middle of a call.

FINALIZERS = """
import gc
import numpy as np
from kvoffload.native import load
cache, ghosts = load("_cache"), load("_ghosts")

class Harm:
    # In a cycle, so that the garbage collector finalizes it, when any list or tuple is made.
    def __init__(self, slots): self.me, self.slots = self, slots
    def __del__(self): self.slots[:] = 10**9

def call(method, *others):
    slots = np.arange(2000)
    gc.disable()
    for _ in range(3): Harm(slots)
    gc.set_threshold(1)
    gc.enable()
    try: return method(slots, *others)
    except IndexError: return None
    finally: gc.set_threshold(700)

keys = [b"%d" % i for i in range(2000)]
ready, none_busy = [True] * 2000, np.zeros(2000, dtype=np.bool_)
for _ in range(20):
    table = cache.BlockTable(2000)
    pair, recent = ghosts.GapLists(2000), ghosts.RecencyList(2000)
    call(lambda slots: table.insert(keys, slots))
    table.remove(np.flatnonzero([key is not None for key in table.key_of]))
    table.insert(keys, np.arange(2000))
    call(table.remove)
    call(lambda slots: table.chain(slots, []))
    call(table.idle)
    call(table.evict)
    call(recent.append)
    recent.append(np.arange(2000))
    recent.pop_oldest(5, np.ones(2000, dtype=np.bool_))
    call(recent.mark_evictable)
    call(lambda slots: pair.insert(slots, [1] * 2000))
    call(lambda slots: pair.use(slots, ready))
    pair.insert(np.arange(2000), np.zeros(2000, dtype=np.int64))
    pair.pop_shared(5, 5, np.ones(2000, dtype=np.bool_))
    call(pair.mark_evictable)
print("survived")
"""


def test_a_process_survives_finalizers_that_change_what_was_given() -> None:
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    ended = subprocess.run(
        [sys.executable, "-c", FINALIZERS], env=environment, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stdout) == (0, "survived\n"), ended.stderr[-2000:]


# Keys that a client chooses.


def cpu_s(call: Callable[[], object]) -> float:
    """Returns the least time of three calls."""
    times = []
    for _ in range(3):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return min(times)


FACTOR = 0x9E3779B97F4A7C15
"""Of the multiplicative hash of native tables."""
CHOSEN = 6000


def test_names_that_are_chosen_to_collide_cost_no_more_than_others() -> None:
    """A search of a table goes on until a place is free: with a known hash it would take CHOSEN / 2 steps."""
    inverse = np.uint64(pow(FACTOR, -1, 2**64))
    low = np.random.default_rng(0).integers(0, 2**32, CHOSEN, dtype=np.uint64)
    together, apart = low * inverse, np.random.default_rng(1).integers(0, MOST, CHOSEN, dtype=np.uint64)
    assert not (together * np.uint64(FACTOR) >> np.uint64(32)).any(), "without a secret all are in one place"
    shadows = [ghosts.Shadows(2048, 0, RULES) for _ in range(2)]
    times = [cpu_s(partial(s.access, n, MOST, 0)) for s, n in zip(shadows, (together, apart), strict=True)]
    assert times[0] < 15 * times[1] + 0.001


native: Any = load("_cache")
lists: Any = load("_ghosts")

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
