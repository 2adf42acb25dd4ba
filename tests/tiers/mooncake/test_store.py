"""The tier on a real Mooncake Store: each fault ends in misses, and the tier comes back without a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvoffload.abc import ByteArray, TierError
from kvoffload.abc.tier import HIT, MISS
from kvoffload.tiers.mooncake.client import MooncakeClient, connect
from kvoffload.tiers.mooncake.config import MooncakeConfig
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.record import ValueFormat
from tests.tiers.made import closed_later
from tests.tiers.mooncake.rig import Master, needs_mooncake, segment
from tests.tiers.remote.rig import FINGERPRINT, StoreServer, eventually

pytestmark = needs_mooncake

VALUES = ValueFormat(FINGERPRINT)
KEYS = [bytes([i]) * 36 for i in range(32)]
SLOT_BYTES = (1 << 18, 1 << 16)
SEGMENT_BYTES = 64 << 20


class Server(StoreServer):
    def __init__(self, master: Master, fingerprint: str = FINGERPRINT) -> None:
        super().__init__(MooncakeConfig(master=master.address).open, SLOT_BYTES, fingerprint=fingerprint)
        self.connect()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master that tests do not harm."""
    master = Master(tmp_path_factory.mktemp("store"))
    with segment(master, SEGMENT_BYTES):
        yield master
    master.kill()


def settings(master: Master) -> dict[str, object]:
    return {
        "host": "127.0.0.1",
        "master": master.address,
        "metadata": "P2PHANDSHAKE",
        "protocol": "tcp",
        "devices": "",
        "segment_bytes": 0,
    }


def test_servers_share_blocks_and_other_fingerprints_do_not(store: Master) -> None:
    one, other, stranger = Server(store), Server(store), Server(store, "6f" * 32)
    assert one.states(KEYS[:4]) == [MISS] * 4
    assert all(result.ok and result.nbytes for result in one.write(KEYS[:3]).values())
    assert other.states(KEYS[:4]) == [HIT] * 3 + [MISS]
    assert all(result.ok for result in other.read(KEYS[:3]).values())
    assert [result.nbytes for result in other.write(KEYS[:3]).values()] == []
    assert stranger.states(KEYS[:3]) == [MISS] * 3
    one.tier.delete(KEYS[:2])
    one.works_again(KEYS[4:6])
    third = Server(store)
    assert third.states(KEYS[:3]) == [MISS, MISS, HIT], "blocks with a lease were not removed"


