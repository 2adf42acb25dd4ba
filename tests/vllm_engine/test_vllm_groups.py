"""A model that alternates between sliding-window and full-attention layers: it has two KV cache groups."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import GEMMA3, POOL, Run, Runner, assert_at_rest, cases, differences, with_gemma3

pytestmark = pytest.mark.vllm

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"connector": POOL},
    "slow copies, chunked prefill, arc": {
        "connector": POOL | {"policy": "arc"},
        "slow": 1,
        "engine": {"max_num_batched_tokens": 96},
    },
    "blocks of several device blocks, no prefix caching": {
        "connector": POOL | {"block_size_factor": 3},
        "slow": 2,
        "engine": {"enable_prefix_caching": False},
    },
    "asynchronous scheduling, a small pool": {
        "connector": {"host_bytes": "4MiB"},
        "slow": 3,
        "force_async": True,
        "engine": {"num_gpu_blocks_override": 27},
    },
}


DRAFT_ENGINE = {"num_gpu_blocks_override": 48}


def check(result: Run, expected: list[Any]) -> None:
    for got in result["outputs"]:
        assert differences(got, expected) == []
    assert_at_rest(result.result)


@pytest.mark.parametrize(
    "config",
    cases(
        CONFIGURATIONS,
        soak={"plain", "slow copies, chunked prefill, arc", "blocks of several device blocks, no prefix caching"},
    ),
)
def test_outputs_are_identical(run: Runner, gemma3_expected: list[Any], config: dict[str, Any]) -> None:
    result = run("rounds", **with_gemma3(**config))
    check(result, gemma3_expected)
    # Two steps in progress need so many blocks that nothing is preempted.
    assert result["preemptions"] > 0 or config.get("force_async")
    full, windowed = sorted(result["loaded_blocks"], reverse=True)
    assert windowed > 0, "hits in both groups"
    if config["connector"]["host_bytes"] == POOL["host_bytes"]:
        assert full > windowed, "of a prompt longer than the window, windowed layers load less"


def test_corrupted_bytes_change_outputs(run: Runner, gemma3_expected: list[Any]) -> None:
    result = run("rounds", **GEMMA3, connector=POOL, connector_class="CorruptedKVOffloadConnector")
    assert len(differences(result["outputs"][1], gemma3_expected)) == len(gemma3_expected)


@pytest.mark.soak
def test_failing_copies_are_misses(run: Runner, gemma3_expected: list[Any]) -> None:
    """Whole loads fail while other requests hold blocks. vLLM must get past a request that lost all of its blocks."""
    result = run("rounds", rounds=3, **GEMMA3, connector=POOL, connector_class="FailingKVOffloadConnector")
    check(result, gemma3_expected)
    assert result["metrics"]["load_failures"] > 0
    assert result["metrics"]["load_blocks"] > 0


@pytest.mark.soak
def test_a_draft_models_kv_is_right_too(run: Runner, expected: list[Any]) -> None:
    """The model checks drafts, so wrong ones do not change outputs but are accepted less often. Here the model is its
    own draft model, so nearly all are accepted."""
    result = run("rounds", rounds=3, connector=POOL, draft=True, engine=DRAFT_ENGINE)
    for got in result["outputs"]:
        assert differences(got, expected) == []
    assert result["metrics"]["host_hit_tokens"] > 0
    assert result["accepted"] > 0.95 * result["drafted"] > 0
    assert_at_rest(result.result)


@pytest.mark.soak
def test_drafts_from_corrupted_kv_are_accepted_less_often(run: Runner, expected: list[Any]) -> None:
    """The control. The outputs stay the same."""
    result = run("rounds", rounds=3, connector=POOL, draft=True, corrupt_drafts=True, engine=DRAFT_ENGINE)
    for got in result["outputs"]:
        assert differences(got, expected) == []
    assert result["accepted"] < 0.95 * result["drafted"]
