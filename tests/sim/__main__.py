"""``python -m tests.sim simulate --seeds N``: runs simulations and shows a progress bar.

By default these are servers that start one after the other on a failing disk; with ``--servers KIND`` two to four
servers that share a medium of that kind, and with ``--handovers`` also hand requests over to each other; with
``--pairs`` servers with the features of a covering array.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.sim import simulation
from tests.sim.handovers import simulate_handovers
from tests.sim.media import MEDIA
from tests.sim.pairs import beside_the_default, covering_array, run_row
from tests.sim.servers import simulate_servers
from tests.sim.simulation import Report, run_each


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("simulate", help="run servers that crash and restart on failing media")
    command.add_argument(
        "--servers",
        choices=sorted(MEDIA),
        metavar="KIND",
        help=f"two to four servers on one medium: {', '.join(sorted(MEDIA))}",
    )
    command.add_argument("--handovers", action="store_true", help="with --servers: some compute prompts, others go on")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--seeds", type=int, default=1000, help="number of seeds (default 1000)")
    command.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    command.add_argument(
        "--pairs", action="store_true", help="every two features together, on one server after another"
    )
    options = parser.parse_args(arguments)
    if options.pairs:
        rows = covering_array() + beside_the_default(0) + beside_the_default(1) + beside_the_default(2)
        return _run(options, lambda seed: run_row(rows[seed % len(rows)], seed), "simulate --pairs")
    if not options.servers:
        return _run(options, simulation.simulate, "simulate")
    medium = MEDIA[options.servers]

    def run_one(seed: int) -> Counter[str]:
        return simulate_handovers(medium, seed) if options.handovers else simulate_servers(medium, seed)

    return _run(
        options, run_one, f"simulate --servers {options.servers}" + (" --handovers" if options.handovers else "")
    )


def _run(options: argparse.Namespace, run_one: Callable[[int], Counter[str]], command: str) -> int:
    if options.seeds == 1:
        # A single seed is replayed for debugging: let its exception through.
        _print(Report(run_one(options.first)), 0.0, options.json)
        return 0
    begin = time.monotonic()
    with _progress(options.seeds) as progress:
        report = run_each(range(options.first, options.first + options.seeds), run_one, progress)
    _print(report, time.monotonic() - begin, options.json)
    if not options.json:
        for seed, law in report.failures.items():
            print(f"FAILED: seed {seed}: {law}")
            print(f"  replay: python -m tests.sim {command} --first {seed} --seeds 1")
    return bool(report.failures)


def _print(report: Report, seconds: float, as_json: bool) -> None:
    done = report.counts["simulations"] + len(report.failures)
    if as_json:
        counts = dict(sorted(report.counts.items()))
        print(json.dumps({"simulations": done, "seconds": seconds, "failures": report.failures, "counts": counts}))
        return
    print(_counts(report))
    print(f"{done} simulations in {seconds:.0f} s, {len(report.failures)} with a broken law")


def _counts(report: Report) -> str:
    return "\n".join(f"{count:>12,}  {name}" for name, count in sorted(report.counts.items()))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Report], None]]:
    """Yields a callback that shows progress on a terminal: a bar if rich is installed, otherwise a line."""
    if not sys.stderr.isatty():
        yield lambda report: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _print_line(total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("simulations", total=total)

        def advance(report: Report) -> None:
            failed = f", [red]{len(report.failures)} failed" if report.failures else ""
            bar.update(task, advance=1, description=f"simulations{failed}")

        yield advance


def _print_line(total: int) -> Callable[[Report], None]:
    def print_line(report: Report) -> None:
        done = report.counts["simulations"] + len(report.failures)
        if done % 10 == 0 or done == total:
            end = "\n" if done == total else ""
            text = f"\r{done} of {total} simulations, {len(report.failures)} failed"
            print(text, end=end, file=sys.stderr, flush=True)

    return print_line


if __name__ == "__main__":
    sys.exit(main())
