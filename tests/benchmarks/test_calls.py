"""What stores, hits and idle steps cost on the scheduler's thread, in calls and lookups, which no machine changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.calls import BOTH, NO_TOKENS, STEP, Cell, Trace, measure
from kvoffload.cache.keys import key_group_idx
from kvoffload.connector.layout import KeyLayout

PLAIN, FULL = Cell(64), Cell(64, num_tiers=2, is_exclusive=True)
BOUNDS = {
    PLAIN: {
        "store": (500, 20, 17),
        "host hit": (134, 3, 3),
        "disk hit": (362, 6, 6),
        STEP: (17, 0, 0),
        BOTH: (29, 0, 0),
        NO_TOKENS: (32, 0, 0),
    },
    FULL: {
        "store": (895, 42, 35),
        "host hit": (180, 6, 5),
        "disk hit": (472, 12, 11),
        STEP: (25, 0, 0),
        BOTH: (44, 0, 0),
        NO_TOKENS: (47, 0, 0),
    },
}
"""Calls, with little to spare; index operations; keys probed, per block."""


def counts(trace: Trace) -> tuple[int, int]:
    return trace.calls, trace.index_operations


@pytest.mark.parametrize("cell", BOUNDS)
def test_no_operation_costs_more_than_its_bound(tmp_path: Path, cell: Cell) -> None:
    """A bound that is exceeded is raised only for something that users get for it."""
    traces = measure(tmp_path, cell)
    costs = {
        name: (trace.calls, trace.index_operations, trace.keys_probed / cell.num_blocks)
        for name, trace in traces.items()
    }
    above = {
        name: (cost, BOUNDS[cell][name])
        for name, cost in costs.items()
        if any(n > most for n, most in zip(cost, BOUNDS[cell][name], strict=True))
    }
    assert not above
    hit = traces["disk hit"]
    # The engine's call, four objects, and the index.
    assert len(hit.receivers) <= 6
    if cell is PLAIN:
        assert len(hit.files) <= 45
        assert len(hit.classes) <= 55


@pytest.mark.parametrize("cell", BOUNDS)
def test_no_operation_makes_a_call_per_block(tmp_path: Path, cell: Cell) -> None:
    few = measure(tmp_path / "few", Cell(4, cell.num_tiers, cell.is_exclusive))
    many = measure(tmp_path / "many", cell)
    assert {name: counts(trace) for name, trace in few.items()} == {name: counts(trace) for name, trace in many.items()}


def test_a_call_per_block_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control of the tests above."""
    monkeypatch.setattr(
        KeyLayout, "num_tokens", lambda layout, found: 16 * sum(key_group_idx(key) == 0 for key in found)
    )
    hit = measure(tmp_path, PLAIN)["disk hit"]
    assert hit.by_function["cache/keys.py:key_group_idx"] >= PLAIN.num_blocks
    assert hit.calls > BOUNDS[PLAIN]["disk hit"][0]
