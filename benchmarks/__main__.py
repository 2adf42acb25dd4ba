"""``python -m benchmarks``: runs every benchmark and writes ``bench-report/NAME.json``.

``--help`` needs no package: each benchmark is imported when it runs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import textwrap
from pathlib import Path

BENCHMARKS = (
    *("calls", "managers", "copies", "disk", "doors", "engine", "handover", "hints", "object_store", "policies"),
    *("shared_dir", "steps", "stores", "tenants", "ttft", "waiting"),
)


def what(name: str) -> str:
    """Returns the first sentence of a benchmark's documentation."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").split()).split(". ")[0].removesuffix(".").replace("``", "")


def main() -> None:
    lines = (
        textwrap.fill(what(name), 100, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16)
        for name in sorted(BENCHMARKS)
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs benchmarks and writes bench-report/NAME.json.",
        epilog="benchmarks:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which of the benchmarks below to run; default: all")
    parser.add_argument("--out", type=Path, default=Path("bench-report"), help="directory of the JSON files")
    parser.add_argument("--quick", action="store_true", help="use smaller sizes, to check that the benchmarks run")
    args = parser.parse_args()
    for name in args.names or BENCHMARKS:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; the benchmarks are {', '.join(BENCHMARKS)}")
        importlib.import_module(f"benchmarks.{name}").main(args.out, args.quick)


if __name__ == "__main__":
    main()
