"""A real Mooncake Store that refuses writes is read on. The clock is the tests'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import Ability
from kvoffload.tiers.mooncake.client import connect
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.memory import ValueMemory
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.worker import StoreWorker
from tests.tiers.mooncake.rig import Master, needs_mooncake, segment
from tests.tiers.mooncake.test_store import settings
from tests.tiers.remote.in_front import ServerInFront, chain

pytestmark = needs_mooncake
SLOT_BYTES = 64 << 10
HOST_BLOCKS = 256
SEGMENT_BYTES = 16 << 20
QUOTA = "/api/v1/tenant_quotas?tenant_id=default"
Heal = Callable[[], object]


class Server(ServerInFront):
    def __init__(self, master: Master) -> None:
        self.master = master
        self.client = connect(settings(master))
        pool = np.zeros((HOST_BLOCKS, SLOT_BYTES), dtype=np.uint8)
        rows = ValueMemory([pool], True, 1 << 20)
        self.client.register(rows.memory)
        super().__init__(StoreWorker(self.client, rows, ValueFormat("5e" * 32)), pool, "mooncake")

    def close(self) -> None:
        self.manager.shutdown()
        self.client.close()


def set_quota(master: Master, nbytes: int) -> None:
    master.ask("PUT", QUOTA, {"requested_quota_bytes": nbytes})


# What makes the store refuse writes. Each returns what ends that.


def over_its_quota(server: Server, stack: ExitStack) -> Heal:
    set_quota(server.master, 1 << 20)
    return lambda: set_quota(server.master, SEGMENT_BYTES)


def drained(server: Server, stack: ExitStack) -> Heal:
    names = server.master.ask("GET", "/get_all_segments").split()
    server.master.ask("POST", "/api/v1/drain_jobs", {"segments": names})
    return lambda: stack.enter_context(segment(server.master, SEGMENT_BYTES))


def full(server: Server, stack: ExitStack) -> Heal:
    """Nothing is evicted that has been asked for lately."""
    value = np.zeros(SLOT_BYTES, dtype=np.uint8)
    server.client.register(value)
    names: list[str] = []
    outcomes = [Outcome.OK]
    while outcomes == [Outcome.OK]:
        names.append(f"other/{len(names)}")
        outcomes = server.client.put(names[-1:], [[value]])
        server.client.exists(names[-1:])
    return lambda: server.client.remove(names)


REFUSALS = (full, drained, over_its_quota)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("refuse", REFUSALS, ids=lambda refuse: refuse.__name__)
def test_while_writes_are_refused_what_is_there_is_found(
    refuse: Callable[[Server, ExitStack], Heal], tmp_path: Path, stack: ExitStack
) -> None:
    policies = tmp_path / "quotas"
    policies.write_text('{"version": 1, "tenants": []}')
    options = ("-enable_multi_tenants=true", f"-tenant_quota_connector_uri={policies}", "-default_kv_lease_ttl=1h")
    master = Master(tmp_path, *options)
    stack.callback(master.kill)
    set_quota(master, SEGMENT_BYTES)
    stack.enter_context(segment(master, SEGMENT_BYTES))
    server = Server(master)
    stack.callback(server.close)
    old = [chain(f"old{i}") for i in range(8)]
    for i, keys in enumerate(old):
        server.store(keys)
        assert server.finds(keys, f"before{i}")
    heal = refuse(server, stack)
    for i in range(60):
        server.store(chain(f"new{i}"))
        assert server.finds(old[i % 8], f"r{i}")
        server.step(0.5)
    assert not server.has(chain("new59")), "writes were refused, which this test is about"
    counts = server.manager.take_counts()
    assert [counts[f"tier_paused:{ability},mooncake"] for ability in Ability] == [0, 0], "a full store is no fault"
    heal()
    for i in range(10):
        server.step(1.0)
        server.store(chain(f"healed{i}"))
    assert server.has(chain("healed9"))
