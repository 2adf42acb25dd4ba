"""Requests with adapters, as the scheduler half sees them: whose bytes their blocks belong to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from kvoffload.abc import MissReason, OffloadKey, Request
from kvoffload.cache.keys import ADAPTER_BYTES, NAMESPACE_BYTES
from kvoffload.cache.tenants import Tenants
from kvoffload.connector import adapters
from kvoffload.connector.adapters import ASK_AGAIN_S, DROPPED, NO_ADAPTER, UNREADABLE, Adapter, AdapterNeed
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.transfer.inline import InlineTransfer
from tests.connector.rig import FakeRequest, LoadedAdapters, Rig, only, prompt

TENANT = b"t" * NAMESPACE_BYTES


@dataclass(eq=False)
class AdapterRequest(FakeRequest):
    adapter: Adapter | None = None


def adapter_of(request: Request) -> Adapter | None:
    assert isinstance(request, AdapterRequest)
    return request.adapter


def rig_of(num_workers: int = 1) -> Rig:
    return Rig(num_workers=num_workers, options={"adapter_of": adapter_of, "tenants": Tenants(TENANT)})


def using(number: int, tokens: list[int], name: str = "r", is_reread: bool = False, source: str = "") -> AdapterRequest:
    return AdapterRequest(name, tokens, adapter=Adapter(number, f"adapter {number}", is_reread, source=source))


def answer(rig: Rig, *digests: bytes, meta: StepMeta | None = None) -> None:
    """Answers the questions of a step: one worker per digest."""
    meta = rig.step() if meta is None else meta
    for digest in digests:
        rig.half.update_connector_output(WorkerReport(answers={question: [digest] for question in meta.questions}))


def say(rig: Rig, number: int, digest: bytes) -> None:
    """A worker has loaded, or dropped, an adapter."""
    rig.half.update_connector_output(WorkerReport(adapters={number: {digest}}))


def compute(rig: Rig, meta: StepMeta, loaded: dict[int, bytes]) -> None:
    """A worker computes a step with the adapters that are loaded, and reports the stores of the step."""
    watch = LoadedAdapters()
    worker = OffloadingConnectorWorker(InlineTransfer([], np.zeros((1, 4096), np.uint8)), adapters=watch)
    watch.loaded = loaded
    # These were reported before.
    watch.changes()
    worker.end_step(StepMeta(computes_with=meta.computes_with))
    report = worker.take_report()
    if report is not None:
        rig.half.update_connector_output(report)
    rig.report(*meta.stores)


def store(rig: Rig, number: int, digest: bytes, tokens: list[int]) -> None:
    """A request with an adapter, of which the workers say this, computes ``tokens``, and its blocks are stored."""
    request = using(number, tokens, "writer")
    if rig.look_up(request) == (None, False):
        answer(rig, digest)
    meta = rig.start(request)
    rig.report(*meta.stores)
    rig.end(request)


def found(rig: Rig, number: int, digest: bytes, tokens: list[int], name: str = "reader") -> int | None:
    request = using(number, tokens, name)
    if rig.look_up(request) == (None, False):
        answer(rig, digest)
    tokens_found, _ = rig.look_up(request)
    rig.half.request_finished(request)
    return tokens_found


def test_blocks_belong_to_the_bytes_of_an_adapter() -> None:
    rig = rig_of()
    store(rig, 1, b"old", prompt(8))
    assert found(rig, 1, b"", prompt(9)) == 8
    assert found(rig, 2, b"new", prompt(9)) == 0
    store(rig, 2, b"new", prompt(8))
    for number, digest in ((3, b"old"), (4, b"new"), (5, b"old")):
        assert found(rig, number, digest, prompt(9)) == 8
    assert found(rig, 6, b"third", prompt(9)) == 0


def test_the_model_alone_has_keys_of_its_own_of_the_same_length() -> None:
    rig = rig_of()
    store(rig, 1, b"old", prompt(8))
    alone = AdapterRequest("alone", prompt(9))
    assert rig.look_up(alone) == (0, False), "nobody is asked"
    rig.start(alone)
    keys: list[list[OffloadKey]] = rig.manager.asked_stores
    lengths = {len(key) for asked in keys for key in asked}
    assert len(lengths) == 1
    assert {key[:NAMESPACE_BYTES] for asked in keys for key in asked} == {TENANT}
    adapters = [asked[0][NAMESPACE_BYTES : NAMESPACE_BYTES + ADAPTER_BYTES] for asked in keys]
    assert adapters[-1] == NO_ADAPTER
    assert adapters[0] != NO_ADAPTER


def test_a_request_waits_for_all_workers_and_asks_once() -> None:
    rig = rig_of(num_workers=2)
    one, two = using(1, prompt(9), "one"), using(1, prompt(9), "two")
    for request in (one, two):
        assert rig.look_up(request) == (None, False)
    meta = rig.step()
    assert len(meta.questions) == 1
    answer(rig, b"left", meta=meta)
    assert rig.look_up(one) == (None, False)
    assert rig.step().questions == {}
    answer(rig, b"right", meta=meta)
    assert rig.look_up(one) == rig.look_up(two) == (0, False)


@pytest.mark.parametrize("trouble", ["no answer", "unreadable", "one worker cannot read it"])
def test_an_unknown_adapter_is_neither_loaded_nor_stored(trouble: str) -> None:
    rig = rig_of(num_workers=2)
    request = using(1, prompt(9))
    assert rig.look_up(request) == (None, False)
    if trouble == "no answer":
        rig.clock.now += 1.1
    else:
        answer(rig, b"digest" if trouble.startswith("one") else UNREADABLE, UNREADABLE)
    assert not rig.start(request).stores
    (state,) = rig.half.requests.values()
    assert not state.options.to_pass_on(), "a server that goes on with the request may know the adapter"
    assert not rig.end(request).stores
    assert [record.reason for record in rig.half.records] == [MissReason.ADAPTER_UNKNOWN]
    if trouble != "no answer":
        # The next request asks again.
        assert found(rig, 1, b"", prompt(9), "next") is None
        assert rig.look_up(using(1, prompt(9), "last")) == (None, False)
        answer(rig, b"digest", b"digest")


def test_an_adapter_that_was_dropped_is_asked_for_again() -> None:
    """Its files may be others when it is loaded again."""
    rig = rig_of()
    store(rig, 1, b"old", prompt(8))
    say(rig, 1, b"old")
    assert found(rig, 1, b"", prompt(9)) == 8
    say(rig, 1, DROPPED)
    assert found(rig, 1, b"new", prompt(9)) == 0
    say(rig, 1, DROPPED)
    assert found(rig, 1, b"old", prompt(9)) == 8


def test_an_adapter_that_is_read_for_each_request_is_asked_for_each_time() -> None:
    rig = rig_of()
    store(rig, 1, b"old", prompt(8))
    request = using(1, prompt(9), is_reread=True)
    assert rig.look_up(request) == (None, False)
    answer(rig, b"new")
    assert rig.look_up(request) == (0, False)


def test_a_load_says_which_bytes_it_needs() -> None:
    rig = rig_of()
    store(rig, 1, b"old", prompt(8))
    request = using(1, prompt(9))
    meta = rig.load(request)
    job, _ = only(meta.loads)
    assert {job: AdapterNeed(1, frozenset([b"old"]))} == meta.needs


@pytest.mark.parametrize("when", ["running", "finished", "waiting"])
def test_what_follows_a_change_under_the_same_number_is_not_stored(when: str) -> None:
    rig = rig_of()
    request = using(1, prompt(8))
    assert rig.look_up(request) == (None, False)
    answer(rig, b"old")
    if when == "waiting":
        assert rig.look_up(request) == (0, False)
        say(rig, 1, b"new")
        assert not rig.start(request).stores
    else:
        meta = rig.start(request)
        if when == "finished":
            rig.half.request_finished(request)
        say(rig, 1, b"new")
        rig.report(*meta.stores)
        request.tokens += prompt(8, 50)
        assert not rig.step({request: 8}, more={"r": rig.new_blocks(2)}).stores
    assert found(rig, 2, b"old", prompt(9), "a") == 0
    assert found(rig, 3, b"new", prompt(9), "b") == 0


def test_device_blocks_of_other_bytes_under_the_same_name_are_not_stored() -> None:
    """The engine's own cache finds blocks by the name of an adapter."""
    rig = rig_of()
    store(rig, 1, b"old", prompt(8))
    for number, digest, stores in ((2, b"new", False), (3, b"old", True)):
        request = using(number, prompt(16), f"r{number}")
        assert rig.look_up(request, 8) == (None, False)
        answer(rig, digest)
        assert rig.look_up(request, 8) == (0, False)
        ids = [1, 2, *rig.new_blocks(2)]
        rig.allocate(request, ids)
        request.num_computed_tokens = 8
        meta = rig.step({request: 8}, new={request.request_id: ids})
        assert bool(meta.stores) is stores
        rig.report(*meta.stores)
        rig.end(request)


