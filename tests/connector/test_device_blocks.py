"""Host memory that does not repeat the device: a block is stored when it leaves the device, and not before."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.abc import (
    KVGroup,
    MissReason,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ScheduledStep,
    TransferSpec,
)
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import TenantConfig, Tenants
from kvoffload.connector.device_blocks import MAX_NAMES, DeviceBlocks
from kvoffload.connector.layout import Block
from kvoffload.connector.leaving import LEAST_OFFERED, MAX_LEAVING_BYTES, MAX_LEAVING_S, MIN_SPEED_SAMPLE
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.lab.tier import CatalogTier
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from tests.clock import Clock
from tests.connector.group_rig import SIZE, GroupRig
from tests.connector.rig import TOKENS, FakeRequest, Rig, device_ids, only, prompt


def rig_of(
    num_host_blocks: int = 16,
    next_free: Callable[[int], Iterable[int]] | None = None,
    enable_events: bool = False,
    device_blocks: int = 16,
    block_bytes: int = 1,
    tenants: Tenants | None = None,
    policy: type[LRUPolicy] = LRUPolicy,
    engine: Mapping[str, Any] = {},
) -> Rig:
    backend = HostBackend(TOKENS, num_host_blocks)
    manager = PolicyOffloadingManager(backend, policy(num_host_blocks), enable_events, device_blocks=device_blocks)
    engine = {"keeps_blocks": True, "device_blocks": device_blocks, "next_free": next_free, **engine}
    options: dict[str, Any] = {
        "misses": manager.history.misses,
        "enable_events": enable_events,
        "slot_bytes": [1, block_bytes],
    }
    options["tenants"] = tenants
    return Rig(manager=manager, options=options | engine)


def finish(rig: Rig, name: str, tokens: list[int], ids: list[int], tenant: str | None = None) -> None:
    """A request computes ``tokens`` in device blocks ``ids``, and ends."""
    request = FakeRequest(name, tokens, None if tenant is None else {"kvoffload": {"tenant": tenant}})
    assert not rig.start(request, ids).stores, "the device holds what was computed"
    assert not rig.end(request).stores


def test_what_the_engine_finds_on_the_device_does_not_leave_it() -> None:
    rig = rig_of()
    finish(rig, "a", prompt(8), [1, 2])
    sharer = FakeRequest("b", prompt(12), num_computed_tokens=8)
    assert not rig.start(sharer, [1, 2, 3], computed=8, num_tokens=4).stores
    rig.end(sharer)
    job, spec = only(rig.start(FakeRequest("c", prompt(8, start=50)), [3, 2]).stores)
    assert device_ids(spec) == [2, 3], "the head of the chain is stored as its head"
    rig.report(job)
    assert rig.status(prompt(12)) == [None, 0, 0]


def test_a_step_that_writes_to_the_blocks_of_a_load_waits_for_what_leaves_them() -> None:
    rig = rig_of(num_host_blocks=32)
    finish(rig, "a", prompt(8), [1, 2])
    rig.manager.complete_store(rig.manager.prepare_store(rig.keys(prompt(8, start=50))).store_spec)
    request = FakeRequest("b", [*prompt(8, start=50), 99])
    assert rig.look_up(request) == (8, True)
    rig.allocate(request, [1, 2], 8)
    meta = rig.half.build_connector_meta(ScheduledStep({}, written={2}))
    job, _ = only(meta.stores)
    assert (meta.fences, meta.fenced_blocks) == ([job], frozenset({2}))
    assert list(meta.load_after.values()) == [[job]]


class InPieces:
    """A host of 16 blocks that has 8 blocks of each of two chains, and a device that has ``num_held`` of a third one,
    ``num_early`` of which were stored early. The first chain is being loaded."""

    def __init__(
        self,
        written: Collection[int] = (),
        params: Mapping[str, Any] | None = None,
        num_held: int = 8,
        num_early: int = 0,
    ) -> None:
        self.rig = rig_of()
        self.first, self.second, self.third = (prompt(8 * TOKENS, start=start) for start in (0, 500, 900))
        self.ids = list(range(1, 9))
        for tokens in (self.second, self.first):
            keys = self.rig.keys(tokens)
            self.rig.manager.complete_store(self.rig.manager.prepare_store(keys).store_spec)
        finish(self.rig, "a", self.third[: num_held * TOKENS], self.ids[:num_held])
        assert self.rig.half.stores.leaving is not None
        self.device = self.rig.half.stores.leaving.device
        self.device.soon(self.ids, num_early)
        self.request = FakeRequest("b", [*self.first, 99], params)
        assert self.rig.look_up(self.request) == (8 * TOKENS, True)
        self.rig.allocate(self.request, self.ids, 8 * TOKENS)
        self.request.num_computed_tokens = 8 * TOKENS
        self.meta = self.rig.half.build_connector_meta(ScheduledStep({}, written=written))

    def go_on(self, failed: bool = False) -> StepMeta:
        """The piece ends, and what leaves for it has been stored."""
        self.rig.report(*self.meta.stores)
        self.rig.report(*self.meta.loads, failed=failed)
        self.meta = self.rig.step()
        return self.meta

    @property
    def num_loading(self) -> int:
        """Blocks that are pinned."""
        return sum(status == 1 for status in self.rig.status(self.first))


def test_what_leaves_for_a_large_load_takes_the_slots_of_what_was_loaded() -> None:
    case = InPieces()
    for i in range(8):
        ((job, spec),) = case.meta.loads.items()
        assert device_ids(spec) == [1 + i], "a sixteenth of host memory"
        assert spec.device.block_indices == (i,)
        assert case.meta.pieces == {job: case.ids if i == 7 else []}
        assert case.meta.load_after == {job: list(case.meta.stores)}
        assert [device_ids(each) for each in case.meta.stores.values()] == [[1 + i]]
        assert case.num_loading == 8 - i
        case.go_on()
    assert not case.meta.loads
    assert case.rig.status(case.third) == [0] * 8
    assert case.rig.status(case.second) == [0] * 7 + [None], "before the first piece there was no room"
    assert case.rig.half.metrics.snapshot()["load_blocks"] == 8
    assert [held[2:4] for held in case.device.get(case.rig.keys(case.first))] == [(1 + i, i) for i in range(7)]
    case.rig.step({case.request: 1}, new={"b": [*case.ids, 9]})
    assert len(case.device.latest) == 8


def test_what_is_written_to_in_the_step_is_no_reason_for_pieces() -> None:
    """It leaves the device at once."""
    case = InPieces(written=range(1, 8))
    assert [device_ids(spec) for spec in case.meta.loads.values()] == [case.ids]
    assert not case.meta.pieces


@pytest.mark.parametrize(
    ("num_held", "num_early", "is_cut"), [(1, 0, False), (2, 0, True), (8, 7, False), (8, 6, True)]
)
def test_a_load_is_cut_if_more_than_one_piece_is_to_be_stored_for_it(
    num_held: int, num_early: int, is_cut: bool
) -> None:
    assert bool(InPieces(num_held=num_held, num_early=num_early).meta.pieces) == is_cut


@pytest.mark.parametrize("params", [None, {"kvoffload": {"session": "s"}}])
def test_pieces_of_a_request_with_hints_do_not_leave_host_memory_first(params: Mapping[str, Any] | None) -> None:
    """Hints concern host memory. Without hints, the control, they do."""
    case = InPieces(params=params)
    for _ in range(8):
        case.go_on()
    assert case.rig.status(case.first)[:7] == [None if params is None else 0] * 7


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_reset_ends_a_load_in_pieces(is_sent: bool) -> None:
    case = InPieces()
    case.go_on()
    case.rig.report(*case.meta.stores)
    if is_sent:
        case.rig.half.reset()
        case.rig.report(*case.meta.loads)
    else:
        case.rig.report(*case.meta.loads)
        case.rig.half.reset()
    meta = case.rig.step()
    assert (meta.broken_loads, meta.loads) == ({"b": case.ids}, {})
    assert not case.rig.half.jobs.jobs
    case.rig.manager.check_integrity()


def test_switching_off_reports_a_load_in_pieces() -> None:
    case = InPieces()
    case.rig.half.switch_off("a test")
    assert case.rig.step().broken_loads == {"b": case.ids}, "the worker waits for the piece in progress"


@pytest.mark.parametrize("name", ["complete_load", "note_device", "complete_store"])
def test_a_load_in_pieces_is_not_lost_if_the_end_of_a_job_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = InPieces()
    case.go_on()
    monkeypatch.setattr(case.rig.manager, name, None)
    case.rig.report(*case.meta.stores, *case.meta.loads)
    assert case.rig.half.off
    assert case.rig.step().broken_loads == {"b": case.ids}


def test_another_request_waits_for_a_load_in_pieces() -> None:
    case = InPieces()
    case.go_on()
    assert case.rig.half.jobs.keys_loading == dict.fromkeys(case.rig.keys(case.first), 1)
    other = FakeRequest("c", [*case.first, 98])
    assert case.rig.look_up(other) == (None, False)
    for _ in range(7):
        case.go_on()
    assert case.rig.look_up(other, computed=7 * TOKENS) == (TOKENS, True)


def test_blocks_that_the_device_holds_leave_host_memory_first() -> None:
    rig = rig_of(num_host_blocks=3)
    finish(rig, "a", prompt(8), [1, 2])
    rig.report(*rig.start(FakeRequest("b", prompt(8, start=50)), [2, 1]).stores)
    rig.half.request_finished(rig.half.requests["b"].request)
    rig.step()
    again = FakeRequest("c", [*prompt(8), 99])
    meta = rig.load(again, ids=[3, 4])
    rig.report(*meta.loads, *meta.stores)
    rig.step({again: 1}, new={"c": [3, 4, 5]})
    rig.end(again)
    rig.report(*rig.start(FakeRequest("d", prompt(8, start=70)), [1, 2]).stores)
    assert rig.status(prompt(8, start=50)) == [0, 0], "stored for the last block of the chain that the device holds"
    assert rig.status(prompt(8)) == [None, 0], "the device keeps the head for longest"
    # What has left the device is no duplicate any more.
    rig.report(*rig.start(FakeRequest("e", prompt(8, start=90)), [3, 4]).stores)
    assert rig.status(prompt(8)) == [0, 0]


def test_blocks_of_the_next_steps_are_stored_early_and_no_step_waits_for_them() -> None:
    free = list(range(1, 25))
    rig = rig_of(num_host_blocks=32, next_free=lambda n: free[:n])
    finish(rig, "a", prompt(24 * TOKENS), free[::-1])
    free.remove(1)
    meta = rig.start(FakeRequest("b", prompt(4, start=500)), [1])
    # Of 24 blocks a step has handed out 24, so the next ones are stored, an eighth at most: tails first.
    assert [device_ids(spec) for spec in meta.stores.values()] == [[1], [3, 2]]
    assert meta.fences == [min(meta.stores)], "the second job reads what is still on the device"
    rig.report(*meta.stores)
    free.remove(2)
    meta = rig.start(FakeRequest("c", prompt(4, start=600)), [2])
    assert [device_ids(spec) for spec in meta.stores.values()] == [[4]], "3 is stored already"
    assert not meta.fences


@pytest.mark.parametrize("has_failed", [False, True])
def test_what_was_stored_early_is_offered_again_only_if_its_copy_has_failed(has_failed: bool) -> None:
    free = list(range(1, 25))
    rig = rig_of(num_host_blocks=32, next_free=lambda n: free[:n])
    finish(rig, "a", prompt(24 * TOKENS), free[::-1])
    free.remove(1)
    first, early = rig.start(FakeRequest("b", prompt(4, start=500)), [1]).stores
    rig.report(first)
    rig.report(early, failed=has_failed)
    offered: list[list[bytes]] = []
    ask = rig.manager.prepare_store
    rig.manager.prepare_store = lambda keys, context, offer: offered.append(keys) or ask(keys, context, offer)  # type: ignore[func-returns-value]
    del free[:2]
    # 2 and 3 leave.
    meta = rig.start(FakeRequest("c", prompt(8, start=600)), [2, 3])
    stored = [device_ids(spec) for spec in meta.stores.values()]
    assert stored == ([[3, 2], [5, 4]] if has_failed else [[5, 4]])
    assert sum(map(len, offered)) == (4 if has_failed else 2)


def test_a_reset_forgets_what_the_device_holds() -> None:
    for is_pause in (False, True):
        rig = rig_of()
        finish(rig, "a", prompt(8), [1, 2])
        rig.half.reset(is_pause)
        assert not rig.start(FakeRequest("b", prompt(4, start=50)), [2]).stores
        assert rig.manager.explain_miss(rig.keys(prompt(4))[0]).reason is MissReason.RESET


def test_a_request_does_not_wait_for_forgotten_blocks_that_cannot_be_stored() -> None:
    rig = rig_of(num_host_blocks=2)
    finish(rig, "a", prompt(12), [1, 2, 3])
    rig.start(FakeRequest("b", prompt(8, start=50)), [4, 5])
    assert not rig.step().stores
    busy = rig.manager.prepare_store([bytes([i]) * 36 for i in range(2)])
    request = FakeRequest("c", [*prompt(12), 99])
    assert rig.look_up(request) == (None, False)
    assert not rig.step().stores
    assert rig.look_up(request) == (0, False)
    rig.manager.complete_store(busy.store_spec)


def test_a_request_waits_for_another_block_that_the_engine_forgets_while_it_waits() -> None:
    """Another request was given the device block, whose contents the end of the step stores."""
    rig = rig_of(num_host_blocks=8)
    finish(rig, "a", prompt(12), [1, 2, 3])
    request = FakeRequest("c", [*prompt(12), 99])
    assert rig.look_up(request, 8) == (None, False)
    stores = rig.step().stores
    assert rig.look_up(request, 4) == (None, False)
    rig.report(*stores)
    rig.report(*rig.step().stores)
    assert rig.look_up(request, 4) == (8, True)


class Refusing(LRUPolicy):
    """Takes nothing for which another block would leave."""

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_]:
        return np.zeros(len(keys), dtype=np.bool_)


def test_forgotten_blocks_that_a_request_waits_for_are_stored_whatever_they_seem_to_be_worth() -> None:
    rig = rig_of(num_host_blocks=3, policy=Refusing)
    finish(rig, "a", prompt(12), [1, 2, 3])
    rig.report(*rig.start(FakeRequest("b", prompt(12, start=50)), [3, 2, 1]).stores)
    rig.half.request_finished(rig.half.requests["b"].request)
    assert not rig.start(FakeRequest("c", prompt(4, start=90)), [3]).stores, "it is not worth more than the others"
    finish(rig, "e", prompt(8, start=70), [4, 5])
    request = FakeRequest("f", [*prompt(8, start=70), 99])
    assert rig.look_up(request) == (None, False)
    rig.report(*rig.step().stores)
    assert rig.look_up(request) == (8, True)


def test_what_was_not_worth_storing_ahead_may_be_when_it_leaves() -> None:
    rig = rig_of(num_host_blocks=2, next_free=lambda n: [1, 2][:n], policy=Refusing)
    others = rig.keys(prompt(8, start=50))
    rig.manager.complete_store(rig.manager.prepare_store(others).store_spec)
    finish(rig, "a", prompt(8), [2, 1])
    assert not rig.start(FakeRequest("b", prompt(4, start=90)), [3]).stores, "there is no room"
    rig.manager.drop(others)
    assert device_ids(only(rig.start(FakeRequest("c", prompt(4, start=70)), [1]).stores)[1]) == [1]


def test_blocks_of_a_request_with_hints_are_stored_at_once() -> None:
    """And leave early, if the request says so."""
    rig = rig_of(num_host_blocks=2)
    request = FakeRequest("a", prompt(8), {"kvoffload": {"session": "s", "drop": True}})
    rig.report(*rig.start(request, [1, 2]).stores)
    assert rig.status(prompt(8)) == [0, 0]
    rig.end(request)
    finish(rig, "b", prompt(8, start=50), [3, 4])
    rig.report(*rig.start(FakeRequest("c", prompt(8, start=70)), [4, 3]).stores)
    assert rig.status(prompt(8)) == [None, None]
    assert rig.status(prompt(8, start=50)) == [0, 0]
    assert not rig.start(FakeRequest("d", prompt(8, start=90)), [1, 2]).stores, "they do not come back"


def test_blocks_for_a_remote_decoder_are_stored_at_once() -> None:
    rig = rig_of()
    request = FakeRequest("a", prompt(8), {"do_remote_decode": True})
    rig.report(*rig.start(request, [1, 2]).stores)
    assert rig.status(prompt(8)) == [0, 0]
    assert rig.half.request_finished(request) == (True, None)
    assert rig.step().releases == ["a"]


def burst(num_blocks: int, block_bytes: int) -> tuple[Rig, TransferSpec]:
    """A chain fills the device, and leaves it in one step. Returns the store."""
    rig = rig_of(num_host_blocks=num_blocks, device_blocks=num_blocks, block_bytes=block_bytes)
    finish(rig, "a", prompt(num_blocks * TOKENS), list(range(1, num_blocks + 1)))
    other = FakeRequest("b", prompt(num_blocks * TOKENS, start=-num_blocks * TOKENS))
    job, spec = only(rig.start(other, list(range(num_blocks, 0, -1))).stores)
    rig.report(job)
    return rig, spec


def test_a_burst_is_bounded_in_bytes_and_keeps_heads() -> None:
    n = LEAST_OFFERED + 10
    for most in (LEAST_OFFERED, LEAST_OFFERED + 7):
        rig, spec = burst(n, MAX_LEAVING_BYTES // most)
        assert sorted(device_ids(spec)) == list(range(1, most + 1))
        assert rig.half.metrics.snapshot()["lost_blocks"] == n - most
    rig, spec = burst(n, MAX_LEAVING_BYTES // n)
    assert len(device_ids(spec)) == n
    assert "lost_blocks" not in rig.half.metrics.snapshot()


def test_what_is_lost_is_no_text_that_was_never_stored() -> None:
    rig, _ = burst(LEAST_OFFERED + 1, MAX_LEAVING_BYTES)
    rig.half.request_finished(rig.half.requests["b"].request)
    request = FakeRequest("c", [*prompt((LEAST_OFFERED + 1) * TOKENS), 99])
    assert rig.look_up(request) == (LEAST_OFFERED * TOKENS, True)
    rig.allocate(request, rig.new_blocks(LEAST_OFFERED), LEAST_OFFERED * TOKENS)
    assert rig.half.records[-1].reason is MissReason.LEFT_UNSTORED


def test_what_may_be_overwritten_is_lost() -> None:
    rig = rig_of()
    finish(rig, "a", prompt(8), [1, 2])
    rig.half.build_connector_meta(ScheduledStep({}, overwritten={1}))
    assert rig.half.metrics.snapshot()["lost_blocks"] == 1
    assert rig.manager.explain_miss(rig.keys(prompt(4))[0]).reason is MissReason.LEFT_UNSTORED


def test_a_burst_is_bounded_by_the_time_that_its_copy_takes() -> None:
    """If large copies were measured."""
    for nbytes, most in ((MIN_SPEED_SAMPLE, 70), (MIN_SPEED_SAMPLE - 1, 80)):
        rig = rig_of(num_host_blocks=80, device_blocks=80, block_bytes=1000)
        finish(rig, "a", prompt(80 * TOKENS), list(range(1, 81)))
        seconds = nbytes / 1000 * MAX_LEAVING_S / 70.5
        rig.half.update_connector_output(WorkerReport(store_bytes=nbytes, store_seconds=seconds))
        spec = rig.start(FakeRequest("b", prompt(80 * TOKENS, start=-500)), list(range(80, 0, -1))).stores
        assert len(device_ids(only(spec)[1])) == most


def test_what_the_load_of_a_waiting_request_takes_is_stored_ahead() -> None:
    """Without a step that hands anything out, and once."""
    free = list(range(1, 17))
    rig = rig_of(num_host_blocks=96, next_free=lambda n: free[:n])
    finish(rig, "a", prompt(16 * TOKENS), free[::-1])
    rig.manager.complete_store(rig.manager.prepare_store(rig.keys(prompt(24, start=500))).store_spec)
    request = FakeRequest("b", [*prompt(24, start=500), 99])
    assert rig.look_up(request) == (24, True)
    stores = rig.step().stores
    assert [device_ids(spec) for spec in stores.values()] == [[6, 5, 4, 3, 2, 1]]
    rig.report(*stores)
    assert rig.look_up(request) == (24, True)
    assert not rig.step().stores
    meta = rig.load(request, ids=[1, 2, 3, 4, 5, 6])
    assert not meta.stores, "all that leaves is stored"
    assert not meta.fences
    del free[:6]
    assert not rig.step().stores


def test_one_piece_of_a_load_is_stored_ahead() -> None:
    free = list(range(1, 17))
    rig = rig_of(num_host_blocks=32, next_free=lambda n: free[:n])
    finish(rig, "a", prompt(16 * TOKENS), free[::-1])
    rig.manager.complete_store(rig.manager.prepare_store(rig.keys(prompt(24, start=500))).store_spec)
    assert rig.look_up(FakeRequest("b", [*prompt(24, start=500), 99])) == (24, True)
    assert [device_ids(spec) for spec in rig.step().stores.values()] == [[2, 1]]


def test_a_request_that_ends_takes_nothing_any_more() -> None:
    free = list(range(1, 17))
    rig = rig_of(num_host_blocks=32, next_free=lambda n: free[:n])
    finish(rig, "a", prompt(16 * TOKENS), free[::-1])
    rig.manager.complete_store(rig.manager.prepare_store(rig.keys(prompt(24, start=500))).store_spec)
    request = FakeRequest("b", [*prompt(24, start=500), 99])
    rig.look_up(request)
    rig.half.request_finished(request)
    free.remove(1)
    stores = rig.start(FakeRequest("c", prompt(4, start=600)), [1]).stores
    assert [device_ids(spec) for spec in stores.values()] == [[1], [2]], "as many as the step has handed out"


def test_a_block_of_two_tenants_without_salts_is_stored_for_both() -> None:
    """Whoever uses it last, and as often as they like. The engine's block hashes do not depend on the tenant."""
    rig = rig_of(tenants=Tenants(b"space", [TenantConfig("a"), TenantConfig("b")]))
    finish(rig, "a", prompt(8), [1, 2], tenant="a")
    for name in ("b1", "b2"):
        other = FakeRequest(name, [*prompt(8), 99], {"kvoffload": {"tenant": "b"}}, num_computed_tokens=8)
        assert not rig.start(other, [1, 2, 3], computed=8, num_tokens=1).stores
        rig.end(other)
    meta = rig.start(FakeRequest("c", prompt(4, start=50)), [1])
    assert [device_ids(spec) for spec in meta.stores.values()] == [[1], [1]]
    assert meta.fences == list(meta.stores)
    rig.report(*meta.stores)
    for tenant in "ab":
        again = FakeRequest(f"{tenant}3", [*prompt(4), 99], {"kvoffload": {"tenant": tenant}})
        assert rig.look_up(again) == (4, True)
    by_record = {record.req_id: record.stored_tokens for record in rig.half.records}
    assert by_record == {"a": TOKENS, "b1": TOKENS, "b2": 0, "c": 0}


