"""The list of requests that may complete a block: it never misses one, and looks at few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.connector.stores import DueList
from tests.connector.test_engine_model import exact_ends, silent_updates
from tests.scale import scaled
from tests.sim.engine import ModelEngine, Scenario


class OneTokenLate(DueList):
    def add(self, req_id: str, tokens: int) -> None:
        super().add(req_id, tokens + 1)


def test_a_decoding_request_is_looked_at_once_per_block() -> None:
    due_list = DueList()
    for i in range(16):
        due_list.add(f"r{i}", i + 1)
    scheduled = dict.fromkeys((f"r{i}" for i in range(16)), 1)
    for _ in range(64):
        (req_id,) = due_list.take(scheduled)
        due_list.add(req_id, 16)


def test_requests_that_become_due_in_neighbouring_steps_come_out_together() -> None:
    due_list, together = DueList(together=8), 8
    names = [f"r{i}" for i in range(2, 50)]
    for tokens, name in enumerate(names, start=2):
        due_list.add(name, tokens)
    scheduled = dict.fromkeys(names, 1)
    taken = {name: step for step in range(1, 80) for name in due_list.take(scheduled)}
    assert taken.keys() == set(names)
    assert len(set(taken.values())) == 7
    assert all(tokens <= taken[name] < tokens + together for tokens, name in enumerate(names, start=2))


def test_what_is_to_be_looked_at_in_the_next_step_does_not_wait_for_others() -> None:
    due_list = DueList(together=8)
    for _ in range(20):
        due_list.add("r", 1)
        assert due_list.take({"r": 1}) == ["r"]


def test_a_removed_request_is_not_taken_and_each_is_in_it_once() -> None:
    due_list = DueList()
    due_list.add("a", 2)
    due_list.add("b", 2)
    due_list.add("a", 5)
    due_list.remove("b")
    due_list.remove("b")
    assert len(due_list) == 1
    assert due_list.take({"a": 4}) == []
    assert due_list.take({"a": 1}) == ["a"]
    due_list.add("c", 9)
    due_list.clear()
    assert due_list.take({"c": 16}) == []


# In the model engine: a look at every request finds nothing that the list has missed.


def look_at_all(engine: ModelEngine) -> None:
    """After each step, every request that was not looked at is asked for blocks that are due."""
    scheduler, stores = engine.scheduler, engine.scheduler.stores
    store_running, due_of = stores.store_running, stores.due_of
    looked_at: set[str] = set()

    def note(state: Any, num_computed: int, num_before: int) -> Any:
        looked_at.add(state.context.req_id)
        return due_of(state, num_computed, num_before)

    def compare(scheduled: Any, requests: Any) -> None:
        looked_at.clear()
        store_running(scheduled, requests)
        for req_id, tokens in scheduled.items():
            state = requests.get(req_id)
            if state is not None and req_id not in looked_at:
                before = state.request.num_computed_tokens
                assert due_of(state, before + tokens, before) is None, f"{req_id} was missed"
        assert not scheduler.off

    stores.due_of = note  # type: ignore[method-assign]
    stores.store_running = compare  # type: ignore[method-assign]


def missed(engine: ModelEngine) -> bool:
    """Whether the comparison has failed: its error switches offloading off, as any does."""
    try:
        engine.run()
    except AssertionError:
        return True
    return engine.scheduler.off


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("scenario", [Scenario.random, silent_updates, exact_ends])
def test_the_scheduler_half_misses_no_request(scenario: Callable[[int], Scenario]) -> None:
    assert not any(missed(ModelEngine(scenario(seed), look_at_all)) for seed in range(scaled(20)))


@pytest.mark.usefixtures("quiet")
def test_a_missed_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.connector.stores.DueList", OneTokenLate)
    assert any(missed(ModelEngine(Scenario.random(seed), look_at_all)) for seed in range(20))


@pytest.mark.usefixtures("quiet")
def test_blocks_that_are_stored_late_are_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks of the small models wait, several at once. The engine compares the bytes of what is loaded."""
    monkeypatch.setattr("kvoffload.connector.stores.TOGETHER_SHARE", 2.0)
    stored = 0
    for seed in range(scaled(20)):
        engine = ModelEngine(Scenario.random(seed))
        engine.run()
        assert not engine.scheduler.off
        stored += int(engine.scheduler.metrics.snapshot().get("store_blocks", 0))
    assert stored > 0
