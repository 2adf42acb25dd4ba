"""Fixtures for real vLLM: one engine per child process. Slow results are shared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import GEMMA3, Run, Runner

from demo.process import with_demo

# Engines import from the checkout, in their processes too.
os.environ |= with_demo(os.environ)

LOG_CHARS_SHOWN = 6000


@pytest.fixture(autouse=True)
def folder_of_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows, when a test fails, the end of each log that a server or a store has written to since the test began."""
    report = yield
    folder = item.funcargs.get("folder_of_logs")
    if report.failed and isinstance(folder, Path):
        logs = [log for log in folder.rglob("*.log") if log.is_file() and log.stat().st_mtime >= call.start]
        for log in sorted(logs):
            text = log.read_text(errors="replace")[-LOG_CHARS_SHOWN:]
            report.sections.append((f"end of {log.relative_to(folder)}", text))
    return report


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    base = tmp_path_factory.getbasetemp()
    runner = Runner(tmp_path_factory.mktemp("vllm"), base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    with contextlib.closing(runner):
        yield runner


@pytest.fixture(scope="session")
def baseline(run: Runner) -> Run:
    """A round of vLLM without kvoffload, with preemptions."""
    result = run.once("baseline", "rounds", rounds=1)
    assert result["preemptions"] > 0
    return result


@pytest.fixture(scope="session")
def expected(baseline: Run) -> list[Any]:
    """The answers without offloading."""
    (answers,) = baseline["outputs"]
    return list(answers)


@pytest.fixture(scope="session")
def gemma3_expected(run: Runner) -> list[Any]:
    """The answers of the model with two KV cache groups, without offloading."""
    result = run.once("gemma3", "rounds", rounds=1, **GEMMA3)
    assert result["preemptions"] > 0
    return list(result["outputs"][0])
