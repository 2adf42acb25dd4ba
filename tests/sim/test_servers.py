"""Simulated servers that share a medium break no law, and each bug planted in them breaks one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvoffload.abc import ByteArray, OffloadKey, States, Tier, TierResult
from kvoffload.tiering.health import CircuitBreaker
from kvoffload.tiers.remote import link
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.known import PresenceCache
from kvoffload.tiers.remote.link import StoreProcess
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from tests.scale import scaled
from tests.sim import __main__ as program
from tests.sim import life as living
from tests.sim import store_medium
from tests.sim.engine import Leak, WrongBytes
from tests.sim.life import Blocked
from tests.sim.planted import Bug, bugs, check_found
from tests.sim.servers import Costly, DeletedOthers, NotFound, SharedMedium, plan_servers, simulate_servers
from tests.sim.simulation import Report, run_each
from tests.sim.store_medium import StoreConnection, StoreMedium
from tests.sim.stores import SimulatedClient, SimulatedProcess, SimulatedStarter, StoreFaults

SEEDS = scaled(8)
PLANTED_SEEDS = 400


@pytest.fixture(scope="module")
def report() -> Report:
    return run_each(range(SEEDS), lambda seed: simulate_servers(StoreMedium, seed))


def test_no_law_is_broken_on_a_store(report: Report) -> None:
    assert report.failures == {}


def test_servers_find_each_others_blocks(report: Report) -> None:
    assert report.counts["servers that read blocks of others"] > SEEDS / 4
    assert report.counts["blocks found again"] > SEEDS / 12


def test_a_slow_medium_keeps_what_one_thread_of_an_idle_server_writes() -> None:
    assert simulate_servers(StoreMedium, 7310023)["blocks found again"] == 1


def test_a_seed_replays_its_simulation() -> None:
    assert simulate_servers(StoreMedium, 3) == simulate_servers(StoreMedium, 3)


def test_plans_have_everything() -> None:
    plans = [plan_servers(seed) for seed in range(300)]
    lives = [life for plan in plans for machine in plan.machines for life in machine]
    assert {len(plan.machines) for plan in plans} == {2, 3, 4}
    assert {life.end for life in lives} == {"stay", "close", "kill"}
    assert {life.weights for life in lives} == {0, 1}
    for share in (
        sum(plan.is_calm for plan in plans) / len(plans),
        sum(plan.has_outage for plan in plans) / len(plans),
        sum(bool(plan.jump_rate) for plan in plans) / len(plans),
        sum(life.must_find for life in lives) / len(lives),
        sum(bool(life.disk_blocks) for life in lives) / len(lives),
    ):
        assert 0.1 < share < 0.9


# Bugs. Each is planted before the servers start; ``Failing`` chooses the faults that show it.


class Failing(StoreMedium):
    """A store that fails in one way, whatever the seed says."""

    faults_now = StoreFaults()
    hang_s = 0.2

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__(seed, True)
        self.faults = self.faults_now
        self.stall_s = self.hang_s
        self.death_s = 0.0


def failing(hang_s: float = 0.2, **rates: float) -> type[StoreMedium]:
    return type("Failing", (Failing,), {"faults_now": StoreFaults(**rates), "hang_s": hang_s})


def half_of_a_value_accepted(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """The record is verified, the payload is not."""
    verify = ValueFormat.verify

    def verify_the_record(
        values: ValueFormat, key: OffloadKey, record: ByteArray, parts: Sequence[ByteArray]
    ) -> Outcome:
        return Outcome.OK if record.any() else verify(values, key, record, parts)

    monkeypatch.setattr(ValueFormat, "verify", verify_the_record)
    return failing(truncated=0.3)


def value_of_another_key_accepted(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """Whatever is a whole block is taken for the block that was asked for."""
    verify, pack = ValueFormat.verify, ValueFormat.record

    def verify_itself(values: ValueFormat, key: OffloadKey, record: ByteArray, parts: Sequence[ByteArray]) -> Outcome:
        verdicts = {verify(values, each, record, parts) for each in written}
        return next(each for each in (Outcome.OK, Outcome.MISSING, Outcome.CORRUPT) if each in verdicts)

    written: set[OffloadKey] = set()

    def pack_and_note(values: ValueFormat, key: OffloadKey, parts: Sequence[ByteArray]) -> ByteArray:
        written.add(key)
        return pack(values, key, parts)

    monkeypatch.setattr(ValueFormat, "record", pack_and_note)
    monkeypatch.setattr(ValueFormat, "verify", verify_itself)
    return failing(wrong_value=0.3)


def fingerprint_ignored(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(living, "fingerprint", lambda weights: "00" * 32)
    return StoreMedium


def reset_deletes_the_blocks_of_others(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    class Connection(StoreConnection):
        def open(self, pools: Sequence[ByteArray]) -> Tier:
            tier, store = super().open(pools), self.medium.store
            reset = tier.reset

            def remove_all() -> None:
                reset()
                for name in [name for name in store.values if f"/{self.server.fingerprint}/" in name]:
                    store.remove(name, self.state)

            monkeypatch.setattr(tier, "reset", remove_all)
            return tier

    monkeypatch.setattr(store_medium, "StoreConnection", Connection)
    return StoreMedium


def breaker_that_never_opens(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(CircuitBreaker, "_add_failures", lambda breaker, failures, now: None)
    monkeypatch.setattr(CircuitBreaker, "detect_hang", lambda breaker, under_way, now: False)
    # A process that does not answer is not ended either.
    monkeypatch.setattr(link, "LOOKUP_DEADLINE_S", 1e9)
    monkeypatch.setattr(link, "TRANSFER_DEADLINE_S", 1e9)
    return StoreMedium


def old_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """A process that was killed still writes what it was reading into the host."""

    class Process(SimulatedProcess):
        is_killed = False

        def kill(self) -> None:
            self.is_ready, self.is_killed = False, True

        @property
        def has_ended(self) -> bool:
            return self.is_killed or super().has_ended

    class Starter(SimulatedStarter):
        process_class = Process

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.all: list[SimulatedProcess] = []

        def start(self) -> StoreProcess:
            process = super().start()
            self.all += [self.process] if self.process else []
            return process

        def processes(self) -> list[SimulatedProcess]:
            return [each for each in self.all if each.dies_at > float("-inf")]

        @property
        def is_idle(self) -> bool:
            return self.process is None or self.process.num_open == 0

    monkeypatch.setattr(StoreConnection, "starter_class", Starter)
    monkeypatch.setattr(link, "TRANSFER_DEADLINE_S", 0.01)
    monkeypatch.setattr(link, "FIRST_PAUSE_S", 0.0)
    return failing(hang_s=0.03, late_get=0.3)


def misses_remembered_for_good(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    note_missing = PresenceCache.note_missing

    def note_for_good(cache: PresenceCache, keys: Iterable[OffloadKey], now: float, ttl_s: float = 1.0) -> None:
        note_missing(cache, keys, now, float("inf"))

    monkeypatch.setattr(PresenceCache, "note_missing", note_for_good)
    return StoreMedium


def store_asked_on_the_schedulers_thread(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    class Connection(StoreConnection):
        def open(self, pools: Sequence[ByteArray]) -> Tier:
            tier = super().open(pools)
            contains, client = tier.contains, SimulatedClient(self.medium.store, self.state)

            def ask_at_once(keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
                client.exists([key.hex() for key in keys])
                return contains(keys, ahead)

            monkeypatch.setattr(tier, "contains", ask_at_once)
            return tier

    monkeypatch.setattr(store_medium, "StoreConnection", Connection)
    return failing()


def a_result_lost(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    poll, polled = RemoteTier.poll, [0]

    def lose_the_tenth(tier: RemoteTier) -> list[TierResult]:
        results = poll(tier)
        polled[0] += len(results)
        return results[1:] if results and polled[0] % 10 == 0 else results

    monkeypatch.setattr(RemoteTier, "poll", lose_the_tenth)
    return failing()


BUGS: dict[Bug, tuple[tuple[type[Exception], ...], int]] = {
    half_of_a_value_accepted: ((WrongBytes,), 12),
    value_of_another_key_accepted: ((WrongBytes,), 5),
    fingerprint_ignored: ((WrongBytes,), 22),
    reset_deletes_the_blocks_of_others: ((DeletedOthers,), 11),
    breaker_that_never_opens: ((Costly,), 10),
    old_process_goes_on: ((WrongBytes,), 11),
    misses_remembered_for_good: ((NotFound,), 6),
    store_asked_on_the_schedulers_thread: ((Blocked,), 0),
    a_result_lost: ((Leak,), 0),
}
"""The errors of the laws that each breaks, and a seed that has found it, which is tried first."""


@pytest.mark.parametrize("bug", bugs(BUGS, slow={breaker_that_never_opens, old_process_goes_on}))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    laws, hint = BUGS[bug]
    check_found(bug, laws, hint, PLANTED_SEEDS)


# The program.


def test_the_program_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["simulate", "--servers", "store", "--seeds", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["simulations"] == 2
    assert printed["failures"] == {}
    assert printed["counts"]["servers"] >= 4
