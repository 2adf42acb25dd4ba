"""Clients abort requests at every stage: nothing leaks, and other requests are not affected."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import POOL, Runner, assert_at_rest, differences

pytestmark = pytest.mark.vllm


def test_survivors_are_identical_and_nothing_leaks(run: Runner, expected: list[Any]) -> None:
    result = run("aborts", connector=POOL, slow=3, engine={"max_num_batched_tokens": 64})
    assert {"waiting", "loading", "prefilling", "decoding"} <= set(result["aborted"])
    gone = {int(name[1:]) for name in result["aborted"].values()}
    survivors = [i for i in range(len(expected)) if i not in gone]
    assert len(survivors) >= 5
    answers = result["outputs"]
    assert [i for i, answer in enumerate(answers) if answer is None] == sorted(gone)
    assert differences([answers[i] for i in survivors], [expected[i] for i in survivors]) == []
    assert result["metrics"]["host_hit_tokens"] > 0
    assert_at_rest(result.result)


@pytest.mark.parametrize("contents", ["exclusive", pytest.param("inclusive", marks=pytest.mark.soak)])
def test_a_storm_of_requests_aborts_failures_and_resets(run: Runner, expected: list[Any], contents: str) -> None:
    """All at once, in a small pool, with copies that take many steps and sometimes fail."""
    result = run(
        "storm",
        seed=1,
        requests=150,
        connector={"host_bytes": "1MiB", "host_contents": contents},
        slow=1,
        failing=0.3,
        force_async=True,
        engine={"max_num_batched_tokens": 128},
    )
    assert result["left"] == 0
    assert result["aborted"] > 0
    assert len(result["answers"]) + result["aborted"] == 150
    for index, (tokens, logprobs) in result["answers"]:
        right_tokens, right_logprobs = expected[index]
        right = [right_tokens[: len(tokens)], right_logprobs[: len(tokens)]]
        assert differences([[tokens, logprobs]], [right]) == []
    assert result["preemptions"] > 0
    metrics = result["metrics"]
    for name in ("host_hit_tokens", "load_failures", "store_failures", "evicted_blocks", "misses:reset"):
        assert metrics[name] > 0, name
    assert_at_rest(result.result)


def test_a_load_that_fails_whole_is_recomputed(run: Runner) -> None:
    """The request needs more than half of the device, and vLLM keeps blocks reserved for it."""
    result = run("failed_load", connector=POOL | {"host_contents": "inclusive"}, again=False)
    assert result["steps"] is not None
    assert differences(result["outputs"][0], result["expected"]) == []
    assert result["metrics"]["load_failures"] == 1
    assert result["metrics"].get("host_hit_tokens", 0) > 0
    assert_at_rest(result.result)


def test_vllm_never_admits_a_second_load_after_a_failed_one(run: Runner) -> None:
    """This is why kvoffload offers none: the reservation of the failed request leaves no room for it. If this test
    fails, vLLM has been fixed, and a request could be offered a second load."""
    result = run("failed_load", connector=POOL | {"host_contents": "inclusive"}, again=True)
    assert result["metrics"]["load_failures"] == 1
    assert result["steps"] is None
