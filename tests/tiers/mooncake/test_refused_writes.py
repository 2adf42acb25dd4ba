"""A real Mooncake Store that refuses writes is full, and read on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.mooncake.client import MooncakeClient, connect
from kvoffload.tiers.remote.client import Outcome
from tests.tiers.mooncake.rig import Master, needs_mooncake, segment
from tests.tiers.mooncake.test_store import settings
from tests.tiers.remote.rig import eventually

pytestmark = needs_mooncake
VALUE_BYTES = 64 << 10
SEGMENT_BYTES = 16 << 20
QUOTA = "/api/v1/tenant_quotas?tenant_id=default"
Heal = Callable[[], object]


@dataclass
class Store:
    """A store with one segment, and a client of it that has registered ``values``."""

    master: Master
    stack: ExitStack
    client: MooncakeClient
    values: ByteArray

    def put(self, *names: str) -> list[Outcome]:
        return self.client.put(names, [[row] for row in self.values[: len(names)]])


def set_quota(master: Master, nbytes: int) -> None:
    master.ask("PUT", QUOTA, {"requested_quota_bytes": nbytes})


# What makes the store refuse writes. Each returns what ends that.


def over_its_quota(store: Store) -> Heal:
    set_quota(store.master, store.values.nbytes)
    return lambda: set_quota(store.master, SEGMENT_BYTES)


def drained(store: Store) -> Heal:
    names = store.master.ask("GET", "/get_all_segments").split()
    store.master.ask("POST", "/api/v1/drain_jobs", {"segments": names})
    return lambda: store.stack.enter_context(segment(store.master, SEGMENT_BYTES))


def full(store: Store) -> Heal:
    """Nothing is evicted that has been asked for lately."""
    names = ["other/0"]
    while store.put(names[-1]) == [Outcome.OK]:
        store.client.exists(names[-1:])
        names.append(f"other/{len(names)}")
    return lambda: store.client.remove(names)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    policies = tmp_path / "quotas"
    policies.write_text('{"version": 1, "tenants": []}')
    options = ("-enable_multi_tenants=true", f"-tenant_quota_connector_uri={policies}", "-default_kv_lease_ttl=1h")
    master = Master(tmp_path, *options)
    with ExitStack() as stack:
        stack.callback(master.kill)
        set_quota(master, SEGMENT_BYTES)
        stack.enter_context(segment(master, SEGMENT_BYTES))
        client = connect(settings(master))
        stack.callback(client.close)
        values = np.random.default_rng(0).integers(0, 256, (8, VALUE_BYTES), dtype=np.uint8)
        client.register(values)
        yield Store(master, stack, client, values)


@pytest.mark.parametrize("refuse", [full, drained, over_its_quota], ids=lambda refuse: refuse.__name__)
def test_a_store_that_refuses_writes_is_full_and_is_read_on(refuse: Callable[[Store], Heal], store: Store) -> None:
    """A full store is no fault: its tier is not paused."""
    old = [f"old/{i}" for i in range(8)]
    assert store.put(*old) == store.client.exists(old) == [Outcome.OK] * 8
    before = store.values.copy()
    heal = refuse(store)
    for i in range(10):
        assert store.put(f"new/{i}") == [Outcome.FULL]
        store.values[:] = 0
        assert store.client.get(old, [[row] for row in store.values]) == [Outcome.OK] * 8
        assert (store.values == before).all()
    heal()
    eventually(lambda: store.put("healed") == [Outcome.OK])
