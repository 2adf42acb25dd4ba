"""Stores: which blocks are due, what is one job, and what becomes of blocks that are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import KVGroup, MissReason, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.messages import StepMeta
from kvoffload.connector.stores import DueList
from tests.connector.group_rig import GroupRig
from tests.connector.rig import (
    REMOTE_DECODE,
    TOKENS,
    FakeRequest,
    Rig,
    device_ids,
    make_half,
    only,
    prompt,
    rig_with,
    start_together,
)
from tests.connector.test_engine_model import exact_ends, silent_updates
from tests.scale import scaled
from tests.sim.engine import ModelEngine, Scenario


def test_a_chain_stored_in_parts_loses_its_tail_before_its_head() -> None:
    rig = Rig(num_host_blocks=5)
    rig.store(prompt(4), "short")
    request = FakeRequest("r", prompt(16))
    jobs = [*rig.start(request, [2, 3, 4, 5], num_tokens=8).stores]
    for _ in range(2):
        jobs += rig.step({request: 4}).stores
    rig.report(*jobs)
    rig.end(request)
    chain = rig.keys(prompt(16))
    assert rig.manager.reorders[-1] == (chain, chain[1:])
    for n, left in enumerate((4, 3, 2, 1)):
        rig.manager.prepare_store([b"other %d" % n])
        assert rig.manager.lookup(chain) == left


@pytest.mark.parametrize(
    ("known", "scheduled", "stored"),
    [(3, 3, 0), (4, 4, 1), (7, 7, 1), (12, 4, 1), (12, 7, 1), (12, 8, 2), (12, 12, 3), (12, 16, 3)],
)
def test_whole_blocks_of_known_and_computed_tokens_are_stored(known: int, scheduled: int, stored: int) -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(known))
    meta = rig.start(request, [1, 2, 3, 4], num_tokens=scheduled)
    assert [b for spec in meta.stores.values() for b in device_ids(spec)] == [1, 2, 3, 4][:stored]
    assert rig.status(prompt(known))[:stored] == [-1] * stored


def test_no_room_is_tried_again_at_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_with(prompt(4), num_host_blocks=1)
    job, _ = only(rig.load(FakeRequest("pins", prompt(5))).loads)
    request = FakeRequest("r", prompt(4, start=50))
    with caplog.at_level(logging.WARNING):
        assert not rig.start(request).stores
        assert not rig.step({request: 0}).stores
    assert rig.half.metrics.snapshot()["refused_stores"] == 2
    assert sum("no room" in record.message for record in caplog.records) == 1, "warned once"
    rig.report(job)
    assert only(rig.step({request: 0}).stores)
    assert rig.half.metrics.snapshot()["evicted_blocks"] == 1


def test_each_prompt_of_a_step_has_a_store_of_its_own() -> None:
    rig = Rig()
    meta = start_together(rig, FakeRequest("a", prompt(8)), FakeRequest("b", prompt(4, start=50)))
    assert {spec.req_id: device_ids(spec) for spec in meta.stores.values()} == {"a": [10, 11], "b": [20]}
    by_id = {spec.req_id: job for job, spec in meta.stores.items()}
    rig.report(by_id["a"], failed=True)
    rig.report(by_id["b"])
    assert rig.status(prompt(8)) == [None, None]
    assert rig.status(prompt(4, start=50)) == [0]
    rig.manager.check_integrity()


def test_a_request_that_fits_is_stored_although_another_of_its_step_does_not() -> None:
    rig = Rig(num_host_blocks=3)
    rig.store(prompt(4, start=90))
    rig.load(FakeRequest("pins", prompt(5, start=90)))
    big, small = FakeRequest("big", prompt(12)), FakeRequest("small", prompt(8, start=50))
    meta = start_together(rig, big, small)
    assert [spec.req_id for spec in meta.stores.values()] == ["small"]
    assert rig.half.metrics.snapshot()["refused_stores"] == 1
    rig.report(*meta.stores)
    assert rig.status(prompt(8, start=50)) == [0, 0]


def test_blocks_that_slid_away_are_skipped() -> None:
    rig = Rig(factor=2)
    request = FakeRequest("r", prompt(32))
    meta = rig.start(request, [0, 0, 1, 2, 0, 3, 4, 5])
    assert device_ids(only(meta.stores)[1]) == [1, 2, 4, 5]
    assert rig.status(prompt(32)) == [None, -1, None, -1]


class FirstOnly(LRUPolicy):
    """Admits only the first block of each store for which there is no room."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.left_out: list[OffloadKey] = []

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> np.ndarray:
        return np.asarray(np.arange(len(keys)) == len(keys) - 1)

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self.left_out += keys


