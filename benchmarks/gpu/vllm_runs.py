"""Where vLLM is installed: the identity tests of real vLLM, and the demo, on the GPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.parts import Options, Skipped
from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = "tests/vllm_engine/test_vllm_outputs.py"
NEEDED = ("vllm", "click", "rich", "hypothesis")


def run(report: Report, options: Options) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing or options.dry_run:
        raise Skipped(f"needs {', '.join(missing)}" if missing else "not rehearsed: make test runs it on a CPU")
    deadline = time.monotonic() + options.seconds * 0.95
    _run(report, [sys.executable, "-m", "pytest", IDENTITY, "-q"], options.out / "identity.log", deadline)
    demo = [sys.executable, "-m", "demo", "--out", str(options.out / "demo")]
    _run(report, demo, options.out / "demo.log", deadline)


def _run(report: Report, command: list[str], log: Path, deadline: float) -> None:
    name = log.stem
    try:
        with log.open("w") as file:
            done = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=max(1.0, deadline - time.monotonic())
            )
    except subprocess.TimeoutExpired:
        report.add(name, f"no time left: see {log}")
        return
    lines = [line for line in log.read_text().splitlines() if re.search(r"passed|failed|identical", line)]
    report.must(name, done.returncode == 0, (lines or ["no summary"])[-1].strip(" =")[:120])
