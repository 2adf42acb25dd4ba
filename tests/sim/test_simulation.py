"""Simulated servers on a failing disk break no law, and each bug planted in them breaks one."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvoffload.abc import ByteArray, LoadStoreSpec, OffloadKey, Slots, Tier, TierResult
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering import chains, writes
from kvoffload.tiering.chains import TierBlocks
from kvoffload.tiering.health import MAX_FAILURES
from kvoffload.tiering.plan import Bools, ChainLayout, Look, WritePlan, plan_writes
from kvoffload.tiering.waits import Waits
from kvoffload.tiers.disk.blockio import Batch, BlockIO
from kvoffload.tiers.disk.format import payload_checksums
from kvoffload.tiers.disk.tier import DiskTier
from tests.asking_tier import AskingTier
from tests.clock import Clock
from tests.scale import scaled
from tests.sim import life as living
from tests.sim import simulation
from tests.sim.__main__ import main
from tests.sim.engine import BrokenPromise, Late, Leak, LowerTiers, ModelEngine, Scenario, WrongBytes
from tests.sim.executor import SteppedExecutor
from tests.sim.life import Blocked, FalseAlarm
from tests.sim.memory_tier import MemoryTier
from tests.sim.simulation import (
    DiskLife,
    OverBudget,
    Report,
    Server,
    Unlocked,
    plan,
    run_simulations,
    simulate,
)
from tests.sim.storage import FaultRates
from tests.sim.watch import SlotTaken, Unreachable

SEEDS = scaled(60)
FIRST_SEED = 60
"""The rarest faults happen with few seeds, and with one of the next 90."""
PLANTED_SEEDS = 600


@pytest.fixture(scope="module")
def report() -> Report:
    return run_simulations(range(FIRST_SEED, FIRST_SEED + SEEDS))


def test_no_law_is_broken(report: Report) -> None:
    assert report.failures == {}


def test_every_kind_of_fault_and_end_happens(report: Report) -> None:
    for fault in (field.name for field in dataclasses.fields(FaultRates)):
        assert report.counts[f"faults: {fault}"] > 0, f"never injected: {fault}"
    for end in ("close", "kill", "power_loss"):
        assert report.counts[f"lives that were to end by {end}"] > SEEDS / 10
    for event in (
        "lives killed in an operation",
        "lives closed while a job hangs",
        "tier_bad_blocks:disk",
        "tier_evicted_blocks:disk",
        "faults: read_only",
    ):
        assert report.counts[event] > 0, f"never happened: {event}"
    assert report.counts["restarts that read from disk"] > SEEDS / 6
    assert report.counts["calm restarts that read from disk"] > SEEDS / 30


def test_a_seed_replays_its_simulation() -> None:
    counts = [simulate(seed) for seed in range(10)]
    assert counts == [simulate(seed) for seed in range(10)]
    assert len({tuple(sorted(each.items())) for each in counts}) == 10


def warm(seed: int) -> list[DiskLife]:
    """Two lives without faults and resets and with room for all blocks. The first one ends when its requests have."""
    first = plan(seed)[0]
    scenario = dataclasses.replace(
        first.scenario,
        reset_chance=0.0,
        update_chance=0.0,
        abort_chance=0.0,
        copy_failure_rate=0.0,
        options_rate=0.0,
        store_threshold=None,
        num_host_blocks=200,
        num_requests=8,
        load_deadline_ms=1000.0,
    )
    if any(group.state for group in scenario.groups):
        # With the same prompts, none of which ends with a block, there are states that a later request can use.
        unit = math.lcm(*(group.block_tokens for group in scenario.groups))
        tokens = max(unit + 1, scenario.document_tokens + (scenario.document_tokens % unit == 0))
        num_blocks = scenario.num_device_blocks + 2 * unit
        scenario = dataclasses.replace(
            scenario,
            max_question_tokens=0,
            document_tokens=tokens,
            num_device_blocks=num_blocks,
            drops_last_state=False,
        )
    calm = dataclasses.replace(
        first,
        scenario=scenario,
        num_blocks=400,
        rates=FaultRates(),
        read_only_at=None,
        full_at=None,
        kill_at=None,
        end="close" if seed % 2 else "kill",
        end_at=None,
        lookup_deadline_ms=100.0,
        load_only_if_faster=False,
        max_queued=4096,
    )
    return [calm, dataclasses.replace(calm, scenario=dataclasses.replace(scenario, seed=seed + 10**6))]


def sleeping(lives: list[DiskLife], sleep_chance: float) -> list[DiskLife]:
    """Returns the same lives, with sleeps from which servers wake up with the same or other weights."""
    return [
        dataclasses.replace(life, scenario=dataclasses.replace(life.scenario, sleep_chance=sleep_chance))
        for life in lives
    ]


def test_no_law_is_broken_by_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "plan", lambda seed: sleeping(plan(seed), 0.1))
    assert run_simulations(range(SEEDS // 5)).failures == {}


def test_blocks_on_disk_outlive_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "plan", lambda seed: sleeping(warm(seed), 0.1))

    def never_keeps(server: Server) -> None:
        reset = server.engine.scheduler.reset
        server.engine.scheduler.reset = lambda is_pause=False: reset()  # type: ignore[method-assign]

    kept, dropped = run_simulations(range(10)), run_simulations(range(10), patch=never_keeps)
    assert kept.failures == dropped.failures == {}
    assert kept.counts["promoted_blocks"] > dropped.counts["promoted_blocks"]


def test_a_restart_without_faults_reads_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "plan", warm)
    cold = [seed for seed in range(10) if not simulate(seed)["restarts that read from disk"]]
    assert not cold, f"nothing was read from disk after the restart of {cold}"


class InMemory(LowerTiers):
    """A fast small tier, or a slow large one that must be asked first, or both."""

    def __init__(self, seed: int, clock: Clock, write_share: float) -> None:
        self.random, self.clock, self.write_share = Random(seed), clock, write_share
        self.executors: list[SteppedExecutor] = []
        self.lookup_deadline_ms = self.random.choice((0.0, 3.0, 100.0))
        self.load_only_if_faster = self.random.random() < 0.3

    def make(self, pools: Sequence[ByteArray]) -> list[Tier]:
        tiers: list[Tier] = []
        for tier_class, num_blocks in self.random.choice(((MEMORY,), (ASKING,), (MEMORY, ASKING))):
            chance = self.random.choice((0.1, 0.5, 0.9))
            max_queued = self.random.choice((2, 4096))
            self.executors.append(SteppedExecutor(self.random.randrange(1000), 3, max_queued, chance, clock=self.clock))
            tiers.append(tier_class(pools, num_blocks, self.executors[-1], self.clock))
        return tiers

    def tick(self) -> None:
        for executor in self.executors:
            executor.tick()

    def settle(self) -> None:
        for executor in self.executors:
            executor.drain()


MEMORY, ASKING = (MemoryTier, 6), (AskingTier, 60)


def short_of_host(seed: int) -> Scenario:
    """Returns a scenario in which many requested blocks have left the host and the device."""
    rng, scenario = Random(seed), Scenario.random(seed)
    return dataclasses.replace(
        scenario,
        num_host_blocks=rng.choice((6, 12, 24)) * max(1, len(scenario.groups)),
        prefix_caching=rng.random() < 0.3,
        num_documents=rng.randint(2, 4),
        load_deadline_ms=rng.choice((0.0, 3.0, 10.0, 50.0, 1000.0)),
    )


def run_in_memory(seed: int) -> ModelEngine:
    clock, scenario = Clock(100.0), short_of_host(seed)
    # The usual share of such a small host is one block, so hardly anything would be written.
    num_writing = Random(seed).choice((1, 4, scenario.num_host_blocks))
    lower = InMemory(seed, clock, (num_writing + 0.5) / scenario.num_host_blocks)
    engine = ModelEngine(scenario, lower=lower, clock=clock)
    engine.run()
    return engine


def test_any_engine_on_tiers_that_never_fail() -> None:
    promoted = Counter[str]()
    for seed in range(SEEDS // 3):
        engine = run_in_memory(seed)
        assert engine.tiered is not None
        what = " and ".join(tier.tier.name for tier in engine.tiered.tiers)
        promoted[what] += int(engine.scheduler.metrics.snapshot().get("promoted_blocks", 0))
    assert len(promoted) == 3
    assert all(promoted.values()), f"nothing was promoted: {promoted}"


class MoodyTier(MemoryTier):
    """By chance, lookups of it have failed, and it takes on no read of blocks that it holds."""

    def __init__(self, pools: Sequence[ByteArray], executor: SteppedExecutor, clock: Clock, random: Random) -> None:
        super().__init__(pools, 60, executor, clock)
        self._random = random

    def poll(self) -> list[TierResult]:
        if self._random.random() < 0.02:
            self.num_failed_lookups += MAX_FAILURES
        return super().poll()

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return [] if self._random.random() < 0.9 else super().read(keys, slots)


class Moody(LowerTiers):
    """A MoodyTier, whose pauses are short on its clock."""

    write_share = 0.5

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random, self.clock = Random(seed), clock
        self.executor = SteppedExecutor(seed, chance=0.9, clock=clock)

    def make(self, pools: Sequence[ByteArray]) -> list[Tier]:
        return [MoodyTier(pools, self.executor, self.clock, self.random)]

    def tick(self) -> None:
        self.executor.tick()
        self.clock.now += self.random.choice((0.0, 0.0, 0.5))

    def settle(self) -> None:
        self.executor.drain()


def run_moody(seed: int) -> None:
    """Runs an engine with chains longer than its host memory and requests that wait for device blocks."""
    clock = Clock(100.0)
    scenario = Scenario(
        seed=seed,
        num_layers=1,
        block_size=2,
        num_device_blocks=24,
        prefix_caching=False,
        num_host_blocks=10,
        load_deadline_ms=60_000.0,
        num_requests=30,
        num_documents=2,
        document_tokens=28,
        max_question_tokens=2,
        max_new_tokens=6,
        copy_chance=1.0,
    )
    ModelEngine(scenario, lower=Moody(seed, clock), clock=clock).run()


def run_moody_seeds(num_seeds: int) -> None:
    for seed in range(num_seeds):
        run_moody(seed)


def test_what_makes_room_for_a_test_read_is_not_promised() -> None:
    """Whether or not the tier takes the read on."""
    run_moody_seeds(scaled(10))


def test_an_eviction_that_is_not_counted_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyOffloadingManager, "num_removed", 0)
    with pytest.raises(BrokenPromise):
        run_moody_seeds(20)


# Bugs. Each is planted in a server before that runs.


def checksum_not_verified(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = BlockIO._verified

    def whatever_was_read(
        io: BlockIO, batch: Batch, blocks: Any, spans: Any, problems: Any, header: Any, *args: Any
    ) -> Any:
        batch.facts["payload_checksum"] = payload_checksums(header, batch.keys, blocks)
        return verified(io, batch, blocks, spans, problems, header, *args)

    monkeypatch.setattr(BlockIO, "_verified", whatever_was_read)


def record_written_before_the_payload(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs, index = tier.files.slabs, tier.files.index
    write, write_records = slabs.write, index.write_records
    late: dict[int, Any] = {}
    monkeypatch.setattr(slabs, "write", late.__setitem__)

    def records_first(first_slot: int, records: ByteArray) -> None:
        write_records(first_slot, records)
        if first_slot in late:
            write(first_slot, late.pop(first_slot))

    monkeypatch.setattr(index, "write_records", records_first)


def old_record_stays_while_the_payload_is_overwritten(
    server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier.files.index, "empty_records", lambda first_slot, count: None)


def promotion_ready_before_it_is_read(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    read, poll = tier.read, tier.poll
    reported: list[TierResult] = []

    def read_and_tell(keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = read(keys, slots)
        reported.extend(TierResult(key, True, nbytes=tier.block_bytes) for key in taken)
        return taken

    def poll_early() -> list[TierResult]:
        early = reported.copy()
        reported.clear()
        return early + [result for result in poll() if not result.is_read]

    monkeypatch.setattr(tier, "read", read_and_tell)
    monkeypatch.setattr(tier, "poll", poll_early)


def budget_off_by_one_slab(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    budget, make_room = tier.files.budget, tier.files.budget.make_room
    slab = budget.layout.slots_per_slab
    monkeypatch.setattr(budget, "make_room", lambda num_slots: make_room(num_slots - slab))


def reset_without_a_new_generation(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "reset", tier.catalog.blocks.reset)


def reset_forgets_what_is_being_written(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late completion of a write brings its key back."""

    def forget_the_rest() -> None:
        written = list(server.written)
        tier.delete([key for key, state in zip(written, tier.contains(written), strict=True) if state])

    monkeypatch.setattr(tier.catalog.blocks, "reset", forget_the_rest)


