"""``pytest -m cuda``: the tests that need a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/transfer/cuda/gpu"
REHEARSED = f"{FOLDER}/test_gpu_service.py"


def run(report: Report, options: Options) -> None:
    # A rehearsal of the suite takes a few files only: tests/transfer/cuda/test_proof.py rehearses all of it.
    where = REHEARSED if options.dry_run else FOLDER
    results, log = options.out / "tests.xml", options.out / "pytest.log"
    command = [sys.executable, "-m", "pytest", "-m", "cuda", where, f"--junitxml={results}", "-v"]
    environment = dict(os.environ, KVOFFLOAD_GPU_REHEARSAL="1" if options.dry_run else "0")
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if not results.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}: see {log}")
    cases = [case for suite in ET.parse(results).iter("testsuite") for case in suite.iter("testcase")]
    failed = [case.get("name", "?") for case in cases if case.find("failure") is not None]
    failed += [case.get("name", "?") for case in cases if case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    # A GPU with less memory proves as much of the rest.
    unexplained = [case.get("name", "?") for case in skipped if "device memory" not in _reason(case)]
    report.add("tests passed", len(cases) - len(failed) - len(skipped))
    report.add("tests skipped", len(skipped))
    for name in failed:
        report.add("failed", name)
    report.must("all tests pass", not failed and bool(cases), f"{len(failed)} failed" if failed else "")
    if not options.dry_run:
        report.must("no test is skipped but for lack of device memory", not unexplained, ", ".join(unexplained))


def _reason(case: ET.Element) -> str:
    skipped = case.find("skipped")
    return "" if skipped is None else skipped.get("message", "")
