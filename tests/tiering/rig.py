"""A host in front of a plain tier in memory, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from kvoffload.abc import (
    KVGroup,
    LookupState,
    Need,
    OffloadKey,
    ReqContext,
    Slots,
    States,
    TierError,
    TierResult,
    TierStats,
)
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.lookups import last_possible
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from tests.clock import Clock
from tests.sim.executor import SteppedExecutor
from tests.sim.memory_tier import MemoryTier

SLOT_BYTES = 4096


A, B, MEASURES = ReqContext("a"), ReqContext("b"), ReqContext("measures")


def chain(name: str, n: int) -> list[OffloadKey]:
    return [f"{name}{i}".encode().ljust(12, b".") + bytes(4) for i in range(n)]


def content(key: OffloadKey) -> np.ndarray:
    return np.resize(np.frombuffer(key, dtype=np.uint8), SLOT_BYTES)


class SpyTier(MemoryTier):
    """A MemoryTier that records calls, and fails, hangs or does not know as its attributes say."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.reads: list[OffloadKey] = []
        self.writes: list[OffloadKey] = []
        self.expected: list[list[OffloadKey]] = []
        """The chains that were announced."""
        self.shown: list[tuple[str, list[OffloadKey]]] = []
        """What was touched and reordered, see ``Tier.touch``."""
        self.was_reset = False
        self.held_by_others: set[OffloadKey] = set()
        """Blocks that it does not know of and that a write finds in the medium."""
        self.num_deleted = 0
        self.asked: list[OffloadKey] = []
        self.refuses = False
        self.fails: TierError | None = None
        self.unsure = False
        self.seconds_per_block: float | None = None
        self.most_writes = 1 << 30
        """Blocks that it writes at the same time."""
        self.fails_for: OffloadKey | None = None
        self.num_fails = 0
        """This many writes of ``fails_for`` fail, then they succeed."""
        self.claimed_blocks: int | None = None
        self.hanging: dict[OffloadKey, float] = {}
        """How many seconds the read or write of a block takes."""

    def stats(self) -> TierStats:
        stats = super().stats()
        if self.claimed_blocks is not None:
            stats = stats._replace(capacity_bytes=self.claimed_blocks * self.block_bytes)
        return stats

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        n = max(0, self.most_writes - len(self.under_way))
        taken = super().write(keys[:n], slots[:n])
        self.writes += taken
        return taken

    def touch(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey] | None = None) -> None:
        self.shown.append(("touch" if stored is None else "reorder", list(keys)))
        super().touch(keys, stored)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self.num_deleted += len(keys)
        super().delete(keys)

    def reset(self) -> None:
        self.was_reset = True
        if not self.is_shared:
            super().reset()

    def read_block(self, key: OffloadKey, slot: int, block: Any) -> None:
        self._hang(key)
        super().read_block(key, slot, block)

    def write_block(self, key: OffloadKey, slot: int, block: Any) -> None:
        self._hang(key)
        super().write_block(key, slot, block)

    def _hang(self, key: OffloadKey) -> None:
        if key in self.hanging:
            assert isinstance(self.executor, SteppedExecutor)
            self.executor.stall(self.hanging[key])

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        if ahead:
            self.expected.append(list(ahead))
        self.asked += keys
        states = super().contains(keys)
        return np.full_like(states, LookupState.RETRY) if self.unsure else states

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = [] if self.refuses else super().read(keys, slots)
        self.reads += taken
        return taken

    def poll(self) -> list[TierResult]:
        results = []
        for result in super().poll():
            error = self.fails or result.error
            if self.fails is not None and not result.is_read:
                super().delete([result.key])
            if result.key == self.fails_for and not result.is_read and self.num_fails:
                error, self.num_fails = TierError.IO, self.num_fails - 1
                self.delete([result.key])
            seconds = result.seconds if self.seconds_per_block is None else self.seconds_per_block
            begun = result.ended - seconds
            nbytes = 0 if result.key in self.held_by_others and not result.is_read else result.nbytes
            results.append(TierResult(result.key, result.is_read, error, nbytes, seconds, begun, result.ended))
        return results