def test_names_of_a_device_block_are_bounded_and_the_first_one_stays() -> None:
    rig = rig_of(num_host_blocks=64)
    finish(rig, "t0", prompt(4), [1], tenant="t0")
    for i in range(1, 2 * MAX_NAMES):
        request = FakeRequest(f"t{i}", [*prompt(4), 99], {"kvoffload": {"tenant": f"t{i}"}}, num_computed_tokens=4)
        rig.look_up(request, computed=4)
        rig.allocate(request, [1, 2])
        rig.step({request: 1}, new={f"t{i}": [1, 2]})
        rig.end(request)
    rig.report(*rig.start(FakeRequest("c", prompt(4, start=50)), [1]).stores)
    found = []
    for i in range(2 * MAX_NAMES):
        again = FakeRequest(f"again{i}", [*prompt(4), 99], {"kvoffload": {"tenant": f"t{i}"}})
        found.append(bool(rig.look_up(again)[0]))
    assert found == [True, *[False] * MAX_NAMES, *[True] * (MAX_NAMES - 1)]


def test_what_is_stored_for_a_request_is_counted_after_it_has_ended() -> None:
    """For the one that has computed it, and only if the store has succeeded."""
    rig = rig_of()
    finish(rig, "a", prompt(12), [1, 2, 3])
    sharer = FakeRequest("b", [*prompt(12), 99], num_computed_tokens=12)
    rig.start(sharer, [1, 2, 3, 4], computed=12, num_tokens=1)
    rig.end(sharer)
    rig.report(*rig.start(FakeRequest("c", prompt(4, start=50)), [3]).stores)
    rig.report(*rig.start(FakeRequest("d", prompt(4, start=60)), [2]).stores, failed=True)
    assert {record.req_id: record.stored_tokens for record in rig.half.records} == {"a": TOKENS, "b": 0, "c": 0, "d": 0}


