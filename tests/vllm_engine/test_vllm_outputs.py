"""Offloading changes when KV is computed, but never the outputs."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import (
    HAS_CUDA,
    POOL,
    WHOLE_PROMPTS,
    Run,
    Runner,
    assert_at_rest,
    assert_computed_whole,
    cases,
    differences,
    differences_beyond_ties,
)

pytestmark = pytest.mark.vllm

BFLOAT16_TOLERANCE = 0.1

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "lru, factor 4": {"connector": POOL | {"block_size_factor": 4}},
    "arc, slow copies, chunked prefill": {
        "connector": POOL | {"policy": "arc"},
        "slow": 1,
        "engine": {"max_num_batched_tokens": 96},
    },
    "slow copies, no prefix caching": {
        "connector": POOL,
        "slow": 2,
        "engine": {"enable_prefix_caching": False},
    },
    "stored when computed, slow copies, chunked prefill": {
        "connector": POOL | {"host_contents": "inclusive"},
        "slow": 1,
        "force_async": True,
        "engine": {"max_num_batched_tokens": 96},
    },
    "asynchronous scheduling, found as a plugin": {"connector": POOL, "force_async": True, "plugin": True},
}
"""All of them preempt requests. Slow copies are the hard case for fences: a block may be read or filled many steps
after the step that asked for it."""


def check_identical(run: Run, expected: list[Any]) -> None:
    for answers in run["outputs"]:
        assert differences(answers, expected) == []
    assert run["preemptions"] > 0
    assert_at_rest(run.result)


@pytest.mark.parametrize("config", cases(CONFIGURATIONS, soak={"lru, factor 4", "slow copies, no prefix caching"}))
def test_outputs_are_identical(run: Runner, expected: list[Any], config: dict[str, Any]) -> None:
    result = run("rounds", **config)
    check_identical(result, expected)
    keeps = config.get("engine", {}).get("enable_prefix_caching", True)
    set_to = config["connector"].get("host_contents", "exclusive")
    said = set_to if keeps else "inclusive contents, because the device cache does not keep blocks"
    assert f"; {said}" in result.log
    assert result["metrics"]["host_hit_tokens"] > 0
    assert result["metrics"]["load_bytes"] > 0
    assert result["async_scheduling"] == config.get("force_async", False)


def test_corrupted_bytes_change_outputs(run: Runner, expected: list[Any]) -> None:
    """The control: without it the comparisons here would prove nothing. Everything that the second round loads is
    corrupted."""
    result = run("rounds", connector=POOL, connector_class="CorruptedKVOffloadConnector")
    assert len(differences(result["outputs"][1], expected)) == len(expected)


def test_failing_copies_are_misses(run: Runner, expected: list[Any]) -> None:
    result = run("rounds", rounds=3, connector=POOL, connector_class="FailingKVOffloadConnector")
    check_identical(result, expected)
    assert result["metrics"]["store_failures"] > 0
    assert result["metrics"]["load_failures"] > 0
    assert result["metrics"]["load_blocks"] > 0


@pytest.mark.parametrize("kind", WHOLE_PROMPTS)
def test_answers_about_whole_prompts_use_no_offloaded_blocks(run: Runner, kind: str) -> None:
    right = run("whole_prompts", **WHOLE_PROMPTS[kind])["outputs"]
    result = run("whole_prompts", connector=POOL, **WHOLE_PROMPTS[kind])
    assert_computed_whole(result, right)


def test_records_distinguish_evicted_from_new_prefixes(run: Runner, expected: list[Any]) -> None:
    """With a pool of a few blocks, records say whether a missing prefix was evicted, and when."""
    result = run("rounds", connector={"host_bytes": "1MiB"})
    check_identical(result, expected)
    assert result["used_blocks"] == result["metrics"]["pool_blocks"] < 75
    assert result["metrics"]["evicted_blocks"] > 0
    first, second = result["records"][:10], result["records"][10:]
    assert {record["reason"] for record in first} <= {"never_stored", "evicted", "being_written"}
    assert "never_stored" in {record["reason"] for record in first}
    evicted = [record for record in second if record["reason"] == "evicted"]
    assert evicted
    for record in evicted:
        assert record["age_s"] > 0
        assert record["missed_key"]


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_with_cuda_graphs_outputs_are_identical(run: Runner, layout: str) -> None:
    """In bfloat16, as served: blocks are gathered in one layout and copied directly in the other."""
    config: dict[str, Any] = {
        "engine": {"dtype": "bfloat16", "enforce_eager": False},
        "environment": {"VLLM_KV_CACHE_LAYOUT": layout},
        "force_async": True,
    }
    right = run("rounds", rounds=1, **config)["outputs"][0]
    result = run("rounds", connector=POOL, **config)
    for answers in result["outputs"]:
        assert differences_beyond_ties(answers, right, BFLOAT16_TOLERANCE) == []
    assert result["metrics"]["load_bytes"] > 0
    assert_at_rest(result.result)
