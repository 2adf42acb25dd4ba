"""Deterministic simulation: servers that run, end and start again on one disk that fails, all chosen by a seed.

A simulation is a few *lives* of a server, one after the other, on the same simulated disk: the model engine, the real
connector, TieredOffloadingManager and DiskTier, with simulated time, threads and medium, which take turns on one
thread. So a seed replays a whole run. The disk flips bits, tears writes, reads and writes too little, is full, stalls,
turns read-only; servers are killed at any operation, lose their power, shut down in order, come back with other weights
or another budget. These laws must hold:

- every byte that a request attends to is its own (the model engine checks each);
- a host slot that the tier reads into or writes from belongs to that block until the tier has reported it;
- the disk never holds more than the tier says, and that is never more than the tier was given;
- nothing is written behind a block that was never on disk, nor stays behind one whose write has failed;
- no request waits past its deadline, all of them end, and no method of the tier does I/O on the scheduler's thread;
- a promised load begins, no pin is left, no file is left open, and the connector is never switched off;
- without faults, blocks that were written are found again after a restart (``Report`` has the counts for it).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvoffload.abc import ByteArray, ConfigError, IntegrityError, OffloadKey, Tier
from kvoffload.tiers.disk.tier import CLOSE_DEADLINE_S, DiskTier
from tests.clock import Clock
from tests.sim.engine import Leak, Scenario, random_groups
from tests.sim.executor import Killed
from tests.sim.life import WEIGHTS_APART, FalseAlarm, Life, LivingServer, Patch, disk_bytes
from tests.sim.scenario import PARTS_SHARE, STATES_SHARE
from tests.sim.shared_storage import SimulatedStorage
from tests.sim.storage import FaultRates, FaultyStorage
from tests.sim.watch import TierWatch

MAX_STEPS_TO_A_JOB = 10
"""How many steps a kill waits for a job to be half done."""
MAX_SETTLING_S = 120.0
"""Transfers under way when all requests have ended end within this time, even stalled ones."""
MAX_FAILURES = 10
"""``run_simulations`` stops after this many failures."""


class OverBudget(AssertionError):
    """The disk held more than its budget, or more than the tier said."""


class Unlocked(AssertionError):
    """A server released the lock of the disk while it still used it."""


@dataclass(frozen=True, kw_only=True)
class DiskLife(Life):
    """One server on the disk. It ends by close, kill, or power_loss."""

    num_blocks: int
    """The budget: room for this many blocks on disk."""
    slab_blocks: int
    rates: FaultRates
    faulty_start: bool
    """Faults begin before the disk is opened."""
    calm_at: int
    """The step after which no more faults are injected."""
    read_only_at: int | None
    full_at: int | None
    """The step after which another process fills the disk."""
    stall_s: float
    kill_at: int | None
    """The operation on the disk during which the server is killed, if it gets that far."""
    blocks_per_job: int

    @property
    def is_calm(self) -> bool:
        """Whether its disk never fails, although it may be slow and the server may be killed."""
        is_full = self.read_only_at is not None or self.full_at is not None
        only_stalls = dataclasses.replace(self.rates, stall=0.0) == FaultRates()
        return only_stalls and not is_full and self.end != "power_loss"


def plan(seed: int) -> list[DiskLife]:
    """Returns the lives of the simulation of ``seed``."""
    rng = Random(seed)
    base, parts = small_scenario(rng), Random(f"parts {seed}")
    if parts.random() < PARTS_SHARE:
        base = base.with_parts(parts)
    base = base.with_heads(Random(f"heads {seed}"))
    calm = rng.random() < 0.3
    # Of every block, the disk has room for all parts.
    num_blocks, num_parts = rng.choice((3, 12, 40, 100)), max(base.parts.counts)
    slow = rng.random() < 0.4
    slab_blocks = rng.choice((2, 5, 100))
    lives, weights = [], 0
    for number in range(rng.randint(2, 4)):
        if rng.random() < 0.15:
            weights = 1 - weights
        if rng.random() < 0.2:
            num_blocks = rng.choice((2, 5, 12, 40))
        if rng.random() < 0.05:
            slab_blocks = rng.choice((1, 3))
        lives.append(_life(rng, base, seed * 10 + number, calm, slow, weights, num_blocks * num_parts, slab_blocks))
    return lives


def small_scenario(rng: Random) -> Scenario:
    """Returns a scenario of few short requests, in which blocks are scarce."""
    block_size, factor = rng.choice((1, 2, 4)), rng.choice((1, 1, 2))
    document_tokens = rng.choice((8, 16, 24)) * block_size // 2
    longest = (document_tokens + 6 + 3) // block_size + 1
    scenario = Scenario(
        num_layers=1,
        block_size=block_size,
        block_size_factor=factor,
        num_device_blocks=2 + longest + rng.randint(0, longest),
        max_tokens_per_step=rng.choice((5, 16, 64)),
        max_running=rng.randint(1, 4),
        prefix_caching=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.3,
        num_host_blocks=rng.choice((8, 24, 48, 100)),
        policy=rng.choice(("lru", "auto")),
        num_documents=rng.randint(1, 3),
        document_tokens=document_tokens,
        max_question_tokens=6,
        max_new_tokens=3,
        abort_chance=rng.choice((0.0, 0.0, 0.05)),
        reset_chance=rng.choice((0.0, 0.0, 0.0, 0.03)),
        copy_chance=rng.choice((0.4, 1.0)),
        copy_failure_rate=rng.choice((0.0, 0.0, 0.0, 0.2)),
        documents_seed=rng.randrange(1 << 30),
    )
    if rng.random() < 0.3:
        scenario = scenario.with_groups(random_groups(rng)[:2], rng)
    else:
        scenario = dataclasses.replace(scenario, num_ranks=rng.choice((1, 1, 2)), tensor_parallel=True)
    rng = Random(f"exclusive {scenario.documents_seed}")
    scenario = dataclasses.replace(scenario, is_exclusive=rng.random() < 0.6, looks_ahead=rng.random() < 0.5)
    rng = Random(f"states {scenario.documents_seed}")
    if rng.random() < STATES_SHARE:
        # A state is found by requests with the same tokens up to it, so questions must be rare.
        scenario = dataclasses.replace(scenario.with_states(rng), max_question_tokens=rng.choice((0, 0, 1, 6)))
    return scenario


def _life(
    rng: Random, base: Scenario, seed: int, calm: bool, slow: bool, weights: int, num_blocks: int, slab_blocks: int
) -> DiskLife:
    scenario = dataclasses.replace(
        base,
        seed=seed,
        num_requests=rng.randint(3, 8),
        update_chance=Random(seed).choice((0.0, 0.0, 0.0, 0.04)),
        keeps_device_cache=seed % 2 == 0,
        store_threshold=rng.choice((None, None, None, None, 2)),
        load_deadline_ms=rng.choice((0.0, 3.0, 10.0, 30.0)) if slow else rng.choice((30.0, 200.0)),
    ).with_parallelism(Random(f"parallelism {seed}"))
    end = rng.choice(("close", "kill") if calm else ("close", "kill", "kill", "power_loss"))
    life = DiskLife(
        scenario=scenario,
        weights=weights,
        num_blocks=num_blocks,
        slab_blocks=slab_blocks,
        rates=_rates(rng, calm),
        faulty_start=rng.random() < 0.15,
        calm_at=rng.choice((10, 40, 1 << 30)),
        read_only_at=None if calm or rng.random() < 0.95 else rng.randint(0, 30),
        full_at=None if calm or rng.random() < 0.9 else rng.randint(0, 30),
        stall_s=rng.choice((0.005, 0.05, 30.0)),
        end=end,
        end_at=rng.randint(5, 60) if rng.random() < (0.5 if end == "close" else 0.8) else None,
        kill_at=None if rng.random() < 0.7 else int(2 ** rng.uniform(2, 9)),
        lookup_deadline_ms=rng.choice((0.0, 5.0, 100.0)),
        load_only_if_faster=rng.random() < 0.2,
        num_threads=rng.choice((1, 3, 4)),
        max_queued=rng.choice((2, 8, 4096)),
        blocks_per_job=rng.choice((1, 3, 1000)),
        write_share=rng.choice((0.125, 0.5, 0.9)),
        full_steps=choose_full_steps(seed),
    )
    if end == "close" and life.stall_s > CLOSE_DEADLINE_S:
        # By chance it seldom happens that a job still hangs when the server has been closed.
        life = dataclasses.replace(life, rates=dataclasses.replace(life.rates, stall=0.3), calm_at=1 << 30)
    return life


def choose_full_steps(seed: int) -> range:
    """Returns the steps in which the engine gives device blocks to no request, often none."""
    rng = Random(f"full {seed}")
    start = rng.randint(0, 20)
    return range(start, start + rng.choice((0, 0, 0, 50, 400)))


def _rates(rng: Random, calm: bool) -> FaultRates:
    """Returns no faults, or some kinds of them, rare or frequent."""
    names = [each.name for each in dataclasses.fields(FaultRates)]
    chosen = ["stall"] if calm else rng.sample(names, rng.choice((1, 1, 2, 3)))
    rates = FaultRates(**{name: rng.choice((0.01, 0.05, 0.3)) for name in chosen})
    return FaultRates() if rng.random() < 0.3 else rates


class Server(LivingServer):
    """One life under way."""

    life: DiskLife
    steps_per_check = 8

    def __init__(self, life: DiskLife, storage: SimulatedStorage, clock: Clock, new_versions: Iterator[int]) -> None:
        super().__init__(life, clock, new_versions)
        seed = life.scenario.seed
        self.executor = self.make_executor(seed, Random(seed).choice((0.1, 0.3, 0.6, 0.9)))
        self.medium = storage.restart(self.pause)
        self.storage = FaultyStorage(self.medium, seed, stall=lambda: self.executor.stall(life.stall_s))
        self.storage.kill_at = life.kill_at
        self.tier: DiskTier | None = None
        self.hangs = False
        """Whether a job was still under way when the tier was closed."""

    @property
    def written(self) -> dict[OffloadKey, None]:
        """Keys that the tier has taken on to write."""
        return self.watches[0].written if self.watches else {}

    def make(self, pools: Sequence[ByteArray]) -> Sequence[Tier]:
        life, medium = self.life, self.medium
        before = medium.used_bytes
        most = max(before, disk_bytes(pools, life.num_blocks, life.slab_blocks))
        medium.capacity_bytes = most + (64 << 10)
        medium.reset_peak()
        self.storage.rates = life.rates if life.faulty_start else FaultRates()
        job_bytes = life.blocks_per_job * sum(pool.shape[1] for pool in pools)
        try:
            self.tier = self.open_disk(
                self.storage, pools, life.num_blocks, life.slab_blocks, self.executor, job_bytes=job_bytes
            )
        except (ConfigError, OSError):
            if not self.storage.injected:
                raise
            return []
        if medium.peak_bytes > most:
            raise OverBudget(f"{medium.peak_bytes} bytes at the start, {most} allowed, {before} before")
        medium.reset_peak()
        self.storage.rates = life.rates
        self.watches.append(TierWatch(self.tier))
        return [self.tier]

    def check_all_reachable(self) -> None:
        """Raises Unreachable if a block is left behind one whose write has failed. For when nothing is under way."""
        tiered = self.engine.tiered
        assert tiered is not None
        if self.watches and not tiered.tiers[0].is_off and not tiered.tiers[0].writes.backlog.num_ready:
            self.watches[0].check_all_reachable()

    def run(self) -> None:
        """Runs the life to its end. Raises Killed if it is killed, and AssertionError if a law is broken."""
        with self.serving():
            self.engine.run(self.life.end_at)
            if self.life.end != "close":
                self._run_into_a_job()
        if self.life.end_at is None:
            self.check_all_reachable()
        if self.life.end == "close":
            self.close()
        self.check_budget()

    def _run_into_a_job(self) -> None:
        """Runs on until a job is half done, if that happens soon."""
        for _ in range(MAX_STEPS_TO_A_JOB):
            if self.executor.in_the_middle or not self.is_serving:
                break
            self.engine.run(self.engine.steps + 1)

    def close(self) -> None:
        self.engine.scheduler.shutdown()
        if self.storage.is_killed():
            # The thread that writes the rest and closes the files has ended there, and no one else has noticed.
            raise Killed
        if self.executor.idle and (self.medium.num_open or self.medium.is_locked):
            raise Leak(f"{self.medium.num_open} files are open after the shutdown, locked: {self.medium.is_locked}")
        self.hangs = not self.executor.idle
        if self.hangs and not self.medium.is_locked:
            raise Unlocked("the next server could start while a job of this one still writes")

    def die(self) -> None:
        super().die()
        if self.life.end == "power_loss":
            self.medium.power_loss()
        else:
            self.medium.kill()

    def tick(self) -> None:
        steps, life, storage = self.engine.steps, self.life, self.storage
        if steps == life.calm_at:
            storage.active = False
        storage.read_only = life.read_only_at is not None and steps >= life.read_only_at
        if steps == life.full_at:
            self.medium.capacity_bytes = self.medium.used_bytes
        super().tick()

    def check(self) -> None:
        self.check_budget()
        super().check()

    def settle(self) -> None:
        self.is_serving = self.storage.active = False
        until = self.clock.now + MAX_SETTLING_S
        while not self.executor.idle and self.clock.now < until:
            self.executor.drain()
            self.clock.now += 1.0
        if not self.executor.idle:
            raise Leak("jobs of the tier do not end")

    def check_budget(self) -> None:
        if self.tier is not None:
            files = self.tier.files
            used, claimed, allowed = self.medium.peak_bytes, files.used_bytes, files.budget.capacity_bytes
            if self.medium.used_bytes > claimed or max(used, claimed) > allowed:
                raise OverBudget(f"{used} bytes in use at most, {claimed} according to the tier, {allowed} allowed")


def simulate(seed: int, patch: Patch[Server] | None = None) -> Counter[str]:
    """Runs the simulation of ``seed`` and returns counts of what happened in it. Raises the error of a law that is
    broken."""
    lives = plan(seed)
    counts = Counter({"simulations": 1})
    storage = SimulatedStorage(0, seed)
    clock = Clock(1000.0)
    calm = True
    written: dict[OffloadKey, None] = {}
    for number, life in enumerate(lives):
        calm = calm and life.is_calm
        new_versions = itertools.count(life.weights * WEIGHTS_APART + 1 + number * 10_000)
        server = Server(life, storage, clock, new_versions)
        try:
            server.start(patch)
            server.run()
            _check_calm(server, calm)
        except Killed:
            counts["lives killed in an operation"] += 1
        except (AssertionError, IntegrityError) as error:
            raise type(error)(f"simulation {seed}, life {number}: {error}") from error
        finally:
            server.die()
        written.update(server.written)
        if calm:
            _audit(seed, number, life, storage.clone(), list(written))
        _count(counts, server, number, calm)
        clock.now += 1.0
    return counts


def _audit(seed: int, number: int, life: DiskLife, storage: SimulatedStorage, keys: list[OffloadKey]) -> None:
    """Raises FalseAlarm if the disk, which never failed, holds a block that cannot be read."""
    scenario = dataclasses.replace(life.scenario, num_host_blocks=max(1, len(keys)), num_requests=0)
    life = dataclasses.replace(life, scenario=scenario, kill_at=None, max_queued=len(keys) + 1)
    server = Server(life, storage, Clock(5000.0), itertools.count(1))
    server.start()
    assert server.tier is not None
    taken = server.tier.read(keys, np.arange(len(keys), dtype=np.int64))
    server.settle()
    results = server.tier.poll()
    server.die()
    bad = [result for result in results if not result.ok]
    if bad or len(results) != len(taken):
        raise FalseAlarm(f"simulation {seed}, life {number}: afterwards, on a disk that never failed: {bad}")


def _check_calm(server: Server, calm: bool) -> None:
    """Raises FalseAlarm if a block was found bad on a disk that never failed. Even blocks that a kill has torn must not
    be found."""
    found = server.engine.scheduler.metrics.snapshot()
    bad = {name: found[name] for name in ("tier_bad_blocks:disk", "tier_off:disk") if found.get(name)}
    if calm and bad:
        raise FalseAlarm(f"on a disk that never failed: {bad}")


def _count(counts: Counter[str], server: Server, number: int, calm: bool) -> None:
    counts["lives"] += 1
    counts[f"lives that were to end by {server.life.end}"] += 1
    counts["operations on the disk"] += server.storage.operations
    for fault, n in server.storage.injected.items():
        counts[f"faults: {fault}"] += n
    if server.tier is None:
        counts["lives without a disk"] += 1
        return
    counts["lives closed while a job hangs"] += server.hangs
    found = server.engine.scheduler.metrics.snapshot()
    for name in (
        "promoted_blocks",
        *(f"tier_{each}:disk" for each in ("write_blocks", "bad_blocks", "evicted_blocks", "off")),
    ):
        counts[name] += int(found.get(name, 0))
    counts["steps"] += server.engine.steps
    if number:
        counts["restarts"] += 1
        counts["restarts that read from disk"] += found.get("promoted_blocks", 0) > 0
        if calm:
            counts["calm restarts"] += 1
            counts["calm restarts that read from disk"] += found.get("promoted_blocks", 0) > 0


@dataclass
class Report:
    """Counts of simulations, lives, steps, blocks and faults; and by seed, the laws that were broken."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)


def run_simulations(
    seeds: Iterable[int], progress: Callable[[Report], None] = lambda report: None, patch: Patch[Server] | None = None
) -> Report:
    """Runs the simulations of ``seeds``, and calls ``progress`` after each. Stops after MAX_FAILURES failures."""
    return run_each(seeds, lambda seed: simulate(seed, patch), progress)


def run_each(
    seeds: Iterable[int],
    simulate_one: Callable[[int], Counter[str]],
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Calls ``simulate_one`` for each seed, and ``progress`` after each. Stops after MAX_FAILURES failures."""
    report = Report()
    with quiet():
        for seed in seeds:
            try:
                report.counts += simulate_one(seed)
            except Exception as error:
                report.failures[seed] = f"{type(error).__name__}: {error}"
                if len(report.failures) == MAX_FAILURES:
                    break
            progress(report)
    return report


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the warnings and errors that failing disks cause."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
