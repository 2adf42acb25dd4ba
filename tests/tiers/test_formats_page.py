"""docs/formats.md is true: its tables alone are enough to read what the tiers write."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvoffload.tiers.disk.format import FACTS, FORMAT_VERSION, RECORD, Header, pack_records
from kvoffload.tiers.disk.journal import ENTRY, JOURNAL_VERSION, JournalHeader
from kvoffload.tiers.disk.recency import mark
from kvoffload.tiers.remote.record import FORMAT_VERSION as STORE_VERSION
from kvoffload.tiers.remote.record import ValueFormat

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
TABLES = [
    [(int(at), int(size), field) for at, size, field in re.findall(r"^\| (\d+) \| (\d+) \| (.*) \|$", table, re.M)]
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M)
    if table.startswith("| at |")
]
FINGERPRINT = "5e" * 32
KEY = bytes(range(36))


def fields(table: int, data: bytes) -> dict[str, int | bytes]:
    """Returns the fields of ``data`` by the first word of their rows: numbers up to 8 bytes, else bytes."""
    found: dict[str, int | bytes] = {}
    for at, size, field in TABLES[table]:
        raw = data[at : at + size]
        assert len(raw) == size
        found[re.split(r"[ ,:]", field)[0]] = (
            raw if size > 8 or field.startswith("magic") else int.from_bytes(raw, "little")
        )
    return found


def is_sealed(data: bytes) -> bool:
    return xxh3_64_intdigest(data[:-8]) == int.from_bytes(data[-8:], "little")


def test_an_index_is_read_by_the_page() -> None:
    header = Header(FINGERPRINT, (4096, 8192), 7, 12345)
    raw = header.pack().tobytes()
    found = fields(0, raw)
    assert (found["magic"], found["version"], found["ranks"]) == (b"kvoffidx", FORMAT_VERSION, 2)
    assert (found["fingerprint"], found["slots"], found["generation"]) == (FINGERPRINT.encode(), 7, 12345)
    assert (found["1"], found["bytes"]) == (0, 4096)
    assert is_sealed(raw)
    facts = np.zeros(1, dtype=FACTS)
    facts["sequence"], facts["stored_at"], facts["payload_checksum"] = 11, 22, 33
    record = pack_records(header, [KEY], facts)[0].tobytes()
    found = fields(1, record)
    assert (found["magic"], found["version"], found["generation"]) == (b"kvob", FORMAT_VERSION, 12345)
    assert (found["sequence"], found["stored"], found["key"]) == (11, 22, KEY.ljust(64, b"\0"))
    assert record[112:120] == (33).to_bytes(8, "little")
    assert record[20:24] == (12288).to_bytes(4, "little")
    assert is_sealed(record)
    assert mark(KEY, 99.5) == 100 << 24 | xxh3_64_intdigest(KEY) & 0xFFFFFF


def test_a_journal_is_read_by_the_page() -> None:
    raw = JournalHeader(512, 5, 6, 7).pack().tobytes()
    found = fields(3, raw)
    assert (found["magic"], found["version"], found["entries"]) == (b"kvoffjnl", JOURNAL_VERSION, 512)
    assert (found["epoch"], found["generation"], found["head"]) == (5, 6, 7)
    assert is_sealed(raw)


def test_a_value_of_a_store_is_read_by_the_page() -> None:
    parts = [np.full(64, 3, dtype=np.uint8), np.full(32, 4, dtype=np.uint8)]
    raw = ValueFormat(FINGERPRINT, hmac_key=b"k" * 32).record(KEY, parts).tobytes()
    found = fields(5, raw)
    assert (found["magic"], found["version"], found["ranks"]) == (b"kvor", STORE_VERSION, 2)
    assert found["key"] == KEY.ljust(64, b"\0")
    assert raw[24:32] == (96).to_bytes(8, "little")
    seed = bytes.fromhex(FINGERPRINT) + bytes(8) + KEY
    checksum = xxh3_64_intdigest(seed)
    for part in parts:
        checksum = xxh3_64_intdigest(part.data, checksum)
    assert raw[96:104] == checksum.to_bytes(8, "little")
    assert found["with"] != bytes(16)
    assert is_sealed(raw)


@pytest.mark.parametrize(("table", "dtype"), [(1, RECORD), (4, ENTRY)])
def test_no_field_is_missing(table: int, dtype: np.dtype[np.void]) -> None:
    fields = dict(dtype.fields or {})
    fields.pop("unused", None)
    assert {at: size for at, size, _ in TABLES[table]} == {each[1]: each[0].itemsize for each in fields.values()}
