"""Servers on a simulated bucket break no law, and each bug planted in the client of object stores breaks one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import pytest

from kvoffload.testing.engine import WrongBytes
from kvoffload.testing.object_store_medium import BucketFaults, ObjectStoreMedium
from kvoffload.testing.scale import scaled
from kvoffload.testing.servers import DeletedOthers, NotFound, SharedMedium, simulate_servers
from kvoffload.testing.simulation import FalseAlarm, run_each
from kvoffload.tiers.object_store.bucket import Found
from kvoffload.tiers.object_store.client import ObjectStoreClient
from kvoffload.tiers.object_store.contents import Place, Places, make_note, mark
from kvoffload.tiers.object_store.search import Search
from kvoffload.tiers.remote import worker
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.record import Verdict

SEEDS = scaled(10)
PLANTED_SEEDS = 300


def test_no_law_is_broken_on_a_bucket() -> None:
    report = run_each(range(SEEDS), lambda seed: simulate_servers(ObjectStoreMedium, seed))
    assert report.failures == {}
    assert report.counts["servers that read blocks of others"] > SEEDS / 4


class Shared(ObjectStoreMedium):
    """A bucket whose objects have up to three values, and that fails in one way, whatever the seed says."""

    faults_now = BucketFaults()
    forget_rate = 0.0

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__(seed, True)
        self.values_per_object = 3
        self.faults = self.faults_now
        self.stall_s, self.death_s = 0.2, 0.0
        self._forget_rate = self.forget_rate


def offset_off_by_one_block(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    find = Places.find

    def find_the_next(places: Places, value: bytes) -> Place | None:
        place = find(places, value)
        return place and place._replace(number=(place.number + 1) % len(place.marks))

    monkeypatch.setattr(Places, "find", find_the_next)
    return Shared


def notes_trusted_without_verification(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(worker, "verify", lambda *args: Verdict.GOOD)
    return type("Replaced", (Shared,), {"faults_now": BucketFaults(wrong_value=0.3)})


def places_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """What was found once is not asked for again, and not forgotten when a read does not find it."""
    make = Search.__init__

    def remember(search: Search, names: Sequence[str], step: int, places: Places, groups: Collection[int]) -> None:
        make(search, names, step, places, groups)
        search.take(
            {place.name: Found(0, make_note(place.marks)) for name in names if (place := places.find(mark(name)))}
        )

    monkeypatch.setattr(Places, "gone", lambda places, name: None)
    monkeypatch.setattr(Search, "__init__", remember)
    return type("Forgetful", (Shared,), {"forget_rate": 0.3})


Bug: TypeAlias = Callable[[pytest.MonkeyPatch], type[SharedMedium]]

BUGS: dict[Bug, tuple[Sequence[type[Exception]], int]] = {
    offset_off_by_one_block: ((FalseAlarm, NotFound, DeletedOthers), 0),
    notes_trusted_without_verification: ((WrongBytes,), 0),
    places_kept_for_good: ((NotFound,), 0),
}
"""The errors of the laws that each breaks, and a seed that has found it, which is tried first."""


def failure(seed: int, bug: Bug) -> str:
    """Returns what the simulation of ``seed`` finds with ``bug`` planted in it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        medium = bug(monkeypatch)
        return run_each([seed], lambda seed: simulate_servers(medium, seed)).failures.get(seed, "")


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    laws, hint = BUGS[bug]
    names = tuple(f"{law.__name__}: simulation" for law in laws)
    failures = ((seed, failure(seed, bug)) for seed in [hint, *range(PLANTED_SEEDS)])
    found, law = next(((seed, law) for seed, law in failures if law.startswith(names)), (None, ""))
    assert found is not None, f"not found in {PLANTED_SEEDS} seeds"
    print(f"{bug.__name__}: found by seed {found}: {law}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        medium = bug(monkeypatch)
    assert not run_each([found], lambda seed: simulate_servers(medium, seed)).failures, "found without the bug too"
