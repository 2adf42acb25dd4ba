"""Several servers on one shared directory, each with a clock of its own, stepped by the test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvoffload.abc import LookupState, TierError, TierResult
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.journal import journal_bytes, num_entries_for
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.shared_dir.seats import GONE_AFTER_S, Machine
from kvoffload.tiers.shared_dir.tier import SharedDirTier, Surroundings
from tests.sim.executor import SteppedExecutor
from tests.sim.shared_folder import SteppedRepeating
from tests.tiers.disk import rig as disk
from tests.tiers.disk.rig import FINGERPRINT, PAGE, content, key

NUM_HOST_SLOTS = 256
READ_SLOT = 128
"""The first host slot that is read into."""
HIT, MISS = LookupState.HIT, LookupState.MISS


def capacity(num_slots: int, *slot_bytes: int, num_slabs: int = 1) -> int:
    """Returns a budget for so many blocks, and for the journal and heartbeat."""
    return disk.capacity(num_slots, *slot_bytes, num_slabs=num_slabs) + journal_bytes(num_entries_for(0)) + 2 * PAGE


def still(
    clock: Callable[[], float], name: str, do: Callable[[], None], interval_s: float, finish: Callable[[], None]
) -> SteppedRepeating:
    """Returns the thread of a tier, which does nothing: the test calls ``keep`` and ``follow``."""
    return SteppedRepeating(do, interval_s, finish, clock)


class Server:
    """One server. Jobs of its tier run in ``run``; ``background`` does what its threads would do."""

    def __init__(
        self,
        path: Path,
        num_slots: int = 8,
        *,
        boot: str = "boot-a",
        time: Callable[[], float] = lambda: 0.0,
        storage: Callable[[], Storage] | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.pools = make_pools(NUM_HOST_SLOTS, PAGE)
        self.executor = SteppedExecutor(seed=seed)
        fingerprint, identity = settings.pop("fingerprint", FINGERPRINT), settings.pop("identity", {})
        self.tier = SharedDirTier(
            DirectoryStorage(path) if storage is None else storage(),
            TierContext(self.pools, fingerprint, identity=identity),
            settings.pop("capacity_bytes", None) or capacity(num_slots),
            settings.pop("gone_after_s", GONE_AFTER_S),
            surroundings=Surroundings(
                **{
                    "machine": Machine(f"host-{boot}", 1, boot),
                    "executor": self.executor,
                    "clock": time,
                    "wall_clock": time,
                    "random": Random(seed).randbytes,
                    "repeat": partial(still, time),
                    **settings,
                }
            ),
        )

    def background(self) -> None:
        self.tier.writer.keep()
        self.tier.others.follow()
        self.tier.others.blocks.check_integrity()

    def run(self) -> list[TierResult]:
        results = []
        while self.tier.has_jobs:
            self.executor.drain()
            results += self.tier.poll()
        self.tier.poll()
        self.executor.drain()
        self.tier.check_integrity()
        return results

    def write(self, *names: int, version: int = 0) -> list[int]:
        """Writes blocks and lets others know. Returns those that were written."""
        for slot, name in enumerate(names):
            self.pools[0][slot] = content(name, version=version)
        taken = self.tier.write([key(name) for name in names], np.arange(len(names)))
        written = [result.key for result in self.run() if result.ok and not result.is_read]
        self.tier.writer.keep()
        assert set(written) <= set(taken)
        return [name for name in names if key(name) in written]

    def begin_read(self, *names: int) -> list[int]:
        """Begins to read blocks. Returns those that were taken on."""
        taken = self.tier.read([key(name) for name in names], np.arange(len(names)) + READ_SLOT)
        return [name for name in names if key(name) in taken]

    def read(self, *names: int, version: int = 0) -> dict[int, TierError | None]:
        """Reads blocks. Returns the error of each that was taken on, None if it was right."""
        self.begin_read(*names)
        return self.end_read(*names, version=version)

    def end_read(self, *names: int, version: int = 0) -> dict[int, TierError | None]:
        errors = {result.key: result.error for result in self.run() if result.is_read}
        for i, name in enumerate(names):
            if key(name) in errors and errors[key(name)] is None:
                assert np.array_equal(self.pools[0][READ_SLOT + i], content(name, version=version)), "wrong bytes"
        return {name: errors[key(name)] for name in names if key(name) in errors}

    def finds(self, *names: int) -> list[int]:
        states = self.tier.contains([key(name) for name in names])
        return [name for name, state in zip(names, states.tolist(), strict=True) if state == HIT]

    def kill(self) -> None:
        """Ends the process without a word: its threads stop, and its files are closed."""
        self.executor.kill()
        self.tier.own.files.close()


Serve = Callable[..., Server]
