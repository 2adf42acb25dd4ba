"""Servers on a simulated bucket break no law, and each bug planted in the client of object stores breaks one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from kvoffload.testing.engine import WrongBytes
from kvoffload.testing.object_store_medium import BucketFaults, ObjectStoreMedium
from kvoffload.testing.scale import scaled
from kvoffload.testing.servers import DeletedOthers, NotFound, SharedMedium, simulate_servers
from kvoffload.testing.simulation import FalseAlarm, run_each
from kvoffload.tiers.object_store import client
from kvoffload.tiers.object_store.bucket import NewObject
from kvoffload.tiers.object_store.contents import Place, Places
from kvoffload.tiers.remote import worker
from kvoffload.tiers.remote.record import Verdict

SEEDS = scaled(8)
PLANTED_SEEDS = 100


def test_no_law_is_broken_on_a_bucket() -> None:
    report = run_each(range(SEEDS), lambda seed: simulate_servers(ObjectStoreMedium, seed))
    assert report.failures == {}
    assert report.counts["servers that read blocks of others"] > SEEDS / 4


class Shared(ObjectStoreMedium):
    """A bucket whose objects have up to three values, and that fails in one way, whatever the seed says."""

    faults_now = BucketFaults()

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__(seed, True)
        self.values_per_object = 3
        self.faults = self.faults_now
        self.stall_s, self.death_s = 0.2, 0.0


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


def objects_named_by_their_last_value(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """The server that has stored them finds them, and others do not."""
    make = client.new_object

    def make_reversed(group: Sequence[int], *args: Any) -> NewObject:
        return dataclasses.replace(make(group, *args), name=args[0][group[-1]])

    monkeypatch.setattr(client, "new_object", make_reversed)
    return Shared


Bug: TypeAlias = Callable[[pytest.MonkeyPatch], type[SharedMedium]]

BUGS: dict[Bug, tuple[Sequence[type[Exception]], int]] = {
    offset_off_by_one_block: ((FalseAlarm, DeletedOthers), 4),
    notes_trusted_without_verification: ((WrongBytes,), 4),
    objects_named_by_their_last_value: ((NotFound,), 10),
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
