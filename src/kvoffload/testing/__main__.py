"""``python -m kvoffload.testing simulate --seeds N``: runs simulations and shows a progress bar."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvoffload.testing.simulation import Report, run_simulations, simulate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvoffload.testing", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("simulate", help="run servers that crash and restart on a failing disk")
    command.add_argument("--seeds", type=int, default=1000, help="number of seeds (default 1000)")
    command.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    command.set_defaults(run=_simulate)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def _simulate(options: argparse.Namespace) -> int:
    if options.seeds == 1:
        # A single seed is replayed for debugging: let its exception through.
        print(_counts(Report(simulate(options.first))))
        return 0
    begin = time.monotonic()
    with _progress(options.seeds) as progress:
        report = run_simulations(range(options.first, options.first + options.seeds), progress)
    done = report.counts["simulations"] + len(report.failures)
    print(_counts(report))
    for seed, law in report.failures.items():
        print(f"FAILED: seed {seed}: {law}")
        print(f"  replay: python -m kvoffload.testing simulate --first {seed} --seeds 1")
    took = time.monotonic() - begin
    print(f"{done} simulations in {took:.0f} s, {len(report.failures)} with a broken law")
    return bool(report.failures)


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
            print(
                f"\r{done} of {total} simulations, {len(report.failures)} failed", end=end, file=sys.stderr, flush=True
            )

    return print_line


if __name__ == "__main__":
    sys.exit(main())
