"""Servers on a simulated bucket break no law, and each bug planted in the client of object stores breaks one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.tiers.object_store import client
from kvoffload.tiers.object_store.bucket import NewObject
from kvoffload.tiers.object_store.contents import Places, ValuePlace
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.record import ValueFormat
from tests.scale import scaled
from tests.sim.engine import WrongBytes
from tests.sim.life import FalseAlarm
from tests.sim.object_store_medium import BucketFaults, ObjectStoreMedium
from tests.sim.planted import Bug, check_found
from tests.sim.servers import DeletedOthers, NotFound, SharedMedium, simulate_servers
from tests.sim.simulation import run_each

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

    def find_the_next(places: Places, value: bytes) -> ValuePlace | None:
        place = find(places, value)
        return place and place._replace(number=(place.number + 1) % len(place.marks))

    monkeypatch.setattr(Places, "find", find_the_next)
    return Shared


def notes_trusted_without_verification(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    monkeypatch.setattr(ValueFormat, "verify", lambda *args: Outcome.OK)
    return type("Replaced", (Shared,), {"faults_now": BucketFaults(wrong_value=0.3)})


def objects_named_by_their_last_value(monkeypatch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """The server that has stored them finds them, and others do not."""
    make = client.new_object

    def make_reversed(group: Sequence[int], *args: Any) -> NewObject:
        return dataclasses.replace(make(group, *args), name=args[0][group[-1]])

    monkeypatch.setattr(client, "new_object", make_reversed)
    return Shared


BUGS: dict[Bug, tuple[Sequence[type[Exception]], int]] = {
    offset_off_by_one_block: ((FalseAlarm, DeletedOthers), 4),
    notes_trusted_without_verification: ((WrongBytes,), 22),
    objects_named_by_their_last_value: ((NotFound,), 6),
}
"""The errors of the laws that each breaks, and a seed that has found it, which is tried first."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    laws, hint = BUGS[bug]
    check_found(bug, laws, hint, PLANTED_SEEDS)
