"""kvoffload's eviction policies inside vLLM's own offloading."""

from __future__ import annotations

import os

import pytest
from test_vllm_versions import OVERLAYS, in_front
from vllm_harness import Run, Runner

from benchmarks.synthetic import generate
from kvoffload.lab.writer import write_trace
from tests.scale import SCALE

pytestmark = pytest.mark.vllm

VERSIONS = [None, *(pytest.param(name, marks=pytest.mark.soak) for name in OVERLAYS)]
"""None: the installed version."""


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda version: version or "installed")
def seen(request: pytest.FixtureRequest, run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Run:
    chat = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_trace(generate("chat").between(0, 0.05), chat)
    traces = os.environ.get("KVOFFLOAD_TRACES") if SCALE > 1 and request.param is None else None
    options = {"seeds": int(20 * SCALE), "steps": 120, "chat": str(chat), "traces": traces}
    environment = {"PYTHONPATH": in_front(request.param)} if request.param else {}
    return run("cache_policies", **options, environment=environment)


def test_random_schedules_keep_what_vllm_relies_on(seen: Run) -> None:
    counts = seen["schedules"]
    assert min(counts.values()) > 0, counts
    assert seen["control"]


def test_a_chain_loses_its_tail_first(seen: Run) -> None:
    for policy, chains in seen["chains"].items():
        assert chains["tail"] == list(range(len(chains["tail"]))), policy
        assert 0 < len(chains["tail"]) < 8, policy
        # Of a chain that is longer than the cache, the head stays.
        assert chains["long"][: chains["again"]] == list(range(chains["again"])), policy
        assert chains["again"] > 6, policy


def test_promotions_of_a_long_chain_cost_as_much_each_as_those_of_a_short_one(seen: Run) -> None:
    short, long = seen["one_by_one"]
    assert long < short + 1


def test_a_policy_that_fails_is_replaced_by_lru(seen: Run) -> None:
    assert seen["starts_over"] == {"policy": "LRUPolicy", "left": [0, 0, 1, 2]}
    assert "LRU evicts from vLLM's host memory" in seen.log


def test_a_bug_in_every_call_does_not_reach_vllm(seen: Run) -> None:
    assert seen["keeps_failing"] == {"after_failed_stores": [], "first": [0, 1, 2]}


def test_replays_find_the_same(seen: Run) -> None:
    for ours, theirs in seen["replays"]:
        assert abs(ours - theirs) < 0.3
