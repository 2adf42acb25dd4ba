"""Models with recurrent or convolutional layers beside attention: hits need a state exactly at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from test_vllm_disk import check_answers, disk_tokens, found, with_disk
from test_vllm_ranks import PARALLEL, TWO_RANKS
from vllm_harness import (
    DEADLINE_S,
    LFM2,
    POOL,
    QWEN3NEXT,
    Run,
    Runner,
    assert_at_rest,
    cases,
    differences,
    differences_beyond_ties,
    with_lfm2,
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

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "slow copies, arc, blocks of several device blocks": {
        "connector": POOL | {"policy": "arc", "block_size_factor": 2},
        "slow": 1,
    },
    "asynchronous scheduling, a small pool": {
        "connector": {"host_bytes": "1MiB"},
        "slow": 3,
        "force_async": True,
        "engine": {"max_num_batched_tokens": 96},
    },
}


@pytest.fixture(scope="session")
def lfm2_expected(run: Runner) -> list[Any]:
    """The answers of a model with short convolutions, without offloading."""
    result = run.once("lfm2", "rounds", rounds=1, **LFM2)
    return list(result["outputs"][0])


def check(result: Run, expected: list[Any]) -> None:
    for answers in result["outputs"]:
        assert differences(answers, expected) == []
    assert_at_rest(result.result)


def hits_of_second_round(result: Run) -> list[int]:
    """Returns which prompts of the second round found something in host memory. Records are in the order in which the
    lookups ended."""
    records = sorted(result["records"], key=lambda record: int(record["req_id"].split("-")[0]))
    return [i for i, record in enumerate(records[len(records) // 2 :]) if record["host_tokens"]]


@pytest.mark.parametrize("config", cases(CONFIGURATIONS, soak={"asynchronous scheduling, a small pool"}))
def test_outputs_are_identical(run: Runner, lfm2_expected: list[Any], config: dict[str, Any]) -> None:
    result = run("rounds", rounds=3, **with_lfm2(**config))
    check(result, lfm2_expected)
    assert result["preemptions"] > 0
    assert result["async_scheduling"] == config.get("force_async", False)
    *states, full = result["loaded_blocks"]
    assert len(states) == 3
    assert len(set(states)) == 1, "each hit loads one state per group"
    assert 0 < states[0] < full
    assert not result["metrics"].get("store_failures"), (
        "vLLM's model runner for CPUs fills blocks with zeros after fences"
    )


@pytest.mark.soak
def test_copies_fail_where_blocks_are_filled_with_zeros_before_fences(run: Runner) -> None:
    """The control."""
    config = next(iter(CONFIGURATIONS.values()))
    result = run("rounds", rounds=3, **with_lfm2(**config), connector_class="UnfencedKVOffloadConnector")
    assert result["metrics"]["store_failures"] > 0


def test_corrupted_states_change_outputs(run: Runner, lfm2_expected: list[Any]) -> None:
    """The control: the KV of the second round is right, and its states are not."""
    result = run("rounds", **LFM2, connector=POOL, connector_class="CorruptedStatesKVOffloadConnector")
    assert f"set --prefix-cache-retention-interval {BLOCK_SIZE} to keep them" in result.log
    hits = hits_of_second_round(result)
    assert hits
    assert set(hits) <= set(differences(result["outputs"][1], lfm2_expected))


@pytest.mark.soak
def test_gated_delta_nets(run: Runner) -> None:
    """Without preemptions the answers are the same in bfloat16 too. A preempted request computes its output again as a
    prompt, so logprobs round otherwise, and tokens of the same logprob may differ, without kvoffload too."""
    (expected,) = run("rounds", rounds=1, **CALM)["outputs"]
    calm = run("rounds", **CALM, connector=POOL)
    check(calm, expected)
    assert calm["preemptions"] == 0
    assert calm["metrics"]["host_hit_tokens"] > 0
    preempted = run("rounds", **QWEN3NEXT, connector=POOL, slow=1)
    assert preempted["preemptions"] > 0
    assert preempted["metrics"]["host_hit_tokens"] > 0
    for answers in preempted["outputs"]:
        assert differences_beyond_ties(answers, expected, BFLOAT16_TOLERANCE) == []
    assert_at_rest(preempted.result)
    wrong = run("rounds", **CALM, connector=POOL, connector_class="CorruptedStatesKVOffloadConnector")
    hits = hits_of_second_round(wrong)
    assert hits
    assert set(hits) <= set(differences(wrong["outputs"][1], expected))
    assert differences_beyond_ties(wrong["outputs"][1], expected, BFLOAT16_TOLERANCE)


@pytest.mark.soak
def test_a_turn_computes_little_of_the_former_one(run: Runner) -> None:
    """At most one block of the prompt and the answer before is computed again. The device cannot keep all of them. vLLM
    must be asked to keep states of outputs, and the log says so."""
    engine = {"max_model_len": 1024, "num_gpu_blocks_override": 48, "prefix_cache_retention_interval": BLOCK_SIZE}
    with_turns: dict[str, Any] = with_lfm2(prompts=4, engine=engine)
    reference = run("turns", **with_turns)
    result = run("turns", **with_turns, connector=POOL)
    for answers, expected in zip(result["outputs"], reference["outputs"], strict=True):
        assert differences(answers, expected) == []
    records = sorted(result["records"], key=lambda record: int(record["req_id"].split("-")[0]))
    known = [0] * 4 + result["known"][0] + result["known"][1]
    assert len(records) == len(known)
    for record, tokens in zip(records, known, strict=True):
        computed_again = tokens - record["device_tokens"] - record["host_tokens"]
        assert computed_again <= BLOCK_SIZE, record
    assert sum(record["host_tokens"] for record in records) > 0
    assert "keeps no states of outputs" not in result.log
    assert_at_rest(result.result)


@pytest.mark.soak
def test_what_the_device_lacks_is_restored(run: Runner) -> None:
    """The device may hold KV without the state behind it, and the other way round: what is missing comes from host
    memory, and no hit ends where a state is missing."""
    engine = {"num_gpu_blocks_override": 200, "prefix_cache_retention_interval": BLOCK_SIZE}
    result = run("divergent", **with_lfm2(connector=POOL, engine=engine))
    expected, whole, tokens = result["expected"], result["whole"], result["found"]
    assert differences(result["outputs"], [expected] * len(result["outputs"])) == []
    assert tokens.pop("nothing") == [whole, 0]
    assert tokens.pop("all states") == tokens.pop("all KV") == [0, whole]
    assert tokens
    for device, host in tokens.values():
        assert device > 0 < host
        assert device + host == whole
    assert_at_rest(result.result)


@pytest.mark.soak
def test_a_restarted_server_answers_from_disk(run: Runner, lfm2_expected: list[Any], tmp_path: Path) -> None:
    connector = with_disk(tmp_path / "disk")
    first = run("rounds", rounds=1, close=True, **LFM2, connector=connector)
    check_answers(first, lfm2_expected)
    second = run("rounds", rounds=1, close=True, **LFM2, connector=connector)
    assert found(second) > 0
    assert disk_tokens(second) > 0
    check_answers(second, lfm2_expected)


@pytest.mark.soak
def test_two_ranks(run: Runner, lfm2_expected: list[Any]) -> None:
    """Each rank has a part of every state. Copies end, or fail, at other times on each of them."""
    result = run(
        "rounds",
        rounds=3,
        connector=POOL,
        connector_class="SlowKVOffloadConnector",
        environment=TWO_RANKS,
        **with_lfm2(engine=PARALLEL["tensor"]),
    )
    check(result, lfm2_expected)
    for name in ("host_hit_tokens", "load_failures", "store_failures"):
        assert result["metrics"][name] > 0, name


def test_a_storm_of_requests_aborts_failures_and_resets(run: Runner, lfm2_expected: list[Any]) -> None:
    requests = 40 if SCALE <= 1 else 300
    result = run(
        "storm",
        seed=2,
        requests=requests,
        slow=1,
        failing=0.3,
        force_async=True,
        **with_lfm2(connector={"host_bytes": "1MiB"}),
    )
    assert result["left"] == 0
    assert len(result["answers"]) + result["aborted"] == requests
    for index, (tokens, logprobs) in result["answers"]:
        right_tokens, right_logprobs = lfm2_expected[index]
        right = [right_tokens[: len(tokens)], right_logprobs[: len(tokens)]]
        assert differences([[tokens, logprobs]], [right]) == []
    for name in ("host_hit_tokens", "store_failures"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)


@pytest.mark.soak
def test_gated_delta_nets_on_two_ranks(run: Runner) -> None:
    parallel: dict[str, Any] = {**CALM, "engine": CALM["engine"] | PARALLEL["tensor"], "environment": TWO_RANKS}
    (expected,) = run("rounds", rounds=1, **parallel)["outputs"]
    result = run("rounds", rounds=3, **parallel, connector=POOL, connector_class="SlowKVOffloadConnector")
    check(result, expected)
    assert result["metrics"]["host_hit_tokens"] > 0


@pytest.mark.soak
def test_gated_delta_nets_from_disk(run: Runner, tmp_path: Path) -> None:
    (expected,) = run("rounds", rounds=1, **CALM)["outputs"]
    connector = with_disk(tmp_path / "disk")
    for is_second in (False, True):
        result = run("rounds", rounds=1, close=True, **CALM, connector=connector)
        check_answers(result, expected)
        assert (disk_tokens(result) > 0) == is_second


@pytest.mark.soak
def test_turns_with_gated_delta_nets(run: Runner) -> None:
    """Turns continue from host memory exactly as they do on a device that keeps everything. One that has lost a state
    computes the answer before as a prompt, which rounds otherwise."""
    engine = CALM["engine"] | {"max_model_len": 768, "prefix_cache_retention_interval": 64}
    keeps_all: dict[str, Any] = {**CALM, "prompts": 4, "engine": engine | {"num_gpu_blocks_override": 200}}
    turns: dict[str, Any] = {**keeps_all, "engine": engine | {"num_gpu_blocks_override": 34}}
    reference, result = run("turns", **keeps_all), run("turns", **turns, connector=POOL)
    for answers, expected in zip(result["outputs"], reference["outputs"], strict=True):
        assert differences(answers, expected) == []
    assert sum(record["host_tokens"] for record in result["records"]) > 0
    assert_at_rest(result.result)


@pytest.mark.soak
def test_without_prefix_caching_the_server_ends_with_the_fix(run: Runner) -> None:
    child, result = run.start("rounds", **with_lfm2(connector=POOL, engine={"enable_prefix_caching": False}))
    assert child.wait(DEADLINE_S) != 0
    said = result.with_suffix(".log").read_text()
    assert "ConfigError: mamba_cache_mode=none" in said
    assert "turn prefix caching on" in said
