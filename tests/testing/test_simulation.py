"""Simulated servers on a failing disk break no law, and each bug planted in them does."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

import pytest

from kvoffload.abc import ByteArray, LoadStoreSpec, OffloadKey, Slots, Tier, TierResult
from kvoffload.testing import simulation
from kvoffload.testing.__main__ import main
from kvoffload.testing.engine import Clock, Late, Leak, LowerTiers, ModelEngine, Scenario, WrongBytes
from kvoffload.testing.scale import scaled
from kvoffload.testing.simulation import (
    Blocked,
    FalseAlarm,
    Life,
    OverBudget,
    Report,
    Server,
    SlotTaken,
    Unlocked,
    Unreachable,
    plan,
    run_simulations,
    simulate,
)
from kvoffload.testing.storage import FaultRates
from kvoffload.testing.tiers import AskingTier, MemoryTier, SteppedExecutor
from kvoffload.tiers.disk import blockio
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.writethrough import WriteThrough

SEEDS = scaled(150)
PLANTED_SEEDS = 600


@pytest.fixture(scope="module")
def report() -> Report:
    return run_simulations(range(SEEDS))


def test_no_law_is_broken(report: Report) -> None:
    assert report.failures == {}


def test_what_is_to_be_tested_happens(report: Report) -> None:
    for fault in (field.name for field in dataclasses.fields(FaultRates)):
        assert report.counts[f"faults: {fault}"] > 0, f"never injected: {fault}"
    for end in ("close", "kill", "power_loss"):
        assert report.counts[f"lives that were to end by {end}"] > SEEDS / 10
    for event in (
        "lives killed in an operation",
        "lives closed while a job hangs",
        "disk_bad_blocks",
        "disk_evicted_blocks",
        "faults: read_only",
    ):
        assert report.counts[event] > 0, f"never happened: {event}"
    assert report.counts["restarts that read from disk"] > SEEDS / 4
    assert report.counts["calm restarts that read from disk"] > SEEDS / 10


def test_a_seed_replays_its_simulation() -> None:
    for seed in range(20):
        assert simulate(seed) == simulate(seed)
    assert len({tuple(sorted(simulate(seed).items())) for seed in range(20)}) == 20


def warm(seed: int) -> list[Life]:
    """Two lives without faults, without resets, with room for all, the first one as long as it takes."""
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


def sleeping(lives: list[Life], sleep_chance: float) -> list[Life]:
    """The same servers, which sleep now and then, with the same weights and with others."""
    return [
        dataclasses.replace(life, scenario=dataclasses.replace(life.scenario, sleep_chance=sleep_chance))
        for life in lives
    ]


def test_no_law_is_broken_by_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "plan", lambda seed: sleeping(plan(seed), 0.1))
    assert run_simulations(range(SEEDS // 5)).failures == {}


def test_what_is_on_disk_outlives_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "plan", lambda seed: sleeping(warm(seed), 0.1))

    def never_wakes_up(server: Server) -> None:
        server.engine.scheduler.wake_up = lambda: None  # type: ignore[method-assign]

    kept, dropped = run_simulations(range(10)), run_simulations(range(10), patch=never_wakes_up)
    assert kept.failures == dropped.failures == {}
    assert kept.counts["promoted_blocks"] > dropped.counts["promoted_blocks"]


def test_a_restart_without_faults_reads_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "plan", warm)
    cold = [seed for seed in range(40) if not simulate(seed)["restarts that read from disk"]]
    assert len(cold) <= 2, f"nothing was read from disk after the restart of {cold}"


class InMemory(LowerTiers):
    """A fast small tier and a slow large one that has to be asked, or one of them."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random, self.clock = Random(seed), clock
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
    """So that much of what is asked for has left the host, and was not kept on the device."""
    rng, scenario = Random(seed), Scenario.random(seed)
    return dataclasses.replace(
        scenario,
        num_host_blocks=rng.choice((6, 12, 24)) * max(1, len(scenario.groups)),
        prefix_caching=rng.random() < 0.3,
        num_documents=rng.randint(2, 4),
        load_deadline_ms=rng.choice((0.0, 3.0, 10.0, 50.0, 1000.0)),
    )


