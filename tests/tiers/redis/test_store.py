"""The tier on a real Redis server: each fault ends in misses, and the tier comes back without a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, Tier, TierError
from kvoffload.abc.tier import HIT, MISS
from kvoffload.host.pool import HostPool
from kvoffload.testing.conformance import keys as keys_of
from kvoffload.testing.tier_conformance import SharedTierConformance
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.redis.client import RedisClient
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.remote.memory import ValueMemory
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker
from tests.tiers.redis.rig import RedisServer, make_client, needs_redis
from tests.tiers.remote.memory_store import DirectChannel
from tests.tiers.remote.rig import StoreServer, content

pytestmark = needs_redis

FINGERPRINT = "5e" * 32
VALUES = ValueFormat(FINGERPRINT)
KEYS = [bytes([i]) * 36 for i in range(32)]
SLOT_BYTES = (1 << 16, 1 << 14)
DEADLINE_S = 90.0
HMAC_KEY = b"k" * 32


class Server(StoreServer):
    """A tier of one server. With a ``client`` it has no process."""

    def __init__(
        self,
        store: RedisServer,
        fingerprint: str = FINGERPRINT,
        client: RedisClient | None = None,
        hmac_key: bytes = b"",
        **options: Any,
    ) -> None:
        self.hosts: list[HostPool] = []
        self.client = client
        if client is None:
            self.hosts = [HostPool(64, nbytes) for nbytes in SLOT_BYTES]
            pools = [host.data for host in self.hosts]
            handles = [host.handle() for host in self.hosts]
            tier = RedisConfig(url=store.url, **options).open(TierContext(pools, fingerprint, handles))
        else:
            pools = [np.zeros((64, nbytes), dtype=np.uint8) for nbytes in SLOT_BYTES]
            worker = StoreWorker(client, ValueMemory(pools), ValueFormat(fingerprint, hmac_key=hmac_key))
            tier = RemoteTier(DirectChannel(worker), sum(SLOT_BYTES), name="redis")
        assert isinstance(tier, RemoteTier)
        super().__init__(tier, pools)
        self.connect()

    def close(self) -> None:
        super().close()
        if self.client is not None:
            self.client.close()
        for host in self.hosts:
            host.close()


def direct(store: RedisServer, fingerprint: str = FINGERPRINT, hmac_key: bytes = b"") -> Server:
    return Server(store, fingerprint, make_client(store.url), hmac_key)


@pytest.fixture(scope="module")
def module_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    store = RedisServer(tmp_path_factory.mktemp("redis"))
    yield store
    store.kill()


@pytest.fixture
def store(module_store: RedisServer) -> RedisServer:
    module_store.raw().flushall()
    return module_store


def test_servers_share_blocks_and_other_fingerprints_do_not(store: RedisServer) -> None:
    one, other, stranger = Server(store), direct(store), direct(store, "6f" * 32)
    assert one.states(KEYS[:4]) == [MISS] * 4
    assert all(result.ok and result.nbytes for result in one.move(KEYS[:3], is_read=False).values())
    assert other.states(KEYS[:4]) == [HIT] * 3 + [MISS]
    assert other.errors(KEYS[:3]) == [None] * 3
    assert stranger.states(KEYS[:3]) == [MISS] * 3
    assert store.raw().dbsize() == 3
    one.tier.delete(KEYS[:2])
    one.works_again(KEYS[4:6])
    third = direct(store)
    assert third.states(KEYS[:3]) == [MISS, MISS, HIT]
    for each in (one, other, stranger, third):
        each.close()


def test_a_server_that_is_killed_and_comes_back_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RedisServer(tmp_path / "redis", "--requirepass", "the-password")
    secret = tmp_path / "secret"
    secret.write_text("the-password")
    with caplog.at_level(logging.INFO):
        server = Server(store, password_file=str(secret))
        server.works_again(KEYS[:4])
        server.tier.poll()
        store.kill()
        failed = server.tier.num_failed_lookups
        assert server.states(KEYS[8:12]) == [MISS] * 4
        assert server.tier.num_failed_lookups > failed
        assert not any(result.ok for result in server.move(KEYS[:4], is_read=True).values())
        store.start()
        server.works_again(KEYS[:4])
        server.close()
    store.kill()
    assert "cannot be reached" in caplog.text
    assert "has no memory limit" in caplog.text
    assert "the-password" not in caplog.text


def test_a_server_that_stands_still(tmp_path: Path) -> None:
    store = RedisServer(tmp_path / "redis")
    server = Server(store)
    server.works_again(KEYS[:4])
    store.pause()
    begun = time.monotonic()
    assert server.states(KEYS[8:12]) == [MISS] * 4
    assert time.monotonic() - begun <= DEADLINE_S
    store.resume()
    server.works_again(KEYS[:4])
    server.close()
    store.kill()


def test_a_full_server_refuses_blocks_and_takes_them_again(store: RedisServer) -> None:
    server, raw = direct(store), store.raw()
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] // 2)
    assert {result.error for result in server.move(KEYS[:4], is_read=False).values()} == {TierError.NO_SPACE}
    raw.config_set("maxmemory", 0)
    server.works_again(KEYS[:4])
    server.close()


def test_bad_values_are_found_removed_and_written_again(store: RedisServer) -> None:
    server, raw = direct(store), store.raw()
    keys = KEYS[8:15]
    server.works_again(keys)
    names = [VALUES.name(key) for key in keys]
    values = [raw.get(name) for name in names]
    middle = len(values[0]) // 2
    raw.set(names[0], values[0][:middle] + bytes([values[0][middle] ^ 1]) + values[0][middle + 1 :])
    raw.set(names[1], np.random.default_rng(0).bytes(len(values[1])))
    raw.set(names[2], values[3])
    raw.set(names[3], values[3][:999])
    raw.delete(names[4])
    raw.hset(names[4], "a", 1)
    raw.set(names[5], values[5] + b"\r\n")
    assert server.errors(keys) == [TierError.CORRUPT] * 6 + [None]
    server.works_again(keys)
    assert [raw.get(name) for name in names] == values
    raw.delete(names[0])
    assert server.errors(keys[:1]) == [TierError.GONE]
    server.close()


def test_blocks_of_another_size_are_misses_and_stay(store: RedisServer) -> None:
    """Servers with the same fingerprint and other blocks do not remove each other's."""
    server, raw = direct(store), store.raw()
    for key, nbytes in zip(KEYS[20:22], (999, 1 << 20), strict=True):
        payload = np.arange(nbytes).astype(np.uint8)
        value = VALUES.record(key, [payload]).tobytes() + payload.tobytes()
        raw.set(VALUES.name(key), value)
        assert server.states([key]) == [HIT]
        assert server.errors([key]) == [TierError.GONE]
        server.works_again(KEYS[22:23])
        assert raw.get(VALUES.name(key)) == value
    server.close()


