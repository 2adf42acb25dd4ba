"""How the integrity board combines its cells, what it publishes, and when it says that it proves nothing."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.peers.board import Row, ServiceLogs, run_cell
from benchmarks.peers.board_faults import FAULTS, Bench, Board, Fault, worse
from benchmarks.peers.board_judge import Cell, Outcome
from benchmarks.peers.board_places import Folder, NotApplicableError, OtherEngine, Place
from benchmarks.peers.board_process import CrashError, RefusedError
from benchmarks.peers.board_report import index, markdown, publish, table_of, twice, verdict
from benchmarks.peers.board_systems import SYSTEMS, System, offloading, p2p
from benchmarks.peers.systems import HangError

RIGHT = Cell(Outcome.RIGHT, from_cache=8)
MISS = Cell(Outcome.MISS, computed=8)
WRONG = Cell(Outcome.WRONG, wrong=8)
HANG = Cell(Outcome.HANG, from_cache=2, unanswered=6, message="no answer in 40 s")
CRASH = Cell(Outcome.CRASH)
REFUSED = Cell(Outcome.REFUSED, message="only on GPUs")
LATE = Cell(Outcome.NOT_APPLICABLE, message="not run: the board's time was over")
NO_BOARD: Any = None


def system_in(place: Callable[[Path], Place] = Folder, **changes: Any) -> System:
    return System("a-system", "A system", lambda place: {}, place, **changes)


def row(first: Cell, flips: Cell, second: Cell | None = None, **changes: Any) -> dict[str, Any]:
    cells = {"no fault": twice(first), "byte flips": twice(flips, second)}
    return {"id": "a", "notes": [], "is_control": False, "versions": {}, "cells": cells, **changes}


def result(rows: dict[str, Any], distinct: int = 8) -> dict[str, Any]:
    return {
        "date": "2026-01-02",
        "seconds": 120.0,
        "machine": "2 cores",
        "load": 0.25,
        "python": "3.11",
        "versions": {"vllm": "1.0"},
        "problems": [],
        "prompts": 8,
        "controls": [{"prompts_that_tell_the_weights_apart": distinct}],
        "faults": {name: {"how": "", "folder": name.replace(" ", "-")} for name in ("no fault", "byte flips")},
        "systems": rows,
    }


def run_row(tmp_path: Path, faults: list[Fault], system: System | None = None, ends_at: float = 1e18) -> dict[str, Any]:
    ran = Row(NO_BOARD, system or system_in(), tmp_path, ends_at).run(faults, lambda system, fault, cell: None)
    cells: dict[str, Any] = ran["cells"]
    return cells


def gives(*cells: Cell, name: str = "planted") -> tuple[Fault, list[Cell]]:
    """Returns a fault that gives one cell after the other, and those that are left."""
    left = list(cells)
    return Fault(name, "", lambda board, bench: left.pop(0)), left


def test_controls_that_hold() -> None:
    rows = {
        "a": row(RIGHT, MISS),
        "b": row(RIGHT, WRONG, WRONG),
        "c": row(RIGHT, WRONG, WRONG, is_control=True),
        "d": row(REFUSED, REFUSED),
        "e": {"notes": [], "is_control": False, "cells": {"no fault": twice(WRONG, WRONG)}},
    }
    assert verdict(result(rows)) == []


@pytest.mark.parametrize(
    ("cells", "changes", "distinct", "words"),
    [
        ((MISS, MISS), {}, 8, "a: does not answer from the cache without a fault"),
        ((WRONG, MISS), {}, 8, "a: does not answer from the cache without a fault"),
        ((RIGHT, MISS), {"is_control": True}, 8, "a: flipped bits do not reach what is loaded"),
        ((RIGHT, MISS), {}, 7, "the same answers with the replaced weights"),
    ],
)
def test_controls_that_fail_are_named(cells: tuple[Cell, Cell], changes: Any, distinct: int, words: str) -> None:
    (problem,) = verdict(result({"a": row(*cells, **changes)}, distinct))
    assert words in problem


def test_the_worse_of_two_engines_counts() -> None:
    assert worse(MISS, RIGHT) is RIGHT
    assert worse(RIGHT, MISS) is MISS
    assert worse(RIGHT, WRONG) is WRONG
    assert worse(WRONG, RIGHT) is WRONG
    assert worse(HANG, MISS) is HANG


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
    def run(board: Board, bench: Bench) -> Cell:
        raise error

    cell = run_cell(NO_BOARD, Bench(system_in(), Folder(tmp_path), tmp_path), Fault("planted", "", run))
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
    ],
)
def test_what_should_never_happen_is_bold_if_it_has_happened_twice(
    first: Cell, second: Cell | None, shown: str, tmp_path: Path
) -> None:
    planted, left = gives(*filter(None, (first, second)))
    ran = run_row(tmp_path, [planted])["planted"]
    assert left == []
    assert [ran["first"], ran["second"]] == [each and each.to_dict() for each in (first, second)]
    assert f"| {shown} |" in markdown(result({"a": row(RIGHT, first, second)}))


def test_a_system_that_fails_without_a_fault_is_asked_no_further(tmp_path: Path) -> None:
    for kind, cells, after in (
        ("refused", [REFUSED], Outcome.REFUSED),
        ("wrong", [WRONG, WRONG], Outcome.NOT_APPLICABLE),
        ("wrong once", [WRONG, RIGHT, MISS], Outcome.MISS),
    ):
        planted, left = gives(*cells)
        faults = [dataclasses.replace(fault, run=planted.run) for fault in FAULTS[:2]]
        ran = run_row(tmp_path / kind, faults)
        assert left == []
        assert ran["byte flips"]["first"]["outcome"] == after


def test_what_is_not_installed_or_comes_too_late_is_named(tmp_path: Path) -> None:
    planted, left = gives(RIGHT)
    missing = system_in(packages=("no-such-package",))
    assert "no-such-package is not installed" in run_row(tmp_path, [planted], missing)["planted"]["text"]
    assert "the board's time was over" in run_row(tmp_path, [planted], ends_at=0)["planted"]["text"]
    assert left == [RIGHT], "neither has run"


def test_versions_are_those_that_the_engine_finds() -> None:
    assert system_in(packages=("pytest", "no-such-package")).versions() == {"pytest": pytest.__version__}
    assert system_in(packages=("pytest",)).missing() is None


def test_each_cell_has_the_lines_that_a_service_wrote_during_it(tmp_path: Path) -> None:
    log, logs = tmp_path / "server.log", ServiceLogs(tmp_path)
    for number in range(3):
        cell = tmp_path / str(number)
        cell.mkdir()
        if number != 1:
            with log.open("a") as file:
                file.write(f"line {number}\n")
        logs.copy(cell)
    found = {path.parent.name: path.read_text() for path in tmp_path.glob("*/server.log")}
    assert found == {"0": "line 0\n", "2": "line 2\n"}


def test_what_is_kept_is_restored_without_what_broke(tmp_path: Path) -> None:
    place = Folder(tmp_path / "work")
    place.empty()
    (place.folder / "block").write_bytes(bytes(1 << 16))
    assert place.keep()
    assert place.flip() == 1
    assert place.truncate() == 1
    (place.folder / "new").write_bytes(b"new")
    place.restore()
    assert {path.name: path.read_bytes() for path in place.folder.iterdir()} == {"block": bytes(1 << 16)}
    with pytest.raises(NotApplicableError):
        place.stop_service()
    place.close()
    assert not place.work.exists()


def test_requests_name_the_engine_that_has_stored_also_when_it_is_dead(tmp_path: Path) -> None:
    class Dead:
        killed = False

        def stop(self) -> None:
            raise AssertionError("it must go on running")

        def kill(self) -> None:
            self.killed = True

    place, first = OtherEngine(tmp_path), Dead()
    place.begin()
    assert place.source() is None
    stored_at = offloading(p2p, place)["kv_connector_extra_config"]["secondary_tiers"][0]["port"]
    place.stored(first)
    place.begin()
    offloading(p2p, place)
    assert place.port != stored_at
    assert place.source() == {"remote_host": "127.0.0.1", "remote_port": stored_at}
    place.stop_service()
    assert first.killed
    assert place.source() is not None
    place.empty()
    assert place.source() is None


def test_every_system_has_a_name_of_its_own_and_every_cell_a_place_in_the_table() -> None:
    assert len({system.name for system in SYSTEMS}) == len(SYSTEMS)
    assert len({system.id for system in SYSTEMS}) == len(SYSTEMS)
    assert len({fault.folder for fault in FAULTS}) == len(FAULTS)
    output = io.StringIO()
    Console(file=output, width=200).print(table_of(result({"a system": row(RIGHT, WRONG, WRONG)})))
    for words in ("a system", "byte flips", "8 from cache", "8 wrong; again: 8 wrong"):
        assert words in output.getvalue()


def test_the_documentation_gets_every_system_and_every_message_once() -> None:
    found = result(
        {
            "a": row(RIGHT, Cell(Outcome.WRONG, from_cache=1, wrong=7), WRONG),
            "b": row(REFUSED, REFUSED),
            "c": row(RIGHT, HANG, HANG, notes=["It ran alone."], versions={"c": "7"}),
            "d": row(RIGHT, LATE, notes=["It ran alone."]),
            "e": row(RIGHT, Cell(Outcome.NOT_APPLICABLE, message="it keeps no files")),
        }
    )
    found["problems"] = ["c is odd"]
    assert markdown(found).splitlines() == [
        "2026-01-02, 2 minutes, 8 prompts per cell; 2 cores, load 0.2 at the start; Python 3.11; vllm 1.0, c 7.",
        "",
        "| system | no fault | byte flips |",
        "|---|---|---|",
        "| a (1) | 8 from cache | 1 from cache, **7 wrong**; again: **8 wrong** |",
        "| b (2) | does not start |  |",
        "| c (3) | 8 from cache | 2 from cache, **hang**, **6 not answered**; again: 2 from cache, **hang**, "
        "**6 not answered** |",
        "| d (4) | 8 from cache | not run |",
        "| e (5) | 8 from cache | - |",
        "",
        "- (2) Does not start: only on GPUs",
        "- (3, 4) It ran alone.",
        "- (3) *byte flips*: no answer in 40 s",
        "- (4) *byte flips*: not run: the board's time was over",
        "- The board proves nothing here: c is odd",
    ]


def test_the_index_has_the_logs_of_both_times(tmp_path: Path) -> None:
    for folder in ("no-fault", "byte-flips", "byte-flips-again"):
        (tmp_path / "a" / folder).mkdir(parents=True)
        (tmp_path / "a" / folder / "engine-1.log").write_text("")
    lines = index(result({"A system": row(RIGHT, HANG, CRASH)}), tmp_path).splitlines()
    assert lines[-1] == (
        "| a | byte flips | 2 from cache, hang, 6 not answered: no answer in 40 s | crash | "
        "[byte-flips/engine-1.log](a/byte-flips/engine-1.log) "
        "[byte-flips-again/engine-1.log](a/byte-flips-again/engine-1.log) |"
    )


def test_the_board_takes_the_marked_part_of_the_page() -> None:
    page = "before\n<!-- Board: replace from here to the end -->\n\nold\n\n<!-- End of the board. -->\nafter\n"
    new = publish(page, "| new |\n")
    assert new == page.replace("old", "| new |")
    assert publish(new, "| new |\n") == new
    with pytest.raises(ValueError, match="has no part"):
        publish("a page", "| new |")


def test_the_page_has_that_part() -> None:
    page = (Path(__file__).parents[2] / "docs" / "peers.md").read_text(encoding="utf-8")
    assert "| new |" in publish(page, "| new |")


def test_a_system_may_run_with_another_python() -> None:
    assert {system.python() for system in SYSTEMS} > {sys.executable}