class SharedTier(SpyTier):
    """Is used by others too, and bounds itself, unless it has ``room``. Remembers what it was asked to hand over and to
    look for. As long as ``knows`` is False, it does not say what it holds; unless it ``is_open``, its directory has not
    answered yet."""

    is_shared = True
    knows = True
    is_open = True
    room: int | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.handed_over: list[list[OffloadKey]] = []
        self.looked_for: list[tuple[list[OffloadKey], str, float]] = []

    def stats(self) -> TierStats:
        return super().stats()._replace(capacity_bytes=None) if self.is_open else TierStats(0, 0, 0, is_connected=False)

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        states = super().contains(keys, ahead)
        if not self.knows:
            states[:] = LookupState.RETRY
        return states

    def most_blocks(self, key: OffloadKey) -> int | None:
        return self.room

    def hand_over(self, keys: Sequence[OffloadKey]) -> str:
        self.handed_over.append(list(keys))
        return "seat-7"

    def look_for(
        self, keys: Sequence[OffloadKey], place: str, pause_s: float, chain: Collection[OffloadKey] = ()
    ) -> None:
        self.looked_for.append((list(keys), place, pause_s))
        self.chain = list(chain)


class Rig:
    """A host of ``host_blocks`` in front of tiers, with a clock of their own. ``tier`` is the first of them,
    ``tier_class`` makes the last."""

    def __init__(
        self,
        host_blocks: int = 16,
        tier_blocks: int = 64,
        policy: str = "lru",
        groups: Sequence[KVGroup] = (KVGroup(16),),
        enable_events: bool = False,
        num_tiers: int = 1,
        num_threads: int = 4,
        tier_class: type[SpyTier] = SpyTier,
        device_blocks: int = 0,
        **options: Any,
    ) -> None:
        self.clock = Clock()
        self.pools = make_pools(host_blocks, SLOT_BYTES)
        self.executor = SteppedExecutor(clock=self.clock, num_threads=num_threads)
        classes = [SpyTier] * (num_tiers - 1) + [tier_class]
        self.tiers = [make(self.pools, tier_blocks, self.executor, self.clock) for make in classes]
        for i, tier in enumerate(self.tiers[1:], 2):
            tier.name = f"memory-{i}"
        self.tier = self.tiers[0]
        backend = HostBackend(16, host_blocks)
        self.host = PolicyOffloadingManager(
            backend, make_policy(policy, host_blocks), enable_events, clock=self.clock, device_blocks=device_blocks
        )
        self.manager = TieredOffloadingManager(
            self.host, self.tiers, TieringSettings(groups, **options), clock=self.clock, random=lambda: 0.0
        )

    def store(self, keys: list[OffloadKey]) -> None:
        """A request with the chain ``keys`` stores its blocks, with bytes made from their keys, and ends."""
        output = self.manager.prepare_store(keys)
        assert output is not None
        for key, slot in zip(output.keys_to_store, output.store_spec.slots.tolist(), strict=True):
            self.pools[0][slot] = content(key)
        self.manager.complete_store(keys)
        self.manager.end_chain(keys, [])

    def settle(self, times: int = 1) -> None:
        """Starts what lookups have asked for, and ends all transfers of the tier. What ends lets more begin, which the
        next time ends."""
        for _ in range(times):
            self.manager.poll()
            self.executor.drain()
            self.manager.poll()
            self.manager.check_integrity()

    def store_below(self, keys: list[OffloadKey]) -> None:
        """Puts ``keys`` into the tier but not into the host."""
        for key in keys:
            self.store([key])
            self.settle()
        self.host.reset()

    def put(self, tier: SpyTier, keys: list[OffloadKey]) -> None:
        """Puts blocks into one tier only."""
        assert tier.write(keys, np.arange(len(keys))) == keys
        for i, key in enumerate(keys):
            self.pools[0][i] = content(key)
        self.executor.drain()
        tier.poll()

    def measure(self, seconds_per_block: float, tier: SpyTier | None = None) -> None:
        """A tier reads blocks in ``seconds_per_block``, and the engine computes a block of 16 tokens per second. Both
        have done so once."""
        tier, key = self.tier if tier is None else tier, chain(f"measured {seconds_per_block}", 1)
        self.put(tier, key)
        tier.seconds_per_block = seconds_per_block
        assert self.manager.lookup(key, MEASURES) is None
        self.settle()
        self.manager.release_request(MEASURES)
        self.manager.observe_prefill(160, 10.0)

    def bytes_of(self, keys: list[OffloadKey]) -> list[bytes]:
        spec = self.manager.prepare_load(keys)
        self.manager.complete_load(keys)
        return [bytes(self.pools[0][slot]) for slot in spec.slots.tolist()]

    def fill_host(self, name: str = "filler") -> None:
        """Fills the host with other blocks, which evict all that can be evicted."""
        for key in chain(name, self.host.num_blocks):
            output = self.host.prepare_store([key])
            if output is not None:
                self.host.complete_store([key])

    def counts(self) -> dict[str, float]:
        return dict(self.manager.take_counts())


