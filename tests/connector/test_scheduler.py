"""The scheduler half of the connector, one full-attention group, over a real LRU manager."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import (
    BlockHash,
    ConfigError,
    KVGroup,
    MissReason,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduledStep,
    TransferSpec,
)
from kvoffload.cache.admission import FilterReusedOffloadingManager
from kvoffload.cache.keys import hash_blocks, make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager, PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.request import Phase, Storing
from kvoffload.connector.scheduler import OffloadingConnectorScheduler

TOKENS = 4
"""Per device block."""
REMOTE_DECODE = {"do_remote_decode": True}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SpyManager(LRUOffloadingManager):
    """The real thing, which remembers what it was asked. ``unknown``: a lower tier has not answered yet."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(HostBackend(TOKENS, num_blocks), enable_events=True)
        self.lookups: list[list[OffloadKey]] = []
        self.touches: list[list[OffloadKey]] = []
        self.refreshes: list[tuple[list[OffloadKey], list[OffloadKey]]] = []
        self.asked_stores: list[list[OffloadKey]] = []
        self.unknown = False
        self.told = False
        """Whether lookups may find more now."""

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        self.lookups.append(list(keys))
        return None if self.unknown else super().lookup(keys, req_context)

    def poll(self) -> bool:
        return self.told

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.touches.append(list(keys))
        super().touch(keys, req_context)

    def reorder_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
    ) -> None:
        self.refreshes.append((list(keys), list(stored)))
        super().reorder_chain(keys, stored, req_context)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        self.asked_stores.append(list(keys))
        return super().prepare_store(keys, req_context)


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    tokens: list[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    hash_tokens: int = TOKENS

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[BlockHash]:
        return hash_blocks(self.tokens, self.hash_tokens)


@dataclass
class FakeBlocks:
    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.ids),)


