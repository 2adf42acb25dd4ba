"""The table of faults tells right, computed, wrong, hanging and crashed apart."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import faults
from benchmarks.peers.judge import TOLERANCE, Answer, Asked, Outcome, is_right, judge

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


def test_a_few_cached_tokens_are_not_an_answer_from_the_cache() -> None:
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


def test_a_flip_changes_any_float_of_usual_size(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 16).astype("<f4")
    (tmp_path / "values").write_bytes(values.tobytes())
    assert faults.flip(tmp_path) == 4
    flipped = np.fromfile(tmp_path / "values", "<f4")
    changed = flipped != values
    assert changed.sum() == 4
    with np.errstate(over="ignore"):
        assert (~(np.abs(flipped[changed]) < 1e15)).all()