def test_what_follows_a_part_of_a_device_block_is_not_stored() -> None:
    """The engine has copied it from a block of any origin into a new one."""
    rig = rig_of()
    for name, computed in (("whole", 0), ("part", 2)):
        request = using(1, prompt(8), name)
        request.tokens[-1] = computed
        if rig.look_up(request, computed) == (None, False):
            answer(rig, b"digest")
        assert rig.look_up(request, computed) == (0, False)
        ids = rig.new_blocks(2)
        rig.allocate(request, ids)
        request.num_computed_tokens = computed
        meta = rig.step({request: 8 - computed}, new={name: ids})
        assert bool(meta.stores) is (name == "whole")


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    monkeypatch.setattr(adapters, "MAX_KNOWN", 3)
    monkeypatch.setattr(adapters, "MAX_ASKED", 2)
    for number in range(5):
        found(rig, number, b"digest", prompt(9), f"r{number}")
    assert (known := rig.half.lookups.adapters) is not None
    assert [number for number in range(5) if known.digests(Adapter(number, "")) is not None] == [2, 3, 4]
    assert len(rig.step().questions) == 2


@pytest.mark.parametrize("loaded", [b"A", b"B"])
def test_what_a_batch_has_computed_with_other_bytes_than_planned_is_not_stored(loaded: bytes) -> None:
    """Of requests that name an adapter with and without reading it again, the engine heeds one."""
    rig = rig_of()
    store(rig, 1, b"A", prompt(4, 90))
    inplace, plain = using(1, prompt(8), "in place", is_reread=True), using(1, prompt(8, 200), "plain")
    assert rig.look_up(inplace) == (None, False)
    assert rig.look_up(plain) == (0, False), "it uses what is loaded"
    answer(rig, b"B")
    ids = {request: rig.new_blocks(2) for request in (inplace, plain)}
    for request, blocks in ids.items():
        assert rig.look_up(request) == (0, False)
        rig.allocate(request, blocks)
    meta = rig.step({inplace: 8, plain: 8}, new={request.request_id: blocks for request, blocks in ids.items()})
    assert meta.stores
    if loaded == b"B":
        say(rig, 1, b"B")
    compute(rig, meta, {1: loaded})
    for request in ids:
        rig.end(request)
    found_of = {
        (request.request_id, digest): found(rig, number, digest, [*request.tokens, 1])
        for number, (request, digest) in enumerate(itertools.product(ids, (b"A", b"B")), start=2)
    }
    right = {("plain", b"A"): 8 if loaded == b"A" else 0, ("in place", b"B"): 8 if loaded == b"B" else 0}
    assert found_of == dict.fromkeys(found_of, 0) | right


