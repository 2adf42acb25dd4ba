"""How the integrity board combines its cells, and when it says that it proves nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.peers import board
from benchmarks.peers.board import FAULTS, run_cell, worse
from benchmarks.peers.board_judge import Cell, Outcome
from benchmarks.peers.board_process import CrashError, HangError, RefusedError
from benchmarks.peers.board_report import markdown, table_of, verdict
from benchmarks.peers.board_systems import SYSTEMS, FolderSystem, NotApplicableError

RIGHT = Cell(Outcome.RIGHT, from_cache=8)
MISS = Cell(Outcome.MISS, computed=8)
WRONG = Cell(Outcome.WRONG, wrong=8)


def result(rows: dict[str, tuple[bool, Cell, Cell]], distinct: int = 8) -> dict[str, Any]:
    return {
        "date": "2026-01-02",
        "seconds": 120.0,
        "versions": {"vllm": "1.0"},
        "problems": [],
        "prompts": 8,
        "controls": {"prompts_that_tell_the_weights_apart": distinct},
        "faults": {"no fault": "", "byte flips": ""},
        "systems": {
            name: {
                "note": "",
                "is_control": is_control,
                "cells": {
                    fault: {**cell.to_dict(), "text": str(cell)}
                    for fault, cell in (("no fault", first), ("byte flips", flips))
                },
            }
            for name, (is_control, first, flips) in rows.items()
        },
    }


def test_controls_that_hold() -> None:
    refused = Cell(Outcome.REFUSED, message="only on GPUs")
    rows = {"a": (False, RIGHT, MISS), "b": (False, RIGHT, WRONG), "c": (True, RIGHT, WRONG)}
    assert verdict(result(rows | {"d": (False, refused, refused)})) == []


@pytest.mark.parametrize(
    ("rows", "distinct", "words"),
    [
        ({"a": (False, MISS, MISS)}, 8, "a: does not answer from the cache without a fault"),
        ({"a": (False, WRONG, MISS)}, 8, "a: does not answer from the cache without a fault"),
        ({"a": (True, RIGHT, MISS)}, 8, "a: flipped bits do not reach what is loaded"),
        ({"a": (False, RIGHT, MISS)}, 7, "the same answers with the replaced weights"),
    ],
)
def test_controls_that_fail_are_named(rows: dict[str, Any], distinct: int, words: str) -> None:
    (problem,) = verdict(result(rows, distinct))
    assert words in problem


def test_the_worse_of_two_engines_counts() -> None:
    assert worse(MISS, RIGHT) is RIGHT
    assert worse(RIGHT, MISS) is MISS
    assert worse(RIGHT, WRONG) is WRONG
    assert worse(WRONG, RIGHT) is WRONG
    hang = Cell(Outcome.HANG)
    assert worse(hang, MISS) is hang


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RefusedError("only on GPUs"), Outcome.REFUSED),
        (HangError("no answer"), Outcome.HANG),
        (CrashError("died"), Outcome.CRASH),
        (NotApplicableError("no server"), Outcome.NOT_APPLICABLE),
        (OSError("may not mount"), Outcome.NOT_APPLICABLE),
    ],
)
def test_what_an_engine_does_at_start_is_a_cell(error: Exception, outcome: Outcome, tmp_path: Path) -> None:
    def run(self: board.Board, system: Any) -> Cell:
        raise error

    fault = board.Fault("planted", "", run)
    unused: Any = None
    cell = run_cell(unused, FolderSystem(tmp_path), fault)
    assert cell.outcome is outcome
    assert str(error) in cell.message


@pytest.mark.parametrize(
    ("first", "second", "runs"),
    [
        (Cell(Outcome.HANG), RIGHT, 2),
        (Cell(Outcome.CRASH), Cell(Outcome.CRASH), 2),
        (WRONG, RIGHT, 1),
        (MISS, RIGHT, 1),
    ],
)
def test_a_hang_and_a_crash_are_seen_twice_before_they_count(
    first: Cell, second: Cell, runs: int, tmp_path: Path
) -> None:
    cells = [first, second]
    fault = board.Fault("planted", "", lambda board, system: cells.pop(0))
    unused: Any = None
    assert run_cell(unused, FolderSystem(tmp_path), fault) is (second if runs == 2 else first)
    assert len(cells) == 2 - runs


def test_what_is_kept_is_restored_without_what_broke(tmp_path: Path) -> None:
    system = FolderSystem(tmp_path)
    system.empty()
    (system.folder / "block").write_bytes(bytes(1 << 16))
    assert system.keep()
    assert system.flip() == 1
    assert system.truncate() == 1
    (system.folder / "new").write_bytes(b"new")
    system.restore()
    assert {path.name: path.read_bytes() for path in system.folder.iterdir()} == {"block": bytes(1 << 16)}
    with pytest.raises(NotApplicableError):
        system.stop_service()


def test_every_system_has_a_name_of_its_own_and_every_cell_a_place_in_the_table() -> None:
    assert len({kind.name for kind in SYSTEMS}) == len(SYSTEMS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    output = io.StringIO()
    Console(file=output, width=200).print(table_of(result({"a system": (False, RIGHT, WRONG)})))
    for words in ("a system", "byte flips", "8 right from the cache", "wrong answer: 8 wrong"):
        assert words in output.getvalue()


def test_the_documentation_gets_every_system_that_starts_and_every_message() -> None:
    refused = Cell(Outcome.REFUSED, message="only on GPUs")
    hang = Cell(Outcome.HANG, from_cache=2, unanswered=6, message="no answer in 40 s")
    late = Cell(Outcome.NOT_APPLICABLE, message="not run: the board's time was over")
    found = result(
        {
            "a": (False, RIGHT, Cell(Outcome.WRONG, from_cache=1, wrong=7)),
            "b": (False, refused, refused),
            "c": (False, RIGHT, hang),
            "d": (False, RIGHT, late),
            "e": (False, RIGHT, Cell(Outcome.NOT_APPLICABLE, message="it keeps no files")),
        }
    )
    found["systems"]["c"]["note"] = "It ran alone."
    found["problems"] = ["c is odd"]
    assert markdown(found).splitlines() == [
        "2026-01-02, 2 minutes, 8 prompts per cell; vllm 1.0.",
        "",
        "| fault | a (1) | c (2) | d (3) | e (4) |",
        "|---|---|---|---|---|",
        "| no fault | 8 from cache | 8 from cache | 8 from cache | 8 from cache |",
        "| byte flips | 1 from cache, **7 wrong** | 2 from cache, **hang**, 6 not answered | not run | - |",
        "",
        "- (2) It ran alone.",
        "- (2), byte flips: no answer in 40 s",
        "- (3), byte flips: not run: the board's time was over",
        "- b does not start: only on GPUs",
        "- The board proves nothing here: c is odd",
    ]
