"""Fixtures for real vLLM: one engine per child process. Slow results are shared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import FEW, GEMMA3, Runner

from demo.process import with_demo
from demo.run import vllm_installed

# Engines import from the checkout, in their processes too.
os.environ |= with_demo(os.environ)

# Without an import of vLLM, which takes longer than everything else that collection needs.
collect_ignore_glob = [] if vllm_installed() else ["test_*.py"]
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
def expected(run: Runner) -> list[Any]:
    """The right answers of the Llama."""
    return run.right("llama")


@pytest.fixture(scope="session")
def gemma3_expected(run: Runner) -> list[Any]:
    """The right answers of the model with two KV cache groups."""
    return run.right("gemma3", max_tokens=GEMMA3["max_tokens"])


@pytest.fixture(scope="session")
def one_head_expected(run: Runner) -> list[Any]:
    """The right answers of a model with a single KV head."""
    return run.right("one-head", FEW)
