"""Several ranks, on one node or two: a copy counts when every rank has made it, and each rank gets its own bytes.

The rows of docs/support.md's table: tensor and pipeline parallelism; the same over several nodes; ranks that hold the
same KV; prefix caching off. In ``make soak`` more of these, and of the canonical layout.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from driver import BLOCK_SIZE, MAX_TOKENS
from vllm_harness import (
    DEADLINE_S,
    FEW,
    GEMMA3,
    PARALLEL,
    POOL,
    TOLERANCE,
    TWO_RANKS,
    Run,
    Runner,
    assert_at_rest,
    assert_counted,
    check,
    differences,
    differences_beyond_ties,
    disk_tokens,
    eventually,
    finish,
    found,
    with_disk,
    with_gemma3,
)

from demo.process import kill_session

pytestmark = pytest.mark.vllm

NUM_LAYERS = 2
SLOW = {"connector": POOL, "connector_class": "SlowKVOffloadConnector"}
"""Copies of each rank end, or fail, at other times."""
FAILING = ("host_hit_tokens", "load_blocks", "load_failures", "store_failures")
ONE_HEAD: dict[str, Any] = {
    "model_kind": "one-head",
    "prompts": FEW,
    "environment": TWO_RANKS,
    "engine": PARALLEL["tensor"],
}
LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
STEP_DEADLINE_S = 20
"""How long vLLM waits for the results of all ranks. A node that is killed between its step and its result is noticed
only then; else the connection between the ranks breaks."""
ENDS_WITHIN_S = STEP_DEADLINE_S + 40


def test_ranks_with_the_same_kv_share_a_pool_without_prefix_caching(run: Runner, one_head_expected: list[Any]) -> None:
    """Each rank holds the only KV head. The host holds twice the tokens that it would hold in a pool per rank."""
    engine = {**PARALLEL["tensor"], "enable_prefix_caching": False}
    result = run("rounds", rounds=3, **SLOW, **ONE_HEAD | {"engine": engine}, replicas=True)
    check(result, one_head_expected)
    assert_counted(result, *FAILING)
    block_bytes = 2 * BLOCK_SIZE * 32 * 4 * NUM_LAYERS
    tokens = (64 << 20) // block_bytes * BLOCK_SIZE
    assert f" in 1 pool for 2 ranks = {tokens:,} tokens" in result.log
    assert "inclusive contents, because the device cache does not keep blocks" in result.log
    assert result["replicas"] == [[2, 1, 1], [2, 1, 1]]


@contextmanager
def two_nodes(run: Runner, acts: Any, parallel: str = "tensor", **config: Any) -> Iterator[tuple[Any, Path, Any]]:
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
    first, result = run.start(acts, engine=engine | {"node_rank": 0}, **common)
    try:
        second, _ = run.start(acts, engine=engine | {"node_rank": 1}, **common)
        try:
            yield first, result, second
        finally:
            kill_session(second)
    finally:
        kill_session(first)


def on_two_nodes(run: Runner, **config: Any) -> Run:
    """Returns the result of the scenario ``rounds`` on two nodes."""
    with two_nodes(run, "rounds", **config) as (first, result, _):
        log = finish(first, result.with_suffix(".log"))
        return Run(json.loads(result.read_text())["rounds"], log)


def test_the_stages_of_a_pipeline_on_two_nodes_keep_their_own_parts(run: Runner, expected: list[Any]) -> None:
    """Rows "pipeline parallelism" and "over several nodes"."""
    result = on_two_nodes(run, rounds=3, parallel="pipeline", **SLOW)
    check(result, expected[:FEW])
    assert_counted(result, *FAILING)
    assert "host pool of 128 MiB on 2 ranks of 2 nodes = " in result.log


@pytest.mark.soak
def test_each_node_has_a_pool_of_what_both_hold(run: Runner, one_head_expected: list[Any]) -> None:
    """Both ranks hold the only KV head, and could share a pool if they were on one node."""
    result = on_two_nodes(run, rounds=3, model_kind="one-head", **SLOW)
    check(result, one_head_expected)
    wrong = on_two_nodes(
        run, model_kind="one-head", connector=POOL, connector_class="CorruptedSecondNodeKVOffloadConnector"
    )
    assert len(differences(wrong["outputs"][1], one_head_expected)) == len(one_head_expected)


@pytest.mark.soak
def test_an_engine_whose_second_node_is_killed_ends(run: Runner, tmp_path: Path) -> None:
    acts = {"endless": {"said": str(tmp_path / "said")}}
    with two_nodes(run, acts, connector=POOL) as (first, _, second):
        said = tmp_path / "said"
        assert eventually(lambda: (said.exists() and said.read_text()) or first.poll() is not None, DEADLINE_S)
        assert first.poll() is None
        kill_session(second)
        assert first.wait(ENDS_WITHIN_S) != 0


# Several groups on tensor-parallel ranks are in test_vllm_hybrids too.
@pytest.mark.soak
@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_ranks(run: Runner, parallel: str, gemma3_expected: list[Any]) -> None:
    # In a pipeline two steps may be in progress, which need more blocks.
    blocks = {"num_gpu_blocks_override": 28} if parallel == "pipeline" else {}
    config = with_gemma3(**SLOW, environment=TWO_RANKS, engine=PARALLEL[parallel] | blocks)
    result = run("rounds", rounds=4, **config)
    check(result, gemma3_expected)
    assert result["preemptions"] > 0
    assert_counted(result, *FAILING)


@pytest.mark.soak
def test_a_rank_without_a_pool_of_its_own_notices_corrupted_bytes(run: Runner, one_head_expected: list[Any]) -> None:
    result = run("rounds", **ONE_HEAD, connector=POOL, connector_class="CorruptedFollowerKVOffloadConnector")
    assert len(differences(result["outputs"][1], one_head_expected)) == len(one_head_expected)


# The canonical layout.

ENGINES: dict[str, dict[str, Any]] = {"one": {}, **PARALLEL}


def server(run: Runner, directory: Path, ranks: str, options: dict[str, Any] | None = None, **config: Any) -> Run:
    """Asks a server with the disk tier ``directory`` one prompt after the other, and closes it."""
    return run(
        "rounds",
        rounds=1,
        close=True,
        prompts=FEW,
        connector=with_disk(directory) | {"canonical_layout": True} | (options or {}),
        environment=TWO_RANKS,
        engine={"max_num_seqs": 1} | ENGINES[ranks] | config.pop("engine", {}),
        **config,
    )


def check_found(result: Run, right: list[Any]) -> None:
    for answers in result["outputs"]:
        assert differences_beyond_ties(answers, right, TOLERANCE) == []
    assert_at_rest(result.result)
    assert found(result) > 0
    assert disk_tokens(result) > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["llama", "one-head", "gemma3"])
def test_servers_of_other_numbers_of_ranks_find_each_others_blocks(run: Runner, kind: str, tmp_path: Path) -> None:
    """Ranks that take the heads of others answer wrong: the control."""
    model = {"llama": {}, "one-head": {"model_kind": kind}, "gemma3": GEMMA3}[kind]
    right = run.right(kind, FEW, GEMMA3["max_tokens"] if kind == "gemma3" else MAX_TOKENS)
    kinds = ENGINES if kind == "llama" else ("one", "tensor")
    for writer, reader in itertools.permutations(kinds, 2):
        folder = tmp_path / f"{writer} {reader}"
        server(run, folder, writer, **model)
        check_found(server(run, folder, reader, **model), right)
    if kind == "llama":
        server(run, tmp_path / "wrong", "one")
        result = server(run, tmp_path / "wrong", "tensor", connector_class="SwappedKVOffloadConnector")
        assert found(result) > 0
        assert len(differences_beyond_ties(result["outputs"][0], right, TOLERANCE)) == FEW


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"canonical_layout": False}, {}),
        ({}, {"model_kind": "one-head"}),
        ({}, {"engine": {"dtype": "bfloat16"}}),
    ],
    ids=["without the option", "another head count", "another dtype"],
)
def test_nothing_else_is_found(run: Runner, tmp_path: Path, options: dict[str, Any], config: dict[str, Any]) -> None:
    """The weights count as the same, whatever the model."""
    same = {"model_fingerprint": "same"}
    server(run, tmp_path / "disk", "one", options=same)
    result = server(run, tmp_path / "disk", "tensor", options=same | options, **config)
    assert_at_rest(result.result)
    assert (found(result), disk_tokens(result)) == (0, 0)
