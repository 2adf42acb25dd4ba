"""Bugs planted in what servers on one medium use, and the search for a seed whose simulation finds each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import pytest

from tests.sim.servers import MakeMedium, SharedMedium, simulate_servers
from tests.sim.simulation import run_each

Bug: TypeAlias = Callable[[pytest.MonkeyPatch], type[SharedMedium]]
"""Plants a bug and returns the medium on which it shows."""
Simulate: TypeAlias = Callable[[MakeMedium, int], Counter[str]]


def wrap(target: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a method. ``around`` gets the method, and its arguments."""
    setattr(target, name, partial(around, getattr(target, name)))


def bugs(names: Iterable[Bug], slow: Collection[Bug]) -> list[Any]:
    """Returns parameters of a test. ``make soak`` looks for those in ``slow``, which take long to find."""
    return [pytest.param(bug, marks=pytest.mark.soak if bug in slow else ()) for bug in names]


def failure(seed: int, bug: Bug, simulate: Simulate = simulate_servers) -> str:
    """Returns what the simulation of ``seed`` finds with ``bug`` planted in it, "" for nothing."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        medium = bug(monkeypatch)
        return run_each([seed], lambda seed: simulate(medium, seed)).failures.get(seed, "")


def check_found(
    bug: Bug, laws: Sequence[type[Exception]], hint: int, num_seeds: int, simulate: Simulate = simulate_servers
) -> None:
    """Raises AssertionError unless a seed, ``hint`` or one of the first ``num_seeds``, finds that ``bug`` breaks one of
    ``laws``, and finds nothing without it."""
    names = tuple(f"{law.__name__}: simulation" for law in laws)
    failures = ((seed, failure(seed, bug, simulate)) for seed in [hint, *range(num_seeds)])
    found, law = next(((seed, law) for seed, law in failures if law.startswith(names)), (None, ""))
    assert found is not None, f"not found in {num_seeds} seeds"
    print(f"{bug.__name__}: found by seed {found}: {law}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        medium = bug(monkeypatch)
    assert not run_each([found], lambda seed: simulate(medium, seed)).failures, "found without the bug too"
