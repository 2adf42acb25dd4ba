"""The canonical layout: servers with other numbers of ranks find each other's blocks on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from driver import BLOCK_SIZE, make_prompts
from test_vllm_disk import disk_tokens, found, with_disk
from test_vllm_ranks import FEW, PARALLEL, TWO_RANKS
from vllm_harness import GEMMA3, LFM2, POOL, TOLERANCE, Run, Runner, assert_at_rest, differences_beyond_ties

pytestmark = pytest.mark.vllm

ENGINES: dict[str, dict[str, Any]] = {"one": {}, **PARALLEL}


def server(run: Runner, directory: Path, ranks: str, options: dict[str, Any] | None = None, **config: Any) -> Run:
    """Asks a server with the disk tier ``directory`` one prompt after the other, and closes it."""
    connector = with_disk(directory) | {"canonical_layout": True} | (options or {})
    # Other variables of vLLM count as other software, so all servers have these.
    return run(
        "rounds",
        rounds=1,
        close=True,
        prompts=FEW,
        connector=connector,
        environment=TWO_RANKS,
        engine={"max_num_seqs": 1} | ENGINES[ranks] | config.pop("engine", {}),
        **config,
    )


def check(result: Run, expected: list[Any]) -> None:
    for answers in result["outputs"]:
        assert differences_beyond_ties(answers, expected[:FEW], TOLERANCE) == []
    assert_at_rest(result.result)


Left = Callable[..., Path]


@pytest.fixture(scope="module")
def left(run: Runner, expected: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Returns a copy of the directory that a server of a kind has left."""
    folder = tmp_path_factory.mktemp("canonical")

    def make(ranks: str, name: str = "model", right: list[Any] | None = None, **config: Any) -> Path:
        directory = folder / f"{ranks} {name}"
        if not directory.exists():
            result = server(run, directory, ranks, **config)
            check(result, expected if right is None else right)
            assert disk_tokens(result) == 0
            assert result["metrics"]["tier_write_blocks:disk"] > 0
        copies = len(list(folder.iterdir()))
        return Path(shutil.copytree(directory, folder / f"copy {copies}"))

    return make


PAIRS: list[Any] = [
    ("one", "tensor"),
    pytest.param("tensor", "one", marks=pytest.mark.soak),
    pytest.param("one", "pipeline", marks=pytest.mark.soak),
    pytest.param("pipeline", "one", marks=pytest.mark.soak),
    pytest.param("tensor", "pipeline", marks=pytest.mark.soak),
    pytest.param("pipeline", "tensor", marks=pytest.mark.soak),
]


def assert_all_is_found(result: Run) -> None:
    assert found(result) > 0
    assert len(result["records"]) == FEW
    records = sorted(result["records"], key=lambda record: record["tokens_asked"])
    for record, prompt in zip(records, sorted(make_prompts(FEW), key=len), strict=True):
        tokens = record["device_tokens"] + record["host_tokens"] + record["disk_tokens"]
        assert tokens >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE - 1
    assert disk_tokens(result) > 0


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_all_that_one_server_has_left_another_finds(
    run: Runner, expected: list[Any], left: Left, writer: str, reader: str
) -> None:
    result = server(run, left(writer), reader)
    check(result, expected)
    assert_all_is_found(result)


@pytest.mark.soak
def test_ranks_that_take_the_heads_of_others_answer_wrong(run: Runner, expected: list[Any], left: Left) -> None:
    """The control."""
    result = server(run, left("one"), "tensor", connector_class="SwappedKVOffloadConnector")
    assert_all_is_found(result)
    assert len(differences_beyond_ties(result["outputs"][0], expected[:FEW], TOLERANCE)) == FEW


@pytest.mark.soak
@pytest.mark.parametrize(("writer", "reader"), [("one", "tensor"), ("tensor", "one")])
@pytest.mark.parametrize("kind", ["one-head", "gemma3"])
def test_ranks_with_the_same_head_and_groups_with_windows(
    run: Runner, left: Left, kind: str, writer: str, reader: str
) -> None:
    model = GEMMA3 if kind == "gemma3" else {"model_kind": kind}
    engine = {"max_num_seqs": 1} | dict(GEMMA3["engine"] if kind == "gemma3" else {})
    alone = run.once(f"canonical {kind}", "rounds", **model | {"rounds": 1, "prompts": FEW, "engine": engine})
    right = list(alone["outputs"][0])
    result = server(run, left(writer, kind, right, **model), reader, **model)
    check(result, right)
    # Behind a window fewer tokens than the prompt has are read.
    assert_all_is_found(result) if kind == "one-head" else None
    assert disk_tokens(result) > 0


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
def test_nothing_else_is_found(
    run: Runner, left: Left, expected: list[Any], options: dict[str, Any], config: dict[str, Any]
) -> None:
    """The weights count as the same, whatever the model."""
    same = {"model_fingerprint": "same"}
    result = server(run, left("one", "named", options=same), "tensor", options=same | options, **config)
    assert_at_rest(result.result)
    assert (found(result), disk_tokens(result)) == (0, 0)
    control = server(run, left("one", "named", options=same), "tensor", options=same)
    assert_all_is_found(control)


@pytest.mark.soak
def test_slow_and_failing_copies_of_each_rank(run: Runner, expected: list[Any]) -> None:
    config: dict[str, Any] = {"connector": POOL | {"canonical_layout": True}, "environment": TWO_RANKS}
    config |= {"connector_class": "SlowKVOffloadConnector", "engine": PARALLEL["tensor"]}
    result = run("rounds", rounds=3, prompts=FEW, **config)
    check(result, expected)
    assert result["preemptions"] > 0
    for name in ("host_hit_tokens", "load_blocks", "load_failures", "store_failures"):
        assert result["metrics"][name] > 0, name


@pytest.mark.soak
def test_layers_with_states_keep_their_layout(run: Runner) -> None:
    config = LFM2 | {"connector": POOL | {"canonical_layout": True}}
    result = run("rounds", rounds=1, **config)
    assert "canonical_layout has no effect: layers with states have none." in result.log
    assert_at_rest(result.result)
