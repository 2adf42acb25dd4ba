"""Real vLLM, one engine a child process; what is slow is shared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_harness import GEMMA3, Run, Runner


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    base = tmp_path_factory.getbasetemp()
    runner = Runner(tmp_path_factory.mktemp("vllm"), base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    with contextlib.closing(runner):
        yield runner


@pytest.fixture(scope="session")
def baseline(run: Runner) -> Run:
    """vLLM by itself, preempting."""
    result = run.once("baseline", "rounds", rounds=1)
    assert result["preemptions"] > 0
    return result


@pytest.fixture(scope="session")
def expected(baseline: Run) -> list[Any]:
    """What the prompts are answered without offloading."""
    (answers,) = baseline["outputs"]
    return list(answers)


@pytest.fixture(scope="session")
def gemma3_expected(run: Runner) -> list[Any]:
    """What they are answered by the model with two KV cache groups."""
    result = run.once("gemma3", "rounds", rounds=1, **GEMMA3)
    assert result["preemptions"] > 0
    return list(result["outputs"][0])
