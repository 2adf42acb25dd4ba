"""The integrity board: what each system answers after its cache was broken.

Real vLLM computes a small model with random float32 weights. A first engine answers prompts and stores their KV, a fault
is planted, and a second engine is asked the same prompts. Answers are compared with those of an engine without a cache.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.peers import faults
from benchmarks.peers.board_judge import Answer, Asked, Cell, Outcome, is_right, judge
from benchmarks.peers.board_process import CrashError, HangError, RefusedError, Running
from benchmarks.peers.board_systems import SYSTEMS, NotApplicableError, System
from kvoffload.demo import model as demo_model

PROMPTS = 8
PROMPT_TOKENS = 400
SEED = 0
CHANGED_TENSOR = "model.layers.0.self_attn.v_proj.weight"
BOARD_DEADLINE_S = 1200.0
"""Cells that would begin after this are not run."""
KILL_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    how: str
    run: Callable[[Board, System], Cell]


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
        with system.full():
            with self.start(system) as engine:
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
    Fault("byte flips", "one bit in every 64 KiB of every file (of every value in a store's memory)", Board.flips),
    Fault("truncation", "every file is cut to half its size", Board.truncation),
    Fault("kill -9", "the engine's processes are killed while they store", Board.killed),
    Fault("full disk", "a disk (or a store) with almost no room left", Board.full),
    Fault("replaced weights", "one tensor has another sign, under the same path", Board.weights),
    Fault("store restarted", "the cache's server is killed and started again between requests", Board.restarted),
    Fault("store down", "the same, between one third and two thirds of the requests", Board.restarted_during),
)


def run_cell(board: Board, system: System, fault: Fault) -> Cell:
    """Runs one cell. What the engine does when it starts is a result, too."""
    try:
        return fault.run(board, system)
    except NotApplicableError as error:
        return Cell(Outcome.NOT_APPLICABLE, message=str(error))
    except RefusedError as error:
        return Cell(Outcome.REFUSED, message=str(error))
    except HangError as error:
        return Cell(Outcome.HANG, message=f"at start or end: {error}")
    except CrashError as error:
        return Cell(Outcome.CRASH, message=f"at start or end: {error}")
    except (OSError, RuntimeError) as error:
        return Cell(Outcome.NOT_APPLICABLE, message=f"the fault could not be planted: {error}")


def run_board(
    work: Path, systems: Iterable[type[System]] = SYSTEMS, chosen: Sequence[Fault] = FAULTS
) -> dict[str, Any]:
    """Runs the board and returns its result. Logs and files of the systems are in ``work``."""
    console = Console(stderr=True)
    begun = time.monotonic()
    board = Board(work)
    rows: dict[str, Any] = {}
    kinds = list(systems)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        total = progress.add_task("integrity board", total=len(kinds) * len(chosen))
        for kind in kinds:
            system = kind(work / kind.__name__)
            cells: dict[str, Any] = {}
            refused: Cell | None = None
            missing = system.missing()
            if missing is not None:
                refused = Cell(Outcome.REFUSED, message=missing)
            try:
                for fault in chosen:
                    progress.update(total, description=f"{system.name}: {fault.name}")
                    start = time.monotonic()
                    if refused is not None:
                        cell = refused
                    elif start - begun > BOARD_DEADLINE_S:
                        cell = Cell(Outcome.NOT_APPLICABLE, message="not run: the board's time was over")
                    else:
                        cell = run_cell(board, system, fault)
                    if fault is chosen[0] and cell.outcome is Outcome.REFUSED:
                        refused = cell
                    cells[fault.name] = {**cell.to_dict(), "text": str(cell), "seconds": time.monotonic() - start}
                    progress.console.print(f"{system.name} | {fault.name} | {cell}", highlight=False)
                    progress.advance(total)
            finally:
                system.close()
            rows[system.name] = {"note": system.note, "is_control": system.is_control, "cells": cells}
    return {
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "machine": platform.machine(),
        "seconds": time.monotonic() - begun,
        "controls": board.controls(),
        "faults": {fault.name: fault.how for fault in chosen},
        "systems": rows,
    }


def table_of(result: dict[str, Any]) -> Table:
    """Returns the board as one table."""
    table = Table(title=f"Integrity board: {result['prompts']} prompts per cell", show_lines=True)
    table.add_column("system")
    for name in result["faults"]:
        table.add_column(name)
    for name, row in result["systems"].items():
        table.add_row(name, *(cell["text"] for cell in row["cells"].values()))
    return table


def main(out: Path, work: Path) -> None:
    """Runs the whole board, prints its table and writes ``board.json`` into ``out``."""
    result = run_board(work)
    out.mkdir(parents=True, exist_ok=True)
    (out / "board.json").write_text(json.dumps(result, indent=2) + "\n")
    Console().print(table_of(result))
