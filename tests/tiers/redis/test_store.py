"""The tier on a real Redis server: each fault ends in misses, and the tier comes back without a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, Tier, TierError
from kvoffload.abc.tier import MISS
from kvoffload.testing.conformance import keys as keys_of
from kvoffload.testing.tier_conformance import SharedTierConformance
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.redis.client import RedisClient
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from tests.tiers.redis.rig import RedisServer, make_client, needs_redis
from tests.tiers.remote.rig import FINGERPRINT, StoreServer, tier_here

pytestmark = needs_redis

VALUES = ValueFormat(FINGERPRINT)
KEYS = [bytes([i]) * 36 for i in range(32)]
SLOT_BYTES = (1 << 16, 1 << 14)


class Server(StoreServer):
    """A tier of one server. Without a process, its client runs here."""

    def __init__(
        self, store: RedisServer, fingerprint: str = FINGERPRINT, has_process: bool = False, **options: Any
    ) -> None:
        self.client = None if has_process else make_client(store.url)

        def open_tier(context: TierContext) -> Tier:
            if self.client is None:
                return RedisConfig(url=store.url, **options).open(context)
            return tier_here(self.client, context.pools, ValueFormat(fingerprint), "redis")

        super().__init__(open_tier, SLOT_BYTES, fingerprint=fingerprint)
        self.connect()

    def close(self) -> None:
        super().close()
        if self.client is not None:
            self.client.close()


@pytest.fixture(scope="module")
def module_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    store = RedisServer(tmp_path_factory.mktemp("redis"))
    yield store
    store.kill()


@pytest.fixture
def store(module_store: RedisServer) -> RedisServer:
    module_store.raw().flushall()
    return module_store


def test_a_server_that_is_killed_and_comes_back_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RedisServer(tmp_path / "redis", "--requirepass", "the-password")
    secret = tmp_path / "secret"
    secret.write_text("the-password")
    with caplog.at_level(logging.INFO):
        server = Server(store, has_process=True, password_file=str(secret))
        server.works_again(KEYS[:4])
        server.tier.poll()
        store.kill()
        failed = server.tier.num_failed_lookups
        assert server.states(KEYS[8:12]) == [MISS] * 4
        assert server.tier.num_failed_lookups > failed
        assert not any(result.ok for result in server.read(KEYS[:4]).values())
        store.start()
        server.works_again(KEYS[:4])
        server.close()
    store.kill()
    assert "cannot be reached" in caplog.text
    assert "has no memory limit" in caplog.text
    assert "the-password" not in caplog.text


def test_bad_values_are_found_removed_and_written_again(store: RedisServer) -> None:
    server, raw = Server(store), store.raw()
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


class TestConformance(SharedTierConformance):
    """The tier on a real server, without a process."""

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
        return tier_here(client, pools, VALUES)

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
        self.store.raw().delete(*[VALUES.name(key) for key in keys_of(names)])
        return True
