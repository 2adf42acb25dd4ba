"""KeyIndex compared with the dict that it replaces."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.abc import IntegrityError
from kvoffload.cache.index import SCALAR_BATCH, KeyIndex


class Colliding(bytes):
    """A key whose hash is chosen by its first byte alone: equal tags and buckets are common."""

    def __hash__(self) -> int:
        return self[0] % 3


def make_key(i: int, collide: bool) -> bytes:
    raw = bytes([i % 7]) + i.to_bytes(4, "big")
    return Colliding(raw) if collide else raw


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 300), collide=st.booleans())
def test_agrees_with_a_dict(seed: int, capacity: int, collide: bool) -> None:
    rng = random.Random(seed)
    index = KeyIndex(capacity)
    plain: dict[bytes, int] = {}
    free = list(range(capacity))
    universe = [make_key(i, collide) for i in range(2 * capacity)]
    fixed = tuple(rng.choices(universe, k=20))
    for _ in range(12):
        absent = [key for key in universe if key not in plain]
        new = rng.sample(absent, rng.randint(0, min(len(absent), len(free))))
        slots = [free.pop(rng.randrange(len(free))) for _ in new]
        present, others, homes = index.split(new)
        assert len(present) == 0
        assert others == new
        index.insert(new, np.array(slots, dtype=np.int64), homes)
        plain.update(zip(new, slots, strict=True))
        index.check_integrity()
        asked = rng.choices(universe, k=rng.randint(0, 2 * capacity))
        assert index.find(asked).tolist() == [plain.get(key, -1) for key in asked]
        assert index.find(fixed).tolist() == [plain.get(key, -1) for key in fixed]
        assert [index.get(key) for key in asked] == [plain.get(key, -1) for key in asked]
        present, others, _ = index.split(asked)
        assert present.tolist() == [plain[key] for key in asked if key in plain]
        assert others == list(dict.fromkeys(key for key in asked if key not in plain))
        gone = rng.sample(list(plain), rng.randint(0, len(plain)))
        assert index.remove(np.array([plain[key] for key in gone], dtype=np.int64)) == gone
        free += [plain.pop(key) for key in gone]
        index.check_integrity()
        assert len(index) == len(plain)


def test_a_matching_tag_is_not_a_matching_key() -> None:
    index = KeyIndex(64)
    held = [Colliding(bytes([0]) + i.to_bytes(2, "big")) for i in range(2 * SCALAR_BATCH)]
    index.insert(held, np.arange(len(held)))
    absent = [Colliding(bytes([3]) + i.to_bytes(2, "big")) for i in range(2 * SCALAR_BATCH)]
    assert (index.find(absent) == -1).all()
    assert index.find(held).tolist() == list(range(len(held)))


def test_check_integrity_notices_a_lost_entry() -> None:
    index = KeyIndex(100)
    keys = [make_key(i, False) for i in range(50)]
    index.insert(keys, np.arange(50))
    index.check_integrity()
    index._tags[:] = 0
    with pytest.raises(IntegrityError, match="not found"):
        index.check_integrity()


def test_check_integrity_notices_a_lost_count_and_a_stale_entry() -> None:
    index = KeyIndex(100)
    index.insert([b"a"], np.array([3]))
    index._len = 2
    with pytest.raises(IntegrityError, match="counts its keys wrongly"):
        index.check_integrity()
    index._len = 1
    index._tags.ravel()[np.flatnonzero(index._tags.ravel() == 0)[0]] = 5
    with pytest.raises(IntegrityError, match="entries of removed keys"):
        index.check_integrity()


@pytest.mark.parametrize("n", [SCALAR_BATCH - 1, 3 * SCALAR_BATCH])
def test_the_same_tuple_is_looked_up_again_after_every_change(n: int) -> None:
    index = KeyIndex(64)
    keys = tuple(make_key(i, False) for i in range(n))
    assert (index.find(keys) == -1).all()
    _, absent, homes = index.split(keys)
    index.insert(absent, np.arange(n), homes)
    assert index.find(keys).tolist() == list(range(n))
    assert index.split(keys)[0].tolist() == list(range(n))
    index.remove(np.array([2]))
    assert index.find(keys)[2] == -1
    assert index.split(keys)[1] == [keys[2]]
