"""Host memory in front of a real store whose client runs in the test. The clock is the tests'."""

from __future__ import annotations

import hashlib

from kvoffload.abc import ByteArray, KVGroup, OffloadKey, ReqContext
from kvoffload.abc.tier import HIT
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker
from tests.clock import Clock
from tests.tiers.remote.memory_store import DirectProcess


class ServerInFront:
    """A server with one tier. ``pool``: its host memory."""

    def __init__(self, worker: StoreWorker, pool: ByteArray, name: str) -> None:
        num_slots, slot_bytes = pool.shape
        self.clock = Clock()
        self.tier = RemoteTier(DirectProcess(worker).start, slot_bytes, name=name, clock=self.clock)
        self.host = PolicyOffloadingManager(HostBackend(16, num_slots), make_policy("lru", num_slots))
        settings = TieringSettings([KVGroup(16)], load_only_if_faster=False)
        self.manager = TieredOffloadingManager(self.host, [self.tier], settings, clock=self.clock, random=lambda: 0.0)
        self.step()

    def step(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        for _ in range(4):
            self.manager.poll()

    def store(self, keys: list[OffloadKey]) -> None:
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


def chain(name: str, length: int = 2) -> list[OffloadKey]:
    return [make_offload_key(hashlib.sha256(f"{name}/{i}".encode()).digest(), 0) for i in range(length)]
