"""Other versions of vLLM, in place of the installed one. ``make overlays`` installs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import (
    DEADLINE_S,
    GEMMA3,
    POOL,
    WHOLE_PROMPTS,
    Run,
    Runner,
    assert_at_rest,
    assert_computed_whole,
    differences,
)

from kvoffload.supported import TESTED
from kvoffload.vllm.hints import FIRST_TO_NAME_SESSIONS
from tests.scale import SCALE

pytestmark = pytest.mark.vllm

OVERLAYS = {path.name: path for path in sorted((Path(sys.prefix) / "overlays").glob("*")) if path.name >= TESTED[0]}
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
    paths = [str(OVERLAYS[version]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_USE_V2_MODEL_RUNNER": runner}
    if runner == "0":
        return {"environment": environment}
    smaller = {"max_tokens": 12} if SCALE <= 1 else {}
    return {"environment": environment | {"TRITON_INTERPRET": "1"}, **smaller}


@pytest.fixture(scope="module")
def run_version(run: Runner, overlaid: dict[str, Any]) -> Callable[..., Run]:
    """Runs a scenario with that version."""

    def run_it(scenario: str, **config: Any) -> Run:
        return run(scenario, **overlaid | config)

    return run_it


@pytest.fixture
def not_interpreted(case: tuple[str, str]) -> None:
    """Leaves to ``make soak`` what takes minutes in Triton's interpreter."""
    if case[1] != "0" and SCALE <= 1:
        pytest.skip("make soak runs it: slow with this model runner of vLLM on a CPU")


@pytest.fixture(scope="module")
def answers(run_version: Callable[..., Run], version: str) -> list[Any]:
    """The answers of that version without kvoffload."""
    result = run_version("rounds", rounds=1)
    assert result["vllm"].startswith(version)
    assert result["preemptions"] > 0
    return list(result["outputs"][0])


def test_outputs_are_identical(
    run_version: Callable[..., Run], version: str, overlaid: dict[str, Any], answers: list[Any]
) -> None:
    result = run_version("rounds", rounds=2, connector=POOL, slow=1, engine={"max_num_batched_tokens": 96})
    assert result["vllm"].startswith(version)
    for got in result["outputs"]:
        assert differences(got, answers) == []
    assert result["preemptions"] > 0
    assert result["metrics"]["host_hit_tokens"] > 0
    assert_at_rest(result.result)
    assert "kvoffload is tested with" not in result.log
    assert ("Using V2 Model Runner" in result.log) == (overlaid["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "1")


@pytest.mark.usefixtures("not_interpreted")
def test_corrupted_bytes_change_outputs(run_version: Callable[..., Run], answers: list[Any]) -> None:
    result = run_version("rounds", connector=POOL, connector_class="CorruptedKVOffloadConnector")
    assert len(differences(result["outputs"][1], answers)) == len(answers)


@pytest.mark.soak
@pytest.mark.parametrize("kind", WHOLE_PROMPTS)
def test_answers_about_whole_prompts_use_no_offloaded_blocks(run_version: Callable[..., Run], kind: str) -> None:
    right = run_version("whole_prompts", **WHOLE_PROMPTS[kind])["outputs"]
    result = run_version("whole_prompts", connector=POOL, **WHOLE_PROMPTS[kind])
    assert_computed_whole(result, right)


@pytest.mark.usefixtures("not_interpreted")
@pytest.mark.parametrize("unlimited", [False, True])
@pytest.mark.parametrize("meanwhile", [None, "waiting", "preempted"])
def test_tokens_that_a_session_drops_name_no_blocks(
    run_version: Callable[..., Run], version: str, meanwhile: str | None, unlimited: bool, tmp_path: Path
) -> None:
    """Neither in the process of the sessions nor in the next one. The control: a version that keeps their block hashes
    gives wrong answers if sessions are offloaded."""
    connector = POOL | {"disk_dir": str(tmp_path), "disk_bytes": "32MiB", "load_only_if_faster": False}
    config = {"connector": connector | {"load_deadline_ms": 1000 * DEADLINE_S}, "unlimited": unlimited}
    first = run_version("sessions", **config, blocks=[1, 2, 3], meanwhile=meanwhile)
    second = run_version("sessions", **config, ask=first["prompts"])
    for result in (first, second):
        for name in ("plain", "again"):
            wrong = differences(result["answers"][name], result["answers"]["right"])
            assert bool(wrong) is (unlimited and version < FIRST_TO_NAME_SESSIONS)
        assert result["counts"]["again"]["host_hit_tokens"] > 0
        assert_at_rest(result.result)


@pytest.mark.usefixtures("not_interpreted")
def test_the_disk_tier(run_version: Callable[..., Run], answers: list[Any], tmp_path: Path) -> None:
    """In the canonical layout, too."""
    connector = POOL | {"disk_dir": str(tmp_path / "disk"), "disk_bytes": "32MiB", "load_only_if_faster": False}
    connector["canonical_layout"] = True
    connector["load_deadline_ms"] = 1000 * DEADLINE_S
    for _ in range(2):
        result = run_version("rounds", rounds=1, close=True, connector=connector)
        assert differences(result["outputs"][0], answers) == []
        assert_at_rest(result.result)
        assert "canonical_layout has no effect" not in result.log
    assert result["metrics"]["tier_hit_tokens:disk"] > 0


@pytest.mark.soak
def test_a_storm(run_version: Callable[..., Run], answers: list[Any]) -> None:
    """Preemptions, aborts, resets and failing copies, all at once in a small pool. A quarter of the loads fail: both of
    their tries do."""
    result = run_version("storm", seed=2, requests=100, connector={"host_bytes": "1MiB"}, slow=1, failing=0.5)
    assert result["left"] == 0
    for index, (tokens, logprobs) in result["answers"]:
        right = [part[: len(tokens)] for part in answers[index]]
        assert differences([[tokens, logprobs]], [right]) == []
    for name in ("host_hit_tokens", "load_failures", "store_failures", "evicted_blocks"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)


@pytest.mark.soak
def test_several_groups(run_version: Callable[..., Run]) -> None:
    (expected,) = run_version("rounds", rounds=1, **GEMMA3)["outputs"]
    result = run_version("rounds", rounds=3, **GEMMA3, connector=POOL, slow=2, failing=0.5)
    for got in result["outputs"]:
        assert differences(got, expected) == []
    assert result["metrics"]["load_failures"] > 0
    assert_at_rest(result.result)


@pytest.mark.soak
def test_kv_belongs_to_the_bytes_of_an_adapter(run_version: Callable[..., Run]) -> None:
    plays = [("first", "a", 1, 1, "load"), ("other", "a", 2, 2, ""), ("back", "a", 3, 1, "")]
    patient = POOL | {"load_deadline_ms": 1000 * DEADLINE_S}
    result = run_version("adapters", connector=patient, plays=plays, prompts=2)
    for name, *_ in plays:
        assert differences(result["answers"][name], result["answers"][f"right {name}"]) == [], name
        assert (result["counts"][name]["host_hit_tokens"] > 0) is (name == "back")
