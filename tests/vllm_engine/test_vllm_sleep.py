"""An engine that sleeps and wakes up under load, with the calls that vLLM 0.33 makes to its connectors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from driver import SHORT
from test_vllm_disk import with_disk
from vllm_harness import POOL, Run, Runner, assert_at_rest, differences

from kvoffload.vllm import versions

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("sleeps", "caches", "keeps"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_device_cache_that_may_lose_its_blocks_is_repeated(sleeps: bool, caches: bool, keeps: bool) -> None:
    model, cache = SimpleNamespace(enable_sleep_mode=sleeps), SimpleNamespace(enable_prefix_caching=caches)
    config: Any = SimpleNamespace(model_config=model, cache_config=cache)
    assert versions.keeps_blocks(config) is keeps


MAX_TOKENS = 48
"""Answers are long enough that stores are in progress when the engine falls asleep."""
SLEEPS: dict[str, Any] = {"modes": ["abort", "keep"], "slow": 1, "max_tokens": MAX_TOKENS}


def wrong_answers(result: Run, expected: list[Any], name: str = "answers") -> list[int]:
    """Returns the indices of prompts whose answers differ from ``expected``."""
    answers = result[name]
    right = [expected[index] for index, _ in answers]
    return [answers[i][0] for i in differences([got for _, got in answers], right)]


@pytest.fixture(scope="module")
def expected(run: Runner) -> list[Any]:
    """The answers without offloading."""
    return list(run("rounds", rounds=1, max_tokens=MAX_TOKENS)["outputs"][0])


@pytest.fixture(scope="module")
def slept(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run("sleeps", **SLEEPS, connector=with_disk(tmp_path_factory.mktemp("disk") / "tier"))


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


def test_what_was_offloaded_is_found_after_a_sleep_with_the_same_weights(slept: Run, expected: list[Any]) -> None:
    answers, counts = slept["naps"]["answers"], slept["naps"]["counts"]
    for name, source in [("same", "host_hit_tokens"), ("same, host memory lost", "tier_hit_tokens:disk")]:
        assert differences(answers[name], [[part[:SHORT] for part in answer] for answer in expected]) == []
        assert counts[name][source] > 0, name
        assert counts[name]["load_failures"] == counts[name]["weight_changes"] == 0
    assert differences(answers["others, again"], answers["right 1"]) == []
    assert counts["others, again"]["host_hit_tokens"] > 0


def test_after_a_sleep_with_other_weights_nothing_is_found(slept: Run) -> None:
    answers, counts = slept["naps"]["answers"], slept["naps"]["counts"]
    for name, right in [
        ("others", "right 1"),
        ("one weight", "right, one weight"),
        ("others, right after waking", "right 0"),
        ("reset, after waking", "right 0"),
    ]:
        assert differences(answers[name], answers[right]) == [], name
        assert counts[name]["host_hit_tokens"] == counts[name]["tier_hit_tokens:disk"] == 0, name
        assert counts[name]["load_failures"] == counts[name]["weight_changes"] == 0
    assert len(differences(answers["right 1"], answers["right, one weight"])) > 0


def test_weights_that_are_not_compared_after_a_sleep_give_wrong_answers(slept: Run) -> None:
    """The control."""
    answers, counts = slept["naps"]["answers"], slept["naps"]["counts"]
    assert counts["not compared"]["host_hit_tokens"] > 0
    assert len(differences(answers["not compared"], answers["right 1"])) > 0


def test_other_pools_end_offloading(slept: Run, expected: list[Any]) -> None:
    assert slept["off_with_other_pools"]
    assert slept.log.count("OFFLOADING IS OFF: the handshake (the workers' host pools are not those") == 1
    assert len(slept["without"]) == 10
    assert wrong_answers(slept, expected, "without") == []


@pytest.mark.soak
def test_a_second_scheduler_half_would_be_noticed(run: Runner, expected: list[Any]) -> None:
    """The control: if each handshake makes a new half whose job numbers begin again, it accepts reports of old jobs."""
    result = run("sleeps", **SLEEPS, connector=POOL, forgetful=True)
    assert wrong_answers(result, expected) != []
    assert not set(result["answered"]) <= set(result["recorded"])
