"""Random schedules of the model engine whose requests belong to tenants with random shares: every byte is right, and
all promises are kept."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest

from kvoffload.abc import CachePolicy
from kvoffload.cache.policies import make_policy
from kvoffload.cache.tenants import Shares, TenantConfig, Tenants
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from tests.sim import engine as model
from tests.sim.content import EngineRequest
from tests.sim.scenario import Scenario, make_requests

SEEDS = 60
TENANTS = Tenants(b"", [TenantConfig("a"), TenantConfig("b")])


pytestmark = pytest.mark.usefixtures("quiet")


def random_shares(rng: Random, num_blocks: int) -> Shares:
    guaranteed = [rng.randint(0, num_blocks // 4) for _ in TENANTS.names]
    quota = [rng.randint(max(1, least, num_blocks // 3), num_blocks) for least in guaranteed]
    most = [min(guarantee or 1, q // 2, num_blocks // 8) for guarantee, q in zip(guaranteed, quota, strict=True)]
    retain = [rng.randint(0, n) for n in most] if sum(map(max, guaranteed, most)) <= num_blocks else []
    index_of = {TENANTS.of(name).namespace: i for i, name in enumerate(TENANTS.names[:-1])}
    return Shares(TENANTS.names, index_of, tuple(guaranteed), tuple(quota), num_blocks, tuple(retain))


def check_answer(
    engine: model.ModelEngine,
    counts: Counter[str],
    sizes: dict[str, int],
    request: EngineRequest,
    answer: dict[str, Any] | None,
) -> None:
    """Raises AssertionError if the answer counts other tokens than those of which the request can have blocks. Adds its
    size to ``sizes``."""
    record = next((each for each in engine.scheduler.records if each.req_id == request.request_id), None)
    if record is None:
        return
    layout = engine.scheduler.layout
    kind = "hybrid" if len(layout.groups) > 1 else "plain"
    assert record.retained_tokens <= request.num_computed_tokens, kind
    assert record.retained_tokens % layout.align == 0
    assert (record.retained_tokens > 0) == (record.retained_in is not None)
    counts[f"retained, {kind}"] += record.retained_in is not None
    sizes[request.request_id] = request.num_tokens


def test_random_schedules_with_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    def policy(name: str, num_blocks: int) -> CachePolicy:
        return make_policy(name, num_blocks, random_shares(rng, num_blocks))

    def requests(*arguments: Any) -> list[EngineRequest]:
        made = make_requests(*arguments)
        for request in made:
            if (tenant := rng.choice(("a", "b", None))) is not None:
                options: dict[str, Any] = {"tenant": tenant}
                if rng.random() < 0.5:
                    options |= {"retain_s": 10 ** rng.uniform(-3, 3), "session": rng.choice("xyz")}
                elif rng.random() < 0.2:
                    options |= {"retain_s": 0, "session": rng.choice("xyz")}
                request.kv_transfer_params = {**(request.kv_transfer_params or {}), "kvoffload": options}
        return made

    monkeypatch.setattr(model, "make_policy", policy)
    monkeypatch.setattr(model, "make_requests", requests)
    monkeypatch.setattr(model, "OffloadingConnectorScheduler", partial(OffloadingConnectorScheduler, tenants=TENANTS))
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        rng = Random(seed)
        engine = model.ModelEngine(Scenario.random(seed))
        sizes: dict[str, int] = {}
        engine.on_end = partial(check_answer, engine, counts, sizes)
        engine.run()
        # After a reset it may store them again.
        times = 1 + engine.scheduler.jobs.changes.resets
        for record in engine.scheduler.records:
            if record.req_id in sizes:
                assert record.stored_tokens <= times * sizes[record.req_id], record
        counts["loaded"] += sum(engine.loaded_blocks)
        for use in engine.policy_manager.room.uses():
            counts[f"evicted of {use.name}"] += use.num_evicted
            counts["refused"] += use.num_refused
        counts["retained"] += sum(engine.policy_manager.retention.num_lost)
    expected = (
        "loaded",
        "refused",
        "retained",
        "retained, hybrid",
        "retained, plain",
        *(f"evicted of {name}" for name in TENANTS.names),
    )
    never = [what for what in expected if not counts[what]]
    assert not never, f"never happened, so was not tested: {never}"
