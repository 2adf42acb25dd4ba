"""Model engines of two servers on one directory: the second loads what the first has computed, and no wrong byte."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvoffload.abc import ByteArray, Tier
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.shared_dir.config import SharedDirConfig
from kvoffload.tiers.shared_dir.tier import SharedDirTier
from tests.clock import RealClock
from tests.sim.engine import LowerTiers, ModelEngine
from tests.tiers.disk.kill_server import FINGERPRINT, scenario
from tests.tiers.disk.rig import spoil

BUDGET = 4 << 20
DEADLINE_S = 60.0


class Shared(LowerTiers):
    """The shared directory tier of one server, with its real threads."""

    engine: ModelEngine
    tier: SharedDirTier

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self, pools: Sequence[ByteArray]) -> Sequence[Tier]:
        self.tier = SharedDirConfig(dir=str(self.directory), bytes=BUDGET).open(TierContext(pools, FINGERPRINT))
        return [self.tier]

    def settle(self) -> None:
        while self.tier.is_busy:
            self.tier.wait(0.01)
            self.engine.scheduler.manager.poll()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def start(directory: Path, seed: int) -> Shared:
    lower = Shared(directory)
    lower.engine = ModelEngine(scenario(seed), lower=lower, clock=RealClock())
    return lower


def serve(server: Shared) -> dict[str, float]:
    """Runs the engine to its end, which asserts that no request has attended to a wrong byte. Returns its counters."""
    server.engine.run()
    return server.engine.scheduler.metrics.snapshot()


def wait_until_followed(one: Shared, two: Shared) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(two.tier.blocks) < (one.tier.stats().num_blocks or 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_loads_what_another_one_has_computed(directory: Path) -> None:
    one, two = start(directory, 1), start(directory, 2)
    serve(one)
    one.settle()
    wait_until_followed(one, two)
    own = two.tier.stats().num_blocks
    counters = serve(two)
    assert own == 0
    assert counters.get("promoted_blocks", 0) > 0
    assert not counters.get("off", 0)
    for server in (one, two):
        server.engine.scheduler.shutdown()


def test_a_server_whose_blocks_are_spoiled_harms_no_other(directory: Path) -> None:
    """The control: the second server reads the first one's slabs, and would attend to the wrong bytes."""
    one, two = start(directory, 1), start(directory, 2)
    serve(one)
    one.settle()
    wait_until_followed(one, two)
    for slab in (directory / one.tier.seat.name).glob("*/slab-*"):
        spoil(slab)
    counters = serve(two)
    assert counters.get("tier_bad_blocks:shared_dir", 0) > 0
    assert not counters.get("off", 0)
    for server in (one, two):
        server.engine.scheduler.shutdown()
