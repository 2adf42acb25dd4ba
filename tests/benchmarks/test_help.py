"""The help of the benchmarks: it needs no package and no environment, and has a line per benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("package", ["benchmarks", "benchmarks.peers"])
def test_help_needs_no_package(package: str) -> None:
    # Without the packages of the environment.
    shown = run(sys.executable, "-S", "-E", "-m", package, "--help")
    assert f"usage: python -m {package}" in shown


def test_each_benchmark_says_what_it_measures() -> None:
    words = run(sys.executable, "-S", "-E", "-m", "benchmarks", "--help").split("benchmarks:\n")[1]
    lines = dict(line.split(maxsplit=1) for line in words.splitlines() if line[:3].strip())
    assert sorted(lines) == sorted(BENCHMARKS)
    assert min(map(len, lines.values())) > 30
