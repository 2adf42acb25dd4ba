"""Two servers share a directory on two real NFS mounts: each machine has caches and locks of its own."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import ByteArray, LookupState, TierError, TierResult
from kvoffload.host.pool import SLOT_ALIGNMENT
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.shared_dir.seats import Machine
from kvoffload.tiers.shared_dir.tier import SharedDirTier, Surroundings

MOUNTS = [os.environ.get(f"KVOFFLOAD_NFS_{name}", "") for name in "AB"]
"""Mounts of one directory by two NFS clients, see tools/nfs_guest.py."""
FINGERPRINT = "cd" * 32
BLOCK = 4 * SLOT_ALIGNMENT
NUM_BLOCKS = 40
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(
    not all(MOUNTS), reason="needs two NFS mounts; tools/nfs_guest.py makes them, see tests/tools/test_nfs_guest.py"
)


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


class Server:
    """A tier on one mount. Slot i of its pool is for block i."""

    def __init__(self, mount: str, folder: str, number: int, num_blocks: int) -> None:
        self.folder = folder
        self.pools = make_pools(NUM_BLOCKS, BLOCK, seed=number)
        self.tier = SharedDirTier(
            DirectoryStorage(Path(mount) / folder),
            TierContext(self.pools, FINGERPRINT),
            (1 << 20) + num_blocks * (BLOCK + 1024),
            surroundings=Surroundings(
                machine=Machine(f"machine-{number}", number, f"boot-{number}"), slab_bytes=8 * BLOCK
            ),
        )

    def wait_for(self, is_done: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    def finish(self) -> list[TierResult]:
        results: list[TierResult] = []

        def is_idle() -> bool:
            results.extend(self.tier.poll())
            return not self.tier.has_jobs

        self.wait_for(is_idle)
        return results

    def write(self, numbers: range) -> None:
        """Writes blocks one after the other. While the files grow, the tier takes none on."""
        for number in numbers:
            results: list[TierResult] = []

            def is_written(number: int = number, results: list[TierResult] = results) -> bool:
                self.tier.write([key(number)], np.array([number]))
                results += self.finish()
                return bool(results)

            self.wait_for(is_written)
            assert results[0].ok

    def read(self, numbers: range) -> list[TierResult]:
        self.tier.read([key(number) for number in numbers], np.array(numbers, dtype=np.int64))
        return self.finish()

    def finds(self, numbers: range) -> bool:
        self.tier.poll()
        return bool((self.tier.contains([key(number) for number in numbers]) == LookupState.HIT).all())


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    folder = uuid.uuid4().hex
    first, second = Server(MOUNTS[0], folder, 1, NUM_BLOCKS), Server(MOUNTS[1], folder, 2, NUM_BLOCKS)
    yield first, second
    first.tier.close()
    second.tier.close()


def block(server: Server, number: int) -> ByteArray:
    bytes_of: ByteArray = server.pools[0][number]
    return bytes_of


def test_real_servers_have_seats_of_their_own_and_read_each_others_blocks(servers: tuple[Server, Server]) -> None:
    first, second = servers
    assert {first.tier.seat.name, second.tier.seat.name} == {"writer-0", "writer-1"}
    mine, others = range(10), range(10, 20)
    first.write(mine)
    second.write(others)
    first.wait_for(lambda: first.finds(others) and second.finds(mine))
    assert all(result.ok for result in first.read(others) + second.read(mine))
    for number in range(20):
        assert (block(first, number) == block(second, number)).all()
    # A block that another one has is not stored again.
    assert second.tier.write([key(number) for number in mine], np.arange(10)) == []


def test_real_blocks_that_were_replaced_are_gone_and_not_wrong(servers: tuple[Server, Server]) -> None:
    first, second = servers
    numbers = range(8)
    first.write(numbers)
    second.wait_for(lambda: second.finds(numbers))
    first.tier.delete([key(number) for number in numbers])
    # New blocks take the slots, before the second server has noticed.
    first.write(range(8, 40))
    before = [block(second, number).copy() for number in numbers]
    for result in second.read(numbers):
        number = next(number for number in numbers if key(number) == result.key)
        assert result.error in (None, TierError.GONE)
        if result.ok:
            assert (block(second, number) == block(first, number)).all()
            assert (block(second, number) != before[number]).any()


def test_real_seats_are_used_again_after_an_end_in_order(servers: tuple[Server, Server]) -> None:
    first, second = servers
    first.write(range(10))
    seat = first.tier.seat.name
    first.tier.close()
    third = Server(MOUNTS[0], second.folder, 3, NUM_BLOCKS)
    try:
        assert third.tier.seat.name == seat
        assert third.finds(range(10))
    finally:
        third.tier.close()
