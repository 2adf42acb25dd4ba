"""The journal: what is read from it is exactly what has changed, or nothing at all."""

from __future__ import annotations

import itertools
import threading
from random import Random

import numpy as np
import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk import journal
from kvoffload.tiers.disk.format import EMPTY_RECORD, FormatError, Header
from kvoffload.tiers.disk.journal import (
    ENTRY_BYTES,
    JOURNAL_HEADER_BYTES,
    MIN_ENTRIES,
    Journal,
    JournalHeader,
    digests_of,
    journal_bytes,
    num_entries_for,
    read_entries,
)
from kvoffload.tiers.disk.layout import SlotLayout
from kvoffload.tiers.disk.storage import Storage
from tests.sim.shared_storage import SimulatedStorage
from tests.sim.storage import FaultRates, FaultyStorage
from tests.tiers.disk.rig import key, pack_record

HEADER = Header("ab" * 32, (4096,), 100, 7)


def record(number: int) -> ByteArray:
    return pack_record(HEADER, key(number), sequence=1, stored_at=1, payload_checksum=number)


class Rig:
    """A journal, and a follower's model of the index: digest and checksum by slot."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage or SimulatedStorage(1 << 20)
        self.storage.make_folder("fp")
        self.file = self.storage.open("fp", "journal", create=True)
        self.file.resize(journal_bytes(MIN_ENTRIES))
        self.epochs = itertools.count(100)
        self.journal = Journal(self.file, MIN_ENTRIES, lambda: next(self.epochs))
        self.seen: JournalHeader | None = None
        self.synced = 0

    def write(self, header: Header = HEADER) -> None:
        def sync() -> None:
            self.synced += 1

        self.journal.write(header, sync)

    def read(self, offset: int, nbytes: int) -> ByteArray:
        data = np.zeros(nbytes, dtype=np.uint8)
        return data[: self.file.read([data], offset)]

    def head(self) -> JournalHeader:
        return JournalHeader.unpack(self.read(0, JOURNAL_HEADER_BYTES))

    def follow(self) -> dict[int, int] | None:
        """Returns what has changed since the last call, digests by slot, the latest last; None if all must be read."""
        old, self.seen = self.seen, self.head()
        if old is None or old.epoch != self.seen.epoch:
            return None
        entries = read_entries(self.seen, old.head, self.read)
        if entries is None:
            return None
        return dict(zip(entries["slot"].tolist(), entries["digest"].tolist(), strict=True))


def followed() -> Rig:
    """Returns a journal of which a follower knows all."""
    rig = Rig()
    rig.write()
    rig.follow()
    return rig


def digest(number: int) -> int:
    return int(digests_of([key(number)])[0])


def test_a_follower_reads_what_was_noted() -> None:
    rig = Rig()
    rig.write()
    assert rig.follow() is None, "the first time"
    rig.journal.note(5, np.concatenate([record(1), EMPTY_RECORD, record(2)]))
    rig.journal.note(9, record(3))
    rig.journal.note(5, EMPTY_RECORD)
    rig.write()
    assert rig.follow() == {5: 0, 6: 0, 7: digest(2), 9: digest(3)}
    assert rig.follow() == {}
    synced = rig.synced
    rig.write()
    assert rig.synced == synced, "nothing to do"


def test_the_ring_wraps_and_a_follower_that_fell_behind_notices() -> None:
    rig = followed()
    rng = Random(1)
    number = 0
    behind = 0
    for _ in range(120):
        expected: dict[int, int] = {}
        total = 0
        for _ in range(rng.choice([1, 1, 4])):
            count = rng.randint(1, 200)
            total += count
            for slot in rng.sample(range(1000), count):
                number += 1
                rig.journal.note(slot, record(number))
                expected[slot] = digest(number)
            rig.write()
        found = rig.follow()
        if total > MIN_ENTRIES:
            assert found is None
            behind += 1
        else:
            assert found == expected
    assert behind


@pytest.mark.parametrize(("most", "changes"), [(journal.MAX_PENDING, MIN_ENTRIES // 2 + 1), (3, 5)])
def test_more_changes_than_half_of_the_ring_or_than_are_kept_begin_an_epoch(
    monkeypatch: pytest.MonkeyPatch, most: int, changes: int
) -> None:
    monkeypatch.setattr(journal, "MAX_PENDING", most)
    rig = followed()
    for slot in range(changes):
        rig.journal.note(slot, record(slot + 1))
    rig.write()
    assert rig.follow() is None
    rig.journal.note(3, record(5))
    rig.write()
    assert rig.follow() == {3: digest(5)}


@pytest.mark.parametrize("fault", ["io_error", "no_space", "short_write"])
def test_a_failed_write_is_made_up_for_by_an_epoch(fault: str) -> None:
    storage = FaultyStorage(SimulatedStorage(1 << 20))
    rig = Rig(storage)
    rig.write()
    rig.follow()
    storage.rates = FaultRates(**{fault: 1.0})
    rig.journal.note(3, record(5))
    with pytest.raises(OSError, match=r".+"):
        rig.write()
    storage.rates = FaultRates()
    rig.write()
    assert rig.follow() is None


@pytest.mark.parametrize("byte", [0, 9, 17, 24, 28, 33])
def test_a_damaged_or_old_entry_is_not_taken(byte: int) -> None:
    rig = followed()
    rig.journal.note(3, record(5))
    rig.write()
    at = JOURNAL_HEADER_BYTES + byte
    page = rig.read(at, 1)
    rig.file.write([page ^ np.uint8(1)], at)
    assert rig.follow() is None


def test_entries_of_another_epoch_are_not_taken() -> None:
    """On a network file system the header may arrive before the entries."""
    rig = Rig()
    rig.write()
    rig.journal.note(3, record(5))
    rig.write()
    head = rig.head()
    other = JournalHeader(head.num_entries, head.epoch + 1, head.generation, head.head)
    assert read_entries(head, 0, rig.read) is not None
    assert read_entries(other, 0, rig.read) is None


@pytest.mark.parametrize("kind", ["short", "magic", "version", "checksum", "entries"])
def test_a_bad_header_is_refused(kind: str) -> None:
    raw = JournalHeader(MIN_ENTRIES, 1, 2, 3).pack().copy()
    assert JournalHeader.unpack(raw) == JournalHeader(MIN_ENTRIES, 1, 2, 3)
    if kind == "short":
        raw = raw[:100]
    elif kind == "entries":
        raw = JournalHeader(MIN_ENTRIES - 1, 1, 2, 3).pack()
    else:
        raw[{"magic": 0, "version": 8, "checksum": 40}[kind]] ^= 1
    with pytest.raises(FormatError):
        JournalHeader.unpack(raw)


def test_nothing_is_written_after_close() -> None:
    rig = Rig()
    rig.write()
    before = rig.read(0, journal_bytes(MIN_ENTRIES)).tobytes()
    rig.journal.close()
    rig.journal.note(3, record(5))
    rig.write()
    assert rig.read(0, journal_bytes(MIN_ENTRIES)).tobytes() == before


def test_the_size_of_the_ring_is_bounded() -> None:
    for num_slots in (0, 1, 5000, 10**5, 10**9):
        count = num_entries_for(num_slots)
        JournalHeader.unpack(JournalHeader(count, 1, 2, 3).pack())
        assert journal_bytes(count) == JOURNAL_HEADER_BYTES + count * ENTRY_BYTES <= (4 << 20) + 4096
        with_journal, without = SlotLayout(4096, 8, count), SlotLayout(4096, 8)
        assert with_journal.bytes_of(9) == without.bytes_of(9) + journal_bytes(count), "it is within the budget"


def test_close_does_not_wait_for_a_write_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "WRITING_DEADLINE_S", 0.01)
    rig = Rig()
    rig.journal.note(0, record(1))
    hangs, goes_on = threading.Event(), threading.Event()

    def sync() -> None:
        hangs.set()
        goes_on.wait(60.0)

    thread = threading.Thread(target=rig.journal.write, args=(HEADER, sync))
    thread.start()
    try:
        assert hangs.wait(60.0)
        with pytest.raises(OSError, match="hangs"):
            rig.write()
        assert not rig.journal.close()
    finally:
        goes_on.set()
        thread.join()
    assert rig.journal.close()


def test_digests_depend_on_every_byte_and_on_the_length() -> None:
    base = bytes(range(1, 45))
    family = [base, base[:-1], base + b"\0", base[:-1] + b"\0", bytes(44), bytes(43), bytes(8), bytes(7), b"\0"]
    family += [base[:i] + bytes([base[i] ^ 1 << bit]) + base[i + 1 :] for i in range(44) for bit in range(8)]
    found = digests_of(family)
    assert len(set(found.tolist())) == len(set(family)) == len(family)
    assert found.tolist() == [int(digests_of([key])[0]) for key in family], "alone or together"
    assert (found != 0).all()
    assert len(digests_of([])) == 0


def test_digests_are_spread_evenly() -> None:
    """Keys that differ in a counter only, as in tests, must not meet in the same buckets."""
    found = digests_of([number.to_bytes(36, "big") for number in range(1 << 14)])
    for shift in (0, 16, 32, 48):
        counts = np.bincount((found >> np.uint64(shift) & np.uint64(1023)).astype(np.int64), minlength=1024)
        assert counts.max() <= 16 + 8 * 4
        assert counts.min() > 0
