"""A server that a test kills. It runs one model engine after the other on a disk directory.

``python kill_server.py DIRECTORY BYTES SEED``. Prints "serving" once it runs, then a line of JSON after each engine.
Ends with a traceback and status 1 if an engine attends to a wrong byte, or anything else is not as it should be.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvoffload.abc import ByteArray, Tier
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.tiers.disk.tier import DiskTier
from tests.clock import RealClock
from tests.sim.engine import LowerTiers, ModelEngine, Scenario

FINGERPRINT = hashlib.sha256(b"the weights of the server that is killed").hexdigest()
DOCUMENTS_SEED = 7


class Disk(LowerTiers):
    """The disk tier in a directory, on real threads."""

    engine: ModelEngine
    tier: DiskTier

    def __init__(self, directory: str | Path, capacity_bytes: int) -> None:
        self.directory = directory
        self.capacity_bytes = capacity_bytes

    def make(self, pools: Sequence[ByteArray]) -> Sequence[Tier]:
        self.tier = self.open(pools)
        return [self.tier]

    def open(self, pools: Sequence[ByteArray]) -> DiskTier:
        return open_disk_tier(self.directory, self.capacity_bytes, TierContext(pools, FINGERPRINT))

    def settle(self) -> None:
        while self.tier.has_jobs:
            self.tier.wait(0.01)
            self.engine.scheduler.manager.poll()


def serve(lower: Disk, scenario: Scenario) -> dict[str, float]:
    """Runs an engine until all requests have ended. Returns its counters."""
    lower.engine = engine = ModelEngine(scenario, lower=lower, clock=RealClock())
    print("serving", flush=True)
    engine.run()
    assert len(engine.outputs) == scenario.num_requests
    counters = engine.scheduler.metrics.snapshot()
    engine.scheduler.shutdown()
    return counters


def scenario(seed: int) -> Scenario:
    return Scenario(
        seed=seed,
        num_layers=2,
        num_device_blocks=40,
        num_host_blocks=32,
        num_requests=40,
        num_documents=24,
        documents_seed=DOCUMENTS_SEED,
        load_deadline_ms=2000,
        num_ranks=2,
        tensor_parallel=True,
    )


if __name__ == "__main__":
    directory, capacity_bytes, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for seed in itertools.count(first):
        counters = serve(Disk(directory, capacity_bytes), scenario(seed))
        print(
            json.dumps({name: counters.get(name, 0) for name in ("tier_bad_blocks:disk", "promoted_blocks")}),
            flush=True,
        )
