"""Several ranks and processes: each rank has a pool, and a copy counts when every rank has made it."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import POOL, Runner, assert_at_rest, differences, with_gemma3

pytestmark = pytest.mark.vllm

BLOCK_SIZE, NUM_LAYERS = 32, 2
"""Tokens per block, and layers of the model."""

FEW = 6
"""Number of prompts on two ranks, whose steps take three times as long as those of one."""

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "pipeline": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
}


# Several groups on tensor-parallel ranks are in test_vllm_hybrids too.
@pytest.mark.soak
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_two_ranks(run: Runner, kind: str, parallel: str, expected: list[Any], gemma3_expected: list[Any]) -> None:
    """The copies of each rank end, or fail, at other times."""
    config = {"connector": POOL, "connector_class": "SlowKVOffloadConnector", "environment": TWO_RANKS}
    engine = PARALLEL[parallel]
    if kind == "gemma3":
        # In a pipeline two steps may be in progress, which need more blocks.
        blocks = {"num_gpu_blocks_override": 28} if parallel == "pipeline" else {}
        result = run("rounds", rounds=4, **with_gemma3(**config, engine=engine | blocks))
    else:
        result = run("rounds", rounds=3, prompts=FEW, **config, engine=engine)
    for answers in result["outputs"]:
        assert differences(answers, gemma3_expected if kind == "gemma3" else expected[:FEW]) == []
    assert result["preemptions"] > 0
    for name in ("host_hit_tokens", "load_blocks", "load_failures", "store_failures"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)
    assert " on 2 ranks = " in result.log


@pytest.fixture(scope="session")
def one_head_expected(run: Runner) -> list[Any]:
    """The answers of a model with a single KV head, without offloading and on one rank."""
    return list(run.once("one-head", "rounds", rounds=1, model_kind="one-head", prompts=FEW)["outputs"][0])


ONE_HEAD: dict[str, Any] = {
    "model_kind": "one-head",
    "prompts": FEW,
    "environment": TWO_RANKS,
    "engine": PARALLEL["tensor"],
    "connector": POOL,
}


def test_ranks_with_the_same_kv_share_a_pool(run: Runner, one_head_expected: list[Any]) -> None:
    """Each rank holds the only KV head. The host holds twice the tokens that it would hold in a pool per rank."""
    result = run("rounds", rounds=3, **ONE_HEAD, connector_class="SlowKVOffloadConnector", replicas=True)
    for answers in result["outputs"]:
        assert differences(answers, one_head_expected) == []
    for name in ("host_hit_tokens", "load_blocks", "load_failures", "store_failures"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)
    block_bytes = 2 * BLOCK_SIZE * 32 * 4 * NUM_LAYERS
    tokens = (64 << 20) // block_bytes * BLOCK_SIZE
    assert f" in 1 pool for 2 ranks = {tokens:,} tokens" in result.log
    assert result["replicas"] == [[2, 1, 1], [2, 1, 1]]


@pytest.mark.soak
def test_ranks_with_the_same_kv_notice_corrupted_bytes(run: Runner, one_head_expected: list[Any]) -> None:
    result = run("rounds", **ONE_HEAD, connector_class="CorruptedFollowerKVOffloadConnector")
    assert len(differences(result["outputs"][1], one_head_expected)) == len(one_head_expected)


@pytest.mark.soak
def test_an_engine_in_processes_of_its_own(run: Runner, expected: list[Any]) -> None:
    result = run("rounds", multiprocessing=True, connector=POOL)
    for answers in result["outputs"]:
        assert differences(answers, expected) == []
    assert result["prometheus"]["kvoffload:host_hit_tokens_total"] > 0
    assert result["prometheus"]["kvoffload:load_bytes_total"] > 0
