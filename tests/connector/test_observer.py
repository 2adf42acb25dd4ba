"""What is observed: records, reasons of misses, metrics and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvoffload.abc import MissReason
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import Tenants
from kvoffload.connector import observer
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.options import PARAM
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from tests.clock import Clock
from tests.connector.rig import TOKENS, FakeRequest, Rig, prompt, rig_with


def test_events_come_once() -> None:
    rig = rig_with(prompt(4))
    rig.half.reset()
    events = [(event.keys, event.removed) for event in rig.half.take_events()]
    assert events == [(rig.keys(prompt(4)), False), (rig.keys(prompt(4)), True)]
    assert list(rig.half.take_events()) == []


def test_events_that_nobody_takes_are_described_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "MAX_PENDING_EVENTS", 2)
    rig = Rig(options={"enable_events": True})
    rig.store(prompt(3 * TOKENS))
    (event,) = rig.half.take_events()
    assert [block is not None for block in event.blocks or ()] == [False, True, True]


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
        return {**super().take_counts(), "tier_write_blocks:disk": 1, "tier_blocks:disk": self.asked}


def counting_rig() -> tuple[Rig, CountingManager, CountingPolicy]:
    policy, clock = CountingPolicy(16), Clock()
    manager = CountingManager(HostBackend(TOKENS, 16), policy, clock=clock)
    return Rig(manager=manager, clock=clock), manager, policy


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
    assert (first["tier_blocks:disk"], first["policy_rule:a"], first["policy_score:a"]) == (1, 1, 1)
    rig.store(prompt(8))
    asked = policy.asked
    taken = metrics.take()
    assert (taken["pool_used_blocks"], taken["tier_blocks:disk"], taken["tier_write_blocks:disk"]) == (2, 2, 1)
    assert policy.asked == asked
    rig.clock.now += 1.0
    assert metrics.take()["policy_score:a"] == asked + 1
    assert metrics.snapshot()["tier_write_blocks:disk"] == manager.asked == 4
    assert policy.asked == asked + 1


def test_an_error_when_metrics_are_read_switches_offloading_off_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.manager, "take_counts", lambda: 1 / 0)
    assert rig.half.metrics.take()["off"] == 1
    assert rig.half.off


def test_each_request_leaves_one_record() -> None:
    rig = rig_with(prompt(8))
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


def computed(rig: Rig, failed: bool | None = None) -> OffloadingConnectorScheduler:
    """A request has computed two blocks. ``failed``: how their store has ended, if it has."""
    stores = rig.start(FakeRequest("w", prompt(8))).stores
    if failed is not None:
        rig.report(*stores, failed=failed)
    return rig.half


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda rig: None, MissReason.NEVER_STORED),
        (computed, MissReason.BEING_WRITTEN),
        (lambda rig: computed(rig, failed=True), MissReason.COPY_FAILED),
        (lambda rig: computed(rig, failed=False).reset(), MissReason.RESET),
    ],
)
def test_a_record_has_the_reason_of_the_miss(before: Callable[[Rig], object], reason: MissReason) -> None:
    rig = Rig()
    before(rig)
    assert settle(rig, prompt(8))[0] is reason


def test_evicted_with_its_age() -> None:
    clock = Clock()
    manager = PolicyOffloadingManager(HostBackend(TOKENS, 2), make_policy("lru", 2), clock=clock)
    rig = Rig(manager=manager, clock=clock)
    rig.store(prompt(8), "a")
    rig.store(prompt(8, start=50), "b")
    clock.now += 12.5
    assert settle(rig, prompt(8)) == (MissReason.EVICTED, 12.5)


def test_a_record_names_the_block_and_not_its_namespace() -> None:
    rig = Rig(options={"tenants": Tenants(b"8 bytes.")})
    request = FakeRequest("r", prompt(8))
    rig.look_up(request)
    rig.allocate(request, [1, 2])
    assert rig.half.records[-1].missed_key == make_offload_key(request.block_hashes[0], 0).hex()


def test_retentions_are_counted_for_requests_that_have_a_record() -> None:
    """As bills count them. A request that was aborted in the queue has none."""
    rig = Rig(manager=PolicyOffloadingManager(HostBackend(TOKENS, 8), LRUPolicy(8)))
    counts = []
    for name in ("aborted", "served"):
        request = FakeRequest(name, prompt(8), {PARAM: {"retain_s": 60}})
        rig.look_up(request)
        if name == "served":
            rig.report(*rig.start(request).stores)
        rig.end(request)
        totals = rig.half.metrics.snapshot()
        counts.append(sum(count for metric, count in totals.items() if metric.startswith("retentions")))
    assert counts == [0, 1]
    assert sum(record.retained_in is not None or record.retain_refused is not None for record in rig.half.records) == 1