@dataclass
class Rig:
    """A scheduler half and the little that an engine and its workers do for it."""

    num_host_blocks: int = 16
    factor: int = 1
    num_workers: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    manager: Any = None
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.manager = self.manager or SpyManager(self.num_host_blocks)
        self.half = OffloadingConnectorScheduler(
            self.manager,
            groups=[KVGroup(TOKENS, self.factor)],
            num_workers=self.num_workers,
            load_deadline_ms=1000,
            clock=self.clock,
            **self.options,
        )
        self.next_block = 1

    def new_blocks(self, n: int) -> list[int]:
        ids = list(range(self.next_block, self.next_block + n))
        self.next_block += n
        return ids

    def look_up(self, request: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
        return self.half.get_num_new_matched_tokens(request, computed)

    def allocate(self, request: FakeRequest, ids: list[int], external: int = 0) -> None:
        self.half.update_state_after_alloc(request, FakeBlocks(ids), external)

    def step(
        self,
        scheduled: Mapping[FakeRequest, int] | None = None,
        new: Mapping[str, list[int]] | None = None,
        more: Mapping[str, list[int]] | None = None,
        preempted: Sequence[str] = (),
    ) -> StepMeta:
        """``new`` and ``more``: whole block tables, and blocks that are added to one."""
        by_id = scheduled or {}
        ids = {req_id: (blocks,) for req_id, blocks in {**(new or {}), **(more or {})}.items()}
        meta = self.half.build_connector_meta(
            ScheduledStep(
                {request.request_id: n for request, n in by_id.items()},
                ids,
                frozenset(new or {}),
                preempted,
            )
        )
        for request, n in by_id.items():
            request.num_computed_tokens += n
        return meta

    def report(self, *job_ids: int, failed: bool = False, times: int = 1) -> None:
        report = WorkerReport(dict.fromkeys(job_ids, times), set(job_ids) if failed else set())
        self.half.update_connector_output(report)

    def start(self, request: FakeRequest, ids: list[int] | None = None) -> StepMeta:
        """Looks the request up, declines what is offered, computes all its tokens in one step."""
        ids = self.new_blocks(-(-request.num_tokens // TOKENS)) if ids is None else ids
        self.look_up(request)
        self.allocate(request, ids)
        return self.step({request: request.num_tokens}, new={request.request_id: ids})

    def store(self, tokens: list[int], name: str = "writer") -> None:
        """Some request computes ``tokens``, its blocks are stored, and it is gone."""
        request = FakeRequest(name, tokens)
        meta = self.start(request)
        self.report(*meta.stores, times=self.num_workers)
        self.half.request_finished(request)
        self.step()

    def load(self, request: FakeRequest, computed: int = 0, ids: list[int] | None = None) -> StepMeta:
        """The request takes what it is offered; the step that starts its load."""
        tokens, is_async = self.look_up(request, computed)
        assert tokens, "nothing to load"
        assert is_async
        ids = self.new_blocks(-(-(computed + tokens) // TOKENS)) if ids is None else ids
        self.allocate(request, ids, tokens)
        request.num_computed_tokens = computed + tokens
        return self.step()

    def keys(self, tokens: list[int]) -> list[OffloadKey]:
        hashes = hash_blocks(tokens, TOKENS)[self.factor - 1 :: self.factor]
        return [make_offload_key(h, 0) for h in hashes]

    def status(self, tokens: list[int]) -> list[int | None]:
        """Readers of each block; -1 being written, None absent."""
        found = [self.manager.block_status(key) for key in self.keys(tokens)]
        return [status and status.ref_cnt for status in found]


def prompt(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def only(jobs: Mapping[int, TransferSpec]) -> tuple[int, TransferSpec]:
    ((job_id, spec),) = jobs.items()
    return job_id, spec


def device_ids(spec: TransferSpec) -> list[int]:
    return list(spec.device.block_ids.tolist())


def test_no_half_takes_the_report_of_another_halfs_job() -> None:
    """Two of one process, as when an engine makes a second one: a report of the first one's job says nothing of the
    second one's blocks."""
    first, second = Rig(), Rig()
    (job_id,) = first.start(FakeRequest("a", prompt(4))).stores
    assert job_id not in second.start(FakeRequest("b", prompt(4))).stores
    second.report(job_id)
    assert second.status(prompt(4)) == [-1]
    assert not second.half.off


# Lookup.


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        (3, 0),
        (4, 3),
        (5, 4),
        (8, 7),
        (9, 8),
        (11, 8),
        (12, 8),
        (30, 8),
    ],
)
def test_whole_blocks_are_offered_and_one_token_is_always_left(asked: int, offered: int) -> None:
    rig = Rig()
    rig.store(prompt(10))  # two whole blocks
    assert rig.look_up(FakeRequest("r", prompt(asked))) == (offered, offered > 0)


def test_another_prompt_has_no_hit() -> None:
    rig = Rig()
    rig.store(prompt(10))
    assert rig.look_up(FakeRequest("r", prompt(10, start=1))) == (0, False)


def test_a_one_token_prompt_is_computed_though_its_block_is_there() -> None:
    manager = LRUOffloadingManager(HostBackend(1, 4))
    half = OffloadingConnectorScheduler(manager, groups=[KVGroup(1)])
    request = FakeRequest("r", [7], hash_tokens=1)
    half.get_num_new_matched_tokens(request, 0)
    manager.prepare_store([make_offload_key(request.block_hashes[0], 0)])
    manager.complete_store([make_offload_key(request.block_hashes[0], 0)])
    assert half.get_num_new_matched_tokens(FakeRequest("s", [7], hash_tokens=1), 0) == (0, False)
    assert half.get_num_new_matched_tokens(FakeRequest("t", [7, 8], hash_tokens=1), 0) == (1, True)


@pytest.mark.parametrize(("computed", "offered"), [(0, 12), (4, 8), (8, 4), (12, 0), (16, 0)])
def test_what_the_device_holds_is_not_offered(computed: int, offered: int) -> None:
    rig = Rig()
    rig.store(prompt(12))
    assert rig.look_up(FakeRequest("r", prompt(20)), computed) == (offered, offered > 0)


@pytest.mark.parametrize(
    ("computed", "offered"),
    [(0, 32), (4, 28), (12, 20), (16, 16), (20, 0), (28, 0), (32, 0)],
)
def test_a_device_hit_may_end_inside_a_block_but_less_than_a_block_is_not_worth_it(computed: int, offered: int) -> None:
    rig = Rig(factor=4)
    rig.store(prompt(32))
    assert rig.look_up(FakeRequest("r", prompt(50)), computed) == (offered, offered > 0)
    assert rig.manager.lookups[-1] == rig.keys(prompt(50))[computed // 16 :], "looked up whole"


@pytest.mark.parametrize(("computed", "first"), [(0, 0), (4, 1), (12, 3), (16, 4)])
def test_only_the_missing_device_blocks_are_copied(computed: int, first: int) -> None:
    rig = Rig(factor=4)
    rig.store(prompt(32))
    ids = [100 + i for i in range(8)]
    _, spec = only(rig.load(FakeRequest("r", prompt(50)), computed, ids).loads)
    assert device_ids(spec) == ids[first:]
    assert spec.device.block_indices == (first,)
    assert spec.device.group_sizes == (8 - first,)
    assert len(spec.host.slots) == (1 if first == 4 else 2)


def test_the_engine_may_take_less_than_it_was_offered() -> None:
    rig = Rig(factor=2)
    rig.store(prompt(32))
    request = FakeRequest("r", prompt(40))
    assert rig.look_up(request) == (32, True)
    rig.allocate(request, [50, 51, 52, 53, 54], 20)
    _, spec = only(rig.step().loads)
    assert device_ids(spec) == [50, 51, 52, 53, 54]
    assert len(spec.host.slots) == 3
    assert rig.status(prompt(32)) == [1, 1, 1, 0]


def test_a_full_hit_loads_the_block_of_the_token_that_is_computed_again() -> None:
    rig = Rig()
    rig.store(prompt(8))
    _, spec = only(rig.load(FakeRequest("r", prompt(8)), ids=[50, 51]).loads)
    assert device_ids(spec) == [50, 51]


def test_an_unknown_answer_waits_at_most_for_the_deadline() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.manager.unknown = True
    request = FakeRequest("r", prompt(9))
    for now in (100.0, 100.5, 100.999):
        rig.clock.now = now
        assert rig.look_up(request) == (None, False)
    rig.clock.now = 101.0
    assert rig.look_up(request) == (0, False)
    rig.clock.now = 105.0
    assert rig.look_up(request) == (0, False), "it does not wait twice"


def test_an_unknown_answer_is_asked_for_again_until_it_comes() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.manager.unknown = True
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (None, False)
    rig.step()
    lookups = len(rig.manager.lookups)
    assert rig.look_up(request) == (None, False)
    assert len(rig.manager.lookups) == lookups, "nothing has changed: it is not asked for again"
    rig.manager.unknown, rig.manager.told = False, True
    rig.step()
    assert rig.look_up(request) == (8, True)


def test_who_wants_blocks_that_are_on_their_way_waits_and_then_shares_them() -> None:
    rig = Rig()
    rig.store(prompt(8))
    first, second = FakeRequest("first", prompt(9)), FakeRequest("second", prompt(12))
    job, _ = only(rig.load(first).loads)
    assert rig.look_up(second) == (None, False)
    rig.report(job)
    assert rig.look_up(second, computed=8) == (0, False), "it finds them on the device"


def test_who_wants_other_blocks_does_not_wait() -> None:
    rig = Rig()
    rig.store(prompt(8), "a")
    rig.store(prompt(8, start=50), "b")
    rig.load(FakeRequest("first", prompt(9)))
    assert rig.look_up(FakeRequest("second", prompt(9, start=50))) == (8, True)


def test_after_the_deadline_it_loads_its_own_copy() -> None:
    rig = Rig()
    rig.store(prompt(8))
    job, _ = only(rig.load(FakeRequest("first", prompt(9))).loads)
    second = FakeRequest("second", prompt(9))
    assert rig.look_up(second) == (None, False)
    rig.clock.now += 0.999
    assert rig.look_up(second) == (None, False)
    rig.clock.now += 0.002
    other_job, spec = only(rig.load(second, ids=[70, 71]).loads)
    assert device_ids(spec) == [70, 71]
    assert rig.status(prompt(8)) == [2, 2]
    rig.report(job)
    third = FakeRequest("third", prompt(9))
    assert rig.look_up(third) == (None, False), "the second copy is still on its way"
    rig.report(other_job)
    assert rig.look_up(third) == (8, True)


def test_without_a_device_prefix_cache_nobody_waits_for_anothers_load() -> None:
    rig = Rig(options={"share_loads": False})
    rig.store(prompt(8))
    rig.load(FakeRequest("first", prompt(9)))
    assert rig.look_up(FakeRequest("second", prompt(9))) == (8, True)


def test_one_request_is_one_use_of_its_blocks_however_often_it_is_tried() -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(12))
    for computed in (0, 4, 0):
        rig.look_up(request, computed)
    assert len(rig.manager.lookups) == 3
    rig.allocate(request, [1, 2, 3])
    rig.step({request: 8}, new={"r": [1, 2, 3]})
    rig.step(preempted=["r"])
    request.num_computed_tokens = 0
    rig.look_up(request)
    rig.allocate(request, [4, 5, 6])
    rig.step({request: 12}, new={"r": [4, 5, 6]})
    rig.step({request: 0})
    rig.half.request_finished(request)
    rig.step()
    assert rig.manager.touches == [rig.keys(prompt(12))]


def test_a_chain_stored_in_parts_loses_its_tail_before_its_head() -> None:
    rig = Rig(num_host_blocks=5)
    rig.store(prompt(4), "short")
    request = FakeRequest("r", prompt(16))
    rig.look_up(request)
    rig.allocate(request, [2, 3, 4, 5])
    jobs = [*rig.step({request: 8}, new={"r": [2, 3, 4, 5]}).stores]
    for _ in range(2):
        jobs += rig.step({request: 4}).stores
    rig.report(*jobs)
    rig.half.request_finished(request)
    rig.step()
    chain = rig.keys(prompt(16))
    assert rig.manager.refreshes[-1] == (chain, chain[1:])
    for n, left in enumerate((4, 3, 2, 1)):
        rig.manager.prepare_store([b"other %d" % n])
        assert rig.manager.lookup(chain) == left


def test_a_touched_prompt_outlives_one_that_nobody_asks_for() -> None:
    rig = Rig(num_host_blocks=2)
    rig.store(prompt(4), "old")
    rig.store(prompt(4, start=50), "young")
    rig.look_up(FakeRequest("again", prompt(4)))
    rig.store(prompt(4, start=90), "third")
    assert rig.status(prompt(4)) == [0]
    assert rig.status(prompt(4, start=50)) == [None]


def test_a_lookup_is_remembered_until_something_changes() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(13))
    rig.manager.lookups.clear()
    assert [rig.look_up(request) for _ in range(5)] == [(8, True)] * 5
    assert len(rig.manager.lookups) == 1
    assert rig.look_up(request, computed=4) == (4, True), "the device holds more now"
    assert len(rig.manager.lookups) == 2
    rig.store(prompt(13), "writer of one more block")
    assert rig.look_up(request, computed=4) == (8, True)


def test_waiting_for_anothers_load_asks_the_manager_nothing() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.load(FakeRequest("first", prompt(9)))
    rig.manager.lookups.clear()
    second = FakeRequest("second", prompt(9))
    assert [rig.look_up(second) for _ in range(5)] == [(None, False)] * 5
    assert rig.manager.lookups == []


def test_a_remembered_hit_is_forgotten_when_a_store_evicts_it() -> None:
    rig = Rig(num_host_blocks=2)
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.store(prompt(8, start=50), "other")
    assert rig.look_up(request) == (0, False)


# Loads.


def test_zero_external_tokens_let_go_of_what_was_offered() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.allocate(request, [50, 51, 52], 0)
    meta = rig.step({request: 9}, new={"r": [50, 51, 52]})
    assert not meta.loads
    assert not meta.broken_loads
    assert rig.status(prompt(8)) == [0, 0]
    assert not rig.half.has_pending_work()


def test_a_load_is_pinned_until_every_worker_has_reported() -> None:
    rig = Rig(num_host_blocks=2, num_workers=2)
    rig.store(prompt(8))
    job, _ = only(rig.load(FakeRequest("r", prompt(9))).loads)
    assert rig.status(prompt(8)) == [1, 1]
    rig.report(job)
    assert rig.status(prompt(8)) == [1, 1]
    assert rig.half.has_pending_work()
    assert not rig.start(FakeRequest("w", prompt(8, start=50))).stores, "no room while both are pinned"
    rig.report(job)
    assert rig.status(prompt(8)) == [0, 0]
    assert rig.half.metrics.snapshot()["load_blocks"] == 2


def test_an_aborted_request_stays_pinned_until_its_load_has_ended() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    job, _ = only(rig.load(request).loads)
    assert rig.half.request_finished(request) == (False, None)
    rig.step()
    assert rig.status(prompt(8)) == [1, 1]
    rig.report(job)
    assert rig.status(prompt(8)) == [0, 0]


def test_nothing_is_stored_for_a_request_while_it_is_loading() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(16))
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    assert not rig.step({request: 0}, new={"r": [50, 51]}).stores
    rig.report(job)
    _, spec = only(rig.step({request: 8}, new={"r": [50, 51, 52, 53]}).stores)
    assert device_ids(spec) == [52, 53]


def test_a_loaded_prefix_is_not_stored_again() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(12))
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    rig.report(job)
    rig.manager.asked_stores.clear()
    rig.step({request: 4}, new={"r": [50, 51, 52]})
    assert rig.manager.asked_stores == [rig.keys(prompt(12))[2:]]


def test_a_loaded_prefix_is_stored_again_for_remote_decode() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(12), REMOTE_DECODE)
    job, _ = only(rig.load(request, ids=[50, 51]).loads)
    rig.report(job)
    rig.manager.asked_stores.clear()
    _, spec = only(rig.step({request: 4}, new={"r": [50, 51, 52]}).stores)
    assert rig.manager.asked_stores == [rig.keys(prompt(12))]
    assert device_ids(spec) == [52], "what is still there is not copied"