def test_tokens_of_several_groups_are_counted_once() -> None:
    manager = PolicyOffloadingManager(HostBackend(SIZE, 16), LRUPolicy(16), device_blocks=16)
    rig = GroupRig((KVGroup(SIZE), KVGroup(SIZE)), options={"misses": manager.history.misses}, manager=manager)
    request = rig.request(2 * SIZE)
    tables = rig.admit(request)
    assert not rig.step(request, request.num_tokens).stores
    rig.finish(request)
    other = rig.request(2 * SIZE, first=50)
    rig.hit(other)
    rig.allocate(other, tables)
    rig.done(rig.give(other, other.num_tokens, tables, new=True))
    assert [record.stored_tokens for record in rig.half.records] == [2 * SIZE, 0]


def test_the_garbage_collector_visits_no_object_per_device_block() -> None:
    """A collection would stop the engine's scheduler for as long as it looks at them."""

    def num_tracked(num_blocks: int) -> int:
        keys = [os.urandom(36) for _ in range(num_blocks)]
        states = [rig_of().half.queued.make(FakeRequest(str(i), [])) for i in range(2)]
        for i, state in enumerate(states):
            state.blocks.namespace = bytes([i])
        device = DeviceBlocks()
        gc.collect()
        before = len(gc.get_objects())
        for i in range(num_blocks):
            for state in states[: 1 + (i % 2)]:
                key = state.blocks.namespace + keys[i]
                assert not device.hold(state, [Block(0, i, key, i, [i + 1])])
        assert len(device.latest) == num_blocks * 3 // 2
        # A collection finds out which tuples refer to nothing that it must visit.
        gc.collect()
        gc.collect()
        return len(gc.get_objects()) - before

    assert abs(num_tracked(20_000) - num_tracked(1000)) < 50


