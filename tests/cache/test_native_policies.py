"""Native parts of policies, side by side with the reference: ghosts, shadows, key queues and hashes of keys."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.cache.keys import make_offload_key, plain_hash_keys, plain_key_hashes
from kvoffload.cache.policies.tournament import RULES, PlainShadows
from kvoffload.native import load, reference
from tests.native.twins import make_key, same_answer

native: Any = load("_ghosts")
pytestmark = pytest.mark.skipif(native is None, reason="there is no native code")

MOST = 2**64 - 1


# Hashes of keys.


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_hashes_of_keys_are_the_same(keys: list[bytes]) -> None:
    for of_names in (False, True):
        assert native.key_hashes(keys, of_names).tolist() == plain_key_hashes(keys, of_names).tolist()


def test_hashes_of_every_length_are_the_same_and_every_byte_counts() -> None:
    rng = random.Random(0)
    for size in range(140):
        key = rng.randbytes(size)
        changed = [key[:i] + bytes([key[i] ^ 1]) + key[i + 1 :] for i in range(size)]
        hashes = native.key_hashes([key, *changed])
        assert hashes.tolist() == plain_key_hashes([key, *changed]).tolist()
        assert len(set(hashes.tolist())) == size + 1


@given(seed=st.integers(0, 2**32))
def test_hashes_of_python_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    keys = [make_key(rng.randrange(1000)) for _ in range(rng.randint(0, 300))]
    for asked in (keys, tuple(keys), iter(keys)):
        found = native.hash_keys(asked)
        assert found.dtype == np.int64
        assert found.tolist() == plain_hash_keys(keys).tolist()
    wrong: list[Any] = [*keys, []]
    same_answer(lambda: plain_hash_keys(wrong), lambda: native.hash_keys(wrong), "a list as a key")


def test_only_keys_of_bytes_have_a_hash() -> None:
    with pytest.raises(TypeError):
        native.key_hashes([1])
    with pytest.raises(TypeError):
        native.key_hashes(5)


# Ghosts.


class Tables:
    """A plain and a native table that get the same calls."""

    def __init__(self, capacity: int, plain: type[reference.GhostTable] = reference.GhostTable) -> None:
        self.plain, self.native = plain(capacity), native.GhostTable(capacity)
        self.clock = 0

    def seen(self, hashes: np.ndarray) -> None:
        """Compares what is remembered of ``hashes``."""
        for name in ("stamps", "classes"):
            answers = [getattr(table, name)(hashes).tolist() for table in (self.plain, self.native)]
            # As one bool: where CI is set, pytest takes minutes to describe how long lists differ.
            same = answers[0] == answers[1]
            assert same

    def add(self, hashes: np.ndarray) -> None:
        stamps = np.arange(self.clock, self.clock + len(hashes))
        self.clock += len(hashes)
        self.plain.add(hashes, stamps)
        self.native.add(hashes, stamps)

    def change(self, hashes: np.ndarray, remove: bool) -> None:
        for table in (self.plain, self.native):
            if remove:
                table.take(hashes)
            else:
                table.use(hashes, 100 * self.clock)


@pytest.mark.parametrize("capacity", [1, 5, 16, 17, 32, 33, 500, 5000])
def test_ghosts_are_the_same(capacity: int) -> None:
    tables, rng = Tables(capacity), np.random.default_rng(capacity)
    everything = rng.integers(0, MOST, 4 * capacity, dtype=np.uint64, endpoint=True)
    for step in range(80):
        chosen = everything[rng.permutation(4 * capacity)[: rng.integers(1, 2 + capacity // 2)]]
        if step % 4 < 2:
            tables.add(chosen)
        else:
            tables.change(chosen, step % 4 == 2)
        tables.seen(everything[rng.permutation(4 * capacity)[:capacity]])
    tables.seen(everything)


class OverwritesTheLatest(reference.GhostTable):
    def add(self, hashes: Any, stamps: Any, classes: Any = None) -> None:
        for i in range(len(hashes)):
            ((home, _),) = self._homes(hashes[i : i + 1])
            if len(self._buckets[home]) == self._ways:
                self._buckets[home].popitem()
            super().add(hashes[i : i + 1], stamps[i : i + 1])


class RemembersTooMuch(reference.GhostTable):
    def _entries(self, hashes: Any) -> Any:
        return [self._buckets[home].get(tag) for home, tag in self._homes(hashes)]


@pytest.mark.parametrize("planted", [OverwritesTheLatest, RemembersTooMuch])
def test_a_planted_difference_of_ghosts_is_found(planted: type[reference.GhostTable]) -> None:
    rng = np.random.default_rng(0)
    everything = rng.integers(0, MOST, 2000, dtype=np.uint64, endpoint=True)
    tables = Tables(300, planted)

    def churn() -> None:
        for _ in range(40):
            tables.add(everything[rng.permutation(2000)[:200]])
            tables.change(everything[rng.permutation(2000)[:200]], True)
            tables.seen(everything)

    with pytest.raises(AssertionError):
        churn()


def test_stamps_of_32_bits_keep_their_order_for_ever() -> None:
    table = native.GhostTable(100)
    hashes = plain_key_hashes([b"%d" % i for i in range(3)])
    table.add(hashes[:1], np.array([5]))
    for exponent in range(28, 60):
        latest = 1 << exponent
        table.add(hashes[1:], np.array([latest - 10, latest]))
        old, early, late = table.stamps(hashes).tolist()
        assert (early, late) == (latest - 10, latest)
        assert old <= early
    table.use(hashes, latest + 1)
    classes = table.classes(hashes).tolist()
    assert classes[1:] == [1, 1]
    table.add(hashes[1:2], np.array([latest * 4]))
    assert table.classes(hashes).tolist() == classes


def test_native_ghosts_refuse_what_they_cannot_take() -> None:
    table = native.GhostTable(100)
    hashes = plain_key_hashes([b"a", b"b"])
    with pytest.raises(IndexError):
        table.add(hashes, np.array([1]))
    for classes in ([1], [1, 7], [-1, 0]):
        with pytest.raises(IndexError):
            table.add(hashes, np.array([1, 2]), np.array(classes))
    for call in (table.stamps, table.classes, table.take, lambda hashes: table.use(hashes, 0)):
        with pytest.raises(TypeError):
            call(np.array([0.5]))
    with pytest.raises(ValueError, match="capacity"):
        native.GhostTable(0)


# Shadows.


def both_shadows(host: int, device: int, plain: type[PlainShadows] = PlainShadows) -> tuple[Any, Any]:
    return plain(host, device, RULES), native.Shadows(host, device, RULES)


def follow(pair: tuple[Any, Any], chains: list[np.ndarray], limit: int = MOST) -> None:
    rng, now = random.Random(0), 0
    for chain in chains:
        now += rng.choice((0, 1, 10, 1000)) * reference.TICKS_PER_S
        plain, other = (shadows.access(chain, limit, now) for shadows in pair)
        assert (plain[0], list(plain[1])) == (other[0], list(other[1]))
    for rule in range(len(RULES)):
        plain, other = (shadows.held(rule) for shadows in pair)
        assert plain == other
    same = pair[0].known() == pair[1].known()
    assert same
    assert values(pair[0].rates) == values(pair[1].rates)


def values(rates: Any) -> list[float]:
    return [rates.value(gap, age) for gap in range(reference.GAP_CLASSES) for age in reference.AGE_BOUNDS]


def long_chains(seed: int, num: int) -> list[np.ndarray]:
    """Returns chains with shared heads, some of which recur, and some of which are longer than a shadow."""
    rng = np.random.default_rng(seed)
    known: list[np.ndarray] = []
    for i in range(num):
        own = rng.integers(0, MOST, rng.integers(1, 900 if i % 20 == 0 else 40), dtype=np.uint64, endpoint=True)
        if known and rng.random() < 0.7:
            before = known[int(rng.integers(max(0, len(known) - 40), len(known)))]
            own = np.concatenate((before[: int(rng.integers(0, len(before) + 1))], own[: int(rng.integers(0, 9))]))
        known.append(own)
    return known


@pytest.mark.parametrize(("host", "device"), [(1, 0), (1, 1), (5, 20), (40, 0), (40, 200), (300, 0), (300, 40)])
def test_shadows_are_the_same(host: int, device: int) -> None:
    follow(both_shadows(host, device), long_chains(host + device, 600))


def test_shadows_see_the_same_sample() -> None:
    follow(both_shadows(50, 30), long_chains(3, 200), limit=2**62)


class ForgetsNothing(PlainShadows):
    def _forget(self) -> None:
        pass


class HasNoDevice(PlainShadows):
    def __init__(self, host: int, device: int, rules: Any) -> None:
        super().__init__(host, 0, rules)


class SeesTheTailFirst(PlainShadows):
    def access(self, hashes: Any, limit: int, now: int) -> Any:
        return super().access(hashes[::-1], limit, now)


@pytest.mark.parametrize("planted", [ForgetsNothing, HasNoDevice, SeesTheTailFirst])
def test_a_planted_difference_of_shadows_is_found(planted: type[PlainShadows]) -> None:
    with pytest.raises(AssertionError):
        follow(both_shadows(40, 20, planted), long_chains(40, 300))


def test_native_shadows_refuse_what_they_cannot_take() -> None:
    _, shadows = both_shadows(10, 5)
    with pytest.raises(TypeError):
        shadows.access(np.array([0.5]), MOST, 0)
    with pytest.raises(OverflowError):
        shadows.access(np.array([1], dtype=np.uint64), -1, 0)
    with pytest.raises(IndexError):
        shadows.held(len(RULES))
    assert shadows.access(np.array([], dtype=np.uint64), MOST, 0)[0] == 0


# Keys in order.


def drive(queues: tuple[Any, Any], script: list[tuple[str, Any]]) -> None:
    for name, argument in script:
        answers = [getattr(queue, name)(argument) for queue in queues]
        if name == "holds":
            assert answers[0].tolist() == answers[1].tolist()
        assert list(queues[0]) == list(queues[1])
        assert len(queues[0]) == len(queues[1])
        if name != "cut":
            assert all((key in queues[0]) == (key in queues[1]) for key in argument)


def walk_of_a_queue() -> list[tuple[str, Any]]:
    rng = random.Random(0)
    script: list[tuple[str, Any]] = []
    for step in range(150):
        keys = [make_offload_key(rng.randrange(3000).to_bytes(32, "big"), 0) for _ in range(rng.randrange(300))]
        script.append(("cut", rng.randrange(900)) if step % 10 == 9 else (("add", "discard", "add")[step % 3], keys))
        script.append(("holds", keys))
    return script


@pytest.mark.parametrize("limit", [1, 2, 12, 1000])
def test_key_queues_are_the_same(limit: int) -> None:
    drive((reference.KeyQueue(limit), native.KeyQueue(limit)), walk_of_a_queue())


class MovesNoMember(reference.KeyQueue):
    def add(self, keys: Any) -> None:
        super().add([key for key in keys if key not in self])


def test_a_planted_difference_of_key_queues_is_found() -> None:
    with pytest.raises(AssertionError):
        drive((MovesNoMember(1000), native.KeyQueue(1000)), walk_of_a_queue())


def test_a_key_queue_holds_its_keys_and_no_others() -> None:
    queue = native.KeyQueue(50)
    keys = [bytes(bytearray(b"key %d" % n)) for n in range(100)]
    before = [sys.getrefcount(key) for key in keys]
    queue.add(keys)
    assert [sys.getrefcount(key) for key in keys] == [n + (i >= 50) for i, n in enumerate(before)]
    queue.discard(keys[60:70])
    queue.cut(20)
    queue.clear()
    assert [sys.getrefcount(key) for key in keys] == before
    assert list(queue) == []


def test_a_native_key_queue_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="limit"):
        native.KeyQueue(0)
    with pytest.raises(TypeError):
        native.KeyQueue(3).add([[]])
    with pytest.raises(TypeError):
        native.KeyQueue(3).holds(7)
