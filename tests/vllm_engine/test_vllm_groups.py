"""A model that alternates between sliding-window and full-attention layers: it has two KV cache groups. Its engine also
has the layout in which a block is one piece of memory, and sleeps and wakes up under load with the calls that vLLM 0.33
makes to its connectors.

The rows of docs/support.md's table: sliding windows beside full attention; KV cache layouts; sleep.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from driver import SHORT
from vllm_harness import (
    POOL,
    Run,
    Runner,
    assert_at_rest,
    check,
    differences,
    with_disk,
    with_gemma3,
)

pytestmark = pytest.mark.vllm

MODES = {"modes": ["abort", "keep"]}
ACTS: dict[str, dict[str, Any]] = {
    "rounds": {"rounds": 3, "slow": 1},
    "rounds, corrupted": {"rounds": 1, "corrupt": "all", "forget": True},
    "rounds, reset": {"rounds": 1, "reset": True},
    "sleeps": {**MODES, "slow": 1},
}


@pytest.fixture(scope="module")
def acts(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run.play(
        ACTS,
        **with_gemma3(connector=with_disk(tmp_path_factory.mktemp("groups") / "disk")),
        connector_class="BlocksFirstKVOffloadConnector",
        patches=["keeps over pauses"],
    )


def test_outputs_are_identical_with_blocks_in_one_piece(acts: dict[str, Run], gemma3_expected: list[Any]) -> None:
    """Rows "full attention with sliding windows" and "KV cache layouts"."""
    result = acts["rounds"]
    check(result, gemma3_expected)
    assert "Using BLHNC KV cache layout" in result.log
    assert "KV cache layout BLHNC: a device block is one piece of memory" in result.log
    assert result["preemptions"] > 0
    full, windowed = sorted(result["loaded_blocks"], reverse=True)
    assert full > windowed > 0, "of a prompt longer than the window, windowed layers load less"


def test_corrupted_bytes_change_outputs(acts: dict[str, Run], gemma3_expected: list[Any]) -> None:
    assert len(differences(acts["rounds, corrupted"]["outputs"][0], gemma3_expected)) == len(gemma3_expected)
    check(acts["rounds, reset"], gemma3_expected)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "blocks of several device blocks, no prefix caching": {
        "connector": POOL | {"block_size_factor": 3},
        "slow": 2,
        "engine": {"enable_prefix_caching": False},
    },
    "asynchronous scheduling, failing copies, a small pool": {
        "connector": {"host_bytes": "4MiB", "policy": "arc"},
        "slow": 3,
        "failing": 0.4,
        "force_async": True,
        "engine": {"num_gpu_blocks_override": 27},
    },
}


@pytest.mark.soak
@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_outputs_are_identical(run: Runner, gemma3_expected: list[Any], config: dict[str, Any]) -> None:
    result = run("rounds", rounds=3, **with_gemma3(**config))
    check(result, gemma3_expected)
    # Two steps in progress need so many blocks that nothing is preempted.
    assert result["preemptions"] > 0 or config.get("force_async")
    assert min(result["loaded_blocks"]) > 0, "hits in both groups"
    assert (result["metrics"].get("load_failures", 0) > 0) is ("failing" in config)


# Sleep.


@pytest.mark.parametrize(
    ("sleeps", "caches", "keeps"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_device_cache_that_may_lose_its_blocks_is_repeated(sleeps: bool, caches: bool, keeps: bool) -> None:
    from kvoffload.vllm import versions

    model, cache = SimpleNamespace(enable_sleep_mode=sleeps), SimpleNamespace(enable_prefix_caching=caches)
    config: Any = SimpleNamespace(model_config=model, cache_config=cache)
    assert versions.keeps_blocks(config) is keeps


def wrong_answers(result: Run, expected: list[Any], name: str = "answers") -> list[int]:
    """Returns the indices of prompts whose answers differ from ``expected``."""
    answers = result[name]
    right = [expected[index] for index, _ in answers]
    return [answers[i][0] for i in differences([got for _, got in answers], right)]


class TestSleep:
    """Row "blocks kept over sleep"."""

    def test_answers_are_identical_after_every_wake(self, acts: dict[str, Run], gemma3_expected: list[Any]) -> None:
        slept = acts["sleeps"]
        assert len(slept["answers"]) == 30
        assert wrong_answers(slept, gemma3_expected) == []
        assert min(slept["under_way"]) > 0
        assert slept["metrics"]["host_hit_tokens"] > 0
        assert_at_rest(slept.result)

    def test_one_scheduler_half_serves_all_of_them(self, acts: dict[str, Run]) -> None:
        slept = acts["sleeps"]
        assert slept["one_half"]
        assert set(slept["answered"]) <= set(slept["recorded"])
        assert len(slept["recorded"]) == len(set(slept["recorded"]))

    def test_what_was_offloaded_is_found_after_a_sleep_with_the_same_weights(
        self, acts: dict[str, Run], gemma3_expected: list[Any]
    ) -> None:
        naps = acts["sleeps"]["naps"]
        answers, counts = naps["answers"], naps["counts"]
        for name, source in [("same", "host_hit_tokens"), ("same, host memory lost", "tier_hit_tokens:disk")]:
            assert differences(answers[name], [[part[:SHORT] for part in each] for each in gemma3_expected]) == []
            assert counts[name][source] > 0, name
            assert counts[name]["load_failures"] == counts[name]["weight_changes"] == 0
        assert differences(answers["others, again"], answers["right 1"]) == []
        assert counts["others, again"]["host_hit_tokens"] > 0

    def test_after_a_sleep_with_other_weights_nothing_is_found(self, acts: dict[str, Run]) -> None:
        naps = acts["sleeps"]["naps"]
        answers, counts = naps["answers"], naps["counts"]
        for name, right in [
            ("others", "right 1"),
            ("others, right after waking", "right 0"),
            ("reset, after waking", "right 0"),
        ]:
            assert differences(answers[name], answers[right]) == [], name
            # What was stored in this round may be found in it again.
            assert counts[name]["tier_hit_tokens:disk"] == 0, name
            assert counts[name]["host_hit_tokens"] < counts["same"]["host_hit_tokens"] / 2, name
            assert counts[name]["load_failures"] == counts[name]["weight_changes"] == 0

    def test_weights_that_are_not_compared_after_a_sleep_give_wrong_answers(self, acts: dict[str, Run]) -> None:
        """The control."""
        naps = acts["sleeps"]["naps"]
        assert naps["counts"]["not compared"]["host_hit_tokens"] > 0
        assert len(differences(naps["answers"]["not compared"], naps["answers"]["right 1"])) > 0

    def test_weights_that_come_back_do_not_find_what_others_computed(self, acts: dict[str, Run]) -> None:
        """They are written in place. The last rounds are the control."""
        swapped = acts["sleeps"]["swapped"]
        answers, counts = swapped["answers"], swapped["counts"]
        wrong = [
            len(differences(answers[name], answers[f"right {number}"]))
            for name, number in (("other", 1), ("back", 0), ("unwatched", 1), ("and back", 0))
        ]
        assert len(differences(answers["right 0"], answers["right 1"])) == 10
        assert wrong[:2] == [0, 0]
        assert sum(wrong[2:]) >= 3
        assert counts["other"]["weight_changes"] == counts["back"]["weight_changes"] == 1

    def test_other_pools_end_offloading(self, acts: dict[str, Run], gemma3_expected: list[Any]) -> None:
        slept = acts["sleeps"]
        assert slept["off_with_other_pools"]
        assert slept.log.count("OFFLOADING IS OFF: the handshake (the workers' host pools are not those") == 1
        assert len(slept["without"]) == 10
        assert wrong_answers(slept, gemma3_expected, "without") == []


@pytest.mark.soak
def test_a_second_scheduler_half_would_be_noticed(run: Runner) -> None:
    """The control: if each handshake makes a new half whose job numbers begin again, it accepts reports of old jobs."""
    config: dict[str, Any] = {**MODES, "slow": 1, "max_tokens": 48, "forgetful": True}
    pool = {**POOL, "host_contents": "inclusive"}
    result = run("sleeps", **config, connector=pool, connector_class="ForgetfulKVOffloadConnector")
    assert wrong_answers(result, run.right("llama", max_tokens=48)) != []
    assert not set(result["answered"]) <= set(result["recorded"])
