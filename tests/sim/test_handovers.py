"""Simulated servers that hand requests over to each other break no law, and each bug planted in them breaks one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.abc import IntegrityError, OffloadKey, States
from kvoffload.abc.tier import HIT, MISS
from kvoffload.connector import lookups
from kvoffload.connector.handover import Patience
from kvoffload.connector.request import Match, RequestState
from kvoffload.tiering import lookup
from kvoffload.tiering.unwritten import PromisedBlocks, UnwrittenPins
from kvoffload.tiering.writes import WriteThrough
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.shared_dir.tier import SharedDirTier
from tests.scale import scaled
from tests.sim import __main__ as program
from tests.sim.engine import Late, WrongBytes
from tests.sim.handovers import HandoverLife, Incomplete, Role, Slow, Wasted, plan_handovers, simulate_handovers
from tests.sim.media import MEDIA
from tests.sim.planted import Bug, bugs, check_found
from tests.sim.servers import DeletedOthers, SharedMedium
from tests.sim.shared_folder import SharedFolderMedium
from tests.sim.simulation import run_each
from tests.sim.store_medium import StoreMedium

FIRST_SEED, SEEDS = 2, scaled(3)
"""The first ones hand over much in little time."""
PLANTED_SEEDS = 200


@pytest.mark.parametrize("kind", MEDIA)
def test_no_law_is_broken(kind: str) -> None:
    report = run_each(range(FIRST_SEED, FIRST_SEED + SEEDS), lambda seed: simulate_handovers(MEDIA[kind], seed))
    assert report.failures == {}
    assert report.counts["prompts handed over"] >= SEEDS
    assert report.counts["requests handed over"] >= SEEDS


def test_a_seed_replays_its_simulation() -> None:
    assert simulate_handovers(StoreMedium, 4) == simulate_handovers(StoreMedium, 4)


def test_plans_have_everything() -> None:
    plans = [plan_handovers(seed) for seed in range(300)]
    lives = [life for plan in plans for machine in plan.servers.machines for life in machine]
    assert {role for plan in plans for role in plan.roles} == set(Role)
    assert all(isinstance(life, HandoverLife) for life in lives)
    for share in (
        sum(isinstance(life, HandoverLife) and life.has_other_ranks for life in lives) / len(lives),
        sum(isinstance(life, HandoverLife) and life.has_tenants for life in lives) / len(lives),
        sum(any(group.state for group in life.scenario.groups) for life in lives) / len(lives),
        sum(any(group.sliding_window for group in life.scenario.groups) for life in lives) / len(lives),
        sum(any(group.lookahead for group in life.scenario.groups) for life in lives) / len(lives),
    ):
        assert 0.03 < share < 0.9


def test_the_program_runs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["simulate", "--servers", "store", "--handovers", "--first", "2", "--seeds", "1"]) == 0
    assert "prompts handed over" in capsys.readouterr().out


# Bugs.


def calm(**settings: float) -> type[StoreMedium]:
    """Returns a medium that never fails."""

    class Calm(StoreMedium):
        def __init__(self, seed: int, is_calm: bool) -> None:
            super().__init__(seed, True)
            vars(self).update(settings)

    return Calm


def a_wait_ignores_its_deadline(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    wait, until_handed_over = lookups._wait, lookup._until_handed_over

    def wait_for_good(of: lookups.Lookups, state: RequestState, computed: int) -> Match | None:
        if state.lookup.handover is None or state.context.awaited is None or not state.context.awaited.keys:
            return wait(of, state, computed)
        return Match(of.jobs.changes.wakeups, computed, None, expires=math.inf)

    def never_late(search: Any, awaited: Any, *args: Any) -> States:
        search.now = awaited.since
        return until_handed_over(search, awaited, *args)

    monkeypatch.setattr(lookups, "_wait", wait_for_good)
    monkeypatch.setattr(lookup, "_until_handed_over", never_late)
    return StoreMedium


def an_awaited_block_is_a_hit(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """It counts as there before it is written."""

    def is_there(search: Any, awaited: Any, tier: Any, keys: Sequence[OffloadKey], states: States) -> States:
        states = states.copy()
        states[[i for i, key in enumerate(keys) if states[i] == MISS and key in awaited.keys]] = HIT
        return states

    monkeypatch.setattr(lookup, "_until_handed_over", is_there)
    return StoreMedium


def a_store_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(RemoteTier, "look_for", lambda *args: None)
    return StoreMedium


def a_journal_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(SharedDirTier, "look_for", lambda *args: None)
    return SharedFolderMedium


def a_journal_is_not_written_at_once(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(SharedDirTier, "_write_journal_now", lambda tier: None)
    return SharedFolderMedium


def an_idle_engine_stops_before_blocks_are_written(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(WriteThrough, "is_busy", property(lambda writes: writes.backlog.num_ready > 0))
    return SharedFolderMedium


def promised_blocks_are_dropped(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(PromisedBlocks, "add", lambda promised, keys: None)
    return calm(latency_s=0.02, handover_s=0.49)


def promises_have_no_bounds(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(UnwrittenPins, "num_with_room", lambda pins, keys: len(keys))
    return StoreMedium


def patience_never_ends(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """Also for blocks that a server has computed itself, as if they had come."""
    ended = Patience.ended
    monkeypatch.setattr(Patience, "ended", lambda patience, server, is_complete: ended(patience, server, True))
    return StoreMedium


def ranks_are_not_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(HandoverLife, "fingerprint", super(HandoverLife, HandoverLife).fingerprint)
    return StoreMedium


BUGS: dict[Bug, tuple[tuple[type[Exception], ...], int]] = {
    a_wait_ignores_its_deadline: ((Late,), 4),
    an_awaited_block_is_a_hit: ((Incomplete, Wasted), 0),
    a_store_is_not_asked_again: ((Incomplete, Slow), 0),
    a_journal_is_not_read_again: ((Incomplete, Slow), 1),
    a_journal_is_not_written_at_once: ((Incomplete, Slow), 1),
    an_idle_engine_stops_before_blocks_are_written: ((Incomplete, Slow), 23),
    promised_blocks_are_dropped: ((Incomplete,), 32),
    promises_have_no_bounds: ((IntegrityError,), 4),
    patience_never_ends: ((Wasted,), 0),
    ranks_are_not_in_the_fingerprint: ((WrongBytes, DeletedOthers), 6),
}
"""The errors of the laws that each breaks, and a seed that has found it, which is tried first."""

FAST = {a_wait_ignores_its_deadline, promises_have_no_bounds, ranks_are_not_in_the_fingerprint}
"""The others take long to find."""


@pytest.mark.parametrize("bug", bugs(BUGS, slow=BUGS.keys() - FAST))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    laws, hint = BUGS[bug]
    check_found(bug, laws, hint, PLANTED_SEEDS, simulate_handovers)
