"""A real Redis server that refuses writes is read on, and one that refuses reads is written on. The clock is the
tests'."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload.tiering.health import MAX_FAILURES, MAX_WRITE_PAUSE_S
from kvoffload.tiers.remote.memory import ValueMemory
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.worker import StoreWorker
from tests.tiers.redis.rig import RedisServer, make_client, needs_redis
from tests.tiers.remote.in_front import ServerInFront, chain

pytestmark = needs_redis
SLOT_BYTES = 4096
HOST_BLOCKS = 256

REFUSALS = {
    "OOM": ("CONFIG SET maxmemory 1mb", "CONFIG SET maxmemory 0"),
    "READONLY": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "NOPERM": ("ACL SETUSER default -set", "ACL SETUSER default +set"),
}
"""What makes the server refuse writes with an error, and what ends that."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> RedisServer:
    return RedisServer(tmp_path_factory.mktemp("redis") / "store")


class Server(ServerInFront):
    """Host memory in front of the store, whose client runs here."""

    def __init__(self, redis: RedisServer) -> None:
        self.raw = redis.raw()
        self.raw.flushall()
        self.raw.config_resetstat()
        pool = np.zeros((HOST_BLOCKS, SLOT_BYTES), dtype=np.uint8)
        self.client = make_client(redis.url)
        super().__init__(StoreWorker(self.client, ValueMemory([pool]), ValueFormat("5e" * 32)), pool, "redis")

    def say(self, command: str) -> None:
        self.raw.execute_command(*command.split())

    @property
    def num_sets(self) -> int:
        stats = self.raw.info("commandstats").get("cmdstat_set", {})
        return int(stats.get("calls", 0) + stats.get("rejected_calls", 0))


@pytest.fixture
def server(redis: RedisServer) -> Iterator[Server]:
    server = Server(redis)
    yield server
    server.manager.shutdown()
    server.client.close()


@pytest.mark.parametrize("error", REFUSALS)
def test_while_writes_are_refused_what_is_there_is_found(error: str, server: Server) -> None:
    refuse, allow = REFUSALS[error]
    old = [chain(f"old{i}") for i in range(8)]
    for keys in old:
        server.store(keys)
    before = server.num_sets
    server.say(refuse)
    try:
        for i in range(60):
            server.store(chain(f"new{i}"))
            assert server.finds(old[i % 8], f"r{i}")
            server.step(0.5)
        assert not server.has(chain("new59")), "writes were refused, which this test is about"
        assert server.num_sets - before < MAX_FAILURES + 30 / MAX_WRITE_PAUSE_S + 10
        is_full = error == "OOM"
        assert server.manager.take_counts()["tier_paused:write,redis"] == (not is_full)
        assert server.manager.take_counts()["tier_paused:read,redis"] == 0
    finally:
        server.say(allow)
    for i in range(10):
        server.step(1.0)
        server.store(chain(f"healed{i}"))
    assert server.has(chain("healed9"))


def test_while_reads_are_refused_new_blocks_are_stored(server: Server) -> None:
    """The control."""
    old = chain("old", 24)
    server.store(old)
    server.say("ACL SETUSER default -get")
    try:
        assert not any(server.finds(old, f"r{i}") for i in range(4))
        assert server.manager.take_counts()["tier_paused:read,redis"] == 1
        for i in range(4):
            server.store(chain(f"new{i}"))
            assert server.has(chain(f"new{i}"))
    finally:
        server.say("ACL SETUSER default +get")
    server.step(1.0)
    server.finds(old, "probe")
    assert server.finds(old, "after")
