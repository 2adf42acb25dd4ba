"""BlockIO moves blocks in few calls, in an order that a kill cannot harm, and says what has become of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.abc import ByteArray, TierError
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.disk import blockio
from kvoffload.tiers.disk.blockio import HANDOVER_S, Batch, BlockIO, Done
from kvoffload.tiers.disk.format import FACTS, HEADER_BYTES, RECORD_BYTES, parse_records
from kvoffload.tiers.disk.recovery import open_files
from tests.sim.executor import SteppedExecutor
from tests.sim.shared_storage import SimulatedStorage
from tests.sim.storage import FaultRates, FaultyStorage
from tests.tiers.disk.rig import FINGERPRINT, PAGE, bytes_in, capacity

NUM_SLOTS = 12
READ_SLOT = 32
"""The first host slot that is read into."""


class Rig:
    """Three slabs of four slots."""

    def __init__(self, job_bytes: int = 1 << 20) -> None:
        self.now = 1000.0
        self.storage = FaultyStorage(SimulatedStorage(1 << 20))
        self.files = open_files(
            self.storage, FINGERPRINT, [PAGE], capacity(NUM_SLOTS, num_slabs=3), 4 * PAGE, lambda: 7
        )
        while self.files.num_allocated < NUM_SLOTS:
            self.files.grow()
        self.pools = make_pools(64, PAGE)
        self.executor = SteppedExecutor(clock=lambda: self.now)
        self.io = BlockIO(self.files, self.pools, self.executor, lambda: self.now, lambda: 5.5, job_bytes)
        self.facts = np.zeros(NUM_SLOTS, dtype=FACTS)
        self.storage.operations = 0

    def batch(self, slots: Sequence[int], first_host_slot: int = 0) -> Batch:
        """The block in slot s has the key s."""
        facts = self.facts[list(slots)]
        facts["sequence"] = [100 + slot for slot in slots]
        hosts = first_host_slot + np.arange(len(slots))
        return Batch([key(slot) for slot in slots], hosts, np.array(slots, dtype=np.int64), facts)

    def take(self) -> list[Done]:
        self.executor.drain()
        done = self.io.take_done()
        for run in done:
            self.facts[run.slots] = run.facts
        return done

    def write(self, *slots: int) -> dict[int, TierError | None]:
        assert self.io.submit(self.batch(slots), is_read=False) == len(slots)
        return outcome(self.take())

    def read(self, *slots: int) -> dict[int, TierError | None]:
        assert self.io.submit(self.batch(slots, READ_SLOT), is_read=True) == len(slots)
        return outcome(self.take())

    def recorded(self) -> list[int]:
        """The slots that have valid records."""
        entries = parse_records(self.files.index.header, bytes_in(self.storage, "index")[HEADER_BYTES:])
        assert entries.keys == [key(slot) for slot in entries.slots.tolist()]
        return sorted(entries.slots.tolist())


def key(slot: int) -> bytes:
    return bytes([slot + 1]) * 36


def outcome(done: Sequence[Done]) -> dict[int, TierError | None]:
    return {slot: result.error for run in done for slot, result in zip(run.slots.tolist(), run.results, strict=True)}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_neighbours_within_a_slab_are_moved_together(rig: Rig) -> None:
    rig.write(6, 2, 3, 4, 5)
    # Slots 2 and 3, then 4 to 6 in the next slab: two records and a payload each.
    assert rig.storage.operations == 2 * 3
    rig.storage.operations = 0
    rig.read(2, 3, 4, 5, 6)
    assert rig.storage.operations == 2, "a read writes nothing"


def test_a_read_that_goes_on_when_it_was_abandoned_empties_no_record(rig: Rig) -> None:
    """Another process may have the files by then."""
    rig.write(1)
    slab = rig.storage.open(FINGERPRINT, "slab-00000")
    slab.write([np.full(PAGE, 7, dtype=np.uint8)], PAGE)
    slab.close()
    rig.io.submit(rig.batch((1,), READ_SLOT), is_read=True)
    rig.io.abandon()
    assert outcome(rig.take()) == {1: TierError.CORRUPT}
    assert rig.recorded() == [1]


def test_what_the_executor_does_not_take_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(job_bytes=2 * PAGE)
    accepted = iter([True, True, False])
    submit = rig.executor.submit_read
    monkeypatch.setattr(rig.executor, "submit_read", lambda job: next(accepted) and submit(job))
    rig.write(*range(6))
    assert rig.io.submit(rig.batch(range(6), READ_SLOT), is_read=True) == 4
    assert rig.io.num_moving == {True: 4, False: 0}
    assert len(outcome(rig.take())) == 4
    assert not any(rig.io.num_moving.values())


# Batches.


def test_a_fault_in_the_middle_of_a_batch_costs_one_block(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs over three slabs. Each step fails for one block: its record cannot be emptied, its payload or its new
    record cannot be written."""
    slots = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    index, slabs = rig.files.index, rig.files.slabs
    for part, name, bad in ((index, "empty_records", 2), (slabs, "write", 5), (index, "write_records", 9)):
        call = getattr(part, name)

        def fail_for(slot: int, what: object, call: object = call, bad: int = bad) -> None:
            if slot <= bad < slot + (what if isinstance(what, int) else blocks_in(what)):
                raise OSError("this place cannot be written")
            call(slot, what)  # type: ignore[operator]

        monkeypatch.setattr(part, name, fail_for)
    assert rig.write(*slots) == {slot: TierError.IO if slot in (2, 5, 9) else None for slot in slots}
    assert rig.recorded() == [1, 3, 4, 6, 7, 8, 10]
    monkeypatch.undo()
    assert rig.read(1, 3, 4, 6, 7, 8, 10) == dict.fromkeys((1, 3, 4, 6, 7, 8, 10))


