"""What a disk tier retains stays over floods and restarts, and no longer than promised."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import OffloadKey, RetainRefusal
from kvoffload.cache.retention import MAX_RETAIN_S
from kvoffload.cache.tenants import OTHER, Shares
from kvoffload.tiers.disk.recency import mark, retained_until
from kvoffload.tiers.disk.restart import MAX_CLOCK_STEP_S
from tests.clock import Clock
from tests.tiers.disk.rig import Rig, key


def shares(most: int) -> Any:
    return lambda num_blocks, block_bytes: Shares((OTHER,), {}, (0,), (num_blocks,), num_blocks, (most,))


def keys(*names: int) -> list[OffloadKey]:
    return [key(name) for name in names]


class TimedRig(Rig):
    """A rig whose clocks a test sets: the monotonic one begins anew with every process, as it may."""

    def __init__(self, path: Path, num_slots: int = 16, most: int = 6) -> None:
        self.wall = Clock(1e9)
        super().__init__(path, num_slots=num_slots, shares=shares(most), wall_clock=self.wall)

    def restart(self, **settings: Any) -> None:
        self.mono = Clock(50.0)
        self.open(clock=self.mono, **settings)

    def advance(self, seconds: float) -> None:
        self.wall.now += seconds
        self.mono.now += seconds

    def flood(self) -> None:
        for first in range(30, 60, 5):
            self.write(*range(first, first + 5))

    def num_retained(self) -> int:
        return sum(self.tier.catalog.retention.tenants.num_charged)


@pytest.fixture
def rig(tmp_path: Path) -> TimedRig:
    rig = TimedRig(tmp_path / "disk")
    rig.restart()
    rig.write(1, 2, 3, 4)
    return rig


def test_retained_blocks_survive_floods_and_restarts_until_their_time(rig: TimedRig) -> None:
    assert rig.tier.retain(keys(1, 2, 3), 7, 100.0) is None
    for _ in range(3):
        rig.flood()
        assert rig.present(10) == [1, 2, 3]
        rig.restart()
        rig.advance(30.0)
    rig.check_reads(1, 2, 3)
    rig.advance(11.0)
    rig.flood()
    assert rig.present(10) == []
    rig.restart()
    assert rig.num_retained() == 0


def test_a_killed_process_loses_no_retention(rig: TimedRig) -> None:
    rig.tier.retain(keys(1, 2, 3), 7, 100.0)
    rig.drain()
    entries = np.fromfile(rig.folder / "recency", dtype="<u8")[1::2]
    slots = rig.tier.catalog.blocks.table.find(keys(1, 2, 3))
    untils = [retained_until(name, int(entries[slot])) for name, slot in zip(keys(1, 2, 3), slots, strict=True)]
    assert untils == [int(rig.wall.now) + 100] * 3
    assert np.count_nonzero(entries) == 3


def test_blocks_that_are_written_later_are_retained_from_then_on(rig: TimedRig) -> None:
    assert rig.tier.retain(keys(1, 2, 3, 5, 6), None, 100.0) is None
    rig.write(5, 6)
    rig.restart()
    rig.flood()
    assert rig.present(10) == [1, 2, 3, 5, 6]


def test_a_block_whose_write_ends_while_the_tier_is_closed_stays_retained(rig: TimedRig) -> None:
    rig.tier.retain(keys(1, 2, 5), 7, 100.0)
    rig.tier.write(keys(5), np.array([0]))
    rig.restart()
    assert rig.num_retained() == 3
    rig.flood()
    assert rig.present(10) == [1, 2, 5]


@pytest.mark.parametrize(
    ("step", "num_retained"), [(0.0, 2), (-2.0, 2), (1.0 - MAX_CLOCK_STEP_S, 2), (-1.0 - MAX_CLOCK_STEP_S, 0)]
)
def test_the_longest_time_outlives_a_wall_clock_that_steps_back(rig: TimedRig, step: float, num_retained: int) -> None:
    rig.wall.now += 0.5
    rig.tier.retain(keys(1, 2), 7, MAX_RETAIN_S)
    rig.drain()
    rig.wall.now += step
    rig.restart()
    assert rig.num_retained() == num_retained
    rig.advance(MAX_RETAIN_S + 1.0)
    rig.drain()
    assert rig.num_retained() == 0


def test_a_retention_that_has_ended_early_is_not_there_after_a_restart(rig: TimedRig) -> None:
    rig.tier.retain(keys(1, 2), 7, 100.0)
    rig.tier.retain(keys(3, 4), 8, 100.0)
    rig.drain()
    rig.tier.retain((), 7, 0.0)
    rig.restart()
    rig.flood()
    assert rig.present(10) == [3, 4]


@pytest.mark.parametrize("is_read_only", [False, True])
def test_what_will_not_be_written_is_charged_no_more(rig: TimedRig, is_read_only: bool) -> None:
    rig.tier.retain(keys(1, 20, 21), 7, 100.0)
    rig.tier.files.read_only = is_read_only
    rig.tier.retain(keys(1, 20), None, 0.0)
    (use,) = rig.tier.tenant_uses()
    assert (use.num_retained, use.num_retained_lost) == (2, 1)


@pytest.mark.parametrize(("most", "kept"), [(1, [1, 2, 3, 4]), (8, [1, 2, 3, 4])])
def test_a_smaller_quota_ends_no_retention_and_begins_no_new_one(rig: TimedRig, most: int, kept: list[int]) -> None:
    rig.tier.retain(keys(1, 2, 3, 4), 7, 100.0)
    rig.restart(shares=shares(most))
    rig.flood()
    assert rig.present(10) == kept
    refusal = rig.tier.retain(keys(30), 8, 100.0)
    assert refusal is (RetainRefusal.OVER_QUOTA if most == 1 else None)


def test_what_a_smaller_quota_has_ended_does_not_come_back_with_a_larger_one(rig: TimedRig) -> None:
    rig.tier.retain(keys(1, 2), 7, 100.0)

    def none_to_spare(num_blocks: int, block_bytes: int) -> Shares:
        return Shares((OTHER,), {}, (num_blocks,), (num_blocks,), num_blocks, (0,))

    rig.restart(shares=none_to_spare)
    assert rig.num_retained() == 0
    rig.drain()
    rig.restart(shares=shares(6))
    assert rig.num_retained() == 0


def test_a_reset_ends_all_and_so_does_another_quota_of_none(rig: TimedRig) -> None:
    rig.tier.retain(keys(1, 2), 7, 100.0)
    rig.tier.reset()
    rig.drain()
    assert not np.fromfile(rig.folder / "recency", dtype="<u8")[1::2].any()
    assert rig.num_retained() == 0


def test_a_mark_is_valid_for_its_own_key_only() -> None:
    found = mark(key(1), time.time())
    assert retained_until(key(1), found) > 0
    assert retained_until(key(2), found) == 0
