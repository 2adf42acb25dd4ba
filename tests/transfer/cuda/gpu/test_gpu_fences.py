"""The order of copies and of the engine's work on a CUDA device. Streams are delayed, so that work which does not wait
is seen to come first: each test has a control that leaves the order out and must find other bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import cuda
from benchmarks.gpu.rig import DelayedDevice, Layout, Rig, block_numbers, make_views, rig
from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from tests.transfer.cuda.calls import SUCCESS, WrappedDevice

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("warm_device")]

LAYERS, BLOCKS, PAGE = 4, 16, 4096
CHOSEN, SLOTS = block_numbers([3, 11, 4]), block_numbers([2, 0, 5])
POISON = 0xEE
DELAY_S = 0.25
"""Longer than anything in these tests takes."""
ROWS = np.random.default_rng(0).integers(0, 256, (len(CHOSEN), LAYERS * PAGE), np.uint8)

in_order = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "control"])
where_blocks_are_read = pytest.mark.parametrize(
    ("layout", "operation"), [(Layout.MERGED, "gather"), (Layout.PACKED, "copy")]
)
where_blocks_are_filled = pytest.mark.parametrize(
    ("layout", "operation"), [(Layout.MERGED, "scatter"), (Layout.PACKED, "copy")]
)


def delayed(*operations: str) -> Callable[[CudaDevice], CudaDevice]:
    return lambda inner: DelayedDevice(inner, DELAY_S, operations)


def group_of(layout: Layout) -> PageGroup:
    return PageGroup(make_views(layout, LAYERS, BLOCKS, PAGE))


def stored(r: Rig) -> np.ndarray[Any, Any]:
    return r.slots[SLOTS, : LAYERS * PAGE].copy()


@in_order
@where_blocks_are_read
def test_a_fence_holds_back_work_that_overwrites_blocks_of_a_store(
    layout: Layout, operation: str, ordered: bool
) -> None:
    with rig([group_of(layout)], 8, delayed(operation)) as r:
        r.write(0, CHOSEN, ROWS)
        job = r.store(SLOTS, CHOSEN)
        r.transfer.before_forward()
        if ordered:
            r.transfer.wait([job], CHOSEN.tolist())
        r.fill(0, CHOSEN, POISON)
        assert r.result(job).ok
        assert np.array_equal(stored(r), ROWS) is ordered
        assert (r.rows(0, CHOSEN) == POISON).all()


def test_a_fence_waits_for_the_read_of_the_blocks_and_not_for_the_bus() -> None:
    with rig([group_of(Layout.MERGED)], 8, delayed("copy")) as r:
        r.write(0, CHOSEN, ROWS)
        job = r.store(SLOTS, CHOSEN)
        r.transfer.before_forward()
        r.transfer.wait([job])
        r.fill(0, CHOSEN, POISON)
        cuda.record().synchronize()
        assert not r.has_ended(job), "the engine's stream has waited for the copy"
        assert r.result(job).ok
        assert np.array_equal(stored(r), ROWS)


@in_order
@where_blocks_are_filled
def test_a_wait_holds_back_work_that_reads_blocks_of_a_load(layout: Layout, operation: str, ordered: bool) -> None:
    with rig([group_of(layout)], 8, delayed(operation)) as r:
        r.slots[SLOTS, : LAYERS * PAGE] = ROWS
        r.fill(0, CHOSEN, POISON)
        r.transfer.before_forward()
        job = r.load(SLOTS, CHOSEN)
        if ordered:
            r.transfer.wait([job])
        seen = r.look(0, CHOSEN)
        cuda.record().synchronize()
        assert np.array_equal(seen.cpu().numpy(), ROWS) is ordered
        assert r.result(job).ok
        assert np.array_equal(r.rows(0, CHOSEN), ROWS)


@in_order
@pytest.mark.parametrize("layout", [Layout.MERGED, Layout.PACKED])
def test_a_load_does_not_overtake_work_issued_before_the_forward_pass(layout: Layout, ordered: bool) -> None:
    with rig([group_of(layout)], 8) as r:
        r.slots[SLOTS, : LAYERS * PAGE] = ROWS
        r.fill(0, CHOSEN, POISON)
        r.transfer.before_forward()
        cuda.synchronize()
        cuda.sleep(DELAY_S)
        seen = r.look(0, CHOSEN)
        if ordered:
            r.transfer.before_forward()
        assert r.result(r.load(SLOTS, CHOSEN)).ok
        cuda.synchronize()
        assert bool((seen.cpu().numpy() == POISON).all()) is ordered


class NoWaitForTheEngine(WrappedDevice):
    """A planted fault: no stream waits for events of the engine's stream."""

    def __init__(self, inner: CudaDevice) -> None:
        super().__init__(inner)
        self._engine = inner.engine_stream()
        self._engine_events: set[int] = set()

    def record(self, event: int, stream: int) -> int:
        if stream == self._engine:
            self._engine_events.add(event)
        return super().record(event, stream)

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        return SUCCESS if event in self._engine_events else super().wait(stream, event)


@in_order
@pytest.mark.parametrize("layout", [Layout.MERGED, Layout.PACKED])
def test_a_store_waits_for_the_work_that_computes_its_blocks(layout: Layout, ordered: bool) -> None:
    with rig([group_of(layout)], 8, (lambda inner: inner) if ordered else NoWaitForTheEngine) as r:
        r.fill(0, CHOSEN, POISON)
        cuda.synchronize()
        cuda.sleep(DELAY_S)
        r.write(0, CHOSEN, ROWS)
        job = r.store(SLOTS, CHOSEN)
        r.transfer.before_forward()
        assert r.result(job).ok
        assert np.array_equal(stored(r), ROWS) is ordered


@in_order
def test_a_load_waits_for_the_fence_of_a_store_of_the_same_blocks(ordered: bool) -> None:
    """The blocks of a store are given to a request that loads into them."""
    other = ROWS[:, ::-1].copy()
    with rig([group_of(Layout.MERGED)], 8, delayed("gather")) as r:
        r.write(0, CHOSEN, ROWS)
        places = block_numbers([1, 3, 4])
        r.slots[places, : LAYERS * PAGE] = other
        first = r.store(SLOTS, CHOSEN)
        r.transfer.before_forward()
        if ordered:
            r.transfer.wait([first], CHOSEN.tolist())
        second = r.load(places, CHOSEN)
        assert r.result(second).ok
        assert r.result(first).ok
        assert np.array_equal(stored(r), ROWS) is ordered
        assert np.array_equal(r.rows(0, CHOSEN), other)