def with_shared(**options: Any) -> tuple[Rig, SharedTier]:
    """A rig with a tier of its own and a shared one below it."""
    rig = Rig(**options, tier_class=SharedTier, num_tiers=2)
    shared = rig.tiers[1]
    assert isinstance(shared, SharedTier)
    return rig, shared


def below(num_blocks: int, **options: Any) -> tuple[Rig, list[OffloadKey]]:
    """Returns a rig with the blocks of a chain in the tier, and not in the host."""
    rig, keys = Rig(**options), chain("x", num_blocks)
    rig.store_below(keys)
    return rig, keys


def arrived(manager: TieredOffloadingManager, context: ReqContext) -> dict[str, int]:
    """Returns how many blocks have arrived for a request, by tier, and leaves them pinned."""
    wait = manager._waits.get(context.req_id)
    return {} if wait is None else {tier: len(keys) for tier, keys in wait.promoted.items()}


def lookup_last(
    manager: TieredOffloadingManager, keys: list[OffloadKey], context: ReqContext | None
) -> tuple[int, LookupState]:
    """Returns the last of ``keys`` that is not certainly missing, and its state; -1 and MISS if there is none."""
    states = manager.lookup_each(keys, context, Need.LAST)
    last = last_possible(states)
    return last, LookupState(states[last]) if last >= 0 else LookupState.MISS


def slot_of(rig: Rig, key: OffloadKey) -> int | None:
    status = rig.host.block_status(key)
    return None if status is None else status.slot


def in_tier(rig: Rig, keys: list[OffloadKey]) -> list[int]:
    return np.flatnonzero(rig.tier.contains(keys) == LookupState.HIT).tolist()


def on_disk(rig: Rig, keys: list[OffloadKey]) -> int:
    """Returns how many leading blocks the tier has, and checks that it has none behind them."""
    found = rig.tier.contains(keys) == LookupState.HIT
    leading = len(keys) if found.all() else int(found.argmin())
    assert np.count_nonzero(found) == leading, "a block is written behind a hole"
    return leading


def begin(rig: Rig, keys: list[OffloadKey], context: ReqContext) -> None:
    """A request looks up ``keys``, which it will compute."""
    rig.manager.touch(keys, context)
    rig.manager.lookup(keys, context)


def compute(rig: Rig, keys: list[OffloadKey]) -> None:
    output = rig.manager.prepare_store(keys)
    assert output is not None
    rig.manager.complete_store(keys)
