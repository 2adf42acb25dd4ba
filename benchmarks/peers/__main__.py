"""``python -m benchmarks.peers``: runs every system in turn and writes ``peers-report``.

``--help`` needs no package: what runs and draws is imported later.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.systems import SYSTEMS, System

if TYPE_CHECKING:
    from benchmarks.peers.measure import Result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", help=f"systems, separated by commas: {', '.join(SYSTEMS)}")
    parser.add_argument("--quick", action="store_true", help="ask less, to check that everything runs")
    parser.add_argument("--out", type=Path, default=Path("peers-report"), help="directory of the results and logs")
    parser.add_argument("--board", action="store_true", help="run the integrity board instead: --board --help")
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--board" in arguments:
        from benchmarks.peers import board

        board.command_line([each for each in arguments if each != "--board"])
        return
    parser.add_argument(
        "--multi-turn", action="store_true", help="run vLLM's multi-turn client instead, and write multi-turn.json"
    )
    args = parser.parse_args(arguments)
    if args.multi_turn:
        from benchmarks.peers import multi_turn

        multi_turn.main(args.out.resolve(), args.quick)
        return
    names = choose(args.only, list(SYSTEMS))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        parser.error(f"unknown system {unknown[0]!r}; the systems are {', '.join(SYSTEMS)}")
    from benchmarks.peers.report import text

    results = run([SYSTEMS[name] for name in names], args.out, args.quick)
    print(text(results))
    print(f"\n{args.out / 'peers.html'} has the plots, peers.md the tables, peers.json the figures, logs the logs.")


def choose(only: str | None, known: Sequence[str]) -> list[str]:
    """Returns the names of the systems to run. Recompute always is one, since the others are compared with it."""
    from benchmarks.peers.summary import REFERENCE

    if only is None:
        return list(known)
    asked = [name.strip() for name in only.split(",") if name.strip()]
    return [REFERENCE, *(name for name in asked if name != REFERENCE)]


def run(systems: Sequence[System], out: Path, quick: bool) -> list[Result]:
    """Measures ``systems`` one after the other, and writes what is known after each."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from benchmarks.peers.load import make_load
    from benchmarks.peers.measure import measure
    from benchmarks.peers.page import render_page
    from benchmarks.peers.report import publish
    from demo.model import kv_bytes_per_token, write_model

    load = make_load(quick)
    logs = out / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    results: list[Result] = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with tempfile.TemporaryDirectory() as directory, Progress(*columns, console=Console(stderr=True)) as progress:
        model = Path(directory) / "model"
        write_model(model, seed=0)
        per_token = kv_bytes_per_token(model)
        assert per_token is not None
        task = progress.add_task("", total=len(systems))
        for system in systems:

            def step(what: str, name: str = system.name) -> None:
                progress.update(task, description=f"{name}: {what}")

            results.append(measure(system, load, logs.resolve() / system.name, model, per_token, step))
            progress.advance(task)
            publish(results, facts(results), out)
            (out / "peers.html").write_text(render_page(results, facts(results)), encoding="utf-8")
    return results


def facts(results: Sequence[Result]) -> dict[str, str]:
    """Returns when, where and with what the figures were measured."""
    versions = {name: version for result in results for name, version in result.versions.items()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "Measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {memory >> 30} GiB, no GPU",
        "load before the run ended": f"{os.getloadavg()[2]:.1f}",
        "Python": platform.python_version(),
        **versions,
    }


if __name__ == "__main__":
    main()
