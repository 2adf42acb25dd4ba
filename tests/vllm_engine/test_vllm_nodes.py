"""One engine over two nodes: each node has its own host memory, and a block is found if every rank has its part."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import DEADLINE_S, POOL, Run, Runner, assert_at_rest, differences, eventually, finish

from demo.process import kill_session

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

FEW = 6
"""Number of prompts on two ranks, whose steps take three times as long as those of one."""
LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
STEP_DEADLINE_S = 20
"""How long vLLM waits for the results of all ranks. A node that is killed between its step and its result is noticed
only then; else the connection between the ranks breaks."""
ENDS_WITHIN_S = STEP_DEADLINE_S + 40


@contextmanager
def two_nodes(run: Runner, scenario: str, parallel: str = "tensor", **config: Any) -> Iterator[tuple[Any, Path, Any]]:
    """Starts an engine with one rank on each of two nodes of this machine. Yields the first node's process, the path of
    its result, and the second node's process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    engine = {
        f"{parallel}_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "nnodes": 2,
        "master_addr": "127.0.0.1",
        "master_port": port,
    }
    environment = LOOPBACK | {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_DEADLINE_S)}
    common = {"environment": environment, "prompts": FEW, **config}
    first, result = run.start(scenario, engine=engine | {"node_rank": 0}, **common)
    try:
        second, _ = run.start(scenario, engine=engine | {"node_rank": 1}, **common)
        try:
            yield first, result, second
        finally:
            kill_session(second)
    finally:
        kill_session(first)


def rounds(run: Runner, **config: Any) -> Run:
    """Returns the result of the scenario ``rounds`` on two nodes."""
    with two_nodes(run, "rounds", **config) as (first, result, _):
        log = finish(first, result.with_suffix(".log"))
        return Run(json.loads(result.read_text()), log)


@pytest.fixture(scope="module")
def one_head_expected(run: Runner) -> list[Any]:
    """The answers of a model with a single KV head, without offloading and on one rank."""
    return list(run.once("one-head", "rounds", rounds=1, model_kind="one-head", prompts=FEW)["outputs"][0])


def test_each_node_keeps_its_own_part(run: Runner, one_head_expected: list[Any]) -> None:
    """Both ranks hold the only KV head, and could share a pool if they were on one node. Copies of each rank end, or
    fail, at other times."""
    result = rounds(run, rounds=3, model_kind="one-head", connector=POOL, connector_class="SlowKVOffloadConnector")
    for answers in result["outputs"]:
        assert differences(answers, one_head_expected) == []
    for name in ("host_hit_tokens", "load_blocks", "load_failures", "store_failures"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)
    assert "host pool of 128 MiB on 2 ranks of 2 nodes = " in result.log


def test_corrupted_bytes_on_the_second_node_are_noticed(run: Runner, one_head_expected: list[Any]) -> None:
    result = rounds(run, model_kind="one-head", connector=POOL, connector_class="CorruptedSecondNodeKVOffloadConnector")
    assert len(differences(result["outputs"][1], one_head_expected)) == len(one_head_expected)


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_other_divisions(run: Runner, parallel: str, expected: list[Any]) -> None:
    result = rounds(run, rounds=3, parallel=parallel, connector=POOL, connector_class="SlowKVOffloadConnector")
    for answers in result["outputs"]:
        assert differences(answers, expected[:FEW]) == []
    assert result["metrics"]["host_hit_tokens"] > 0
    assert_at_rest(result.result)


def test_an_engine_whose_second_node_is_killed_ends(run: Runner) -> None:
    with two_nodes(run, "endless", connector=POOL) as (first, result, second):
        assert eventually(lambda: result.exists() or first.poll() is not None, DEADLINE_S)
        assert first.poll() is None
        kill_session(second)
        assert first.wait(ENDS_WITHIN_S) != 0
