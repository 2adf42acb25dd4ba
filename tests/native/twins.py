"""Two objects that must give the same answers: every call goes to both."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.abc import IntegrityError
from kvoffload.cache.table import BlockTable
from kvoffload.native import reference

if TYPE_CHECKING:
    PlainBlockTable = BlockTable
else:
    methods = {name: each for name, each in vars(BlockTable).items() if name not in ("__dict__", "__weakref__")}
    PlainBlockTable = type("PlainBlockTable", (reference.BlockTable,), methods)
"""The table of a manager on that of the reference, whatever native code there is."""


class Own(bytes):
    """A key of an embedder's own type."""


COLLIDING = [key for key in (i.to_bytes(4, "big") for i in range(100_000)) if not hash(key) & 0xFF]
"""Some 400 keys that belong into one bucket of a small table."""


def make_key(i: int) -> bytes:
    """Returns keys of which many are in one bucket."""
    return COLLIDING[i // 3] if i % 3 == 0 else (Own if i % 3 == 1 else bytes)(i.to_bytes(5, "big"))


class Twins:
    """Calls methods of a plain and a native object and compares what they return or raise."""

    def __init__(self, plain: Any, native: Any) -> None:
        self.plain = plain
        self.native = native

    def call(self, name: str, *args: Any) -> Any:
        """Returns the answer, or None if both raise an error of the same type."""
        return same_answer(
            lambda: getattr(self.plain, name)(*map(fresh, args)),
            lambda: getattr(self.native, name)(*map(fresh, args)),
            f"{name}{args}",
        )

    def check(self) -> None:
        self.plain.check_integrity()
        self.native.check_integrity()
        assert len(self.plain) == len(self.native)


def same_answer(plain: Callable[[], Any], native: Callable[[], Any], what: str) -> Any:
    answers: list[Any] = []
    errors: list[type[Exception] | None] = []
    for call in (plain, native):
        try:
            answers.append(call())
            errors.append(None)
        except (IndexError, IntegrityError, TypeError, ValueError) as error:
            answers.append(None)
            errors.append(type(error))
    assert errors[0] is errors[1], f"{what}: {errors}"
    assert is_same(*answers), f"{what}: {answers}"
    return answers[0]


def fresh(value: Any) -> Any:
    """Returns a copy, so that neither object sees what the other has done to it."""
    return value.copy() if isinstance(value, np.ndarray) else value


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype.kind == b.dtype.kind and np.array_equal(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and bool(a == b)


def array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def some(rng: random.Random, population: Any) -> list[Any]:
    """Returns distinct members in random order, often none or all."""
    population = list(population)
    return rng.sample(population, rng.choice([0, len(population), *[rng.randint(0, len(population))] * 3]))