def host_slot_freed_while_a_read_into_it_is_under_way(
    server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, end = server.engine.policy_manager, Waits.end

    def free_at_once(waits: Waits, wait: Any) -> None:
        host.complete_store(list(wait.reading), success=False)
        end(waits, wait)

    monkeypatch.setattr(Waits, "end", free_at_once)


def host_slot_not_held_while_it_is_written_from(
    server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, write = server.engine.policy_manager, tier.write

    def write_and_unpin(keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        host.complete_load(LoadStoreSpec("CPU", slots))
        return write(keys, slots)

    monkeypatch.setattr(tier, "write", write_and_unpin)
    monkeypatch.setattr(TierBlocks, "_unpin", lambda self, keys: None)


def another_fingerprints_blocks(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every life uses the same fingerprint, whatever its weights."""
    monkeypatch.setattr(living, "fingerprint", lambda weights: "00" * 32)


def reset_writes_on_the_schedulers_thread(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    reset = tier.reset

    def reset_at_once() -> None:
        reset()
        tier.files.index.write_header()

    monkeypatch.setattr(tier, "reset", reset_at_once)


def no_deadline(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waits, "_give_up_late", lambda waits, now: None)
    monkeypatch.setattr(server.engine.scheduler.lookups, "deadline_s", 1e9)


def closed_with_a_file_open(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier.files, "close", server.storage.close)


def lock_given_up_while_a_job_hangs(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    close = tier.close

    def close_and_unlock() -> None:
        close()
        server.medium.close()

    monkeypatch.setattr(tier, "close", close_and_unlock)


def a_block_left_out(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks behind it are written behind a hole."""

    def without_the_first(*args: Any, **options: Any) -> WritePlan:
        made = plan_writes(*args, **options)
        return dataclasses.replace(made, keys=made.keys[1:]) if len(made.keys) > 2 else made

    monkeypatch.setattr(writes, "plan_writes", without_the_first)


def a_state_taken_for_optional(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV behind the last state is written, where no request can resume."""

    def without_states(
        layout: ChainLayout, by_group: Any, start: int, stop: int, is_last: bool, look: Look
    ) -> WritePlan:
        def look_past_states(keys: Sequence[OffloadKey]) -> tuple[Bools, Bools]:
            if keys and layout.groups[key_group_idx(keys[0])].state:
                return np.ones(len(keys), np.bool_), np.ones(len(keys), np.bool_)
            return look(keys)

        return plan_writes(layout, by_group, start, stop, is_last, look_past_states)

    monkeypatch.setattr(writes, "plan_writes", without_states)


def what_follows_a_failed_write_stays(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "MAX_REWRITES", -1)
    monkeypatch.setattr(
        chains, "unreachable", lambda layout, by_group, *args: [np.zeros(len(keys), np.bool_) for keys in by_group]
    )


def a_result_lost(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, polled = tier.poll, [0]

    def lose_the_tenth() -> list[TierResult]:
        results = poll()
        polled[0] += len(results)
        return results[1:] if results and polled[0] % 10 == 0 else results

    monkeypatch.setattr(tier, "poll", lose_the_tenth)


Bug: TypeAlias = Callable[[Server, DiskTier, pytest.MonkeyPatch], None]

BUGS: dict[Bug, tuple[type[Exception], int]] = {
    checksum_not_verified: (WrongBytes, 51),
    record_written_before_the_payload: (FalseAlarm, 21),
    old_record_stays_while_the_payload_is_overwritten: (FalseAlarm, 55),
    promotion_ready_before_it_is_read: (WrongBytes, 104),
    budget_off_by_one_slab: (OverBudget, 63),
    reset_without_a_new_generation: (WrongBytes, 5),
    reset_forgets_what_is_being_written: (FalseAlarm, 65),
    host_slot_freed_while_a_read_into_it_is_under_way: (SlotTaken, 0),
    host_slot_not_held_while_it_is_written_from: (SlotTaken, 0),
    another_fingerprints_blocks: (WrongBytes, 87),
    reset_writes_on_the_schedulers_thread: (Blocked, 2),
    no_deadline: (Late, 45),
    closed_with_a_file_open: (Leak, 0),
    lock_given_up_while_a_job_hangs: (Unlocked, 93),
    a_block_left_out: (Unreachable, 0),
    a_state_taken_for_optional: (Unreachable, 3),
    what_follows_a_failed_write_stays: (Unreachable, 245),
    a_result_lost: (Leak, 5),
}
"""The error of the law that each breaks, and a seed that has found it, which is tried first."""


def failure(seed: int, bug: Bug) -> str | None:
    """Returns what the simulation of ``seed`` finds with ``bug`` planted in it."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        def patch(server: Server) -> None:
            if server.tier is not None:
                bug(server, server.tier, monkeypatch)

        return run_simulations([seed], patch=patch).failures.get(seed)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    law, hint = BUGS[bug]

    def found(seed: int) -> str | None:
        said = failure(seed, bug)
        return said if said and said.startswith(f"{law.__name__}: simulation {seed}, life ") else None

    seed, said = next(((seed, said) for seed in [hint, *range(PLANTED_SEEDS)] if (said := found(seed))), (None, None))
    assert seed is not None, f"not found in {PLANTED_SEEDS} seeds"
    print(f"{bug.__name__}: found by seed {seed}: {said}")
    assert found(seed) == said, "the seed does not replay its failure"
    assert not run_simulations([seed]).failures


# The program.


def test_the_program_prints_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "3", "--first", "5"]) == 0
    printed = capsys.readouterr().out
    assert "3  simulations" in printed
    assert "0 with a broken law" in printed


def test_the_program_prints_how_to_replay_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seed: int, patch: object = None) -> Counter[str]:
        raise WrongBytes("a block of another")

    monkeypatch.setattr(simulation, "simulate", fail)
    assert main(["simulate", "--seeds", "2", "--first", "7"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: seed 8: WrongBytes: a block of another" in printed
    assert "python -m tests.sim simulate --first 8 --seeds 1" in printed