@pytest.mark.parametrize("preempted", [False, True])
def test_nothing_is_stored_behind_a_refused_block_and_the_policy_learns_of_it(preempted: bool) -> None:
    policy = FirstOnly(8)
    rig = Rig(manager=PolicyOffloadingManager(HostBackend(TOKENS, 8), policy))
    rig.store(prompt(32, start=500))
    request, ids = FakeRequest("r", prompt(24)), rig.new_blocks(6)
    rig.report(*rig.start(request, ids, num_tokens=12).stores)
    assert rig.status(prompt(24)) == [0, None, None, None, None, None]
    if preempted:
        rig.step(preempted=["r"])
        request.num_computed_tokens = 0
        rig.start(request, ids, num_tokens=12)
    assert not rig.step({request: 12}).stores
    assert rig.status(prompt(24)) == [0, None, None, None, None, None]
    behind = [rig.keys(prompt(24))[i] for i in (2, 1, 5, 4, 3)]  # of either part, its tail first
    assert policy.left_out == behind
    assert rig.manager.explain_miss(rig.keys(prompt(24))[5]).reason is MissReason.NOT_ADMITTED
    # Its end counts once, and another request for the same is judged anew.
    rig.end(request)
    assert policy.left_out == behind
    rig.report(*rig.start(FakeRequest("s", prompt(24))).stores)
    assert rig.status(prompt(24)) == [0, 0, None, None, None, None]


# Single blocks of several requests.


def decode_together(
    rig: Rig, *names: str, params: Mapping[str, Any] | None = None
) -> tuple[list[FakeRequest], StepMeta]:
    """Requests that all complete their first block in one step, with device blocks 10, 20, ..."""
    requests = [FakeRequest(name, prompt(3, start=100 * i), params) for i, name in enumerate(names)]
    start_together(rig, *requests)
    for request in requests:
        request.tokens.append(7)
    return requests, rig.step(dict.fromkeys(requests, 1))


def test_every_held_request_waits_for_a_store_of_several() -> None:
    rig = Rig()
    requests, meta = decode_together(rig, "a", "b", params=REMOTE_DECODE)
    for request in requests:
        assert rig.half.request_finished(request)[0] is True
    assert rig.step().releases == []
    rig.report(*meta.stores)
    assert rig.step().releases == ["a", "b"]


def test_blocks_of_which_a_part_is_gone_are_not_put_beside_others() -> None:
    """A job says where its first device block lies in its slot, and the others follow from that."""
    rig = Rig()
    rig.half = make_half(rig.manager, groups=[KVGroup(TOKENS, 2, sliding_window=4)])
    decoding, *others = [FakeRequest(name, prompt(8, start=100 * i)) for i, name in enumerate("abc")]
    decoding.tokens.pop()
    tables = {name: [10 * i + 1, 10 * i + 2] for i, name in enumerate("abc")}
    for request in (decoding, *others):
        rig.look_up(request)
        rig.allocate(request, tables[request.request_id])
    rig.step({decoding: 7}, new={"a": tables["a"]})
    decoding.tokens.append(7)
    meta = rig.step({decoding: 1, **dict.fromkeys(others, 8)}, new={name: tables[name] for name in "bc"})
    found = {tuple(device_ids(spec)): spec.device.block_indices for spec in meta.stores.values()}
    assert found == {(2,): (1,), (11, 12, 21, 22): (0,)}


@pytest.mark.parametrize("change", ["reversed", "rotated", "a key that was not offered"])
def test_a_manager_that_answers_with_other_blocks_switches_offloading_off(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    prepare_store = rig.manager.prepare_store

    def wrong(keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> PrepareStoreOutput | None:
        output = prepare_store(keys, req_context)
        answers = {
            "reversed": output.keys_to_store[::-1],
            "rotated": output.keys_to_store[1:] + output.keys_to_store[:1],
            "a key that was not offered": [*output.keys_to_store[1:], b"another"],
        }
        assert isinstance(output, PrepareStoreOutput)
        return replace(output, keys_to_store=answers[change])

    monkeypatch.setattr(rig.manager, "prepare_store", wrong)
    assert not rig.start(FakeRequest("r", prompt(12))).stores
    assert rig.half.off


# Blocks that decoding completes in neighbouring steps.


@pytest.mark.parametrize(("window", "late"), [(None, True), (64, False)])
def test_blocks_of_a_window_do_not_wait_for_others(window: int | None, late: bool) -> None:
    rig = GroupRig((KVGroup(64), KVGroup(64, sliding_window=window)) if window else (KVGroup(64),))
    request = rig.request(55)
    rig.admit(request)
    rig.done(rig.step(request, 55))
    waited = []
    for number in range(56, 80):
        request.tokens.append(number)
        if rig.step(request, 1).stores:
            waited.append(number - 64)
    (steps,) = waited
    assert (steps > 0) == late
    assert steps < 8


def test_a_block_that_waits_for_others_is_stored_when_its_request_ends() -> None:
    rig = GroupRig((KVGroup(64),))
    request = rig.request(55)
    rig.admit(request)
    rig.done(rig.step(request, 55))
    for number in range(56, 66):
        request.tokens.append(number)
        assert not rig.step(request, 1).stores
    rig.half.request_finished(request)
    assert len(rig.step(rig.request(0), 0).stores) == 1


# The list of requests that may complete a block: it never misses one, and looks at few.


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
    assert "a" in due_list
    assert "b" not in due_list
    assert due_list.take({"a": 4}) == []
    assert due_list.take({"a": 1}) == ["a"]


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