def test_a_request_that_uses_what_is_loaded_is_not_offered_what_another_will_read_again() -> None:
    rig = rig_of()
    store(rig, 3, b"B", prompt(8))
    store(rig, 1, b"A", prompt(4, 90))
    inplace = using(1, prompt(9), "in place", is_reread=True)
    assert rig.look_up(inplace) == (None, False)
    answer(rig, b"B")
    assert rig.look_up(inplace) == (8, True)
    assert rig.look_up(using(1, prompt(9), "plain")) == (0, False)


def test_an_open_question_is_not_for_a_request_that_reads_again() -> None:
    rig = rig_of()
    assert rig.look_up(using(1, prompt(9, 50), "plain")) == (None, False)
    assert rig.look_up(using(1, prompt(9), "in place", is_reread=True)) == (None, False)
    assert [asked.is_reread for asked in rig.step().questions.values()] == [False, True]


def test_an_answer_that_comes_after_other_bytes_were_loaded_does_not_count() -> None:
    rig = rig_of(num_workers=2)
    request = using(1, prompt(8))
    assert rig.look_up(request) == (None, False)
    meta = rig.step()
    answer(rig, b"A0", meta=meta)
    rig.half.update_connector_output(WorkerReport(adapters={1: {b"B0", b"B1"}}))
    answer(rig, b"A1", meta=meta)
    assert rig.look_up(request) == (None, False)
    again = rig.step()
    assert len(again.questions) == 1
    answer(rig, b"B0", b"B1", meta=again)
    assert rig.look_up(request) == (0, False)


