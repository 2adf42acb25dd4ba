"""Models with recurrent or convolutional layers beside attention: hits need a state exactly at their end.

The rows of docs/support.md's table: recurrent and convolutional layers beside attention; blocks stored in parts; bursts
of aborts and preemptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_harness import (
    LFM2,
    PARALLEL,
    POOL,
    QWEN3NEXT,
    TWO_RANKS,
    Run,
    Runner,
    assert_at_rest,
    assert_counted,
    check,
    differences,
    differences_beyond_ties,
    disk_tokens,
    with_disk,
    with_lfm2,
    wrong_of_storm,
)

from tests.scale import SCALE

pytestmark = pytest.mark.vllm

BFLOAT16_TOLERANCE = 0.1
"""Logprobs differ by up to 0.04 after a preemption, without kvoffload too."""
BLOCK_SIZE = 32
CALM: dict[str, Any] = {
    **QWEN3NEXT,
    "engine": QWEN3NEXT["engine"] | {"max_num_seqs": 2, "num_gpu_blocks_override": 32},
}
"""Gated delta nets without preemptions."""
REQUESTS = 40 if SCALE <= 1 else 300
ACTS: dict[str, dict[str, Any]] = {
    "computed": {},
    "rounds": {"rounds": 3, "slow": 1},
    "storm": {"seed": 2, "requests": REQUESTS, "slow": 1, "failing": 0.3},
    # The KV that is loaded is right, and the states are not.
    "rounds, corrupted": {"corrupt": "states", "forget": True},
}


@pytest.fixture(scope="module")
def acts(run: Runner) -> dict[str, Run]:
    connector = {"host_bytes": "4MiB", "policy": "arc", "canonical_layout": True}
    return run.play(ACTS, **with_lfm2(connector=connector, force_async=True))


@pytest.fixture(scope="module")
def lfm2_expected(acts: dict[str, Run]) -> list[Any]:
    """The answers of a model with short convolutions, without loads."""
    return list(acts["computed"]["outputs"][0])


def hits(records: list[Any]) -> list[int]:
    """Returns which prompts found something in host memory. Records are in the order in which lookups ended."""
    ordered = sorted(records, key=lambda record: int(record["req_id"].split("-")[0]))
    return [i for i, record in enumerate(ordered) if record["host_tokens"]]


class TestShortConvolutions:
    """Rows "recurrent and convolutional layers", "stored in parts" and "bursts of aborts"."""

    def test_outputs_are_identical(self, acts: dict[str, Run], lfm2_expected: list[Any]) -> None:
        result = acts["rounds"]
        check(result, lfm2_expected)
        assert result["preemptions"] > 0
        assert result["async_scheduling"]
        *states, full = result["loaded_blocks"]
        assert len(states) == 3
        assert len(set(states)) == 1, "each hit loads one state per group"
        assert 0 < states[0] < full
        assert not result["metrics"].get("store_failures"), (
            "vLLM's model runner for CPUs fills blocks with zeros after fences"
        )
        assert f"set --prefix-cache-retention-interval {BLOCK_SIZE} to keep them" in result.log
        assert "canonical_layout has no effect: layers with states have none." in result.log

    def test_corrupted_states_change_outputs(self, acts: dict[str, Run], lfm2_expected: list[Any]) -> None:
        """The control."""
        result = acts["rounds, corrupted"]
        found = hits(result["records"][len(lfm2_expected) :])
        assert found
        assert set(found) <= set(differences(result["outputs"][1], lfm2_expected))

    def test_a_storm_of_requests_aborts_failures_and_resets(
        self, acts: dict[str, Run], lfm2_expected: list[Any]
    ) -> None:
        result = acts["storm"]
        assert result["left"] == 0
        assert result["aborted"] > 0
        assert len(result["answers"]) + result["aborted"] == REQUESTS
        assert wrong_of_storm(result, lfm2_expected) == []
        assert_counted(result, "host_hit_tokens", "store_failures")
        assert_at_rest(result.result)


@pytest.mark.soak
def test_copies_fail_where_blocks_are_filled_with_zeros_before_fences(run: Runner) -> None:
    """The control."""
    config = with_lfm2(connector=POOL | {"policy": "arc", "block_size_factor": 2}, slow=1)
    result = run("rounds", rounds=3, **config, connector_class="UnfencedKVOffloadConnector")
    assert result["metrics"]["store_failures"] > 0


@pytest.mark.soak
def test_gated_delta_nets(run: Runner, tmp_path: Path) -> None:
    """Without preemptions the answers are the same in bfloat16 too. A preempted request computes its output again as a
    prompt, so logprobs round otherwise, and tokens of the same logprob may differ, without kvoffload too."""
    plays: dict[str, dict[str, Any]] = {"computed": {}, "rounds": {}, "rounds, corrupted": ACTS["rounds, corrupted"]}
    calm = run.play(plays, **CALM, connector=with_disk(tmp_path / "disk"))
    (expected,) = calm["computed"]["outputs"]
    check(calm["rounds"], expected)
    assert calm["rounds"]["preemptions"] == 0
    assert_counted(calm["rounds"], "host_hit_tokens", "tier_write_blocks:disk")
    found, wrong = hits(calm["rounds, corrupted"]["records"][len(expected) :]), calm["rounds, corrupted"]["outputs"][1]
    assert found
    assert set(found) <= set(differences(wrong, expected))
    assert differences_beyond_ties(wrong, expected, BFLOAT16_TOLERANCE)
    preempted = run("rounds", **QWEN3NEXT, connector=POOL, slow=1)
    assert preempted["preemptions"] > 0
    assert_counted(preempted, "host_hit_tokens")
    for answers in preempted["outputs"]:
        assert differences_beyond_ties(answers, expected, BFLOAT16_TOLERANCE) == []
    assert_at_rest(preempted.result)


@pytest.mark.soak
def test_two_ranks_and_a_restart_from_disk(run: Runner, tmp_path: Path) -> None:
    """Each rank has a part of every state. Copies end, or fail, at other times on each of them."""
    config = {
        **LFM2,
        "engine": LFM2["engine"] | PARALLEL["tensor"],
        "environment": TWO_RANKS,
        "connector": with_disk(tmp_path / "disk"),
        "connector_class": "SlowKVOffloadConnector",
    }
    first = run.play({"computed": {}, "rounds": {"rounds": 3, "close": True}}, **config)
    (expected,) = first["computed"]["outputs"]
    check(first["rounds"], expected)
    assert_counted(first["rounds"], "host_hit_tokens", "load_failures", "store_failures")
    second = run("rounds", rounds=1, **config)
    check(second, expected)
    assert disk_tokens(second) > 0