def test_a_failed_load_is_counted_and_its_request_never_loads_again() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    job, _ = only(rig.load(request).loads)
    rig.report(job, failed=True)
    request.num_computed_tokens = 0
    assert rig.look_up(request) == (0, False)
    assert rig.half.metrics.snapshot()["load_failures"] == 1
    assert "load_blocks" not in rig.half.metrics.snapshot()
    assert rig.status(prompt(8)) == [0, 0]
    assert rig.look_up(FakeRequest("other", prompt(9))) == (8, True)


def test_a_load_fails_if_one_of_two_workers_fails() -> None:
    rig = Rig(num_workers=2)
    rig.store(prompt(8))
    job, _ = only(rig.load(FakeRequest("r", prompt(9))).loads)
    rig.report(job, failed=True)
    rig.report(job)
    assert rig.half.metrics.snapshot()["load_failures"] == 1


def test_a_promise_that_cannot_be_kept_is_reported_as_broken() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.manager.reset()  # behind the connector's back
    rig.allocate(request, [50, 51], 8)
    assert rig.half.has_pending_work()
    meta = rig.step()
    assert not meta.loads
    assert meta.broken_loads == {"r": [50, 51]}
    assert not rig.half.off
    assert rig.look_up(request) == (0, False), "and it never loads again"
    assert rig.step().broken_loads == {}, "reported once"


def test_a_broken_promise_spoils_no_block_that_the_device_held() -> None:
    rig = Rig()
    rig.store(prompt(12))
    request = FakeRequest("r", prompt(13))
    assert rig.look_up(request, computed=4) == (8, True)
    rig.manager.reset()
    rig.allocate(request, [5, 50, 51], 8)
    assert rig.step().broken_loads == {"r": [50, 51]}


def test_tokens_that_were_never_offered_are_reported_as_broken() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(13))
    assert rig.look_up(request) == (8, True)
    rig.allocate(request, [50, 51, 52], 12)
    meta = rig.step()
    assert not meta.loads
    assert set(meta.broken_loads) == {"r"}


# Stores.


@pytest.mark.parametrize(
    ("known", "scheduled", "stored"),
    [(3, 3, 0), (4, 4, 1), (7, 7, 1), (12, 4, 1), (12, 7, 1), (12, 8, 2), (12, 12, 3), (12, 16, 3)],
)
def test_whole_blocks_of_known_and_computed_tokens_are_stored(known: int, scheduled: int, stored: int) -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(known))
    rig.look_up(request)
    rig.allocate(request, [1, 2, 3, 4])
    meta = rig.step({request: scheduled}, new={"r": [1, 2, 3, 4]})
    assert [b for spec in meta.stores.values() for b in device_ids(spec)] == [1, 2, 3, 4][:stored]
    assert rig.status(prompt(known))[:stored] == [-1] * stored


def test_chunks_and_decode_blocks_are_stored_as_they_fill_up() -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(6))
    rig.look_up(request)
    rig.allocate(request, [1, 2])
    assert device_ids(only(rig.step({request: 4}, new={"r": [1, 2]}).stores)[1]) == [1]
    assert not rig.step({request: 2}).stores
    request.tokens.append(99)
    assert not rig.step({request: 1}).stores
    request.tokens.append(98)
    assert device_ids(only(rig.step({request: 1}).stores)[1]) == [2]
    request.tokens.append(97)
    assert not rig.step({request: 1}, more={"r": [3]}).stores


def test_a_token_sampled_but_not_yet_known_completes_no_block() -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(3))
    rig.look_up(request)
    rig.allocate(request, [1])
    assert not rig.step({request: 3}, new={"r": [1]}).stores
    assert not rig.step({request: 1}).stores, "its token has not been reported back"
    request.tokens.append(99)
    assert only(rig.step({request: 1}, more={"r": [2]}).stores)


def test_the_last_whole_block_is_stored_when_the_request_finishes() -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(3))
    rig.look_up(request)
    rig.allocate(request, [1])
    rig.step({request: 3}, new={"r": [1]})
    rig.step({request: 1})
    request.tokens.append(99)
    assert rig.half.request_finished(request, [1]) == (False, None)
    assert rig.half.has_pending_work()
    meta = rig.step()
    job, spec = only(meta.stores)
    assert device_ids(spec) == [1]
    assert meta.fences == []
    rig.report(job)
    assert rig.status([*prompt(3), 99]) == [0]
    assert not rig.half.has_pending_work()


def test_a_store_is_ready_only_when_every_worker_has_reported() -> None:
    rig = Rig(num_workers=2)
    job, _ = only(rig.start(FakeRequest("w", prompt(8))).stores)
    rig.report(job)
    assert rig.status(prompt(8)) == [-1, -1]
    assert rig.look_up(FakeRequest("r", prompt(9))) == (0, False)
    rig.report(job)
    assert rig.status(prompt(8)) == [0, 0]
    assert rig.look_up(FakeRequest("r2", prompt(9))) == (8, True)
    assert rig.half.metrics.snapshot()["store_blocks"] == 2


@pytest.mark.parametrize("failing_worker", [0, 1])
def test_a_failed_store_is_a_miss_and_counted(failing_worker: int) -> None:
    rig = Rig(num_workers=2)
    job, _ = only(rig.start(FakeRequest("w", prompt(8))).stores)
    for worker in range(2):
        rig.report(job, failed=worker == failing_worker)
    assert rig.status(prompt(8)) == [None, None]
    assert rig.half.metrics.snapshot()["store_failures"] == 1
    assert "store_blocks" not in rig.half.metrics.snapshot()
    assert rig.look_up(FakeRequest("r", prompt(9))) == (0, False)
    rig.manager.check_integrity()
    assert rig.manager.num_used_blocks == 0


def test_blocks_that_are_there_are_not_copied_again() -> None:
    rig = Rig()
    rig.store(prompt(4))
    request = FakeRequest("r", prompt(12))
    assert rig.look_up(request, computed=4) == (0, False)
    rig.allocate(request, [7, 8, 9])
    request.num_computed_tokens = 4
    meta = rig.step({request: 8}, new={"r": [7, 8, 9]})
    assert device_ids(only(meta.stores)[1]) == [8, 9]


