"""Maintenance runs one job at a time on a thread, and repeats each kind of work on its own after a failure."""

from __future__ import annotations

import errno
from collections.abc import Sequence, Set
from unittest.mock import Mock

import numpy as np
import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.format import HEADER_BYTES, Header, parse_records
from kvoffload.tiers.disk.maintenance import RETRY_S, Maintenance
from kvoffload.tiers.disk.recency import MAX_PAGES, PAGE_SLOTS, Recency
from kvoffload.tiers.disk.recovery import open_files
from kvoffload.tiers.disk.storage import StoredFile
from tests.sim.executor import SteppedExecutor
from tests.sim.shared_storage import SimulatedStorage
from tests.tiers.disk.rig import FINGERPRINT, PAGE, bytes_in, capacity, pack_record

NUM_SLOTS = 12


class Rig:
    """Slabs of four slots, three of them within the budget."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.storage = SimulatedStorage(1 << 20)
        self.files = open_files(
            self.storage, FINGERPRINT, [PAGE], capacity(NUM_SLOTS, num_slabs=3), 4 * PAGE, lambda: 7
        )
        self.recency = Recency(NUM_SLOTS, self.files.recency)
        # Number 0 stands for no use.
        self.recency.take(1)
        self.executor = SteppedExecutor(clock=lambda: self.now)
        self.maintenance = Maintenance(self.files, self.recency, self.executor, lambda: self.now)

    def run(self) -> list[int]:
        """Lets jobs run until none is due. Returns new slots."""
        new: list[int] = []
        for _ in range(4):
            self.maintenance.submit()
            self.executor.drain()
            new += self.maintenance.poll().tolist()
        return new

    def store(self, slot: int, key: bytes) -> None:
        record = pack_record(self.files.index.header, key, sequence=1, stored_at=0, payload_checksum=0)
        self.files.index.write_records(slot, record)

    def keys(self) -> list[bytes]:
        return parse_records(self.files.index.header, bytes_in(self.storage, "index")[HEADER_BYTES:]).keys


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_full_medium_holds_up_growth_only(rig: Rig) -> None:
    rig.maintenance.grow_now()
    rig.store(2, b"gone")
    rig.storage.capacity_bytes = rig.storage.used_bytes
    rig.maintenance.grow()
    assert rig.run() == []
    rig.files.index.header = Header(FINGERPRINT, (PAGE,), 4, 7, transient=True)
    rig.maintenance.empty_records(np.array([2]))
    rig.recency.note_use(np.array([1]))
    rig.run()
    assert Header.unpack(bytes_in(rig.storage, "index")).transient
    assert rig.keys() == []
    assert bytes_in(rig.storage, "recency").any()


def test_what_has_failed_is_repeated_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.maintenance.grow_now()
    rig.store(2, b"gone")
    calls = []

    def fail(first_slot: int, records: object) -> None:
        calls.append(first_slot)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(rig.files.index, "write_records", fail)
        rig.maintenance.empty_records(np.array([2]))
        rig.run()
        assert calls == [2], "not before RETRY_S"
        rig.now += RETRY_S
        rig.run()
        assert calls == [2, 2]
    rig.run()
    assert rig.keys() == [b"gone"]
    rig.now += RETRY_S
    rig.run()
    assert rig.keys() == []


def test_one_job_at_a_time(rig: Rig) -> None:
    rig.maintenance.grow_now()
    with rig.executor.hold():
        for slot in range(4):
            rig.maintenance.empty_records(np.array([slot]))
            rig.maintenance.submit()
            rig.maintenance.grow()
    assert rig.executor.turn()
    assert not rig.executor.turn(), "the next job is submitted when the first one was polled"


# The recency file gets marks first, and every other page in turn, however many pages change meanwhile.

NUM_PAGES = 2 * MAX_PAGES + 8
PAGE_BYTES = 4096
ALL_SLOTS = NUM_PAGES * PAGE_SLOTS
MARK = np.array([7], dtype=np.uint64)


class Pages(Mock):
    """A file that knows which pages were written. Pages in ``bad`` cannot be."""

    def __init__(self, bad: Set[int] = frozenset()) -> None:
        super().__init__(StoredFile)
        self.bad = bad
        self.marked: set[int] = set()
        self.written: set[int] = set()

    def write(self, buffers: Sequence[ByteArray], offset: int) -> int:
        page = offset // PAGE_BYTES
        if page in self.bad:
            raise OSError(errno.EIO, "Input/output error")
        self.written.add(page)
        if buffers[0].view("<u8")[1::2].any():
            self.marked.add(page)
        return buffers[0].size


@pytest.fixture
def file() -> Pages:
    return Pages()


@pytest.fixture
def recency(file: Pages) -> Recency:
    return Recency(ALL_SLOTS, file)


def use_all(recency: Recency) -> None:
    recency.note_use(np.arange(0, ALL_SLOTS, PAGE_SLOTS))


def test_marks_are_written_before_uses(recency: Recency, file: Pages) -> None:
    use_all(recency)
    recency.note_marks(np.array([ALL_SLOTS - 1]), MARK)
    recency.write(ALL_SLOTS, everything=False)
    assert NUM_PAGES - 1 in file.marked
    assert len(file.written) == MAX_PAGES
    assert (recency.is_urgent, recency.has_changes) == (False, True)


def test_it_is_urgent_until_all_marks_are_written(recency: Recency, file: Pages) -> None:
    slots = np.arange(0, ALL_SLOTS, PAGE_SLOTS)
    recency.note_marks(slots, np.repeat(MARK, len(slots)))
    num_calls = 0
    while recency.is_urgent:
        recency.write(ALL_SLOTS, everything=False)
        num_calls += 1
    assert len(file.marked) == NUM_PAGES
    assert num_calls == -(-NUM_PAGES // MAX_PAGES)
    assert not recency.has_changes


def test_every_page_has_its_turn_while_others_change(recency: Recency, file: Pages) -> None:
    for i in range(3):
        use_all(recency)
        recency.note_marks(np.array([i]), MARK)
        recency.write(ALL_SLOTS, everything=False)
    assert len(file.written) == NUM_PAGES


def test_a_page_that_cannot_be_written_holds_up_no_other() -> None:
    file = Pages(bad={3, 5, 900})
    recency = Recency(ALL_SLOTS, file)
    recency.note_marks(np.array([3, 5, 9]) * PAGE_SLOTS, np.repeat(MARK, 3))
    for _ in range(10):
        use_all(recency)
        try:
            recency.write(ALL_SLOTS, everything=False)
        except OSError:
            assert recency.has_changes
    assert file.written == set(range(NUM_PAGES)) - file.bad
    assert not recency.is_urgent
    file.bad = frozenset()
    recency.write(ALL_SLOTS, everything=True)
    assert file.marked == {3, 5, 9}
    assert not recency.has_changes
