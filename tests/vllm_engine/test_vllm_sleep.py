"""An engine that sleeps and wakes up under load, as vLLM 0.33 calls its connectors then."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": from tests/ on sys.path this directory itself could be imported under that name.
pytest.importorskip("vllm.version")
from vllm_harness import POOL, Run, Runner, assert_at_rest, differences

pytestmark = pytest.mark.vllm

SLEEPS: dict[str, Any] = {"modes": ["abort", "keep"], "slow": 1}


def wrong_answers(result: Run, expected: list[Any], name: str = "answers") -> list[int]:
    """Indices of prompts that were answered otherwise than ``expected``, which is by index."""
    answers = result[name]
    right = [expected[index] for index, _ in answers]
    return [answers[i][0] for i in differences([got for _, got in answers], right)]


@pytest.fixture(scope="module")
def slept(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Run:
    disk = {"disk_dir": str(tmp_path_factory.mktemp("disk") / "tier"), "disk_bytes": "32MiB"}
    return run("sleeps", **SLEEPS, connector=POOL | disk)


def test_answers_are_identical_after_every_wake(slept: Run, expected: list[Any]) -> None:
    assert len(slept["answers"]) == 30
    assert wrong_answers(slept, expected) == []
    assert min(slept["under_way"]) > 0
    assert slept["metrics"]["host_hit_tokens"] > 0
    assert_at_rest(slept.result)


def test_one_scheduler_half_serves_all_of_them(slept: Run) -> None:
    assert slept["one_half"]
    assert set(slept["answered"]) <= set(slept["recorded"])
    assert len(slept["recorded"]) == len(set(slept["recorded"]))


def test_other_pools_end_offloading(slept: Run, expected: list[Any]) -> None:
    assert slept["off_with_other_pools"]
    assert slept.log.count("OFFLOADING IS OFF: the handshake (the workers' host pools are not those") == 1
    assert len(slept["without"]) == 10
    assert wrong_answers(slept, expected, "without") == []


def test_a_second_scheduler_half_would_be_noticed(run: Runner, expected: list[Any]) -> None:
    """The control: a half per handshake, with job numbers that begin again, takes reports of jobs that are not its."""
    result = run("sleeps", **SLEEPS, connector=POOL, forgetful=True)
    assert wrong_answers(result, expected) != []
    assert not set(result["answered"]) <= set(result["recorded"])