def test_no_room_is_tried_again_at_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(num_host_blocks=1)
    rig.store(prompt(4))
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


def start_together(rig: Rig, *requests: FakeRequest) -> StepMeta:
    """Requests that are computed in one step, the first with device blocks 10, 11, ..., the second 20, ..."""
    tables = {}
    for i, request in enumerate(requests):
        tables[request.request_id] = [10 * (i + 1) + j for j in range(-(-request.num_tokens // TOKENS))]
        rig.look_up(request)
        rig.allocate(request, tables[request.request_id])
    return rig.step({request: request.num_tokens for request in requests}, new=tables)


def test_each_request_of_a_step_has_a_store_of_its_own() -> None:
    rig = Rig()
    meta = start_together(rig, FakeRequest("a", prompt(8)), FakeRequest("b", prompt(4, start=50)))
    assert {spec.req_id: device_ids(spec) for spec in meta.stores.values()} == {"a": [10, 11], "b": [20]}
    by_id = {spec.req_id: job for job, spec in meta.stores.items()}
    rig.report(by_id["a"], failed=True)
    rig.report(by_id["b"])
    assert rig.status(prompt(8)) == [None, None]
    assert rig.status(prompt(4, start=50)) == [0]
    rig.manager.check_integrity()


def test_what_two_requests_compute_in_one_step_is_stored_once() -> None:
    rig = Rig()
    meta = start_together(rig, FakeRequest("a", prompt(8)), FakeRequest("b", prompt(12)))
    assert {spec.req_id: device_ids(spec) for spec in meta.stores.values()} == {"a": [10, 11], "b": [22]}
    slots = [slot for spec in meta.stores.values() for slot in spec.host.slots.tolist()]
    assert slots == [rig.manager.block_status(key).slot for key in rig.keys(prompt(12))]


def test_a_request_that_fits_is_stored_though_another_of_its_step_does_not() -> None:
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


def test_a_store_names_each_blocks_slot_in_order() -> None:
    rig = Rig(factor=2)
    _, spec = only(rig.start(FakeRequest("w", prompt(16)), [1, 2, 3, 4]).stores)
    assert device_ids(spec) == [1, 2, 3, 4]
    assert spec.device.block_indices == (0,)
    slots = [rig.manager.block_status(key).slot for key in rig.keys(prompt(16))]
    assert spec.host.slots.tolist() == slots


# Fences.


def in_flight() -> tuple[Rig, int, FakeRequest]:
    """A store of device blocks 1 and 2 that no worker has reported yet."""
    rig = Rig()
    rig.store(prompt(8, start=50), "for others to load")
    request = FakeRequest("w", prompt(8))
    job, _ = only(rig.start(request, [1, 2]).stores)
    return rig, job, request


def test_a_block_handed_to_a_new_request_fences_the_store_that_reads_it() -> None:
    rig, job, _ = in_flight()
    new = FakeRequest("n", prompt(4, start=90))
    rig.look_up(new)
    rig.allocate(new, [2])
    assert rig.step({new: 4}, new={"n": [2]}).fences == [job]


def test_a_block_handed_to_a_load_fences_the_store_that_reads_it() -> None:
    rig, job, _ = in_flight()
    meta = rig.load(FakeRequest("l", prompt(9, start=50)), ids=[1, 20])
    assert meta.fences == [job]
    assert meta.loads


def test_a_block_that_grows_another_request_fences_the_store_that_reads_it() -> None:
    rig, job, _ = in_flight()
    other = FakeRequest("o", prompt(8, start=90))
    rig.look_up(other)
    rig.allocate(other, [20])
    assert rig.step({other: 3}, new={"o": [20]}).fences == []
    assert rig.step({other: 3}, more={"o": [1]}).fences == [job]


def test_a_block_of_a_preempted_request_is_fenced_and_its_store_still_counts() -> None:
    rig, job, request = in_flight()
    other = FakeRequest("o", prompt(4, start=90))
    rig.look_up(other)
    rig.allocate(other, [1])
    assert rig.step({other: 4}, new={"o": [1]}, preempted=["w"]).fences == [job]
    assert rig.status(prompt(8)) == [-1, -1], "not ready before it is reported"
    rig.report(job)
    assert rig.status(prompt(8)) == [0, 0]
    request.num_computed_tokens = 0
    assert rig.look_up(request) == (7, True)


def test_a_block_handed_out_in_the_step_after_its_request_finished_is_read_first() -> None:
    rig = Rig()
    request = FakeRequest("w", prompt(3))
    rig.start(request, [1])
    rig.step({request: 1})
    request.tokens.append(99)
    rig.half.request_finished(request, [1])
    other = FakeRequest("o", prompt(4, start=90))
    rig.look_up(other)
    rig.allocate(other, [1])
    meta = rig.step({other: 3}, new={"o": [1]})
    job, spec = only(meta.stores)
    assert device_ids(spec) == [1]
    assert meta.fences == [job]


def test_what_a_preempted_request_had_not_stored_is_not_read_from_blocks_it_lost() -> None:
    rig = Rig()
    request = FakeRequest("w", prompt(3))
    rig.start(request, [1])
    rig.step({request: 1})
    request.tokens.append(99)
    assert not rig.step(preempted=["w"]).stores
    rig.half.request_finished(request, [])
    assert not rig.step().stores


def test_no_fence_without_need() -> None:
    rig, job, request = in_flight()
    other = FakeRequest("o", prompt(8, start=90))
    rig.look_up(other)
    rig.allocate(other, [20])
    request.tokens += [1, 2]
    assert rig.step({request: 2, other: 4}, new={"o": [20]}, more={"w": [3]}).fences == []
    rig.half.request_finished(request, [1, 2, 3])
    assert rig.step({other: 1}, more={"o": [21]}).fences == [], "freed, but not handed out again"
    rig.report(job)
    assert rig.step({other: 3}, more={"o": [1, 2]}).fences == [], "the store has ended"


def test_a_block_shared_through_the_device_prefix_cache_was_not_handed_out_again() -> None:
    rig, _, _ = in_flight()
    sharer = FakeRequest("s", prompt(12), num_computed_tokens=8)
    rig.look_up(sharer, computed=8)
    rig.allocate(sharer, [1, 2, 20])
    assert rig.step({sharer: 4}, new={"s": [1, 2, 20]}).fences == []


# The end of requests.


def test_a_finished_request_may_be_freed_at_once() -> None:
    rig, job, request = in_flight()
    assert rig.half.request_finished(request, [1, 2]) == (False, None)
    assert rig.half.request_finished(request, [1, 2]) == (False, None), "nor does it matter twice"
    assert rig.half.has_pending_work(), "its store is under way"
    rig.report(job)
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_a_request_nobody_heard_of_may_be_freed_at_once() -> None:
    request = FakeRequest("stranger", prompt(4), REMOTE_DECODE)
    assert Rig().half.request_finished(request, [1]) == (False, None)


def held(tokens: int = 8) -> tuple[Rig, int]:
    """A request for remote decode has finished; its store is under way."""
    rig = Rig(num_workers=2)
    request = FakeRequest("p", prompt(tokens), REMOTE_DECODE)
    job, _ = only(rig.start(request, [1, 2]).stores)
    keep, params = rig.half.request_finished(request, [1, 2])
    assert keep is True
    assert params is None
    return rig, job


def test_remote_decode_keeps_the_blocks_until_they_are_stored_and_releases_once() -> None:
    rig, job = held()
    assert rig.step().releases == []
    rig.report(job)
    assert rig.step().releases == []
    assert rig.half.has_pending_work()
    rig.report(job)
    assert rig.half.has_pending_work(), "somebody must still report the release"
    assert rig.step().releases == ["p"]
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_remote_decode_releases_once_when_its_deadline_is_over() -> None:
    rig, job = held()
    rig.clock.now += 0.999
    assert rig.step().releases == []
    assert rig.half.has_pending_work()
    rig.clock.now += 0.002
    assert rig.step().releases == ["p"]
    rig.report(job, times=2)
    rig.clock.now += 10
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_remote_decode_with_nothing_left_to_store_is_released_in_the_next_step() -> None:
    rig = Rig()
    request = FakeRequest("p", prompt(8), REMOTE_DECODE)
    job, _ = only(rig.start(request, [1, 2]).stores)
    rig.report(job)
    assert rig.half.request_finished(request, [1, 2]) == (True, None)
    assert rig.half.has_pending_work()
    assert rig.step().releases == ["p"]


def test_remote_decode_stores_the_last_block_before_it_releases() -> None:
    rig = Rig()
    request = FakeRequest("p", prompt(3), REMOTE_DECODE)
    rig.start(request, [1])
    rig.step({request: 1})
    request.tokens.append(99)
    assert rig.half.request_finished(request, [1])[0] is True
    meta = rig.step()
    assert meta.releases == []
    rig.report(only(meta.stores)[0])
    assert rig.step().releases == ["p"]


# Reset.


def test_after_a_reset_nothing_is_found_and_late_completions_are_ignored() -> None:
    rig, store, _ = in_flight()
    load, _ = only(rig.load(FakeRequest("l", prompt(9, start=50)), ids=[20, 21, 22]).loads)
    rig.half.reset()
    rig.report(store, load)
    assert not rig.half.off
    assert rig.status(prompt(8)) == [None, None]
    assert rig.status(prompt(8, start=50)) == [None, None]
    assert rig.look_up(FakeRequest("r", prompt(9))) == (0, False)
    rig.manager.check_integrity()
    assert rig.manager.num_used_blocks == 0


@pytest.mark.parametrize("reset", [True, False])
def test_what_running_requests_compute_after_a_reset_is_not_stored(reset: bool) -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(8))
    rig.look_up(request)
    rig.allocate(request, [1, 2])
    rig.step({request: 3}, new={"r": [1, 2]})
    if reset:
        rig.half.reset()
    assert bool(rig.step({request: 5}).stores) is not reset
    rig.half.request_finished(request, [1, 2])
    assert not rig.step().stores


def test_a_request_that_waits_at_a_reset_or_starts_again_after_it_is_stored() -> None:
    rig = Rig()
    waiting, running = FakeRequest("waiting", prompt(4)), FakeRequest("running", prompt(4, start=50))
    rig.look_up(waiting)
    rig.look_up(running)
    rig.allocate(running, [1])
    rig.step({running: 3}, new={"running": [1]})
    rig.half.reset()
    rig.allocate(waiting, [2])
    assert device_ids(only(rig.step({waiting: 4}, new={"waiting": [2]}).stores)[1]) == [2]
    rig.step(preempted=["running"])
    running.num_computed_tokens = 0
    rig.look_up(running)
    rig.allocate(running, [3])
    assert device_ids(only(rig.step({running: 4}, new={"running": [3]}).stores)[1]) == [3]


def test_an_offer_made_before_a_reset_is_not_kept_after_it() -> None:
    rig = Rig()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (8, True)
    rig.half.reset()
    rig.allocate(request, [50, 51], 8)
    assert rig.step().broken_loads == {"r": [50, 51]}
    assert not rig.half.off


def test_a_worker_that_finds_changed_weights_has_all_blocks_forgotten_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(num_workers=2)
    rig.store(prompt(4))
    store, _ = only(rig.start(FakeRequest("s", prompt(4, 50))).stores)
    assert rig.step().epoch == 0
    # The worker that noticed has carried this store out before; the other one has failed it.
    rig.half.update_connector_output(WorkerReport({store: 2}, {store}, changed_at=0))
    assert rig.status(prompt(4)) == rig.status(prompt(4, 50)) == [None]
    assert rig.half.metrics.snapshot()["weight_changes"] == 1
    assert "THE WEIGHTS HAVE CHANGED" in caplog.text
    assert "reset_prefix_cache(reset_connector=True)" in caplog.text
    assert "a store failed" not in caplog.text
    assert rig.step().epoch == 1
    rig.store(prompt(4))
    rig.half.update_connector_output(WorkerReport(changed_at=0))
    assert rig.status(prompt(4)) == [0], "the other worker noticed later what is known already"
    rig.half.update_connector_output(WorkerReport(changed_at=1))
    assert rig.status(prompt(4)) == [None]
    assert rig.step().epoch == 2
    rig.manager.check_integrity()


def go_on(rig: Rig, name: str, tokens: list[int], found: list[int], new: list[int]) -> StepMeta:
    """A request that finds blocks in the engine's own cache and computes the rest."""
    request = FakeRequest(name, tokens)
    rig.look_up(request, len(found) * TOKENS)
    rig.allocate(request, [*found, *new])
    request.num_computed_tokens = len(found) * TOKENS
    return rig.step({request: len(tokens) - request.num_computed_tokens}, new={name: [*found, *new]})


def test_after_a_reset_what_follows_the_engines_own_old_blocks_is_not_stored() -> None:
    """The engine's own cache may still hold KV of weights that are gone."""
    rig = Rig()
    rig.start(FakeRequest("before", prompt(4)), [1])
    rig.half.reset()
    assert not go_on(rig, "old", prompt(12), [1], [2, 3]).stores
    assert not go_on(rig, "older", prompt(16), [1, 2, 3], [4]).stores, "on blocks that follow old ones"
    new = FakeRequest("new", prompt(12, 50))
    assert device_ids(only(rig.start(new, [5, 6, 7]).stores)[1]) == [5, 6, 7]
    assert device_ids(only(go_on(rig, "newer", prompt(16, 50), [5, 6, 7], [8]).stores)[1]) == [8]
    # Blocks are handed out again.
    assert device_ids(only(rig.start(FakeRequest("reused", prompt(4, 70)), [2]).stores)[1]) == [2]
    assert device_ids(only(go_on(rig, "sound", prompt(8, 70), [2], [9]).stores)[1]) == [9]
    assert not go_on(rig, "spoiled", prompt(8), [1], [9]).stores
    assert not go_on(rig, "on spoiled", prompt(12), [9], [10, 11]).stores


def test_after_a_reset_what_follows_a_load_is_stored() -> None:
    rig = Rig()
    rig.half.reset()
    rig.store(prompt(8))
    request = FakeRequest("r", prompt(16))
    load, _ = only(rig.load(request, ids=[20, 21]).loads)
    rig.report(load)
    rig.allocate(request, [20, 21, 22, 23])
    assert device_ids(only(rig.step({request: 8}, new={"r": [20, 21, 22, 23]}).stores)[1]) == [22, 23]


def test_events_come_once() -> None:
    rig = Rig()
    rig.store(prompt(4))
    rig.half.reset()
    events = [(event.keys, event.removed) for event in rig.half.take_events()]
    assert events == [(rig.keys(prompt(4)), False), (rig.keys(prompt(4)), True)]
    assert list(rig.half.take_events()) == []


# Sleep.


def slept(**options: Any) -> Rig:
    """An engine that has stored a block and fallen asleep."""
    rig = Rig(options={"may_sleep": True}, **options)
    rig.store(prompt(8))
    rig.half.reset()
    return rig


def asks_for_a_check(rig: Rig) -> tuple[FakeRequest, int]:
    """A request that waits, and the check that it waits for."""
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (None, False)
    check = rig.step().check_weights
    assert check is not None
    assert rig.step().check_weights is None
    assert rig.look_up(request) == (None, False)
    return request, check


def test_after_a_sleep_with_the_same_weights_blocks_are_found_again() -> None:
    rig = slept(num_workers=2)
    assert rig.step().check_weights is None, "asleep"
    rig.half.wake_up()
    assert rig.step().check_weights is None, "perhaps some memory is asleep still"
    request, check = asks_for_a_check(rig)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(request) == (None, False)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(request) == (8, True)
    assert rig.load(request).loads
    rig.manager.check_integrity()


def test_after_a_sleep_one_worker_with_other_weights_is_enough() -> None:
    rig = slept(num_workers=2)
    rig.half.wake_up()
    request, check = asks_for_a_check(rig)
    rig.half.update_connector_output(WorkerReport({check: 1}, {check}))
    assert rig.look_up(request) == (0, False)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(request) == (0, False)
    assert rig.manager.num_used_blocks == 0


WITHOUT_A_WAKE: dict[str, Callable[[Rig], object]] = {
    "a lookup": lambda rig: rig.look_up(FakeRequest("n", prompt(9))),
    "a step that computes": lambda rig: rig.step({FakeRequest("n", prompt(9)): 1}),
    "another reset": lambda rig: rig.half.reset(),
    "changed weights": lambda rig: rig.half.update_connector_output(WorkerReport(changed_at=1)),
    "the end": lambda rig: rig.half.shutdown(),
}


@pytest.mark.parametrize("event", WITHOUT_A_WAKE)
def test_a_reset_without_a_wake_drops_all_blocks(event: str) -> None:
    rig = slept()
    rig.step()
    assert rig.manager.num_used_blocks == 2, "it may be asleep"
    WITHOUT_A_WAKE[event](rig)
    assert rig.manager.num_used_blocks == 0
    rig.half.wake_up()
    assert rig.look_up(FakeRequest("r", prompt(9))) == (0, False)
    assert rig.step().check_weights is None
    assert not rig.half.off


def test_a_reset_is_no_sleep_where_the_engine_cannot_sleep() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.half.reset()
    assert rig.manager.num_used_blocks == 0


@pytest.mark.parametrize("when", ["awake", "being checked"])
def test_a_reset_after_waking_drops_all_blocks(when: str) -> None:
    rig = slept()
    rig.half.wake_up()
    check = asks_for_a_check(rig)[1] if when == "being checked" else None
    rig.half.reset()
    if check is not None:
        rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(FakeRequest("s", prompt(9))) == (0, False)
    assert rig.manager.num_used_blocks == 0


def test_a_step_that_computes_after_a_sleep_checks_first() -> None:
    """Its tokens are the first that workers accept new weights for."""
    rig = slept()
    rig.half.wake_up()
    assert rig.step({FakeRequest("n", prompt(9)): 1}).check_weights is not None


def test_who_waits_for_a_check_computes_at_the_deadline() -> None:
    rig = slept()
    rig.half.wake_up()
    request, check = asks_for_a_check(rig)
    rig.clock.now += 1
    assert rig.look_up(request) == (0, False)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.manager.num_used_blocks == 0


def test_time_asleep_is_no_wait_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(options={"may_sleep": True})
    rig.store(prompt(8))
    load, _ = only(rig.load(FakeRequest("l", prompt(9))).loads)
    request = FakeRequest("r", prompt(9))
    assert rig.look_up(request) == (None, False), "its blocks are on their way for another"
    rig.half.reset()
    rig.report(load, failed=True)
    rig.clock.now += 60
    let_go: list[str] = []
    monkeypatch.setattr(rig.manager, "release_request", lambda context: let_go.append(context.req_id))
    rig.half.wake_up()
    assert "r" in let_go, "it may wait for lower tiers as if it had just come"
    assert rig.look_up(request) == (None, False)
    check = rig.step().check_weights
    assert check is not None
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(request) == (8, True)


def test_stores_and_loads_under_way_fail_when_the_engine_falls_asleep() -> None:
    rig = Rig(options={"may_sleep": True})
    rig.store(prompt(8))
    request = FakeRequest("l", prompt(9))
    load, _ = only(rig.load(request).loads)
    store, _ = only(rig.start(FakeRequest("s", prompt(8, 50)), [10, 11]).stores)
    rig.half.reset()
    rig.report(store)
    rig.report(load, failed=True)
    rig.half.wake_up()
    new, check = asks_for_a_check(rig)
    rig.half.update_connector_output(WorkerReport({check: 1}))
    assert rig.look_up(new) == (8, True)
    assert rig.look_up(FakeRequest("t", prompt(9, 50))) == (0, False)
    rig.manager.check_integrity()


# Nothing raises into the engine.

BREAKABLE: dict[str, Callable[[Rig, FakeRequest], object]] = {
    "lookup": lambda rig, request: rig.look_up(request),
    "touch": lambda rig, request: rig.look_up(request),
    "prepare_load": lambda rig, request: (rig.look_up(request), rig.allocate(request, [50, 51], 8)),
    "explain_miss": lambda rig, request: rig.load(FakeRequest("r", prompt(13))),
    "prepare_store": lambda rig, request: (rig.look_up(request), rig.start(FakeRequest("s", prompt(4, 70)))),
    "complete_store": lambda rig, request: rig.store(prompt(4, 70), "s"),
    "complete_load": lambda rig, request: rig.report(*rig.load(request).loads),
    "take_events": lambda rig, request: list(rig.half.take_events()),
    "reset": lambda rig, request: rig.half.reset(),
}


@pytest.mark.parametrize("method", BREAKABLE)
def test_an_error_in_the_manager_switches_offloading_off_loudly(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.store(prompt(8))
    assert rig.half.metrics.snapshot()["off"] == 0

    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rig.manager, method, broken)
    BREAKABLE[method](rig, FakeRequest("r", prompt(10)))
    assert rig.half.off
    assert rig.half.metrics.snapshot()["off"] == 1
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(loud) == 1
    assert "OFFLOADING IS OFF" in loud[0].getMessage()
    assert loud[0].exc_info
    # From here on every call answers, and nothing is offered or stored, whatever the manager does.
    request = FakeRequest("after", prompt(10))
    assert rig.look_up(request) == (0, False)
    rig.allocate(request, [60, 61, 62], 0)
    meta = rig.step({request: 10}, new={"after": [60, 61, 62]})
    assert (meta.loads, meta.stores, meta.fences) == ({}, {}, [])
    rig.report(0, 1, 2)
    assert rig.half.request_finished(request, [60, 61, 62]) == (False, None)
    rig.half.reset()
    assert list(rig.half.take_events()) == []
    rig.step()
    assert not rig.half.has_pending_work()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def test_going_off_breaks_the_promises_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.store(prompt(8), "a")
    rig.store(prompt(8, start=50), "b")
    loading, offered = FakeRequest("loading", prompt(9)), FakeRequest("offered", prompt(9, start=50))
    assert rig.look_up(loading) == (8, True)
    assert rig.look_up(offered) == (8, True)
    rig.allocate(loading, [20, 21], 8)
    monkeypatch.setattr(rig.manager, "lookup", None)
    assert rig.look_up(FakeRequest("r", prompt(4, start=200))) == (0, False)
    rig.allocate(offered, [30, 31], 8)
    assert rig.half.has_pending_work()
    meta = rig.step()
    assert not meta.loads
    assert meta.broken_loads == {"loading": [20, 21], "offered": [30, 31]}
    assert not rig.half.has_pending_work()


def test_going_off_releases_what_was_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, job = held()
    monkeypatch.setattr(rig.manager, "lookup", None)
    rig.look_up(FakeRequest("r", prompt(4)))
    assert rig.half.has_pending_work()
    assert rig.step().releases == ["p"]
    rig.report(job, times=2)
    assert rig.step().releases == []
    assert not rig.half.has_pending_work()


def test_an_error_at_shutdown_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(rig.manager, "shutdown", broken)
    rig.half.shutdown()


def test_a_worker_that_reports_too_often_switches_offloading_off() -> None:
    rig = Rig(num_workers=2)
    job, _ = only(rig.start(FakeRequest("w", prompt(4))).stores)
    rig.report(job, times=3)
    assert rig.half.off
    assert rig.half.metrics.snapshot()["off"] == 1


def test_reports_of_unknown_jobs_are_ignored() -> None:
    rig = Rig()
    rig.report(12345, failed=True, times=3)
    assert not rig.half.off


def test_reported_bytes_and_seconds_are_counted() -> None:
    rig = Rig()
    for _ in range(2):
        rig.half.update_connector_output(
            WorkerReport(store_bytes=5, load_bytes=7, store_seconds=0.5, load_seconds=0.25)
        )
    totals = rig.half.metrics.snapshot()
    assert [totals[name] for name in ("store_bytes", "load_bytes", "store_seconds", "load_seconds")] == [
        10,
        14,
        1.0,
        0.5,
    ]


class CountingPolicy(LRUPolicy):
    """Adapts, and counts how often it is asked how."""

    asked = 0

    def state(self) -> Mapping[str, Any]:
        self.asked += 1
        return {"rule": "a", "scores": {"a": self.asked, "b": 0}}


class CountingManager(PolicyOffloadingManager):
    """Counts how often it is asked for what it has counted."""

    asked = 0

    def take_counts(self) -> Mapping[str, float]:
        self.asked += 1
        return {"disk_write_blocks": 1, "disk_blocks": self.asked}


def counting_rig() -> tuple[Rig, CountingManager, CountingPolicy]:
    policy = CountingPolicy(16)
    manager = CountingManager(HostBackend(TOKENS, 16), policy)
    return Rig(manager=manager), manager, policy


def test_a_step_reads_no_gauges() -> None:
    rig, manager, policy = counting_rig()
    request = FakeRequest("r", prompt(6))
    rig.start(request)
    for _ in range(50):
        rig.step({request: 1})
        rig.step()
    assert (manager.asked, policy.asked) == (0, 1), "the record of the request's miss asks once"


def test_metrics_are_read_when_they_are_taken_and_those_of_the_policy_rarely() -> None:
    rig, manager, policy = counting_rig()
    metrics = rig.half.metrics
    first = metrics.take()
    assert (first["disk_blocks"], first["policy_rule:a"], first["policy_score:a"]) == (1, 1, 1)
    rig.store(prompt(8))
    asked = policy.asked
    taken = metrics.take()
    assert (taken["pool_used_blocks"], taken["disk_blocks"], taken["disk_write_blocks"]) == (2, 2, 1)
    assert policy.asked == asked
    rig.clock.now += 1.0
    assert metrics.take()["policy_score:a"] == asked + 1
    assert metrics.snapshot()["disk_write_blocks"] == manager.asked == 4
    assert policy.asked == asked + 1


def test_an_error_when_metrics_are_read_switches_offloading_off_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.manager, "take_counts", lambda: 1 / 0)
    assert rig.half.metrics.take()["off"] == 1
    assert rig.half.off


# Records.


def test_each_request_leaves_one_record() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.half.records.clear()
    request = FakeRequest("r", prompt(16))
    for _ in range(3):
        rig.look_up(request, computed=4)
    assert not rig.half.records, "not settled yet"
    rig.load(request, computed=4, ids=[50, 51])
    rig.step(preempted=["r"])
    rig.look_up(request)
    rig.allocate(request, [60, 61], 0)
    (record,) = rig.half.records
    assert (record.req_id, record.tokens_asked, record.device_tokens, record.host_tokens) == ("r", 16, 4, 4)
    assert record.missed_key == rig.keys(prompt(16))[2].hex()
    assert record.reason is MissReason.NEVER_STORED
    totals = rig.half.metrics.snapshot()
    assert totals["host_hit_tokens"] == 4
    assert totals["device_hit_tokens"] == 4
    assert totals["asked_tokens"] == 8 + 16


def test_a_full_hit_leaves_a_record_without_a_reason() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.load(FakeRequest("r", prompt(10)))
    record = rig.half.records[-1]
    assert (record.host_tokens, record.missed_key, record.reason, record.age_s) == (8, None, None, None)


def settle(rig: Rig, tokens: list[int]) -> tuple[MissReason | None, float | None]:
    """Why a request with ``tokens`` misses its first block."""
    request = FakeRequest("asker", tokens)
    assert rig.look_up(request) == (0, False)
    rig.allocate(request, [90, 91], 0)
    record = rig.half.records[-1]
    assert record.req_id == "asker"
    assert record.missed_key == rig.keys(tokens)[0].hex()
    assert rig.half.metrics.snapshot()[f"misses:{record.reason}"] >= 1
    return record.reason, record.age_s


def test_never_stored() -> None:
    assert settle(Rig(), prompt(8)) == (MissReason.NEVER_STORED, None)


def test_evicted_with_its_age() -> None:
    clock = Clock()
    manager = PolicyOffloadingManager(HostBackend(TOKENS, 2), make_policy("lru", 2), clock=clock)
    rig = Rig(manager=manager, clock=clock)
    rig.store(prompt(8), "a")
    rig.store(prompt(8, start=50), "b")
    clock.now += 12.5
    assert settle(rig, prompt(8)) == (MissReason.EVICTED, 12.5)


def test_being_written() -> None:
    rig = Rig()
    rig.start(FakeRequest("w", prompt(8)))
    assert settle(rig, prompt(8)) == (MissReason.BEING_WRITTEN, None)


def test_of_a_prompt_longer_than_the_pool_the_head_is_stored() -> None:
    rig = Rig(num_host_blocks=2)
    request = FakeRequest("r", prompt(16))
    rig.report(*rig.start(request).stores)
    assert not rig.step({request: 0}).stores
    assert rig.status(prompt(16)) == [0, 0, None, None]
    assert "refused_stores" not in rig.half.metrics.snapshot()


def test_no_room() -> None:
    rig = Rig(num_host_blocks=1)
    rig.store(prompt(4))
    rig.load(FakeRequest("pins", prompt(5)))
    rig.start(FakeRequest("w", prompt(8, start=50)))
    reason, age_s = settle(rig, prompt(8, start=50))
    assert reason is MissReason.NO_ROOM
    assert age_s is not None


def test_not_admitted() -> None:
    backing = LRUOffloadingManager(HostBackend(TOKENS, 4))
    rig = Rig(manager=FilterReusedOffloadingManager(backing, 2))
    rig.store(prompt(8))
    assert settle(rig, prompt(8))[0] is MissReason.NOT_ADMITTED
    assert backing.num_used_blocks == 0


class FirstOnly(LRUPolicy):
    """Of what there is no room for, one block a call may enter."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.left_out: list[OffloadKey] = []

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> np.ndarray:
        return np.arange(len(keys)) < 1

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self.left_out += keys


@pytest.mark.parametrize("preempted", [False, True])
def test_behind_a_refused_block_nothing_is_stored_and_the_policy_is_told_of_it(preempted: bool) -> None:
    policy = FirstOnly(8)
    rig = Rig(manager=PolicyOffloadingManager(HostBackend(TOKENS, 8), policy))
    rig.store(prompt(32, start=500))
    request, ids = FakeRequest("r", prompt(24)), rig.new_blocks(6)
    rig.look_up(request)
    rig.allocate(request, ids)
    rig.report(*rig.step({request: 12}, new={"r": ids}).stores)
    assert rig.status(prompt(24)) == [0, None, None, None, None, None]
    if preempted:
        rig.step(preempted=["r"])
        request.num_computed_tokens = 0
        rig.look_up(request)
        rig.allocate(request, ids)
        rig.step({request: 12}, new={"r": ids})
    assert not rig.step({request: 12}).stores
    assert rig.status(prompt(24)) == [0, None, None, None, None, None]
    assert policy.left_out == rig.keys(prompt(24))[3:]
    assert rig.manager.explain_miss(rig.keys(prompt(24))[5]).reason is MissReason.NOT_ADMITTED
    # Its end counts once, and another request for the same is judged anew.
    rig.half.request_finished(request)
    rig.step()
    assert policy.left_out == rig.keys(prompt(24))[3:]
    rig.report(*rig.start(FakeRequest("s", prompt(24))).stores)
    assert rig.status(prompt(24)) == [0, 0, None, None, None, None]


def test_what_nobody_asked_for_before_was_not_refused() -> None:
    rig = Rig(manager=FilterReusedOffloadingManager(LRUOffloadingManager(HostBackend(TOKENS, 4)), 2))
    assert settle(rig, prompt(8)) == (MissReason.NEVER_STORED, None)


def test_reset() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.half.reset()
    assert settle(rig, prompt(8))[0] is MissReason.RESET


def test_copy_failed() -> None:
    rig = Rig()
    job, _ = only(rig.start(FakeRequest("w", prompt(8))).stores)
    rig.report(job, failed=True)
    assert settle(rig, prompt(8))[0] is MissReason.COPY_FAILED


def test_records_can_be_written_as_json() -> None:
    rig = Rig()
    settle(rig, prompt(8))
    assert json.loads(json.dumps(rig.half.records[-1].to_dict()))["reason"] == "never_stored"


# Keys.


def scheduler(manager: OffloadingManager, **options: Any) -> OffloadingConnectorScheduler:
    return OffloadingConnectorScheduler(manager, groups=[KVGroup(TOKENS)], **options)


def test_what_was_overwritten_before_a_fence_could_hold_is_not_stored() -> None:
    """The engine zeroes a block for its next owner before it tells the workers of the step: their copies may hold
    zeros, and they cannot know."""
    rig = Rig()
    running, finished = FakeRequest("r", prompt(8)), FakeRequest("f", prompt(8, start=100))
    for request, blocks in ((running, [1, 2]), (finished, [3, 4])):
        rig.look_up(request)
        rig.allocate(request, blocks)
    meta = rig.step({running: 8, finished: 4}, new={"r": [1, 2], "f": [3, 4]})
    rig.half.request_finished(finished)
    step = ScheduledStep({}, {"other": ([4],)}, frozenset({"other"}), overwritten={2, 4})
    last = rig.half.build_connector_meta(step)
    for job in [*meta.stores, *last.stores]:
        rig.report(job)
    assert rig.look_up(FakeRequest("again", prompt(9)))[0] == 0, "the job that read block 2"
    assert rig.look_up(FakeRequest("f again", prompt(9, start=100)))[0] == 4
    assert not rig.half.off


def test_the_namespace_is_part_of_the_key() -> None:
    manager = SpyManager(4)
    found = {}
    for namespace in (b"one", b"two", b""):
        scheduler(manager, namespace=namespace).get_num_new_matched_tokens(FakeRequest("r", prompt(4)), 0)
        found[namespace] = manager.lookups[-1]
    (h,) = hash_blocks(prompt(4), TOKENS)
    assert found == {name: [make_offload_key(name + h, 0)] for name in found}


def test_a_blocks_key_has_the_hash_of_its_last_hash_block() -> None:
    manager = SpyManager(4)
    request = FakeRequest("r", prompt(20), hash_tokens=2)
    half = OffloadingConnectorScheduler(manager, groups=[KVGroup(TOKENS, 2)], hash_block_size=2)
    half.get_num_new_matched_tokens(request, 0)
    hashes = request.block_hashes
    assert manager.lookups == [[make_offload_key(hashes[3], 0), make_offload_key(hashes[7], 0)]]


@pytest.mark.parametrize("hash_block_size", [3, 8])
def test_block_sizes_that_do_not_divide_are_refused(hash_block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"device block size 4: must be a multiple of the {hash_block_size}"):
        scheduler(SpyManager(4), hash_block_size=hash_block_size)


@pytest.mark.parametrize("hash_block_size", [1, 2, 4, None])
def test_block_sizes_that_divide_are_taken(hash_block_size: int | None) -> None:
    scheduler(SpyManager(4), hash_block_size=hash_block_size)


def test_the_pools_size_is_a_metric() -> None:
    rig = Rig(num_host_blocks=5)
    rig.store(prompt(8))
    rig.step()
    totals = rig.half.metrics.snapshot()
    assert (totals["pool_blocks"], totals["pool_used_blocks"]) == (5, 2)


def test_shutdown_may_come_twice() -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.half.shutdown()
    rig.half.shutdown()
    assert rig.manager.num_used_blocks == 0


@pytest.mark.parametrize("params", [[1, 2], "do_remote_decode", 7, {}, {"do_remote_decode": []}])
def test_whatever_a_client_sends_along_does_no_harm(params: Any) -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(8), kv_transfer_params=params)
    rig.report(*rig.start(request).stores)
    assert rig.half.request_finished(request) == (False, None)
    rig.step()
    assert not rig.half.off
    assert rig.status(prompt(8)) == [0, 0]


def test_tokens_that_the_engine_takes_back_take_their_keys_along() -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(12))
    rig.report(*rig.start(request).stores)
    request.tokens[8:] = prompt(8, start=70)
    request.num_computed_tokens = 8
    rig.report(*rig.step({request: 8}, more={"r": rig.new_blocks(1)}).stores)
    assert rig.status([*prompt(8), *prompt(8, start=70)]) == [0, 0, 0, 0]
    assert not rig.half.off


def test_a_worker_whose_transfer_broke_switches_offloading_off(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.store(prompt(8))
    rig.half.update_connector_output(WorkerReport(broken=True))
    assert rig.half.off
    assert rig.look_up(FakeRequest("r", prompt(12))) == (0, False)
    assert "OFFLOADING IS OFF" in caplog.text
    assert rig.half.metrics.snapshot()["off"] == 1


def test_a_request_that_waits_is_looked_up_again_only_when_a_load_ends() -> None:
    rig = Rig()
    rig.store(prompt(8))
    job, _ = only(rig.load(FakeRequest("first", prompt(12))).loads)
    waiter = FakeRequest("waiter", prompt(12))
    assert rig.look_up(waiter) == (None, False)
    rig.report(*rig.start(FakeRequest("other", prompt(8, start=90))).stores)
    lookups = len(rig.manager.lookups)
    assert rig.look_up(waiter) == (None, False)
    assert len(rig.manager.lookups) == lookups
    rig.report(job)
    assert rig.look_up(waiter) == (8, True)


def test_a_record_names_the_block_and_not_its_namespace() -> None:
    rig = Rig(options={"namespace": b"8 bytes."})
    request = FakeRequest("r", prompt(8))
    rig.look_up(request)
    rig.allocate(request, [1, 2])
    assert rig.half.records[-1].missed_key == make_offload_key(request.block_hashes[0], 0).hex()


# What is known now.


def test_a_snapshot_shows_requests_and_jobs_and_does_not_change() -> None:
    rig = Rig(num_workers=2)
    rig.store(prompt(8), "writer")
    loader, waiting = FakeRequest("loader", prompt(9)), FakeRequest("waiting", prompt(4, start=50))
    load, _ = only(rig.load(loader, ids=[30, 31]).loads)
    rig.look_up(waiting)
    writer = FakeRequest("second writer", prompt(8, start=90))
    store, _ = only(rig.start(writer, [40, 41]).stores)
    rig.report(store)
    seen = rig.half.snapshot()
    assert {req_id: request.phase for req_id, request in seen.requests.items()} == {
        "loader": Phase.LOADING,
        "waiting": Phase.WAITING,
        "second writer": Phase.RUNNING,
    }
    assert seen.requests["second writer"].block_ids == ((40, 41),)
    assert seen.requests["second writer"].next_store == (2,)
    assert seen.requests["second writer"].num_jobs == 1
    assert seen.requests["second writer"].storing is Storing.ALLOWED
    assert set(seen.jobs) == {load, store}
    assert (seen.jobs[load].is_store, seen.jobs[load].num_pending, seen.jobs[load].num_blocks) == (False, 2, 2)
    assert (seen.jobs[store].is_store, seen.jobs[store].num_pending) == (True, 1)
    assert seen.jobs[store].device_blocks == {40, 41}
    assert seen.jobs[store].req_ids == ("second writer",)
    assert seen.keys_loading == dict.fromkeys(rig.keys(prompt(8)), 1)
    assert (seen.held, seen.num_resets, seen.off) == ((), 0, False)
    rig.half.reset()
    rig.report(load, times=2)
    rig.half.request_finished(writer)
    assert set(seen.jobs) == {load, store}, "it does not change any more"
    after = rig.half.snapshot()
    assert set(after.jobs) == {store}
    assert (after.keys_loading, after.num_resets) == ({}, 1)
    assert after.requests["loader"].storing is Storing.STALE


def test_a_snapshot_shows_requests_that_are_held() -> None:
    assert held()[0].half.snapshot().held == ("p",)
