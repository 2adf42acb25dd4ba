"""Disk tiers in one directory, one after the other, stepped by the test."""

from __future__ import annotations

import dataclasses
import os
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray, LookupState, OffloadKey, TierError, TierResult
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.checksum import sealed
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import FORMAT_VERSION, HEADER_BYTES, Header
from kvoffload.tiers.disk.layout import FIXED_BYTES, SLAB_OVERHEAD_BYTES, slot_cost
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from tests.sim.executor import SteppedExecutor
from tests.sim.shared_storage import SimulatedStorage

PAGE = 4096
FINGERPRINT = "5a" * 32
OTHERS = [digit * 64 for digit in "123"]
NUM_HOST_SLOTS = 512
READ_SLOT = 256
"""The first host slot that is read into."""


def key(name: int) -> OffloadKey:
    return name.to_bytes(4, "big") * 11


def content(name: int, rank: int = 0, nbytes: int = PAGE, version: int = 0) -> ByteArray:
    return np.random.default_rng([name, rank, version]).integers(0, 256, nbytes, dtype=np.uint8)


def capacity(num_slots: int, *slot_bytes: int, num_slabs: int = 1) -> int:
    return FIXED_BYTES + num_slabs * SLAB_OVERHEAD_BYTES + num_slots * slot_cost(sum(slot_bytes or (PAGE,)))


def du(path: Path) -> int:
    """Returns the bytes that files and folders take, as the file system counts them. Some may vanish meanwhile."""
    return sum(each.lstat().st_blocks * 512 for each in [path, *path.rglob("*")] if each.exists())


class Rig:
    """Opens one tier after the other on a directory. Jobs run when ``drain`` is called."""

    def __init__(self, path: Path, *slot_bytes: int, num_slots: int = 8, **settings: Any) -> None:
        self.path = path
        self.slot_bytes = slot_bytes or (PAGE,)
        self.pools = make_pools(NUM_HOST_SLOTS, *self.slot_bytes)
        self.settings: dict[str, Any] = {
            "fingerprint": FINGERPRINT,
            "capacity_bytes": capacity(num_slots, *self.slot_bytes),
        } | settings
        """Fields of DiskSettings, and of DiskTier beside them."""
        self.opened: DiskTier | None = None

    @property
    def tier(self) -> DiskTier:
        assert self.opened is not None
        return self.opened

    @property
    def folder(self) -> Path:
        return self.path / str(self.settings["fingerprint"])

    def storage(self) -> Storage:
        return DirectoryStorage(self.path)

    def open(self, storage: Storage | None = None, **settings: Any) -> DiskTier:
        if self.opened is not None:
            self.opened.close()
        self.settings |= settings
        self.executor = SteppedExecutor()
        fields = {each.name for each in dataclasses.fields(DiskSettings)}
        kept = DiskSettings(**{name: value for name, value in self.settings.items() if name in fields})
        others = {name: value for name, value in self.settings.items() if name not in fields}
        self.opened = DiskTier(storage or self.storage(), self.pools, kept, executor=self.executor, **others)
        self.check()
        return self.tier

    def open_after_kill(self, storage: SimulatedStorage) -> DiskTier:
        """Kills the process that has ``storage``, and opens the tier of the next one."""
        self.opened = None
        return self.open(storage.restart())

    def check(self) -> None:
        self.tier.check_integrity()
        if self.path.exists():
            assert du(self.path) <= self.tier.files.used_bytes <= self.tier.files.budget.capacity_bytes

    def drain(self) -> list[TierResult]:
        self.executor.drain()
        results = self.tier.poll()
        self.executor.drain()
        results += self.tier.poll()
        self.check()
        return results

    def write(self, *names: int, version: int = 0) -> list[TierResult]:
        for i, name in enumerate(names):
            for rank, pool in enumerate(self.pools):
                pool[i] = content(name, rank, pool.shape[1], version)
        results: list[TierResult] = []
        left = {key(name): slot for slot, name in enumerate(names)}
        # Blocks without room are taken on when the files have grown, one slab at a time.
        for _ in range(len(names) + 1):
            for taken in self.tier.write(list(left), np.array(list(left.values()), dtype=np.int64)):
                del left[taken]
            results += self.drain()
            if not left:
                break
        return results

    def read(self, *names: int) -> dict[int, TierError | None]:
        """Reads blocks and asserts that their bytes are right. Returns the error of each that was taken on."""
        self.tier.read([key(name) for name in names], READ_SLOT + np.arange(len(names)))
        results = {result.key: result for result in self.drain()}
        for i, name in enumerate(names):
            if key(name) in results and results[key(name)].ok:
                for rank, pool in enumerate(self.pools):
                    assert np.array_equal(pool[READ_SLOT + i], content(name, rank, pool.shape[1]))
        return {name: results[key(name)].error for name in names if key(name) in results}

    def present(self, most: int = 64) -> list[int]:
        states = self.tier.contains([key(name) for name in range(most)])
        return np.flatnonzero(states == LookupState.HIT).tolist()

    def check_reads(self, *names: int) -> None:
        assert self.read(*names) == dict.fromkeys(names)


def header_of(rig: Rig) -> Header:
    """Returns the header of the index on disk."""
    return Header.unpack(np.fromfile(rig.folder / "index", dtype=np.uint8, count=HEADER_BYTES))


def bytes_in(storage: Storage, name: str) -> ByteArray:
    """Returns all bytes of a file of FINGERPRINT."""
    with closing(storage.open(FINGERPRINT, name)) as file:
        data = np.zeros(file.size(), dtype=np.uint8)
        file.read([data], 0)
    return data


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def put(what: str, path: Path, target: Path) -> None:
    """Makes ``path`` a link to ``target``, a folder with a file, or a pipe."""
    target.write_bytes(b"not ours")
    if what == "link":
        path.symlink_to(target)
    elif what == "folder":
        path.mkdir()
        (path / "file").write_bytes(b"not ours")
    else:
        os.mkfifo(path)


def spoil(path: Path) -> None:
    """Changes every block in a slab."""
    data = np.fromfile(path, dtype=np.uint8)
    data[::512] ^= 1
    path.write_bytes(data.tobytes())


RECORD = struct.Struct("<IHH12sIQ64sQIIQ")
MAGIC = int.from_bytes(b"kvob", "little")


def pack_record(header: Header, key: OffloadKey, *, sequence: int, stored_at: int, payload_checksum: int) -> ByteArray:
    """Returns the record of a slot with a block, RECORD_BYTES bytes."""
    body = RECORD.pack(
        MAGIC,
        FORMAT_VERSION,
        len(key),
        header.fingerprint_id,
        header.block_bytes,
        header.generation,
        key,
        sequence,
        stored_at,
        0,
        payload_checksum,
    )
    return sealed(body)