def test_bad_values_are_removed_and_written_again(store: Master) -> None:
    server = Server(store)
    keys = KEYS[8:12]
    server.works_again(keys)
    # This process joins the store to change values, as nothing in the tier can.
    client = closed_later(connect(settings(store)))
    names = [VALUES.name(key) for key in keys]
    size = 128 + sum(SLOT_BYTES)
    values = np.zeros((4, size), dtype=np.uint8)
    client.register(values)
    client.get(names, [[row] for row in values])
    client.remove(names)
    values[0, size // 2] ^= 1
    values[1] = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    # A server with other blocks may have the same fingerprint.
    foreign = VALUES.name(KEYS[12])
    values[2, 128:999] = 7
    values[2, :128] = VALUES.record(KEYS[12], [values[2, 128:999]])
    client.put([*names, foreign], [[values[0]], [values[1]], [values[3]], [values[3][:999]], [values[2][:999]]])
    results = server.read([*keys, KEYS[12]])
    assert [result.error for result in map(results.get, keys) if result] == [TierError.CORRUPT] * 4
    assert results[KEYS[12]].error is TierError.GONE
    server.works_again(keys)
    assert client.exists([foreign]) == [Outcome.OK]


def test_each_fault_ends_in_misses_and_the_tier_comes_back(tmp_path: Path) -> None:
    master = Master(tmp_path, "-client_ttl=2")
    with segment(master, SEGMENT_BYTES) as owner:
        server = Server(master)
        server.works_again(KEYS[:4])
        # The master stands still.
        master.pause()
        assert server.states(KEYS[8:12]) == [MISS] * 4
        assert server.read(KEYS[:4]) == {}
        master.resume()
        server.works_again(KEYS[:4])
        # It is killed, and comes back empty.
        master.kill()
        failed = server.tier.num_failed_lookups
        assert server.states(KEYS[8:12]) == [MISS] * 4
        assert server.tier.num_failed_lookups > failed
        assert not any(result.ok for result in server.read(KEYS[:4]).values())
        master.start()
        server.works_again(KEYS[:4])
        # The memory is gone.
        owner.kill()
        owner.wait()
        assert not any(result.ok for result in server.read(KEYS[:4]).values())
    with segment(master, SEGMENT_BYTES):
        server.works_again(KEYS[:4])
        server.close()
    master.kill()


def test_a_node_that_is_gone_costs_its_values_only(tmp_path: Path) -> None:
    """The master says for some seconds that these are there, and each attempt to read one takes a second."""
    master = Master(tmp_path, "-client_ttl=4")
    with segment(master, SEGMENT_BYTES):
        with segment(master, SEGMENT_BYTES):
            server = Server(master)
            server.works_again(KEYS)
        errors = [result.error for result in server.read(KEYS).values()]
        assert set(errors) == {None, TierError.AWAY}
        assert server.states(KEYS).count(HIT) == errors.count(None)
        server.works_again(KEYS)
        server.close()
    master.kill()


# A store that refuses writes is full, and is read on.

VALUE_BYTES = 64 << 10
SMALL_BYTES = 16 << 20
QUOTA = "/api/v1/tenant_quotas?tenant_id=default"
Heal = Callable[[], object]


@dataclass
class Small:
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


def over_its_quota(small: Small) -> Heal:
    set_quota(small.master, small.values.nbytes)
    return lambda: set_quota(small.master, SMALL_BYTES)


def drained(small: Small) -> Heal:
    names = small.master.ask("GET", "/get_all_segments").split()
    small.master.ask("POST", "/api/v1/drain_jobs", {"segments": names})
    return lambda: small.stack.enter_context(segment(small.master, SMALL_BYTES))


def full(small: Small) -> Heal:
    """Nothing is evicted that has been asked for lately."""
    names = ["other/0"]
    while small.put(names[-1]) == [Outcome.OK]:
        small.client.exists(names[-1:])
        names.append(f"other/{len(names)}")
    return lambda: small.client.remove(names)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    policies = tmp_path / "quotas"
    policies.write_text('{"version": 1, "tenants": []}')
    options = ("-enable_multi_tenants=true", f"-tenant_quota_connector_uri={policies}", "-default_kv_lease_ttl=1h")
    master = Master(tmp_path, *options)
    with ExitStack() as stack:
        stack.callback(master.kill)
        set_quota(master, SMALL_BYTES)
        stack.enter_context(segment(master, SMALL_BYTES))
        client = connect(settings(master))
        stack.callback(client.close)
        values = np.random.default_rng(0).integers(0, 256, (8, VALUE_BYTES), dtype=np.uint8)
        client.register(values)
        yield Small(master, stack, client, values)


@pytest.mark.parametrize("refuse", [full, drained, over_its_quota], ids=lambda refuse: refuse.__name__)
def test_a_store_that_refuses_writes_is_full_and_is_read_on(refuse: Callable[[Small], Heal], small: Small) -> None:
    """A full store is no fault: its tier is not paused."""
    old = [f"old/{i}" for i in range(8)]
    assert small.put(*old) == small.client.exists(old) == [Outcome.OK] * 8
    before = small.values.copy()
    heal = refuse(small)
    for i in range(10):
        assert small.put(f"new/{i}") == [Outcome.FULL]
        small.values[:] = 0
        assert small.client.get(old, [[row] for row in small.values]) == [Outcome.OK] * 8
        assert (small.values == before).all()
    heal()
    eventually(lambda: small.put("healed") == [Outcome.OK])


def test_a_value_that_is_away_is_not_there_when_it_is_put_again() -> None:
    codes = {"batch_get_into": [64, -800], "batch_is_exist": [1, 1], "batch_put_from_multi_buffers": [-705, -705]}
    fake = Mock(get_size=lambda name: 64, **{name: Mock(return_value=each) for name, each in codes.items()})
    client, rows = MooncakeClient(fake, "tcp"), [[np.zeros(64, dtype=np.uint8)] for _ in "ab"]
    assert client.get("ab", rows) == client.exists("ab") == [Outcome.OK, Outcome.AWAY]
    assert client.put("ab", rows) == [Outcome.HELD, Outcome.AWAY]