@pytest.mark.parametrize("is_off", [False, True])
def test_above_tiers_that_are_off_a_block_can_be_lost(is_off: bool) -> None:
    host = PolicyOffloadingManager(HostBackend(TOKENS, 4), LRUPolicy(4), device_blocks=16)
    manager = TieredOffloadingManager(host, [CatalogTier(8, 1, "lru", Clock(0.0))], TieringSettings([KVGroup(TOKENS)]))
    if is_off:
        manager.switch_off_tiers("a test")
    options: dict[str, Any] = {"misses": host.history.misses, "slot_bytes": [1]}
    rig = Rig(manager=manager, options=options | {"keeps_blocks": True, "device_blocks": 16})
    meta = rig.start(FakeRequest("a", prompt(4)), [1])
    assert bool(meta.stores) is not is_off
    rig.report(*meta.stores)
    rig.half.build_connector_meta(ScheduledStep({}, overwritten={1}))
    assert rig.half.metrics.snapshot().get("lost_blocks", 0) == is_off


def test_what_the_policy_refuses_is_not_lost() -> None:
    rig = rig_of()
    finish(rig, "a", prompt(8), [1, 2])
    nothing = rig.manager.backend.get_load_store_spec([], np.zeros(0, dtype=np.int64))
    rig.manager.prepare_store = lambda keys, context, offer: PrepareStoreOutput([], nothing, [], keys)
    assert not rig.start(FakeRequest("b", prompt(4, start=50)), [2]).stores
    assert "lost_blocks" not in rig.half.metrics.snapshot()


def test_without_room_for_all_the_head_of_a_chain_is_stored() -> None:
    rig = rig_of(num_host_blocks=3)
    finish(rig, "a", prompt(8), [1, 2])
    other = rig.start(FakeRequest("b", prompt(8, start=50)), [2, 1])
    assert rig.status(prompt(8)) == [-1, -1]
    rig.half.request_finished(rig.half.requests["b"].request)
    rig.step()
    _, spec = only(rig.start(FakeRequest("c", prompt(8, start=70)), [1, 2]).stores)
    assert device_ids(spec) == [2], "two of three slots are being written"
    assert len(other.stores) == 1


def test_events_describe_blocks_whose_requests_have_ended() -> None:
    rig = rig_of(enable_events=True)
    finish(rig, "a", prompt(8), [1, 2])
    rig.report(*rig.start(FakeRequest("b", prompt(4, start=50)), [2]).stores)
    events: list[OffloadingEvent] = list(rig.half.take_events())
    (stored,) = (event for event in events if not event.removed)
    assert stored.blocks is not None
    (description,) = stored.blocks
    assert description is not None
    assert (description.start, description.end) == (4, 8)
