"""One simulated server, from its start to its end: what all simulations of servers have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, TypeAlias, TypeVar

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.layout import FIXED_BYTES, SLAB_OVERHEAD_BYTES, slot_cost
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from tests.clock import Clock
from tests.sim.engine import LowerTiers, ModelEngine, Scenario
from tests.sim.executor import SteppedExecutor
from tests.sim.watch import TierWatch

WEIGHTS_APART = 1_000_000
"""Versions of the weights that one server can have."""

AnyServer = TypeVar("AnyServer", bound="LivingServer")
Patch: TypeAlias = Callable[[AnyServer], None]
"""Called with a server that has started; may plant a bug."""


class Blocked(AssertionError):
    """The scheduler's thread waited for the medium."""


class FalseAlarm(AssertionError):
    """A block was found bad, or a tier was switched off, although no device had failed."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """The settings of one server. Simulations add theirs."""

    scenario: Scenario
    weights: int
    end: str
    """How it ends: close, kill, or what a simulation adds."""
    end_at: int | None
    """The step at which it ends, or None if it ends when all requests have."""
    lookup_deadline_ms: float
    load_only_if_faster: bool
    num_threads: int
    max_queued: int
    write_share: float
    """Share of the host's blocks that may be pinned for writes; more than in a real host, which is larger."""
    full_steps: range
    """Steps in which the engine gives device blocks to no request."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.weights)


class LivingServer(LowerTiers):
    """One life under way. ``executors`` run the jobs of its tiers, ``watches`` are one per tier."""

    steps_per_check: ClassVar[int]
    """Steps between two integrity checks."""

    def __init__(self, life: Life, clock: Clock, new_versions: Iterator[int]) -> None:
        self.life = life
        self.clock = clock
        self.lookup_deadline_ms = life.lookup_deadline_ms
        self.load_only_if_faster = life.load_only_if_faster
        self.write_share = life.write_share
        self.fingerprint = life.fingerprint
        self.engine: ModelEngine
        self.executors: list[SteppedExecutor] = []
        self.watches: list[TierWatch] = []
        self.is_serving = False
        self._is_blocked = False
        self._new_versions = new_versions

    def make_executor(self, seed: int, chance: float) -> SteppedExecutor:
        life = self.life
        self.executors.append(SteppedExecutor(seed, life.num_threads, life.max_queued, chance, clock=self.clock))
        return self.executors[-1]

    def start(self, patch: Callable[[Any], None] | None = None) -> None:
        """Makes the engine, which opens the tiers, then calls ``patch``. Raises Killed if the server is killed
        meanwhile."""
        life = self.life
        version = life.weights * WEIGHTS_APART
        self.engine = ModelEngine(
            life.scenario, lower=self, clock=self.clock, version=version, new_versions=self._new_versions
        )
        for watch in self.watches:
            watch.attach(self.engine)
        if patch is not None:
            patch(self)

    def open_disk(
        self,
        storage: Storage,
        pools: Sequence[ByteArray],
        num_blocks: int,
        slab_blocks: int,
        executor: SteppedExecutor,
        **settings: Any,
    ) -> DiskTier:
        """Returns a tier with room for ``num_blocks`` on ``storage``."""
        block_bytes = sum(pool.shape[1] for pool in pools)
        return DiskTier(
            storage,
            pools,
            DiskSettings(
                self.fingerprint,
                disk_bytes(pools, num_blocks, slab_blocks),
                policy=self.life.scenario.policy,
                slab_bytes=slab_blocks * block_bytes,
                **settings,
            ),
            executor=executor,
            clock=self.clock,
            wall_clock=self.clock,
            random=Random(self.life.scenario.seed).randbytes,
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Returns a context in which the engine runs. Raises Blocked if its thread has used a medium."""
        self.is_serving = True
        try:
            yield
        finally:
            self.is_serving = False
            if self._is_blocked:
                raise Blocked("a method of a tier uses its medium on the scheduler's thread")

    def pause(self) -> None:
        """Called before each access to a medium: on a thread of a tier others may run there, on the scheduler's thread
        it breaks a law."""
        if self.is_serving and not any(executor.in_job for executor in self.executors):
            # The connector would handle an error raised here.
            self._is_blocked = True
        for executor in self.executors:
            executor.pause()

    def tick(self) -> None:
        steps = self.engine.steps
        self.engine.batcher.is_full = steps in self.life.full_steps
        self.tick_threads()
        self.check()
        if steps % self.steps_per_check == 0:
            self.engine.scheduler.manager.check_integrity()

    def tick_threads(self) -> None:
        """Lets threads of the tiers go on for a while."""
        for executor in self.executors:
            executor.tick()

    def check(self) -> None:
        """Raises the error of a law that is broken."""
        for watch in self.watches:
            watch.check_slots()
            if watch.unreachable is not None:
                raise watch.unreachable

    def die(self) -> None:
        """The process is gone: threads stop where they are."""
        for executor in self.executors:
            executor.kill()


def fingerprint(weights: int) -> str:
    return hashlib.sha256(b"weights %d" % weights).hexdigest()


def disk_bytes(pools: Sequence[ByteArray], num_blocks: int, slab_blocks: int) -> int:
    """Returns the capacity of a disk tier with room for exactly ``num_blocks``."""
    slabs = -(-num_blocks // slab_blocks)
    return FIXED_BYTES + slabs * SLAB_OVERHEAD_BYTES + num_blocks * slot_cost(sum(pool.shape[1] for pool in pools))
