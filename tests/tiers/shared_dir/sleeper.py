"""A server that a test kills: it writes blocks into a shared directory, says so, and sleeps.

``python sleeper.py DIRECTORY FIRST COUNT``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.shared_dir.tier import SharedDirTier
from tests.tiers.disk.rig import FINGERPRINT, PAGE, content, key
from tests.tiers.shared_dir.rig import NUM_HOST_SLOTS, capacity

if __name__ == "__main__":
    names = range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3]))
    pools = make_pools(NUM_HOST_SLOTS, PAGE)
    root = DirectoryStorage(Path(sys.argv[1]))
    tier = SharedDirTier(root, TierContext(pools, FINGERPRINT), capacity(len(names)))
    for slot, name in enumerate(names):
        pools[0][slot] = content(name)
    tier.write([key(name) for name in names], np.arange(len(names)))
    done = 0
    while done < len(names):
        tier.wait(0.05)
        done += len(tier.poll())
    tier.keep()
    print(tier.seat.name, flush=True)
    time.sleep(600)
