"""Servers that share a simulated store through remote tiers, for the simulation of several servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from kvoffload.abc import ByteArray, Tier
from kvoffload.tiers.remote.client import StoreClient
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker, ValueMemory
from tests.sim.servers import Connection, DeletedOthers, SharedMedium, SharingServer
from tests.sim.stores import (
    ClientState,
    SimulatedClient,
    SimulatedStarter,
    SimulatedStore,
    StoreFaults,
    random_faults,
)

PREFIX = "sim"
HMAC_KEY = b"a key that only servers have, 32b"
"""Of the servers of half of all simulations."""


class StoreMedium(SharedMedium):
    """A store that lies, hangs, forgets, fills up, returns other values and restarts empty, and processes that crash.

    With ``is_calm`` it does none of that, but may be slow.
    """

    kind = "store"
    faults_kind: type[StoreFaults] = StoreFaults

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__()
        rng = self.random = Random(f"store {seed}")
        self.store = SimulatedStore(lambda: self.now, lease_s=rng.choice((0.0, 0.0, 0.1, 5.0)))
        self.faults = self.faults_kind() if is_calm else random_faults(rng, self.faults_kind)
        self.latency_s = rng.choice((0.0, 0.0, 0.002, 0.02))
        self.handover_s += 20 * self.latency_s
        self.stall_s = rng.choice((0.01, 0.2, 30.0))
        self.death_s = rng.choice((0.0, 0.05, 1.0))
        self.start_s = rng.choice((0.0, 0.01, 0.5))
        # Of its own, so that the other choices of a seed do not depend on it.
        self.hmac_key = Random(f"hmac {seed}").choice((b"", HMAC_KEY))
        self.registers_memory = Random(f"rows {seed}").random() < 0.3
        """Whether values move through rows, as with clients whose peers can write to their memory."""
        self._forget_rate = self._clear_rate = self._hide_rate = self._slow_rate = 0.0
        self._hidden_until = self._slow_until = 0.0
        if not is_calm:
            self.store.overwrites = rng.random() < 0.2
            self.store.max_values = rng.choice((3, 20, 1 << 20, 1 << 20))
            self.store.refuses_when_full = rng.random() < 0.3
            self._forget_rate = rng.choice((0.0, 0.0, 0.01, 0.2))
            self._clear_rate = rng.choice((0.0, 0.0, 0.005))
            self._hide_rate = rng.choice((0.0, 0.0, 0.005))
            self._slow_rate = rng.choice((0.0, 0.0, 0.005))

    def connect(self, server: SharingServer) -> Connection:
        return StoreConnection(self, server)

    def tick(self) -> None:
        store, rng = self.store, self.random
        if store.values and rng.random() < self._forget_rate:
            store.evict(rng.choice(list(store.values)))
            self.injected["value evicted"] += 1
        if rng.random() < self._clear_rate:
            store.clear()
            self.injected["store restarted empty"] += 1
        if store.is_reachable and rng.random() < self._hide_rate:
            store.is_reachable = False
            self._hidden_until = self.now + rng.choice((0.05, 1.0, 30.0))
            self.injected["store unreachable"] += 1
        elif not store.is_reachable and self.now >= self._hidden_until:
            store.is_reachable = True
        if self.now >= self._slow_until and rng.random() < self._slow_rate:
            self._slow_until = self.now + rng.choice((0.05, 1.0))
            self.injected["store slow"] += 1

    @property
    def call_s(self) -> float:
        """How long a call takes now."""
        return self.latency_s * 10 + 0.01 if self.now < self._slow_until else self.latency_s

    def end_faults(self) -> None:
        self.faults = self.faults_kind()
        self._forget_rate = self._clear_rate = self._hide_rate = self._slow_rate = 0.0
        self._slow_until = self._hidden_until = 0.0
        self.store.is_reachable = True
        self.store.max_values = 1 << 20

    def begin_outage(self) -> bool:
        self._forget_rate = self._clear_rate = self._hide_rate = self._slow_rate = 0.0
        self._hidden_until = float("inf")
        self.store.is_reachable = False
        return True

    def check(self) -> None:
        if self.store.removed_by_others:
            raise DeletedOthers(f"a server has removed {self.store.removed_by_others[0]}, which it has not put")

    def counts(self) -> Counter[str]:
        return Counter({"values in the store": len(self.store.values), "values evicted": self.store.num_evicted})


class StoreConnection(Connection):
    """The remote tier of one server, and the process of its client. ``tier_class`` and ``starter_class`` may have a
    planted bug."""

    tier_class: type[RemoteTier] = RemoteTier
    starter_class: type[SimulatedStarter] = SimulatedStarter
    worker_class: type[StoreWorker] = StoreWorker

    def __init__(self, medium: StoreMedium, server: SharingServer) -> None:
        self.medium = medium
        self.server = server
        self.random = Random(f"client {server.life.scenario.seed}")
        self.starter: SimulatedStarter | None = None
        self.state = ClientState(
            server,
            lambda: medium.faults,
            self.random,
            self._pause,
            self._stall,
            medium.stall_s,
            lambda: medium.call_s,
            medium.injected,
        )

    def open(self, pools: Sequence[ByteArray]) -> Tier:
        medium, server, life = self.medium, self.server, self.server.life
        self.starter = self.starter_class(
            lambda: self.worker_class(
                self.make_client(),
                ValueMemory(pools, medium.registers_memory),
                ValueFormat(server.fingerprint, PREFIX, medium.hmac_key),
                server.clock,
            ),
            server.clock,
            self.random.randrange(1 << 30),
            life.num_threads,
            life.max_queued,
            medium.start_s,
            medium.death_s,
            self.random.choice((0.3, 0.6, 0.9)),
            lambda: medium.store.is_reachable,
        )
        return self.tier_class(
            self.starter.start,
            sum(pool.shape[1] for pool in pools),
            name="store",
            clock=server.clock,
            random=self.random.random,
        )

    def make_client(self) -> StoreClient:
        """Returns the client for one thread of the process that starts."""
        return SimulatedClient(self.medium.store, self.state)

    def _pause(self) -> None:
        if self.starter is None or not self.starter.in_process:
            # On the scheduler's thread.
            self.server.pause()
        else:
            self.starter.pause()

    def _stall(self, seconds: float) -> None:
        if self.starter is not None:
            self.starter.stall(seconds)

    def tick(self) -> None:
        if self.starter is not None:
            self.starter.tick()

    @property
    def is_idle(self) -> bool:
        return self.starter is None or self.starter.is_idle

    def drain(self) -> None:
        if self.starter is not None:
            self.starter.drain()

    def die(self) -> None:
        if self.starter is not None:
            self.starter.end()

    def counts(self) -> Counter[str]:
        return Counter({"processes of clients": 0 if self.starter is None else self.starter.num_starts})