def test_with_an_hmac_key_only_blocks_of_its_servers_are_loaded(store: RedisServer, tmp_path: Path) -> None:
    """Another client forges blocks with right checksums. The negative control is a server without a key."""
    path = tmp_path / "key"
    path.write_bytes(HMAC_KEY)
    one, other = Server(store, hmac_key_file=str(path)), direct(store, hmac_key=HMAC_KEY)
    open_one, another_key = direct(store), direct(store, hmac_key=b"x" * 32)
    assert all(result.ok for result in one.move(KEYS[:2], is_read=False).values())
    assert other.states(KEYS[:2]) == [HIT] * 2
    assert other.errors(KEYS[:2]) == [None] * 2
    assert open_one.states(KEYS[:2]) == another_key.states(KEYS[:2]) == [MISS] * 2

    parts = [content(KEYS[9], rank, nbytes) for rank, nbytes in enumerate(SLOT_BYTES)]
    raw = store.raw()
    signed = ValueFormat(FINGERPRINT, hmac_key=HMAC_KEY)
    another = ValueFormat(FINGERPRINT, hmac_key=b"a key that the servers do not have")
    for key, named, written in ((KEYS[9], VALUES, VALUES), (KEYS[9], signed, VALUES), (KEYS[10], signed, another)):
        forged = written.record(key, parts).tobytes() + b"".join(part.tobytes() for part in parts)
        raw.set(named.name(key), forged)
    assert open_one.errors(KEYS[9:10]) == [None], "the forged block is not what the tier takes for a good one"
    assert one.states(KEYS[9:11]) == other.states(KEYS[9:11]) == [HIT] * 2
    assert one.errors(KEYS[9:11]) == [TierError.CORRUPT] * 2
    # It has been removed meanwhile, or is forged.
    assert set(other.errors(KEYS[9:11])) <= {TierError.CORRUPT, TierError.GONE}
    one.works_again(KEYS[9:11])
    for server in (one, other, open_one, another_key):
        server.close()


class TestConformance(SharedTierConformance):
    """The tier on a real server, without a process."""

    values: ValueFormat = VALUES
    has_rows = False

    @pytest.fixture(autouse=True)
    def _store(self, store: RedisServer) -> Iterator[None]:
        self.store = store
        self.clients: list[RedisClient] = []
        yield
        for client in self.clients:
            client.close()

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        client = make_client(self.store.url)
        self.clients.append(client)
        worker = StoreWorker(client, ValueMemory(pools, self.has_rows), self.values)
        tier = RemoteTier(DirectChannel(worker), sum(pool.shape[1] for pool in pools), name="redis")
        tier.poll()
        return tier

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier | None:
        return self.make_tier(pools, num_blocks)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.make_tier(pools, 16)

    def spoil(self, tier: Tier) -> bool:
        raw = self.store.raw()
        for name in raw.scan_iter():
            value = raw.get(name)
            raw.set(name, value[:RECORD_BYTES] + bytes([value[RECORD_BYTES] ^ 1]) + value[RECORD_BYTES + 1 :])
        return True

    def lose(self, tier: Tier, names: str) -> bool:
        self.store.raw().delete(*[self.values.name(key) for key in keys_of(names)])
        return True


class TestConformanceOfRows(TestConformance):
    has_rows = True
