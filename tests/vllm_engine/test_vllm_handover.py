"""Servers of real vLLM hand prompts over to each other while they and their store are killed: every answer is that of
a server without kvoffload."""

from __future__ import annotations

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from handover_storm import Fleet, Outcome, Plan, Result, storm
from vllm_harness import Runner

from demo.stores import RedisStore

pytestmark = pytest.mark.vllm

SHORT = Plan(requests=20, kills=3, seed=3, deadline_ms=5000)
LONG = {
    "redis": Plan(requests=500, kills=24, seed=1),
    "shared_dir": Plan(requests=500, kills=28, prefill=2, store="shared_dir", seed=2),
    "two that go on": Plan(requests=500, kills=28, decode=2, seed=4),
}
"""Storms of ``make soak``."""
needs_redis = pytest.mark.skipif(RedisStore.missing() is not None, reason=str(RedisStore.missing()))


@pytest.fixture(scope="module")
def fleet(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(run, tmp_path_factory.mktemp("handovers"))


def check(result: Result, plan: Plan) -> None:
    assert result.is_good, result.problems
    assert result.outcomes.total() == plan.requests
    # Without kills each request is handed over.
    assert result.outcomes[Outcome.HANDED_OVER] >= plan.requests // 4


@needs_redis
def test_answers_do_not_change_while_servers_and_store_are_killed(fleet: Fleet) -> None:
    result = storm(SHORT, fleet)

    check(result, SHORT)
    assert result.kills == {"prefill0": 1, "decode0": 1, "store": 1}


@pytest.mark.soak
@needs_redis
def test_corrupted_hand_overs_are_noticed(fleet: Fleet) -> None:
    """The control: a comparison that never fails proves nothing."""
    plan = Plan(requests=5, kills=0, seed=SHORT.seed, deadline_ms=20_000, corrupt=True)

    result = storm(plan, fleet)

    assert result.outcomes[Outcome.WRONG] >= 3, result
    assert not result.outcomes[Outcome.HANG]


@pytest.mark.soak
@pytest.mark.parametrize("name", LONG)
def test_long_storms(fleet: Fleet, name: str) -> None:
    plan = LONG[name]
    if plan.store == "redis" and RedisStore.missing() is not None:
        pytest.skip(str(RedisStore.missing()))

    result = storm(plan, fleet)

    print(result.to_dict())
    check(result, plan)
    assert result.kills.total() >= 20
    assert {"prefill0", "decode0", "store"} <= set(result.kills)