def test_another_source_under_the_same_number_is_asked_for() -> None:
    rig = rig_of()
    for source in ("one path", "other path"):
        request = using(1, prompt(9), source, source=source)
        assert rig.look_up(request) == (None, False)
        answer(rig, b"digest")
        assert rig.look_up(request) == (0, False)
        rig.end(request)


def test_a_prompt_that_is_loaded_whole_stores_what_follows() -> None:
    """The engine computes its last token again, in a block that the request has loaded itself."""
    rig = rig_of()
    writer = AdapterRequest("writer", prompt(8))
    rig.report(*rig.start(writer).stores)
    rig.end(writer)
    request = AdapterRequest("r", prompt(8))
    meta = rig.load(request)
    rig.report(*meta.loads)
    assert request.num_computed_tokens == 7
    request.tokens += prompt(8, 70)
    ids = [*only(meta.loads)[1].device.block_ids.tolist(), *rig.new_blocks(2)]
    meta = rig.step({request: 9}, new={"r": ids})
    assert meta.stores
    rig.report(*meta.stores)
    rig.end(request)
    turn = AdapterRequest("turn", request.tokens + prompt(8, 170))
    rig.look_up(turn, 16)
    ids += rig.new_blocks(2)
    rig.allocate(turn, ids)
    turn.num_computed_tokens = 16
    assert rig.step({turn: 8}, new={"turn": ids}).stores


def test_a_question_that_is_never_answered_costs_one_wait() -> None:
    rig = rig_of()
    waits = []
    for i in range(4):
        request = using(1, prompt(9), f"r{i}")
        waits.append(rig.look_up(request) == (None, False))
        rig.step()
        rig.clock.now += 1.1
        assert rig.look_up(request) == (0, False)
        rig.half.request_finished(request)
    assert waits == [True, False, False, False]
    # A worker has loaded it, and can answer without reading files.
    say(rig, 1, b"loaded")
    assert found(rig, 1, b"loaded", prompt(9)) == 0
    rig.clock.now += ASK_AGAIN_S
    assert rig.look_up(using(1, prompt(9), "last")) == (0, False), "the answer is remembered"


def test_a_lost_question_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    monkeypatch.setattr(adapters, "MAX_ASKED", 1)
    assert rig.look_up(using(1, prompt(9), "one")) == (None, False)
    assert len(rig.step().questions) == 1
    rig.clock.now += 1.1
    assert rig.look_up(using(2, prompt(9), "two")) == (0, False), "nobody can be asked about another one"
    rig.clock.now += ASK_AGAIN_S
    assert rig.look_up(using(1, prompt(9), "three")) == (None, False)
    assert len(rig.step().questions) == 1
