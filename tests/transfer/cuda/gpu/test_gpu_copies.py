"""Bytes that CudaTransfer copies on a CUDA device: layouts, sizes, groups, registered and unregistered host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.gpu import cuda
from benchmarks.gpu.rig import Layout, Rig, block_numbers, make_views, registered_pool, rig, slot_bytes
from kvoffload.abc import PageGroup
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.slots import Unregistered
from tests.transfer.cuda.calls import WrappedDevice

pytestmark = pytest.mark.cuda

LAYERS, BLOCKS, PAGE = 3, 24, 1024
BLOCK_LISTS = [4, 9, 1, 6, 23, 0]
BEFORE, AFTER = 0xEE, 0xA5
"""What pages and slots hold before something else is copied to them."""


def random_rows(num_rows: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(num_rows).integers(0, 256, (num_rows, nbytes), np.uint8)


def stored(r: Rig, slots: Sequence[int], factor: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns what the slots hold, one row per device block."""
    return r.slots[list(slots), : factor * nbytes].reshape(-1, nbytes).copy()


def round_trip(r: Rig, blocks: Sequence[int], slots: Sequence[int]) -> None:
    """Stores blocks, overwrites them, and loads them again."""
    (group,) = r.groups
    chosen, places = block_numbers(blocks), block_numbers(slots)
    others = block_numbers([b for b in range(len(group.views[0])) if b not in blocks][:64])
    rows = random_rows(len(blocks), group.device_block_bytes)
    r.fill(0, others, BEFORE)
    r.write(0, chosen, rows)
    r.slots[:] = AFTER
    result = r.result(r.store(places, chosen))
    assert result.ok
    assert result.nbytes == rows.nbytes
    assert result.seconds > 0
    assert np.array_equal(stored(r, slots, group.factor, group.device_block_bytes), rows)
    unused = [slot for slot in range(len(r.slots)) if slot not in slots]
    assert (r.slots[unused] == AFTER).all()
    r.fill(0, chosen, BEFORE)
    r.transfer.before_forward()
    job = r.load(places, chosen)
    r.transfer.wait([job])
    seen = r.look(0, chosen)
    assert r.result(job).ok
    assert np.array_equal(r.rows(0, chosen), rows)
    assert np.array_equal(seen.cpu().numpy(), rows)
    assert (r.rows(0, others) == BEFORE).all()


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("layout", Layout)
def test_a_round_trip(layout: Layout, factor: int) -> None:
    group = PageGroup(make_views(layout, LAYERS, BLOCKS, PAGE), factor)
    slots = [5, 2, 7, 0, 1, 3][: len(BLOCK_LISTS) // factor]
    with rig([group], 8) as r:
        round_trip(r, BLOCK_LISTS, slots)


@pytest.mark.parametrize("page", [7, 130, 516, 1032, 18432 + 16])
def test_pages_that_are_not_multiples_of_16_bytes(page: int) -> None:
    group = PageGroup([*make_views(Layout.SEPARATE, 2, BLOCKS, page), *make_views(Layout.SEPARATE, 1, BLOCKS, 4)])
    with rig([group], 8) as r:
        round_trip(r, BLOCK_LISTS, [5, 2, 7, 0, 1, 3])


@pytest.mark.parametrize("layout", [Layout.MERGED, Layout.PACKED])
def test_blocks_of_a_cache_of_40_gib(layout: Layout, request: pytest.FixtureRequest) -> None:
    """Addresses within a cache, and within one layer, do not fit 32 bits."""
    nbytes, page = 40 << 30, 64 << 10
    if cuda.free_memory() < nbytes + (2 << 30):
        if cuda.DEVICE != "cpu":
            pytest.skip("needs 42 GiB of free device memory")
        nbytes, page = 2 << 20, 1 << 10
    num_blocks = nbytes // page // 2
    views = make_views(layout, 2, num_blocks, page)
    request.addfinalizer(cuda.empty_cache)
    with rig([PageGroup(views)], 8) as r:
        round_trip(r, [0, num_blocks - 1, num_blocks // 2, num_blocks // 3, num_blocks - 2], [3, 0, 7, 5, 2])


class AddressesSeen(WrappedDevice):
    """Notes the host memory that copies touch: pieces that lie in ``region`` (start, bytes)."""

    region = (0, 0)
    num_inside = 0

    def before_copies(self, stream: int, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        start, nbytes = self.region
        for addresses in (targets, sources):
            self.num_inside += int(((addresses + sizes > start) & (addresses < start + nbytes)).sum())


@pytest.mark.parametrize("layout", [Layout.MERGED, Layout.PACKED])
def test_unregistered_memory_never_goes_to_the_driver(layout: Layout) -> None:
    group = PageGroup(make_views(layout, LAYERS, BLOCKS, PAGE))
    devices: list[AddressesSeen] = []

    def wrap(inner: Any) -> AddressesSeen:
        devices.append(AddressesSeen(inner))
        return devices[-1]

    with rig([group], 8, wrap, registration=Unregistered()) as r:
        devices[0].region = (int(r.slots.ctypes.data), r.slots.nbytes)
        round_trip(r, BLOCK_LISTS, [5, 2, 7, 0, 1, 3])
        assert devices[0].num_inside == 0
    with rig([group], 8, wrap) as r:
        devices[1].region = (int(r.slots.ctypes.data), r.slots.nbytes)
        round_trip(r, BLOCK_LISTS, [5, 2, 7, 0, 1, 3])
        assert devices[1].num_inside > 0, "the copies of this test are not seen"


def test_copies_across_two_registrations() -> None:
    """Neighbouring slots in two registrations are not copied in one piece, which drivers refuse."""
    group = PageGroup(make_views(Layout.PACKED, 4, BLOCKS, 4096))
    with registered_pool(24, slot_bytes([group]), chunk_bytes=64 << 10) as (pool, registration):
        assert registration.num_ready_slots == 24
        assert registration.boundary_slots == 4
        r = Rig([group], pool.data, registration)
        round_trip(r, list(range(24)), list(range(24)))
        r.close()


def test_the_kernel_is_used(real_device: None, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="kvoffload"),
        rig([PageGroup(make_views(Layout.MERGED, LAYERS, BLOCKS, PAGE))], 8) as r,
    ):
        assert r.device.native_calls().kernels[0] is not None
        assert [record.message for record in caplog.records if record.name.startswith("kvoffload")] == []
