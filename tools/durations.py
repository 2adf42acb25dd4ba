"""Prints where the time of the tests goes, from a report of pytest's option ``--junitxml``: seconds per folder, per
file, and per guarantee of the README, whose table names files of tests. Several processes have more seconds than the
clock."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

NUM_FILES = 20
README = Path(__file__).resolve().parent.parent / "README.md"


def read_report(path: Path) -> dict[str, list[float]]:
    """Returns the seconds of each test that ran, by its file."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            seconds[_file(case.get("classname", ""))].append(float(case.get("time", 0)))
    return dict(seconds)


def _file(classname: str) -> str:
    """Returns the file of a test: ``classname`` is the path of its module, perhaps with classes behind it."""
    parts = classname.split(".")
    last = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "/".join(parts[: last + 1]) + ".py"


def guarantees(readme: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each guarantee of the README with the files of its tests."""
    for line in readme.splitlines():
        files = re.findall(r"`(tests/[\w/]+\.py)`", line)
        if line.startswith("| **") and files:
            yield line.split("**")[1], files


def table(title: str, rows: Mapping[str, list[float]]) -> str:
    lines = [f"{title:60}{'tests':>8}{'seconds':>10}"]
    ordered = sorted(rows.items(), key=lambda row: -sum(row[1]))
    return "\n".join(lines + [f"{name:60}{len(times):8}{sum(times):10.1f}" for name, times in ordered]) + "\n"


def main() -> None:
    files = read_report(Path(sys.argv[1]))
    folders: dict[str, list[float]] = defaultdict(list)
    for name, times in files.items():
        folders[str(Path(name).parent)] += times
    slowest = sorted(files, key=lambda name: -sum(files[name]))[:NUM_FILES]
    laws = {
        name: [each for file in named for each in files.get(file, [])] for name, named in guarantees(README.read_text())
    }
    print(table("folder", folders))
    print(table(f"the {NUM_FILES} slowest files", {name: files[name] for name in slowest}))
    print(table("guarantee (a file may belong to several)", laws))


if __name__ == "__main__":
    main()