def blocks_in(what: object) -> int:
    """Returns how many blocks these records, or these payloads, are of."""
    return len(what) // RECORD_BYTES if isinstance(what, np.ndarray) else len(what)  # type: ignore[arg-type]


def test_bad_and_unreadable_blocks_in_a_batch_leave_the_others_good(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write(*range(NUM_SLOTS))
    slab = rig.storage.open(FINGERPRINT, "slab-00001")
    slab.write([np.full(PAGE, 7, dtype=np.uint8)], 2 * PAGE)
    slab.close()
    read = rig.files.slabs.read

    def short_of_slot_10(slot: int, buffers: Sequence[ByteArray]) -> None:
        if slot <= 10 < slot + len(buffers):
            raise OSError("only 100 bytes were read")
        read(slot, buffers)

    monkeypatch.setattr(rig.files.slabs, "read", short_of_slot_10)
    expected = dict.fromkeys(range(NUM_SLOTS)) | {6: TierError.CORRUPT, 10: TierError.IO}
    assert rig.read(*range(NUM_SLOTS)) == expected
    assert rig.recorded() == [slot for slot in range(NUM_SLOTS) if slot not in (6, 10)]
    good = [slot for slot in range(NUM_SLOTS) if slot not in (6, 10)]
    assert np.array_equal(rig.pools[0][[READ_SLOT + slot for slot in good]], rig.pools[0][good])


def test_short_writes_of_a_batch_are_continued_or_fail_alone(rig: Rig) -> None:
    """The negative control: without the continuation or the calls per block, more blocks would fail than are short."""
    rig.storage.rates = FaultRates(short_write=0.3)
    outcomes = rig.write(*range(NUM_SLOTS))
    rig.storage.rates = FaultRates()
    assert rig.recorded() == [slot for slot, error in outcomes.items() if error is None]
    good = rig.recorded()
    assert rig.read(*good) == dict.fromkeys(good)


def test_a_slow_medium_hands_over_what_it_has_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose deadline passes half way through a job gets the blocks that were read by then."""
    rig.write(0, 2, 4, 6, 8, 10)
    read = rig.files.slabs.read
    taken: list[int] = []

    def slow(slot: int, buffers: Sequence[ByteArray]) -> None:
        taken.extend(slot for run in rig.io.take_done() for slot in run.slots.tolist())
        read(slot, buffers)
        rig.now += 0.6 * HANDOVER_S

    monkeypatch.setattr(rig.files.slabs, "read", slow)
    rig.io.submit(rig.batch((0, 2, 4, 6, 8, 10), READ_SLOT), is_read=True)
    rig.executor.drain()
    assert taken == [0, 2, 4, 6]
    assert outcome(rig.take()) == {8: None, 10: None}


def test_a_job_with_a_bug_reports_all_of_its_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.write(1, 2) == dict.fromkeys((1, 2))

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(blockio, "pack_records", fail)
    monkeypatch.setattr(blockio, "payload_checksums", fail)
    assert rig.write(3, 4) == dict.fromkeys((3, 4), TierError.IO)
    assert rig.read(1, 2) == dict.fromkeys((1, 2), TierError.IO)
    assert not any(rig.io.num_moving.values())
    monkeypatch.undo()
    assert rig.read(1, 2) == dict.fromkeys((1, 2))