def run_in_memory(seed: int) -> ModelEngine:
    clock = Clock(100.0)
    engine = ModelEngine(short_of_host(seed), lower=InMemory(seed, clock), clock=clock)
    assert engine.tiered is not None
    # The usual share of so small a host is one block: hardly anything would be written.
    engine.tiered._max_held = Random(seed).choice((1, 4, engine.scenario.num_host_blocks))
    engine.run()
    return engine


def test_any_engine_on_tiers_that_never_fail() -> None:
    promoted = Counter[str]()
    for seed in range(SEEDS):
        engine = run_in_memory(seed)
        assert engine.tiered is not None
        what = " and ".join(lane.tier.name for lane in engine.tiered._lanes)
        promoted[what] += int(engine.scheduler.metrics.snapshot().get("promoted_blocks", 0))
    assert len(promoted) == 3
    assert all(promoted.values()), f"nothing was promoted: {promoted}"


# Bugs. Each is planted in a server before it runs.


def checksum_not_verified(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockio, "payload_checksum", lambda header, key, buffers: 0)


def record_written_before_the_payload(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    files, write, write_records = tier.files, tier.files.write, tier.files.write_records
    late: dict[int, Any] = {}
    monkeypatch.setattr(files, "write", late.__setitem__)

    def records_first(first_slot: int, records: ByteArray) -> None:
        write_records(first_slot, records)
        if first_slot in late:
            write(first_slot, late.pop(first_slot))

    monkeypatch.setattr(files, "write_records", records_first)


def old_record_stays_while_the_payload_is_overwritten(
    server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records = tier.files.write_records

    def only_new_ones(first_slot: int, records: ByteArray) -> None:
        if records.any():
            write_records(first_slot, records)

    monkeypatch.setattr(tier.files, "write_records", only_new_ones)


def promotion_ready_before_it_is_read(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    read, poll = tier.read, tier.poll
    told: list[TierResult] = []

    def read_and_tell(keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = read(keys, slots)
        told.extend(TierResult(key, True, nbytes=tier.block_bytes) for key in taken)
        return taken

    def poll_early() -> list[TierResult]:
        early = told.copy()
        told.clear()
        return early + [result for result in poll() if not result.is_read]

    monkeypatch.setattr(tier, "read", read_and_tell)
    monkeypatch.setattr(tier, "poll", poll_early)


def pin_leaked(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    host, complete_load = server.engine.policy_manager, server.engine.policy_manager.complete_load
    monkeypatch.setattr(host, "complete_load", lambda keys, context=None: complete_load(list(keys)[1:], context))


def budget_off_by_one_slab(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    files, make_room = tier.files, tier.files.make_room
    slab = files.bytes_of(files.header.slots_per_slab) - files.bytes_of(0)
    monkeypatch.setattr(files, "make_room", lambda nbytes: make_room(nbytes - slab))


def reset_without_a_new_generation(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "reset", tier.catalog.reset)


def reset_forgets_what_is_being_written(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose late completion brings its key back."""

    def forget_the_rest() -> None:
        written = list(server.written)
        tier.delete([key for key, state in zip(written, tier.contains(written), strict=True) if state])

    monkeypatch.setattr(tier.catalog, "reset", forget_the_rest)


def host_slot_freed_while_a_read_into_it_is_under_way(
    server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = server.engine.tiered
    assert tiered is not None
    expire = tiered._expire

    def free_at_once(waiter: Any) -> None:
        tiered.host.complete_store(list(waiter.coming), success=False)
        expire(waiter)

    monkeypatch.setattr(tiered, "_expire", free_at_once)


def host_slot_not_held_while_it_is_written_from(
    server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, write = server.engine.policy_manager, tier.write

    def write_and_unpin(keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        host.complete_load(LoadStoreSpec("CPU", slots))
        return write(keys, slots)

    monkeypatch.setattr(tier, "write", write_and_unpin)
    monkeypatch.setattr(WriteThrough, "_unpin", lambda self, keys: None)


def another_fingerprints_blocks(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second life on, whatever the weights."""
    monkeypatch.setattr(simulation, "fingerprint", lambda weights: "00" * 32)


def reset_writes_on_the_schedulers_thread(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    reset = tier.reset

    def reset_at_once() -> None:
        reset()
        tier.files.write_header()

    monkeypatch.setattr(tier, "reset", reset_at_once)


def no_deadline(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.engine.tiered is not None
    monkeypatch.setattr(server.engine.tiered, "_load_deadline_s", 1e9)
    monkeypatch.setattr(server.engine.scheduler, "_deadline_s", 1e9)


def closed_with_a_file_open(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier.files, "close", server.storage.close)


def lock_given_up_while_a_job_hangs(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    close = tier.close

    def close_and_unlock() -> None:
        close()
        server.medium.close()

    monkeypatch.setattr(tier, "close", close_and_unlock)


def a_block_left_out(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is written behind a hole."""
    assert server.engine.tiered is not None
    writes = server.engine.tiered._lanes[0].writes
    plan = writes._plan

    def without_the_first(chain: Any, room: int) -> Any:
        made = plan(chain, room)
        return dataclasses.replace(made, keys=made.keys[1:]) if len(made.keys) > 2 else made

    monkeypatch.setattr(writes, "_plan", without_the_first)


def what_follows_a_failed_write_stays(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.engine.tiered is not None
    writes = server.engine.tiered._lanes[0].writes
    monkeypatch.setattr(writes, "_rewind", lambda chain: None)
    monkeypatch.setattr(writes, "_take_back", lambda chain: None)


def a_result_lost(server: Server, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, polled = tier.poll, [0]

    def lose_the_tenth() -> list[TierResult]:
        results = poll()
        polled[0] += len(results)
        return results[1:] if results and polled[0] % 10 == 0 else results

    monkeypatch.setattr(tier, "poll", lose_the_tenth)


Bug: TypeAlias = Callable[[Server, DiskTier, pytest.MonkeyPatch], None]

BUGS: dict[Bug, tuple[type[Exception], int]] = {
    checksum_not_verified: (WrongBytes, 308),
    record_written_before_the_payload: (FalseAlarm, 21),
    old_record_stays_while_the_payload_is_overwritten: (FalseAlarm, 79),
    promotion_ready_before_it_is_read: (WrongBytes, 0),
    pin_leaked: (Leak, 0),
    budget_off_by_one_slab: (OverBudget, 2),
    reset_without_a_new_generation: (WrongBytes, 2),
    reset_forgets_what_is_being_written: (FalseAlarm, 7),
    host_slot_freed_while_a_read_into_it_is_under_way: (SlotTaken, 5),
    host_slot_not_held_while_it_is_written_from: (SlotTaken, 2),
    another_fingerprints_blocks: (WrongBytes, 87),
    reset_writes_on_the_schedulers_thread: (Blocked, 2),
    no_deadline: (Late, 5),
    closed_with_a_file_open: (Leak, 0),
    lock_given_up_while_a_job_hangs: (Unlocked, 93),
    a_block_left_out: (Unreachable, 0),
    what_follows_a_failed_write_stays: (Unreachable, 245),
    a_result_lost: (Leak, 1),
}
"""The law that each breaks, and a seed that found it once: that one is tried first."""


def failure(seed: int, bug: Bug) -> str | None:
    """What the simulation of ``seed`` finds with ``bug`` planted in it."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        def patch(server: Server) -> None:
            if server.tier is not None:
                bug(server, server.tier, monkeypatch)

        return run_simulations([seed], patch=patch).failures.get(seed)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    law, hint = BUGS[bug]

    def finds(seed: int) -> bool:
        return (failure(seed, bug) or "").startswith(f"{law.__name__}: simulation {seed}, life ")

    seed = next((seed for seed in [hint, *range(PLANTED_SEEDS)] if finds(seed)), None)
    assert seed is not None, f"not found in {PLANTED_SEEDS} seeds"
    print(f"{bug.__name__}: found by seed {seed}: {failure(seed, bug)}")
    assert finds(seed), "a seed does not replay its failure"
    assert not run_simulations([seed]).failures


# The program.


def test_the_program_says_what_has_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "3", "--first", "5"]) == 0
    told = capsys.readouterr().out
    assert "3  simulations" in told
    assert "0 with a broken law" in told


def test_the_program_says_how_to_replay_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seed: int, patch: object = None) -> Counter[str]:
        raise WrongBytes("a block of another")

    monkeypatch.setattr(simulation, "simulate", fail)
    assert main(["simulate", "--seeds", "2", "--first", "7"]) == 1
    told = capsys.readouterr().out
    assert "FAILED: seed 8: WrongBytes: a block of another" in told
    assert "python -m kvoffload.testing simulate --first 8 --seeds 1" in told
