"""Maintenance runs one job at a time on a thread, and repeats each kind of work on its own after a failure."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvoffload.tiers.disk.format import HEADER_BYTES, Header, parse_records
from kvoffload.tiers.disk.maintenance import RETRY_S, Maintenance
from kvoffload.tiers.disk.recency import Recency
from kvoffload.tiers.disk.recovery import open_files
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
