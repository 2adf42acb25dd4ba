"""How ``make peers`` combines its cells, what it publishes, and when it says that the table proves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import cells as module
from benchmarks.peers import faults
from benchmarks.peers.cells import FAULTS, Bench, run_cell, run_row, worse
from benchmarks.peers.judge import TOLERANCE, Answer, Asked, Cell, Outcome, is_right, judge, short
from benchmarks.peers.place import Place
from benchmarks.peers.report import markdown, verdict
from benchmarks.peers.running import FailedError
from benchmarks.peers.systems import StartError, System

RIGHT = Cell(Outcome.RIGHT, from_cache=8)
MISS = Cell(Outcome.MISS, computed=8)
WRONG = Cell(Outcome.WRONG, wrong=8)
HANG = Cell(Outcome.HANG, from_cache=2, unanswered=6, message="no answer in 40 s")
CRASH = Cell(Outcome.CRASH)
REFUSED = Cell(Outcome.REFUSED, message="only on GPUs")
NO_BENCH: Any = None


class Named(System):
    def __init__(self, name: str, is_control: bool = False, notes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.name = self.title = name
        self.is_control, self.notes = is_control, notes


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Cell]]:
    """Makes all faults give one cell after the other. Returns those that are left."""

    def plant(*cells: Cell) -> list[Cell]:
        left = list(cells)
        for fault in FAULTS:
            monkeypatch.setitem(module.FAULTS, fault, lambda bench, place: left.pop(0))
        return left

    return plant


def test_controls_that_hold_and_that_fail() -> None:
    good = {"no fault": [RIGHT], "byte flips": [MISS]}
    wrong = {"no fault": [RIGHT], "byte flips": [WRONG, WRONG]}
    systems = [Named("a"), Named("control", is_control=True)]
    assert verdict({"a": good, "control": wrong}, systems, 8) == []
    assert verdict({"a": wrong, "control": {"no fault": [RIGHT]}}, systems, 8) == []
    (problem,) = verdict({"a": good, "control": good}, systems, 8)
    assert "control: flipped bits do not reach what is loaded" in problem
    (problem,) = verdict({"a": good, "control": wrong}, systems, 7)
    assert "the same answers with the replaced weights" in problem


def test_the_worse_of_two_engines_counts() -> None:
    assert worse(MISS, RIGHT) is RIGHT
    assert worse(RIGHT, MISS) is MISS
    assert worse(RIGHT, WRONG) is WRONG
    assert worse(WRONG, RIGHT) is WRONG
    assert worse(HANG, MISS) is HANG


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StartError("only on GPUs"), Outcome.REFUSED),
        (FailedError(Outcome.HANG, "no answer"), Outcome.HANG),
        (FailedError(Outcome.CRASH, "died"), Outcome.CRASH),
        (OSError("may not mount"), Outcome.NOT_APPLICABLE),
    ],
)
def test_what_an_engine_does_at_start_is_a_cell(
    error: Exception, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(bench: Bench, place: Place) -> Cell:
        raise error

    monkeypatch.setitem(module.FAULTS, "byte flips", run)
    cell = run_cell(NO_BENCH, Place(System(), tmp_path, 1, 1), "byte flips")
    assert cell.outcome is outcome
    assert str(error) in cell.message


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (WRONG, WRONG, "**8 wrong**; again: **8 wrong**"),
        (WRONG, MISS, "8 wrong; again: 8 computed"),
        (HANG, CRASH, "2 from cache, **hang**, **6 not answered**; again: **crash**"),
        (HANG, RIGHT, "2 from cache, hang, 6 not answered; again: 8 from cache"),
        (Cell(Outcome.FAILED, computed=7, failed=1),) * 2
        + ("7 computed, **1 failed**; again: 7 computed, **1 failed**",),
        (MISS, None, "8 computed"),
        (RIGHT, None, "8 from cache"),
        (REFUSED, None, "does not start"),
    ],
)
def test_what_should_never_happen_is_bold_if_it_has_happened_twice(
    first: Cell, second: Cell | None, shown: str, tmp_path: Path, planted: Callable[..., list[Cell]]
) -> None:
    expected = [cell for cell in (first, second) if cell is not None]
    left = planted(*expected)
    found = run_row(NO_BENCH, System(), ["byte flips"], tmp_path)["byte flips"]
    assert left == []
    assert found == expected
    assert short(found) == shown


def test_a_system_that_does_not_start_is_asked_no_further(tmp_path: Path, planted: Callable[..., list[Cell]]) -> None:
    left = planted(REFUSED, RIGHT)
    assert run_row(NO_BENCH, System(), list(FAULTS), tmp_path) == {fault: [REFUSED] for fault in FAULTS}
    assert left == [RIGHT]
    system = System()
    system.packages = ("no-such-package",)
    (cell,) = run_row(NO_BENCH, system, ["no fault"], tmp_path)["no fault"]
    assert "no-such-package is not installed" in cell.message
    assert left == [RIGHT]


def test_a_control_is_asked_what_it_is_there_for(tmp_path: Path, planted: Callable[..., list[Cell]]) -> None:
    planted(RIGHT, WRONG, WRONG)
    found = run_row(NO_BENCH, Named("control", is_control=True), list(FAULTS), tmp_path)
    assert [short(cells) for cells in found.values()] == ["8 from cache", "**8 wrong**; again: **8 wrong**", *"----"]


def test_the_table_has_every_system_and_every_message_once() -> None:
    systems = [Named("a"), Named("b"), Named("c", notes=("It ran alone.",)), Named("d", notes=("It ran alone.",))]
    late = Cell(Outcome.NOT_APPLICABLE, message="the fault could not be planted: may not mount")
    rows = {
        "a": {"no fault": [RIGHT], "byte flips": [Cell(Outcome.WRONG, from_cache=1, wrong=7), WRONG]},
        "b": {"no fault": [REFUSED], "byte flips": [REFUSED]},
        "c": {"no fault": [RIGHT], "byte flips": [HANG, HANG]},
        "d": {"no fault": [RIGHT], "byte flips": [late]},
    }
    assert markdown(rows, systems).splitlines() == [
        "| system | no fault | byte flips |",
        "|---|---|---|",
        "| a (1) | 8 from cache | 1 from cache, **7 wrong**; again: **8 wrong** |",
        "| b (2) | does not start |  |",
        "| c (3) | 8 from cache | 2 from cache, **hang**, **6 not answered**; again: 2 from cache, **hang**, "
        "**6 not answered** |",
        "| d (4) | 8 from cache | not run |",
        "",
        "- (2) Does not start: only on GPUs",
        "- (3, 4) It ran alone.",
        "- (3) *byte flips*: no answer in 40 s",
        "- (4) *byte flips*: the fault could not be planted: may not mount",
    ]


# The judge of one cell.

PROMPT_TOKENS = 100
REFERENCE = [
    Answer(tokens=[i, i + 1, i + 2], logprobs=[-0.5, -1.0, -1.5], prompt_tokens=PROMPT_TOKENS, cached_tokens=0)
    for i in range(4)
]
CACHED = [replace(answer, cached_tokens=96) for answer in REFERENCE]


def counts(asked: Asked) -> tuple[Outcome, int, int, int, int, int]:
    cell = judge(asked, REFERENCE)
    return cell.outcome, cell.from_cache, cell.computed, cell.wrong, cell.failed, cell.unanswered


def test_right_answers_from_the_cache_and_computed_ones() -> None:
    assert counts(Asked(CACHED)) == (Outcome.RIGHT, 4, 0, 0, 0, 0)
    assert counts(Asked(REFERENCE)) == (Outcome.MISS, 0, 4, 0, 0, 0)
    assert counts(Asked([*CACHED[:1], *REFERENCE[1:]])) == (Outcome.MISS, 1, 3, 0, 0, 0)
    # A few cached tokens are not an answer from the cache.
    assert not replace(REFERENCE[0], cached_tokens=PROMPT_TOKENS // 2 - 1).from_cache
    assert replace(REFERENCE[0], cached_tokens=PROMPT_TOKENS // 2).from_cache


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [9, 9, 9]},
        {"tokens": [2, 3, 99]},
        {"tokens": [2, 3]},
        {"logprobs": [-0.5, -1.0, -1.5 - 3 * TOLERANCE]},
        {"logprobs": [float("nan"), -1.0, -1.5]},
        {"logprobs": [-0.5, -1.0, float("-inf")]},
    ],
)
def test_one_wrong_answer_makes_the_cell_wrong(change: dict[str, Any]) -> None:
    # Another token with another logprob is no tie.
    if change.get("tokens") == [2, 3, 99]:
        change = {**change, "logprobs": [-0.5, -1.0, -1.2]}
    if change.get("tokens") == [9, 9, 9]:
        change = {**change, "logprobs": [-3.0, -1.0, -1.5]}
    wrong = replace(CACHED[2], **change)
    answers = [*CACHED[:2], wrong, CACHED[3]]
    assert counts(Asked(answers)) == (Outcome.WRONG, 3, 0, 1, 0, 0)


def test_a_tie_is_not_wrong_and_ends_the_comparison() -> None:
    tied = replace(CACHED[0], tokens=[0, 77, 78], logprobs=[-0.5, -1.0 + TOLERANCE / 2, -9.0])
    assert is_right(tied, REFERENCE[0])
    assert not is_right(replace(tied, logprobs=[-0.5, -1.1, -9.0]), REFERENCE[0])


def test_hangs_crashes_and_failures_keep_the_counts_of_what_was_answered() -> None:
    assert counts(Asked(CACHED[:3], Outcome.HANG, "no answer in 40 s")) == (Outcome.HANG, 3, 0, 0, 0, 1)
    assert counts(Asked([], Outcome.CRASH, "AssertionError")) == (Outcome.CRASH, 0, 0, 0, 0, 4)
    wrong = replace(CACHED[0], logprobs=[-5.0, -1.0, -1.5])
    assert counts(Asked([wrong], Outcome.HANG)) == (Outcome.WRONG, 0, 0, 1, 0, 3)
    failed = replace(CACHED[0], tokens=[], logprobs=[], error="error")
    assert counts(Asked([failed, *CACHED[1:]])) == (Outcome.FAILED, 3, 0, 0, 1, 0)


# The faults do what their table says.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of several sizes: empty, a few bytes, and not a multiple of 64 KiB."""
    made = tmp_path / "cache"
    (made / "deep").mkdir(parents=True)
    for name, size in {"empty": 0, "tiny": 3, "deep/large": (5 << 16) + 77, "even": 1 << 17}.items():
        (made / name).write_bytes(os.urandom(size))
    return made


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_bit_flips_in_every_whole_64_kib(folder: Path) -> None:
    before = contents(folder)
    assert faults.flip(folder) == 5 + 2
    for path, old in before.items():
        changed = np.frombuffer(old, np.uint8) ^ np.frombuffer(path.read_bytes(), np.uint8)
        pieces = [changed[start : start + faults.FLIP_EVERY] for start in range(0, len(changed), faults.FLIP_EVERY)]
        expected = [int(len(piece) == faults.FLIP_EVERY) for piece in pieces]
        assert [int(np.unpackbits(piece).sum()) for piece in pieces] == expected
    assert faults.flip(folder) == 7
    assert contents(folder) == before, "the same bits flip back"
