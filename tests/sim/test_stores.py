"""The simulated store, its clients and its processes; a remote tier on them passes the conformance suite."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from random import Random

import numpy as np
import pytest

from kvoffload.abc import ByteArray, Tier
from kvoffload.testing.conformance import keys
from kvoffload.testing.tier_conformance import DEADLINE_S, SharedTierConformance, make_pools
from kvoffload.tiers.remote.client import Outcome, StoreError
from kvoffload.tiers.remote.link import ChannelState
from kvoffload.tiers.remote.memory import ValueMemory
from kvoffload.tiers.remote.messages import Op, StoreRequest
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker
from tests.clock import Clock
from tests.sim.stores import (
    ClientState,
    FaultyCalls,
    ForgingClient,
    SimulatedChannel,
    SimulatedClient,
    SimulatedStore,
    StoreFaults,
)

FINGERPRINT = "0f" * 32


class TestRemoteTierOnASimulatedStore(SharedTierConformance):
    @pytest.fixture(autouse=True)
    def without_tiers(self) -> None:
        self.channels: dict[int, SimulatedChannel] = {}
        self.stores: dict[int, SimulatedStore] = {}

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(SimulatedStore(time.monotonic), pools)

    def on(self, store: SimulatedStore, pools: Sequence[ByteArray]) -> Tier:
        def stall(seconds: float) -> None:
            channel.stall(seconds)

        state = ClientState(object(), StoreFaults, Random(0), lambda: channel.pause(), stall)
        channel = SimulatedChannel(
            lambda: StoreWorker(SimulatedClient(store, state), ValueMemory(pools), ValueFormat(FINGERPRINT, "kv")),
            time.monotonic,
        )
        tier = RemoteTier(channel, sum(pool.shape[1] for pool in pools), random=lambda: 0.5)
        self.channels[id(tier)], self.stores[id(tier)] = channel, store
        deadline = time.monotonic() + DEADLINE_S
        while not tier.stats().is_connected and time.monotonic() < deadline:
            tier.poll()
        return tier

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.another(tier, pools)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.on(self.stores[id(tier)], pools)

    def hold(self, tier: Tier) -> AbstractContextManager[None]:
        return self.channels[id(tier)].hold()

    def spoil(self, tier: Tier) -> bool:
        for value in self.stores[id(tier)].values.values():
            value.data[200] ^= 1
        return True

    def lose(self, tier: Tier, names: str) -> bool:
        for key in keys(names):
            self.stores[id(tier)].evict(ValueFormat(FINGERPRINT, "kv").name(key))
        return True


def client(store: SimulatedStore, **rates: float) -> SimulatedClient:
    faults = StoreFaults(**rates)
    return SimulatedClient(store, ClientState(object(), lambda: faults, Random(0), lambda: None, lambda seconds: None))


def data(n: int) -> list[ByteArray]:
    return [np.full(100, n, np.uint8), np.full(50, n + 1, np.uint8)]


def test_a_store_keeps_what_was_put() -> None:
    store = SimulatedStore(Clock())
    one, other = client(store), client(store)
    assert one.put(["a", "b"], [data(1), data(2)]) == [Outcome.OK, Outcome.OK]
    assert other.put(["b", "c"], [data(7), data(3)]) == [Outcome.HELD, Outcome.OK]
    assert other.exists(["a", "b", "d"]) == [Outcome.OK, Outcome.OK, Outcome.MISSING]
    got = data(0)
    assert other.get(["b"], [got]) == [Outcome.OK]
    assert all(np.array_equal(*pair) for pair in zip(got, data(2), strict=True))
    assert one.get(["b"], [[np.empty(3, np.uint8)]]) == [Outcome.OTHER_SIZE]
    assert one.remove(["a", "d"]) == [Outcome.OK, Outcome.MISSING]
    assert not store.removed_by_others
    other.remove(["b"])
    assert store.removed_by_others == ["b"]


def test_a_lease_refuses_a_removal() -> None:
    clock = Clock(100.0)
    store = SimulatedStore(clock, lease_s=5.0)
    one = client(store)
    one.put(["a"], [data(1)])
    assert one.remove(["a"]) == [Outcome.FAILED]
    clock.now += 5.0
    assert one.remove(["a"]) == [Outcome.OK]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_full_store_evicts_or_refuses(refuses: bool) -> None:
    store = SimulatedStore(Clock())
    store.max_values, store.refuses_when_full = 2, refuses
    one = client(store)
    assert one.put(["a", "b", "c"], [data(1)] * 3) == [Outcome.OK, Outcome.OK, Outcome.FULL if refuses else Outcome.OK]
    assert sorted(store.values) == (["a", "b"] if refuses else ["b", "c"])


def test_a_value_may_be_forged() -> None:
    store, faults = SimulatedStore(Clock()), StoreFaults(forged=1.0)
    state = ClientState(object(), lambda: faults, Random(0), lambda: None, lambda seconds: None)

    def forge(name: str, payloads: Sequence[ByteArray]) -> ByteArray:
        return np.concatenate([np.full(100, 9, np.uint8), *payloads])

    one = ForgingClient(SimulatedClient(store, state), FaultyCalls(store, state), forge, lambda name: [f"of {name}"])
    got = data(0)
    assert one.put(["a"], [data(1)]) == [Outcome.OK]
    assert one.get(["a", "b"], [got, data(0)]) == [Outcome.OK, Outcome.MISSING]
    assert (got[0] == 9).all()
    assert not np.array_equal(got[1], data(1)[1])
    assert state.misread == {"of a"}
    assert state.injected["forged"] == 1


@pytest.mark.parametrize("fault", ["wrong_value", "truncated", "garbage"])
def test_a_get_may_return_other_bytes(fault: str) -> None:
    store = SimulatedStore(Clock())
    client(store).put(["a", "b"], [data(1), data(5)])
    faulty, seen = client(store, **{fault: 1.0}), set()
    for _ in range(20):
        got = data(9)
        assert faulty.get(["a"], [got]) == [Outcome.OK]
        seen.add(np.concatenate(got).tobytes())
    assert any(raw != np.concatenate(data(1)).tobytes() for raw in seen)


def test_other_faults() -> None:
    store = SimulatedStore(Clock())
    assert client(store, says_it_has=1.0).exists(["a"]) == [Outcome.OK]
    assert client(store, forgotten=1.0).put(["a"], [data(1)]) == [Outcome.OK]
    assert client(store, full=1.0).put(["a"], [data(1)]) == [Outcome.FULL]
    assert not store.values
    assert client(store, failed=1.0).put(["a"], [data(1)]) == [Outcome.FAILED]
    assert client(store, says_it_lacks=1.0).exists(["a"]) == [Outcome.MISSING]
    assert client(store, rotten=1.0).put(["b"], [data(1)]) == [Outcome.OK]
    assert not np.array_equal(store.values["b"].data, np.concatenate(data(1)))
    with pytest.raises(StoreError):
        client(store, connection_lost=1.0).get(["a"], [data(1)])


class Rig:
    """A channel to a simulated process, with a clock of its own."""

    def __init__(self, death_s: float = 0.0, start_s: float = 0.0, **rates: float) -> None:
        self.clock, self.pools = Clock(100.0), make_pools(8, 4096)
        self.faults = StoreFaults()
        store = SimulatedStore(self.clock)
        state = ClientState(object(), lambda: self.faults, Random(0), self.pause, self.stall, stall_s=30.0)
        self.channel = SimulatedChannel(
            lambda: StoreWorker(
                SimulatedClient(store, state), ValueMemory(self.pools), ValueFormat(FINGERPRINT, "kv"), self.clock
            ),
            self.clock,
            start_s=start_s,
            death_s=death_s,
        )
        self.channel.start()
        self.clock.now += start_s
        self.channel.poll()
        self.key = keys("a")[0]
        self.channel.submit(StoreRequest(1, Op.WRITE, [self.key], [0]))
        self.channel.drain()
        assert [response.outcomes for response in self.channel.poll()] == [[Outcome.OK]]
        self.faults = StoreFaults(**rates)

    def pause(self) -> None:
        self.channel.pause()

    def stall(self, seconds: float) -> None:
        self.channel.stall(seconds)


def test_a_killed_process_touches_host_slots_until_it_is_down() -> None:
    rig = Rig(death_s=50.0, late_get=1.0)
    rig.channel.submit(StoreRequest(2, Op.READ, [rig.key], [5]))
    rig.channel.drain()
    rig.channel.kill()
    assert rig.channel.state is ChannelState.ENDING
    before = rig.pools[0][5].copy()
    rig.clock.now += 30.0
    rig.channel.drain()
    touched = not np.array_equal(rig.pools[0][5], before)
    rig.clock.now += 50.0
    assert rig.channel.poll() == []
    assert rig.channel.state is ChannelState.DOWN  # type: ignore[comparison-overlap]
    after = rig.pools[0][5].copy()
    rig.clock.now += 100.0
    rig.channel.drain()
    assert np.array_equal(rig.pools[0][5], after)
    assert touched


def test_a_crash_ends_the_process_without_a_response() -> None:
    rig = Rig(crash=1.0)
    rig.channel.submit(StoreRequest(2, Op.LOOKUP, [rig.key]))
    rig.channel.drain()
    assert rig.channel.poll() == []
    assert rig.channel.state is ChannelState.DOWN
    assert not rig.channel.submit(StoreRequest(3, Op.LOOKUP, [rig.key]))
    rig.faults = StoreFaults()
    rig.channel.start()
    rig.channel.poll()
    assert rig.channel.submit(StoreRequest(4, Op.LOOKUP, [rig.key]))
    rig.channel.drain()
    assert [response.outcomes for response in rig.channel.poll()] == [[Outcome.OK]]


def test_a_lookup_is_answered_while_a_read_hangs() -> None:
    rig = Rig(late_get=1.0)
    rig.channel.submit(StoreRequest(2, Op.READ, [rig.key], [5]))
    rig.channel.drain()
    rig.channel.submit(StoreRequest(3, Op.LOOKUP, [rig.key]))
    rig.channel.drain()
    assert [response.number for response in rig.channel.poll()] == [3]
    rig.clock.now += 30.0
    rig.channel.drain()
    assert [response.number for response in rig.channel.poll()] == [2]
