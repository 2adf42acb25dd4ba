"""Window: one buffer per value, whose payload is the slots themselves, for any ranks, sizes and order of slots."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.abc import ByteArray
from kvoffload.host.mapping import HUGE_PAGE
from kvoffload.host.pool import HostPool
from kvoffload.tiers.remote.memory import MAX_ROWS, MAX_WINDOW_BYTES, SeparateBuffers, Window
from kvoffload.tiers.remote.record import RECORD_BYTES, Value

PAGE = mmap.PAGESIZE
NUM_SLOTS = 6
SIZES = [(PAGE,), (3 * PAGE, PAGE), (PAGE, 5 * PAGE, 2 * PAGE), (HUGE_PAGE,), (HUGE_PAGE, HUGE_PAGE + PAGE)]


class Rig:
    """Pools of one server as its client's process sees them, and what the test expects in them."""

    def __init__(self, slot_bytes: Sequence[int], window_class: type[Window] = Window) -> None:
        self.hosts = [HostPool(NUM_SLOTS, nbytes) for nbytes in slot_bytes]
        handles = [host.handle() for host in self.hosts]
        self.files = [handle.open_file() for handle in handles]
        self.window = window_class([handle.open() for handle in handles], self.files)
        self.random = np.random.default_rng(0)
        for host in self.hosts:
            host.data[:] = self.random.integers(0, 256, host.data.shape, dtype=np.uint8)
        self.expected = [host.data.copy() for host in self.hosts]
        self.rows: dict[int, tuple[int, Value, bytes]] = {}
        """Slot, memory and record by row."""

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        for host in self.hosts:
            host.close()

    def move(self, row: int, slot: int, is_read: bool) -> None:
        """Gives a row a slot, then has a client change (``is_read``) or only look at its one buffer."""
        value = self.window.value(row, slot)
        (whole,) = value.buffers
        record = self.random.bytes(RECORD_BYTES)
        value.record[:] = np.frombuffer(record, dtype=np.uint8)
        if is_read:
            whole[RECORD_BYTES:] = self.random.integers(0, 256, whole.size - RECORD_BYTES, dtype=np.uint8)
            at = RECORD_BYTES
            for expected in self.expected:
                expected[slot] = whole[at : at + expected.shape[1]]
                at += expected.shape[1]
        self.rows[row] = slot, value, record
        self.check()

    def move_all(self, steps: Sequence[tuple[int, int, bool]]) -> None:
        for row, slot, is_read in steps:
            self.move(row, slot, is_read)

    def check(self) -> None:
        """Asserts that every row has its record and its slot's bytes, and that no other slot has changed."""
        for slot, value, record in self.rows.values():
            (whole,) = value.buffers
            payload = [expected[slot] for expected in self.expected]
            # Not the bytes: pytest would compare long strings letter by letter to say how they differ.
            assert np.array_equal(whole[:RECORD_BYTES], np.frombuffer(record, np.uint8))
            assert np.array_equal(whole[RECORD_BYTES:], np.concatenate(payload))
            assert value.record.tobytes() == record
            assert all(np.array_equal(part, data) for part, data in zip(value.parts, payload, strict=True))
        for host, expected in zip(self.hosts, self.expected, strict=True):
            assert np.array_equal(host.data, expected)


class KeepsItsFormerSlot(Window):
    def __init__(self, pools: Sequence[ByteArray], files: Sequence[int]) -> None:
        super().__init__(pools, files)
        self.kept: dict[int, Value] = {}

    def value(self, row: int, slot: int) -> Value:
        if row not in self.kept:
            self.kept[row] = super().value(row, slot)
        return self.kept[row]


class SharesRows(Window):
    def value(self, row: int, slot: int) -> Value:
        return super().value(0, slot)


class MapsTheNextSlot(Window):
    def value(self, row: int, slot: int) -> Value:
        return super().value(row, (slot + 1) % NUM_SLOTS)


class CopiesTheSlot(Window):
    def value(self, row: int, slot: int) -> Value:
        value = super().value(row, slot)
        copy = value.buffers[0].copy()
        return Value(copy[:RECORD_BYTES], value.parts, [copy])


@pytest.fixture(params=SIZES, ids=str)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


moves = st.lists(st.tuples(st.integers(0, 3), st.integers(0, NUM_SLOTS - 1), st.booleans()), max_size=12)


@given(moves)
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("slot_bytes", SIZES[:3], ids=str)
def test_a_row_is_its_record_and_the_slot_that_it_has_now(
    slot_bytes: Sequence[int], steps: list[tuple[int, int, bool]]
) -> None:
    rig = Rig(slot_bytes)
    try:
        rig.move_all(steps)
    finally:
        rig.close()


STEPS = [(0, 0, True), (1, 1, False), (0, 2, True), (1, 1, True), (0, 5, False), (2, 0, True)]


def test_slots_of_any_size(rig: Rig) -> None:
    rig.move_all(STEPS)


def test_every_row_is_used_at_once(rig: Rig) -> None:
    slots = [row % NUM_SLOTS for row in range(rig.window.num_rows)]
    for row, slot in enumerate(slots[:NUM_SLOTS]):
        rig.move(row, slot, is_read=True)
    values = [rig.window.value(row, slot) for row, slot in enumerate(slots)]
    ranges = sorted((value.buffers[0].ctypes.data, value.buffers[0].nbytes) for value in values)
    assert all(a + nbytes <= b for (a, nbytes), (b, _) in pairwise(ranges))
    memory = rig.window.registered()[0]
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    assert all(begin <= a and a + nbytes <= end for a, nbytes in ranges)


@pytest.mark.parametrize("planted", [KeepsItsFormerSlot, SharesRows, MapsTheNextSlot, CopiesTheSlot])
def test_planted_bugs_are_found(planted: type[Window]) -> None:
    rig = Rig(SIZES[1], planted)
    try:
        with pytest.raises(AssertionError):
            rig.move_all(STEPS)
    finally:
        rig.close()


def test_a_call_moves_many_small_values_or_a_few_large_ones() -> None:
    for slot_bytes, num_rows in ((PAGE, MAX_ROWS), (MAX_WINDOW_BYTES // 4, 4), (2 * MAX_WINDOW_BYTES, 1)):
        assert Window([np.empty((1, slot_bytes), dtype=np.uint8)], [-1]).num_rows == num_rows


def test_a_slot_that_cannot_be_mapped_raises() -> None:
    window = Window([np.empty((1, PAGE), dtype=np.uint8)], [-1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        window.value(0, 0)


def test_slots_that_are_not_whole_pages_have_separate_buffers() -> None:
    pools = [np.zeros((NUM_SLOTS, nbytes), dtype=np.uint8) for nbytes in (PAGE, 64)]
    assert not Window.fits(pools)
    assert Window.fits(pools[:1])
    value = SeparateBuffers(pools).value(3, 2)
    value.buffers[2][:] = 7
    assert [buffer.nbytes for buffer in value.buffers] == [RECORD_BYTES, PAGE, 64]
    assert (pools[1][2] == 7).all()
