"""CudaTransfer on a device without streams: bytes, chunks, results, errors. Streams are checked elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, PageGroup, TransferResult, TransferSpec
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.transfer.cuda.plain_device import PlainDevice

BLOCKS, SLOTS = 64, 64


@dataclass
class Ready:
    """A registration of which the first slots are ready."""

    num_ready_slots: int = SLOTS
    boundary_slots: int = 8


def apart(rng: np.random.Generator) -> list[ByteArray]:
    return [rng.integers(0, 256, (BLOCKS, size), np.uint8) for size in (64, 24, 40)]


def interleaved(rng: np.random.Generator) -> list[ByteArray]:
    whole = rng.integers(0, 256, (BLOCKS, 3, 32), np.uint8)
    return [whole[:, layer] for layer in range(3)]


class Rig:
    def __init__(self, groups: Sequence[PageGroup], registration: object = None, with_thread: bool = False) -> None:
        self.groups = groups
        self.pool = np.zeros((SLOTS, max(group.block_bytes for group in groups) + 7), np.uint8)
        tables = [page_table(group) for group in groups]
        self.device = PlainDevice(tables)
        self.transfer = CudaTransfer(tables, self.pool, self.device, registration or Ready(), with_thread=with_thread)

    def run(self) -> list[TransferResult]:
        while self.transfer.advance():
            pass
        return self.transfer.poll(busy=False)

    def device_bytes(self, group: int, block: int) -> bytes:
        return b"".join(view[block].tobytes() for view in self.groups[group].views)


def spec_of(slots: Sequence[int], *parts: tuple[Sequence[int], int]) -> TransferSpec:
    ids = np.array([block for blocks, _ in parts for block in blocks], dtype=np.int64)
    device = DeviceSpec(ids, tuple(len(blocks) for blocks, _ in parts), tuple(first for _, first in parts))
    return TransferSpec("r", LoadStoreSpec("CPU", np.array(slots, dtype=np.int64)), device)


@pytest.mark.parametrize("ready", [SLOTS, 0, 20])
def test_round_trip_of_jobs_of_several_groups(ready: int) -> None:
    rng = np.random.default_rng(0)
    rig = Rig([PageGroup(apart(rng), 2), PageGroup([]), PageGroup(interleaved(rng))], Ready(ready))
    before = [[view.copy() for view in group.views] for group in rig.groups]
    specs = {
        j: spec_of(
            [4 * j, 4 * j + 1, 4 * j + 3, 4 * j + 2], ([3 * j, 3 * j + 1, 3 * j + 2], 1), ([j], 0), ([50 + j], 0)
        )
        for j in range(12)
    }
    for job_id, spec in specs.items():
        rig.transfer.submit(job_id, spec, is_store=True)
    rig.transfer.before_forward()
    results = rig.run()
    assert sorted((result.job_id, result.ok, result.nbytes) for result in results) == [
        (j, True, 3 * 128 + 96) for j in specs
    ]
    assert rig.pool[1, :128].tobytes() == rig.device_bytes(0, 1), "the second slot of job 0"
    for group in rig.groups:
        for view in group.views:
            view[:] = 0
    for job_id, spec in specs.items():
        rig.transfer.submit(job_id, spec, is_store=False)
    assert all(result.ok for result in rig.run())
    for group, right, used in zip(rig.groups, before, (range(36), (), range(50, 62)), strict=True):
        for view, old in zip(group.views, right, strict=True):
            assert np.array_equal(view[list(used)], old[list(used)])
            assert not np.delete(view, list(used), axis=0).any(), "a block outside the jobs was written"
