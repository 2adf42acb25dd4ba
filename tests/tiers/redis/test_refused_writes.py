"""A real Redis server that refuses writes is read on, and one that refuses reads is written on. The clock is the
tests'."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload.abc import KVGroup, OffloadKey, ReqContext
from kvoffload.abc.tier import HIT
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.tiering.chains import MAX_REST_S
from kvoffload.tiering.health import MAX_FAILURES, MAX_WRITE_PAUSE_S
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiering.unwritten import WRITE_WITHIN_S
from kvoffload.tiers.remote.memory import SeparateBuffers
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker
from tests.clock import Clock
from tests.tiers.redis.rig import RedisServer, make_client, needs_redis
from tests.tiers.redis.test_store import DirectChannel

pytestmark = needs_redis
SLOT_BYTES = 4096
HOST_BLOCKS = 256

REFUSALS = {
    "OOM": ("CONFIG SET maxmemory 1mb", "CONFIG SET maxmemory 0"),
    "READONLY": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "NOREPLICAS": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    "NOPERM": ("ACL SETUSER default -set", "ACL SETUSER default +set"),
}
"""What makes the server refuse writes with an error, and what ends that."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> RedisServer:
    return RedisServer(tmp_path_factory.mktemp("redis") / "store")


class Server:
    """Host memory in front of the store, whose client runs here."""

    def __init__(self, redis: RedisServer) -> None:
        self.raw = redis.raw()
        self.raw.flushall()
        self.raw.config_resetstat()
        self.clock = Clock()
        self.pool = np.zeros((HOST_BLOCKS, SLOT_BYTES), dtype=np.uint8)
        self.client = make_client(redis.url)
        worker = StoreWorker(self.client, SeparateBuffers([self.pool]), ValueFormat("5e" * 32))
        self.tier = RemoteTier(DirectChannel(worker), SLOT_BYTES, name="redis", clock=self.clock)
        self.host = PolicyOffloadingManager(HostBackend(16, HOST_BLOCKS), make_policy("lru", HOST_BLOCKS))
        settings = TieringSettings([16.0], groups=[KVGroup(16)], load_only_if_faster=False)
        self.manager = TieredOffloadingManager(self.host, [self.tier], settings, clock=self.clock, random=lambda: 0.0)
        self.step()

    def say(self, command: str) -> None:
        self.raw.execute_command(*command.split())

    def step(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        for _ in range(4):
            self.manager.poll()

    def store(self, keys: list[OffloadKey], is_handed_over: bool = False) -> None:
        if is_handed_over:
            self.manager.hand_over(keys)
        output = self.manager.prepare_store(keys)
        assert output is not None
        self.manager.complete_store(keys)
        self.manager.end_chain(keys, keys)
        self.step()

    def finds(self, keys: list[OffloadKey], request: str) -> bool:
        self.host.drop(keys)
        context = ReqContext(request)
        for _ in range(4):
            found = self.manager.lookup(keys, context)
            self.step()
        self.manager.release_request(context)
        return found == len(keys)

    def has(self, keys: list[OffloadKey]) -> bool:
        self.tier.contains(keys)
        self.step()
        return bool((self.tier.contains(keys) == HIT).all())

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


def chain(name: str, length: int = 2) -> list[OffloadKey]:
    return [make_offload_key(hashlib.sha256(f"{name}/{i}".encode()).digest(), 0) for i in range(length)]


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


def test_a_hand_over_to_a_full_server_is_written_again_at_a_growing_pace(server: Server) -> None:
    server.say("CONFIG SET maxmemory 1mb")
    try:
        server.store(chain("x", 24), is_handed_over=True)
        for _ in range(int(WRITE_WITHIN_S * 20)):
            server.step(0.05)
        assert server.num_sets < 24 * (WRITE_WITHIN_S / MAX_REST_S + 6)
    finally:
        server.say("CONFIG SET maxmemory 0")
