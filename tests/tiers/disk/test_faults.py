"""With real threads and files on a device that fails, requests go on and get no wrong byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from tests.sim.batching import Batcher
from tests.sim.storage import FaultRates, FaultyStorage
from tests.tiers.disk.kill_server import FINGERPRINT, Disk, scenario, serve

BUDGET = 4 << 20
CLEAN_SEED = 5


class FaultyDisk(Disk):
    """A disk that fails as soon as it has been opened."""

    storage: FaultyStorage

    def __init__(self, directory: Path, rates: FaultRates, read_only: bool = False) -> None:
        super().__init__(directory, BUDGET)
        self.rates = rates
        self.read_only = read_only

    def open(self, pools: Sequence[ByteArray]) -> DiskTier:
        self.storage = FaultyStorage(DirectoryStorage(self.directory), stall_s=60.0)
        tier = DiskTier(self.storage, pools, DiskSettings(FINGERPRINT, BUDGET))
        self.storage.rates, self.storage.read_only = self.rates, self.read_only
        return tier

    def settle(self) -> None:
        """Called when the requests have ended: the device recovers."""
        self.storage.active = False
        super().settle()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory with the blocks of an earlier server."""
    directory = tmp_path / "disk"
    counters = serve(Disk(directory, BUDGET), scenario(CLEAN_SEED))
    assert counters["tier_write_blocks:disk"] > 10
    return directory


def test_without_faults_blocks_are_read_from_disk(filled: Path) -> None:
    counters = serve(FaultyDisk(filled, FaultRates()), scenario(CLEAN_SEED))
    assert counters["tier_hit_tokens:disk"] > 0
    assert counters.get("tier_bad_blocks:disk", 0) == 0


@pytest.mark.parametrize(
    ("fault", "rates", "read_only", "expected"),
    [
        ("read_only", FaultRates(), True, ["tier_write_failures:disk"]),
        ("io_error", FaultRates(io_error=1.0), False, ["tier_read_failures:disk", "tier_write_failures:disk"]),
        ("flip_on_read", FaultRates(flip_on_read=1.0), False, ["tier_bad_blocks:disk"]),
        ("short_read", FaultRates(short_read=1.0), False, ["tier_read_failures:disk"]),
        ("no_space", FaultRates(no_space=1.0), False, ["tier_write_failures:disk"]),
    ],
)
def test_a_device_that_fails_costs_hits_and_nothing_else(
    filled: Path, fault: str, rates: FaultRates, read_only: bool, expected: list[str]
) -> None:
    lower = FaultyDisk(filled, rates, read_only)
    counters = serve(lower, scenario(CLEAN_SEED + 1))
    assert lower.storage.injected[fault] > 0
    assert sum(counters.get(name, 0) for name in expected) > 0
    assert counters["off"] == 0


def test_requests_do_not_wait_for_a_device_that_hangs(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Real threads keep no simulated deadline. All requests must end while the device still hangs.
    monkeypatch.setattr(Batcher, "check_wait", lambda self, request: None)
    lower = FaultyDisk(filled, FaultRates(stall=1.0))
    counters = serve(lower, dataclasses.replace(scenario(CLEAN_SEED + 1), load_deadline_ms=100.0))
    assert lower.storage.injected["stall"] > 0
    assert counters.get("late_promotions", 0) > 0
    assert counters.get("tier_hit_tokens:disk", 0) == 0
    assert counters["off"] == 0
