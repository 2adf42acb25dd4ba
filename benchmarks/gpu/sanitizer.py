"""One round trip under compute-sanitizer, which checks every access of the kernels; and a planted fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import round_trip
from benchmarks.gpu.parts import Options, Skipped
from benchmarks.gpu.report import Report

PROGRAM = "compute-sanitizer"
TOOLKIT = "/usr/local/cuda/bin"
CLEAN = "ERROR SUMMARY: 0 errors"


def run(report: Report, options: Options) -> None:
    if options.dry_run:
        round_trip.main([])
        return
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=TOOLKIT)
    if program is None:
        raise Skipped(f"{PROGRAM} is not installed")
    log = options.out / "sanitizer-clean.log"
    output = _run(program, [], log)
    report.must("memcheck finds nothing in a round trip", CLEAN in output and "right bytes" in output, _last(output))
    output = _run(program, ["--planted"], options.out / "sanitizer-planted.log")
    found = "Invalid __global__" in output
    report.must("memcheck finds a planted block number", found, "yes" if found else _last(output))


def _run(program: str, arguments: list[str], log: Path) -> str:
    command = [
        program,
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        sys.executable,
        "-m",
        "benchmarks.gpu.round_trip",
        *arguments,
    ]
    # Without torch's pools, each tensor is an allocation whose ends the sanitizer knows.
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    with log.open("w") as file:
        subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    return log.read_text()


def _last(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")[:120]
