"""Engines with the canonical layout find blocks of engines with other ranks, and each bug planted in them is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from kvoffload.abc import ByteArray, PageGroup, TransferSpec
from kvoffload.connector.ranks import PageRun, place
from kvoffload.transfer.inline import InlineTransfer
from tests.scale import scaled
from tests.sim import heads, ranks
from tests.sim.engine import ModelEngine, Scenario, WrongBytes
from tests.sim.handovers import plan_handovers, simulate_handovers
from tests.sim.life import Life
from tests.sim.media import MEDIA
from tests.sim.planted import Bug, check_found
from tests.sim.servers import SharedMedium, simulate_servers
from tests.sim.shared_folder import SharedFolderMedium
from tests.sim.store_medium import StoreMedium

PLANTED_SEEDS = 400
ENGINES = (28, 108, 241, 278, 294, 296)
"""Seeds of engines on all kinds of ranks, which load."""
HANDED_OVER_SEED = 71


def test_scenarios_have_everything() -> None:
    found = [scenario for scenario in map(Scenario.random, range(500)) if scenario.heads is not None]
    assert 25 < len(found) < 150
    of = [scenario.heads for scenario in found if scenario.heads is not None]
    assert {each.tensor for each in of} == {1, 2, 3, 4}
    assert {each.stages for each in of} == {1, 2, 3, 4}
    assert {each.pieces for each in of} == {1, 2}
    assert {each.number for each in of} == set(heads.NUMBERS)
    assert {each.replicas for each in of} >= {1, 2, 3, 4}
    assert any(each.tensor > 1 and each.stages > 1 for each in of)
    assert any(len(scenario.groups) > 1 for scenario in found)
    assert not any(scenario.parts.is_divided for scenario in found)
    assert not any(group.state for scenario in found for group in scenario.groups)


def test_servers_of_a_fleet_have_other_ranks() -> None:
    fleets = [plan_handovers(seed).servers.machines for seed in range(200)]
    lives = [[life for machine in fleet for life in machine] for fleet in fleets]
    found = [fleet for fleet in lives if fleet[0].scenario.heads is not None]
    assert len(found) > 20
    for fleet in found:
        for life in fleet:
            same_name = [other for other in fleet if other.fingerprint == life.fingerprint]
            assert {model_of(other) for other in same_name} == {model_of(life)}
    assert sum(len({life.scenario.heads for life in fleet}) > 1 for fleet in found) > 15
    assert sum(len({life.fingerprint for life in fleet}) > 1 for fleet in found) > 2


def model_of(life: Life) -> tuple[int, int, int, int]:
    """Returns all that the bytes of a block depend on."""
    s = life.scenario
    assert s.heads is not None
    return life.weights, s.num_layers, s.heads.number, s.heads.pieces


def test_all_ranks_load() -> None:
    loads = dict.fromkeys(("tensor", "stages", "replicas", "pieces"), 0)
    for seed in (*ENGINES, *range(scaled(1) * 20)):
        engine = ModelEngine(Scenario.random(seed))
        if engine.scenario.heads is None:
            continue
        engine.run()
        assert len({id(rank.host) for rank in engine.ranks}) == 1
        for name in loads:
            loads[name] += engine.ranks[-1].loads if getattr(engine.scenario.heads, name) > 1 else 0
    assert all(loads.values()), loads


@pytest.mark.parametrize("kind", MEDIA)
def test_servers_with_other_ranks_find_each_others_blocks(kind: str) -> None:
    seed = 363 if MEDIA[kind] is SharedFolderMedium else 6
    assert simulate_servers(MEDIA[kind], seed)["blocks found again by other ranks"] == 1


def test_a_server_with_other_ranks_finds_what_is_handed_over() -> None:
    assert simulate_handovers(StoreMedium, HANDED_OVER_SEED)["calm, to other ranks: complete"] > 0


# Bugs.


def ranks_take_each_others_heads(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """Consistently, so that only servers with other ranks notice."""

    def mirrored(
        group: PageGroup, runs: Sequence[Sequence[PageRun]], pages: Sequence[int], begin: int, row: int
    ) -> PageGroup:
        moved = [
            [dataclasses.replace(run, canonical=size - run.canonical - run.nbytes) for run in of_view]
            for of_view, size in zip(runs, pages, strict=True)
        ]
        return place(group, moved, pages, begin, row)

    monkeypatch.setattr(heads, "place", mirrored)
    return StoreMedium


def stages_begin_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(heads, "place", lambda group, runs, pages, begin, row: place(group, runs, pages, 0, row))
    return StoreMedium


def ranks_write_whole_rows(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """The bytes of other ranks, too, which they do not have."""

    class WholeRows(InlineTransfer):
        def __init__(self, groups: Sequence[PageGroup], pool: ByteArray) -> None:
            super().__init__(groups, pool)
            self._pool = pool

        def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
            if is_store:
                self._pool[spec.host.slots] = 0
            super().submit(job_id, spec, is_store)

    monkeypatch.setattr(ranks, "InlineTransfer", WholeRows)
    return StoreMedium


BUGS: dict[Bug, int] = {
    ranks_take_each_others_heads: 10,
    stages_begin_at_the_same_place: 308,
    ranks_write_whole_rows: 47,
}
"""A seed that has found each, which is tried first."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    check_found(bug, (WrongBytes,), BUGS[bug], PLANTED_SEEDS)
