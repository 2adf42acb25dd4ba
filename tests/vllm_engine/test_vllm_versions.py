"""Other versions of vLLM, in place of the installed one. ``make overlays`` installs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from test_vllm_service import check_broken
from vllm_harness import (
    DEADLINE_S,
    GEMMA3,
    POOL,
    Run,
    Runner,
    assert_at_rest,
    assert_counted,
    check,
    differences,
    disk_tokens,
    with_disk,
    wrong_of_storm,
)

from kvoffload.supported import TESTED
from tests.scale import SCALE

pytestmark = pytest.mark.vllm

FIRST_TO_NAME_SESSIONS = "0.32"
"""See ``kvoffload.vllm.hints``."""
OVERLAYS = {path.name: path for path in sorted((Path(sys.prefix) / "overlays").glob("*")) if path.name >= TESTED[0]}


def in_front(version: str) -> str:
    """Returns the PYTHONPATH with which a process imports that version."""
    return os.pathsep.join([str(OVERLAYS[version]), *filter(None, [os.environ.get("PYTHONPATH")])])


RUNNERS = {"0.33": ("0", "1")}
"""Versions of which both of vLLM's model runners are run: the second is the usual one on a GPU from 0.33 on. It runs in
Triton's interpreter."""
CASES: list[Any] = [
    pytest.param((version, runner), marks=() if runner == runners[-1] else pytest.mark.soak)
    for version in OVERLAYS
    for runners in [RUNNERS.get(version.rpartition(".")[0], ("0",))]
    for runner in runners
]
"""``make test`` tries the last model runner of each."""


@pytest.fixture(
    scope="module",
    params=CASES or [pytest.param(None, marks=pytest.mark.skip(reason="no other vLLM here: run make overlays"))],
    ids=lambda case: case and f"{case[0]}-runner-{int(case[1]) + 1}",
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A version, and whether its newer model runner is used."""
    version, runner = request.param
    return version, runner


@pytest.fixture(scope="module")
def version(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture(scope="module")
def overlaid(case: tuple[str, str]) -> dict[str, Any]:
    """Returns the options with which a child uses that version."""
    version, runner = case
    environment = {"PYTHONPATH": in_front(version), "VLLM_USE_V2_MODEL_RUNNER": runner}
    if runner == "0":
        return {"environment": environment}
    smaller = {"max_tokens": 12} if SCALE <= 1 else {}
    return {"environment": environment | {"TRITON_INTERPRET": "1"}, **smaller}


ACTS: dict[str, dict[str, Any]] = {
    "computed": {},
    "rounds": {"slow": 1},
    "rounds, failing": {"failing": 0.7, "rounds": 1, "forget": True},
    "rounds, corrupted": {"corrupt": "all", "rounds": 1, "forget": True},
    "broken": {},
}


@pytest.fixture(scope="module")
def acts(run: Runner, overlaid: dict[str, Any]) -> dict[str, Run]:
    return run.play(ACTS, **overlaid, connector=POOL, engine={"max_num_batched_tokens": 96})


def test_outputs_are_identical(
    acts: dict[str, Run], version: str, overlaid: dict[str, Any], expected: list[Any]
) -> None:
    """Each of the versions in docs/support.md."""
    right = [[part[: overlaid.get("max_tokens")] for part in answer] for answer in expected]
    for name in ("computed", "rounds", "rounds, failing"):
        check(acts[name], right)
    result = acts["rounds"]
    assert result["vllm"].startswith(version)
    assert result["preemptions"] > 0
    assert_counted(result, "host_hit_tokens")
    assert acts["computed"]["metrics"].get("store_blocks", 0) == 0
    assert "; exclusive contents" in result.log
    assert "kvoffload is tested with" not in result.log
    assert ("Using V2 Model Runner" in result.log) == (overlaid["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "1")


def test_corrupted_bytes_change_outputs(acts: dict[str, Run]) -> None:
    right = acts["computed"]["outputs"][0]
    assert len(differences(acts["rounds, corrupted"]["outputs"][0], right)) == len(right)


def test_a_check_that_fails_switches_offloading_off(acts: dict[str, Run]) -> None:
    check_broken(acts["broken"], acts["computed"]["outputs"][0])


@pytest.mark.soak
@pytest.mark.parametrize("unlimited", [False, True])
def test_tokens_that_a_session_drops_name_no_blocks(
    run: Runner, overlaid: dict[str, Any], version: str, unlimited: bool, tmp_path: Path
) -> None:
    """Neither in the process of the sessions nor in the next one. The control: a version that keeps their block hashes
    gives wrong answers if sessions are offloaded."""
    config = {"connector": with_disk(tmp_path), "patches": ["offloads sessions"] if unlimited else []}
    first = run("sessions", **overlaid | config, blocks=[1, 2, 3])
    second = run("sessions", **overlaid | config, ask=first["prompts"])
    for result in (first, second):
        for name in ("plain", "again"):
            wrong = differences(result["answers"][name], result["answers"]["right"])
            assert bool(wrong) is (unlimited and version < FIRST_TO_NAME_SESSIONS)
        assert result["counts"]["again"]["host_hit_tokens"] > 0
        assert_at_rest(result.result)


@pytest.mark.soak
def test_the_disk_tier(run: Runner, overlaid: dict[str, Any], expected: list[Any], tmp_path: Path) -> None:
    """In the canonical layout, too."""
    connector = with_disk(tmp_path / "disk") | {"canonical_layout": True}
    for is_second in (False, True):
        result = run("rounds", rounds=1, close=True, connector=connector, **overlaid)
        check(result, expected)
        assert "canonical_layout has no effect" not in result.log
        assert (disk_tokens(result) > 0) is is_second


@pytest.mark.soak
def test_a_storm(run: Runner, overlaid: dict[str, Any], expected: list[Any]) -> None:
    """Preemptions, aborts, resets and failing copies, all at once in a small pool. A quarter of the loads fail: both of
    their tries do."""
    config = {"seed": 2, "requests": 100, "connector": {"host_bytes": "1MiB"}, "slow": 1, "failing": 0.5}
    result = run("storm", **overlaid | config)
    assert result["left"] == 0
    assert wrong_of_storm(result, expected) == []
    assert_counted(result, "host_hit_tokens", "load_failures", "store_failures", "evicted_blocks")
    assert_at_rest(result.result)


@pytest.mark.soak
def test_several_groups(run: Runner, overlaid: dict[str, Any], gemma3_expected: list[Any]) -> None:
    result = run("rounds", **overlaid | GEMMA3 | {"rounds": 3, "connector": POOL, "slow": 2, "failing": 0.5})
    check(result, gemma3_expected)
    assert_counted(result, "load_failures")


@pytest.mark.soak
def test_kv_belongs_to_the_bytes_of_an_adapter(run: Runner, overlaid: dict[str, Any]) -> None:
    plays = [("first", "a", 1, 1, "load"), ("other", "a", 2, 2, ""), ("back", "a", 3, 1, "")]
    patient = POOL | {"load_deadline_ms": 1000 * DEADLINE_S}
    engine = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
    result = run("adapters", **overlaid | {"connector": patient, "plays": plays, "prompts": 2, "engine": engine})
    for name, *_ in plays:
        assert differences(result["answers"][name], result["answers"][f"right {name}"]) == [], name
        assert (result["counts"][name]["host_hit_tokens"] > 0) is (name == "back")
