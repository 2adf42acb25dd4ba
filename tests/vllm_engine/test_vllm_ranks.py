"""Several ranks and processes: each rank has a pool, and a copy counts when every rank has made it."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import POOL, Runner, assert_at_rest, differences, with_gemma3

from kvoffload.testing.scale import SCALE

pytestmark = pytest.mark.vllm

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "pipeline": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
}


CASES = [("gemma3", "tensor"), ("llama", "pipeline")]
if SCALE > 1:
    CASES += [("llama", "tensor"), ("gemma3", "pipeline")]


@pytest.mark.parametrize(("kind", "parallel"), CASES)
def test_two_ranks(run: Runner, kind: str, parallel: str, expected: list[Any], gemma3_expected: list[Any]) -> None:
    """The copies of each rank end, or fail, at other times."""
    config = {"connector": POOL, "connector_class": "SlowKVOffloadConnector", "environment": TWO_RANKS}
    engine = PARALLEL[parallel]
    if kind == "gemma3":
        # In a pipeline two steps may be in progress, which need more blocks.
        blocks = {"num_gpu_blocks_override": 28} if parallel == "pipeline" else {}
        result = run("rounds", rounds=4, **with_gemma3(**config, engine=engine | blocks))
    else:
        result = run("rounds", rounds=4, **config, engine=engine)
    for answers in result["outputs"]:
        assert differences(answers, gemma3_expected if kind == "gemma3" else expected) == []
    assert result["preemptions"] > 0
    for name in ("host_hit_tokens", "load_blocks", "load_failures", "store_failures"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)
    assert " on 2 ranks = " in result.log


def test_two_ranks_notice_corrupted_bytes(run: Runner, expected: list[Any]) -> None:
    result = run(
        "rounds",
        environment=TWO_RANKS,
        engine=PARALLEL["tensor"],
        connector=POOL,
        connector_class="CorruptedKVOffloadConnector",
    )
    assert len(differences(result["outputs"][1], expected)) == len(expected)


def test_an_engine_in_processes_of_its_own(run: Runner, expected: list[Any]) -> None:
    result = run("rounds", multiprocessing=True, connector=POOL)
    for answers in result["outputs"]:
        assert differences(answers, expected) == []
    assert result["prometheus"]["kvoffload:host_hit_tokens_total"] > 0
    assert result["prometheus"]["kvoffload:load_bytes_total"] > 0
