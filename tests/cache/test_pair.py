"""The lists of ``AutoPolicy``: native code and the reference, each alone and with each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.abc import IntegrityError
from kvoffload.native import load
from kvoffload.native.reference import AGE_BOUNDS, GAP_CLASSES, GapLists, ReturnRates

CAPACITY = 24
native = load("_ghosts")
VERSIONS = [GapLists] if native is None else [GapLists, native.GapLists]
versions = pytest.mark.parametrize("make", VERSIONS, ids=["reference", "native"][: len(VERSIONS)])
needs_native = pytest.mark.skipif(native is None, reason="there is no native code")


def learned(rates: Any) -> Any:
    """Returns rates of return with which each class has values of its own."""
    for gap in range(GAP_CLASSES):
        for at, age in enumerate(AGE_BOUNDS[:-1]):
            for i in range(5):
                rates.add(gap, age, (7 * gap + 3 * at) % 5 > i)
    rates.update(0.5)
    return rates


RATES = [learned(ReturnRates())] if native is None else [learned(ReturnRates()), learned(native.ReturnRates())]
slot_lists = st.lists(st.integers(0, CAPACITY - 1), unique=True, max_size=8)
calls: Any = st.one_of(
    st.tuples(st.sampled_from(["use", "insert"]), slot_lists, st.integers(0, 255)),
    st.tuples(st.sampled_from(["move_to_end", "discard", "mark_evictable"]), slot_lists, st.just(0)),
    st.tuples(
        st.sampled_from(["pop_oldest", "pop_shared", "pop_least", "num_refused"]),
        slot_lists,
        st.integers(0, 9),
    ),
    st.tuples(st.just("begin"), st.just([]), st.sampled_from([1, 3, 100, 10_000, 100_000])),
)


def array(slots: list[int]) -> np.ndarray:
    return np.array(slots, dtype=np.int64)


def rates_of(pair: Any) -> Any:
    return RATES[not isinstance(pair, GapLists)]


def apply(pair: Any, call: tuple[str, list[int], int], members: set[int]) -> object:
    """Makes one call. ``slots`` are limited to those that the contract of a policy allows."""
    name, slots, number = call
    if name in ("use", "insert"):
        slots = [slot for slot in slots if (slot in members) == (name == "use")]
        if name == "use":
            pair.use(array(slots), np.array([number >> i & 1 for i in range(len(slots))], dtype=np.bool_))
        else:
            pair.insert(array(slots), array([(number >> i & 7) % GAP_CLASSES for i in range(len(slots))]))
    elif name == "begin":
        pair.begin(number)
    elif name == "num_refused":
        classes, stamps = array([slot % GAP_CLASSES for slot in slots]), array([1000 * slot for slot in slots])
        return pair.num_refused(classes, stamps, number, rates_of(pair))
    elif name.startswith("pop"):
        busy = np.zeros(CAPACITY, dtype=np.bool_)
        busy[slots] = True
        popped, positions = {
            "pop_oldest": lambda: pair.pop_oldest(number, busy),
            "pop_shared": lambda: pair.pop_shared(number, len(slots), busy),
            "pop_least": lambda: pair.pop_least(number, busy, rates_of(pair)),
        }[name]()
        return popped.tolist(), positions.tolist()
    else:
        getattr(pair, name)(array(slots))
    return None


def follow(pairs: list[Any], script: list[tuple[str, list[int], int]]) -> None:
    """Makes the same calls of all pairs, and compares what can be seen of them."""
    members: set[int] = set()
    for call in script:
        answers = [apply(pair, call, members) for pair in pairs]
        assert all(answer == answers[0] for answer in answers)
        name, slots, _ = call
        if name == "insert":
            members |= set(slots)
        elif name == "discard":
            members -= set(slots)
        elif isinstance(answers[0], tuple):
            members -= set(answers[0][0])
        inside = array(sorted(members))
        assert all(pair.classes(inside).tolist() == pairs[0].classes(inside).tolist() for pair in pairs)
        seen = [(pair.num_once, pair.num_again, pair.tick(1).tolist()) for pair in pairs]
        assert all(each == seen[0] for each in seen)
        for pair in pairs:
            pair.check_integrity(array(sorted(members)))


@needs_native
@given(st.lists(calls, max_size=40))
def test_both_versions_are_the_same(script: list[tuple[str, list[int], int]]) -> None:
    assert native is not None
    follow([GapLists(CAPACITY), native.GapLists(CAPACITY)], script)


class SkipsTooMuch(GapLists):
    """Passes over busy members that are more recent than all victims."""

    def pop_oldest(self, n: int, busy: Any) -> Any:
        victims = super().pop_oldest(n, busy)
        self.pop_shared(1, 0, busy | True)
        return victims


class ForgetsThePlace(GapLists):
    """A skipped member comes back as the most recent one."""

    def mark_evictable(self, slots: Any) -> None:
        super().mark_evictable(slots)
        self.move_to_end(slots[:1])


class TakesTheOldest(GapLists):
    """Does not look at the rates of return."""

    def pop_least(self, n: int, busy: Any, rates: Any) -> Any:
        return self.pop_oldest(n, busy)


@needs_native
@pytest.mark.parametrize("planted", [SkipsTooMuch, ForgetsThePlace, TakesTheOldest])
def test_a_planted_difference_is_found(planted: type[GapLists]) -> None:
    assert native is not None
    script = [
        ("insert", [1, 2, 3, 4], 0b1010),
        ("pop_oldest", [1, 2], 1),
        ("mark_evictable", [2], 0),
        ("pop_oldest", [], 2),
        ("insert", [5, 6, 7], 0b101),
        ("begin", [], 100),
        ("insert", [8, 9, 10], 0b111),
        ("pop_least", [], 2),
    ]
    follow([GapLists(CAPACITY), native.GapLists(CAPACITY)], script)
    with pytest.raises(AssertionError):
        follow([planted(CAPACITY), native.GapLists(CAPACITY)], script)


@versions
def test_the_integrity_check_finds_a_wrong_set_of_members(make: type[GapLists]) -> None:
    pair = make(8)
    pair.insert(array([0, 1]), array([0, 1]))
    pair.check_integrity(array([0, 1]))
    for wrong in ([0], [0, 1, 2], [0, 2]):
        with pytest.raises(IntegrityError):
            pair.check_integrity(array(wrong))
    pair.clear()
    pair.check_integrity(array([]))


@needs_native
def test_native_code_refuses_what_it_cannot_take() -> None:
    assert native is not None
    pair = native.GapLists(4)
    for slots in ([4], [-1], [0, 1 << 40]):
        with pytest.raises(IndexError):
            pair.use(array(slots), np.ones(len(slots), dtype=np.bool_))
    with pytest.raises(IndexError):
        pair.insert(array([0, 1]), array([1]))
    with pytest.raises(TypeError):
        pair.insert(array([0, 1]), np.ones(2))
    with pytest.raises(TypeError):
        pair.discard(np.array([0.5]))
    with pytest.raises(IndexError):
        pair.pop_oldest(1, np.zeros(3, dtype=np.bool_))
    with pytest.raises(ValueError, match="capacity"):
        native.GapLists(-1)
    pair.check_integrity(array([]))


@needs_native
def test_many_skipped_members_come_back_in_order() -> None:
    assert native is not None
    pair, plain = native.GapLists(5000), GapLists(5000)
    rng = np.random.default_rng(0)
    for each in (pair, plain):
        each.insert(np.arange(5000), np.arange(5000) % 3)
        each.pop_oldest(1, np.arange(5000) < 4999)
    for _ in range(20):
        marked = rng.permutation(4999)[:900]
        busy = rng.random(5000) < 0.5
        moved = rng.permutation(4999)[:100]
        answers = []
        for each in (pair, plain):
            each.mark_evictable(marked)
            each.move_to_end(moved)
            slots, positions = each.pop_oldest(150, busy)
            answers.append((slots.tolist(), positions.tolist()))
        assert answers[0] == answers[1]
