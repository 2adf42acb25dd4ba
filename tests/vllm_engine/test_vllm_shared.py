"""Two servers in two processes on one store: the second answers from what the first has computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from test_vllm_ranks import PARALLEL, TWO_RANKS
from vllm_harness import DEADLINE_S, ENVIRONMENT, POOL, Run, Runner, assert_at_rest, differences

from kvoffload.demo.protocol import EngineInfo, RequestResult
from kvoffload.demo.run import model_directory
from kvoffload.demo.shared import run as shared_run
from kvoffload.demo.shared.mooncake import missing
from kvoffload.demo.shared.result import SharedReport, SkippedStore, hit_tokens
from kvoffload.demo.shared.run import SharedDemo

pytestmark = pytest.mark.vllm

PATIENT = {"load_deadline_ms": 1000 * DEADLINE_S, "lookup_deadline_ms": 1000 * DEADLINE_S, "load_only_if_faster": False}
"""Options with which requests wait for blocks, however slow this machine is."""


class Quiet:
    def begin(self, title: str, requests: int) -> None:
        pass

    def request(self, result: RequestResult) -> None:
        pass

    def skip(self, store: SkippedStore) -> None:
        pass


@dataclass(frozen=True)
class Started:
    """The demo with short prompts, and the answers without kvoffload."""

    demo: SharedDemo
    info: EngineInfo
    baseline: dict[int, RequestResult]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    out = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch, model_directory(None, seed=7) as model:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # More blocks than device and host memory hold together.
        for name, value in {
            "DOCUMENTS": 5,
            "BACK_DOCUMENTS": 1,
            "DOCUMENT_BLOCKS": (8, 9),
            "DEVICE_BLOCKS": 26,
            "HOST_BLOCKS": 24,
        }.items():
            patch.setattr(shared_run, name, value)
        plan = shared_run.make_plan(0)
        config = shared_run.make_config(model, plan, seed=7)
        demo = SharedDemo(out, config, shared_run.options(model) | PATIENT, plan, Quiet())
        yield Started(demo, *demo.baseline())


@pytest.mark.parametrize("name", shared_run.STORES)
def test_the_second_server_answers_from_what_the_first_has_computed(
    started: Started, name: str, tmp_path: Path
) -> None:
    """Answers are identical, loads that are corrupted after they were verified change them, and the checksums find
    stored values that were changed."""
    if name == "mooncake" and (reason := missing()) is not None:
        pytest.skip(f"Mooncake Store: {reason}")
    with shared_run.STORES[name](tmp_path / "store", tmp_path) as store:
        result = started.demo.share(store)
    report = SharedReport("tiny", 7, "now", 0.0, started.info, started.baseline, [result])
    assert report.failures == []
    documents = started.demo.plan.shared
    assert hit_tokens(result.first) == 0
    for request, asked in zip(result.shared, documents, strict=True):
        assert request.document == asked
        assert request.disk_tokens > request.prompt_tokens // 2
    assert len(report.compare(result.control).different) > len(documents) // 2
    assert hit_tokens(result.corrupted) == 0
    assert report.to_dict()["stores"][name]["control_detected"] is True


# Servers with other KV.

OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {"engine": {"dtype": "bfloat16"}},
    "ranks": {"engine": PARALLEL["tensor"], "environment": TWO_RANKS},
}


def shared(directory: Path) -> dict[str, Any]:
    return POOL | PATIENT | {"tiers": [{"kind": "shared_dir", "dir": str(directory), "bytes": 64 << 20}]}


@pytest.fixture(scope="module")
def left(run: Runner, expected: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a server has left the blocks of all prompts and answers."""
    directory = tmp_path_factory.mktemp("others") / "shared"
    result = run("rounds", rounds=1, close=True, connector=shared(directory))
    check(result, expected)
    assert result["metrics"]["disk_write_blocks"] > 0
    return directory


def check(result: Run, expected: list[Any] | None) -> None:
    for answers in result["outputs"]:
        assert expected is None or differences(answers, expected) == []
    assert_at_rest(result.result)


def found(result: Run) -> int:
    return sum(record["disk_tokens"] for record in result["records"])


def test_the_same_settings_share(run: Runner, expected: list[Any], left: Path) -> None:
    result = run("rounds", rounds=1, connector=shared(left))
    check(result, expected)
    assert found(result) > 0


@pytest.mark.parametrize("what", OTHERS)
def test_another_dtype_or_number_of_ranks_never_shares(run: Runner, expected: list[Any], left: Path, what: str) -> None:
    """The log says at start whose entries cannot be used and why."""
    result = run("rounds", rounds=1, connector=shared(left), **OTHERS[what])
    check(result, expected if what == "ranks" else None)
    assert found(result) == 0
    assert "cannot be used" in result.log
    assert what in result.log
