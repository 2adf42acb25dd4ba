"""The disk tier's format: headers and records are read as they were written, and damaged ones are rejected."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from kvoffload.abc import ByteArray
from kvoffload.tiers.disk.format import (
    FACTS,
    HEADER_BYTES,
    MAX_SEQUENCE,
    RECORD_BYTES,
    FormatError,
    Header,
    is_fingerprint,
    pack_records,
    parse_records,
    payload_checksum,
    slab_name,
    slab_number,
)
from tests.tiers.disk.rig import pack_record

HEADER = Header("0123456789abcdef" * 4, (4096, 12288), 7, 0x1122334455667788)
KEYS = [bytes([i]) * 44 for i in range(1, 6)]


def record(key: bytes = KEYS[0], header: Header = HEADER, sequence: int = 1, **fields: int) -> ByteArray:
    values = {"stored_at": 1_700_000_000, "payload_checksum": 0xFEDCBA9876543210} | fields
    return pack_record(header, key, sequence=sequence, **values)


def sealed(body: bytes) -> ByteArray:
    """Returns ``body`` followed by its checksum."""
    return np.frombuffer(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)), dtype=np.uint8)


# The header.


@pytest.mark.parametrize("header", [HEADER, replace(HEADER, transient=True), replace(HEADER, slot_bytes=(4096,) * 256)])
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    packed = header.pack()
    assert packed.size == HEADER_BYTES
    assert Header.unpack(packed) == header


def test_a_header_with_any_bit_changed_is_rejected() -> None:
    for i in range(HEADER_BYTES):
        packed = HEADER.pack().copy()
        packed[i] ^= 1 << i % 8
        with pytest.raises(FormatError):
            Header.unpack(packed)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "8s", b"kvoffidy", "begin"),
        (8, "I", 3, "version 3"),
        (12, "I", 0, "impossible"),
        (12, "I", 257, "impossible"),
        (16, "64s", b"g" * 64, "impossible"),
        (16, "64s", b"\xff" * 64, "impossible"),
        (80, "Q", 0, "impossible"),
        (80, "Q", 1 << 63, "impossible"),
        (97, "Q", 0, "impossible"),
        (97, "Q", 4097, "impossible"),
        (97, "Q", 1 << 40, "impossible"),
    ],
)
def test_a_header_with_impossible_values_and_a_valid_checksum_is_rejected(
    offset: int, layout: str, value: int | bytes, message: str
) -> None:
    body = bytearray(HEADER.pack().tobytes()[:-8])
    assert Header.unpack(sealed(bytes(body))) == HEADER
    struct.pack_into("<" + layout, body, offset, value)
    with pytest.raises(FormatError, match=message):
        Header.unpack(sealed(bytes(body)))


# Records.


@pytest.mark.parametrize("key", [b"k", bytes(44), b"end\0\0", bytes(range(64)), b"\xff" * 64])
def test_a_record_is_read_as_it_was_written(key: bytes) -> None:
    entries = parse_records(HEADER, record(key, sequence=9), first_slot=5)
    assert entries.keys == [key]
    assert entries.slots.tolist() == [5]
    (found,) = entries.records
    assert (found["sequence"], found["stored_at"]) == (9, 1_700_000_000)
    assert found["payload_checksum"] == 0xFEDCBA9876543210
    assert entries.num_damaged == 0


def test_a_record_with_any_bit_changed_is_rejected() -> None:
    changed = np.tile(record(), (RECORD_BYTES * 8, 1))
    for bit in range(RECORD_BYTES * 8):
        changed[bit, bit // 8] ^= 1 << bit % 8
    entries = parse_records(HEADER, changed.reshape(-1))
    assert entries.keys == []
    assert entries.num_damaged == RECORD_BYTES * 8


@pytest.mark.parametrize(
    ("header", "damaged"),
    [
        (replace(HEADER, generation=5), 0),
        (replace(HEADER, fingerprint="f" * 64), 1),
        (replace(HEADER, slot_bytes=(4096, 4096)), 1),
    ],
)
def test_a_record_of_another_layout_or_generation_is_no_block(header: Header, damaged: int) -> None:
    entries = parse_records(HEADER, record(header=header))
    assert (entries.keys, entries.num_damaged) == ([], damaged)


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [(4, "H", 3), (6, "H", 0), (6, "H", 65), (6, "H", 65535), (96, "Q", MAX_SEQUENCE + 1)],
)
def test_a_record_with_impossible_values_and_a_valid_checksum_is_rejected(offset: int, layout: str, value: int) -> None:
    body = bytearray(record().tobytes()[:-8])
    assert parse_records(HEADER, sealed(bytes(body))).keys == [KEYS[0]]
    struct.pack_into("<" + layout, body, offset, value)
    assert parse_records(HEADER, sealed(bytes(body))).num_damaged == 1


def test_blocks_come_oldest_first_even_if_a_key_appears_twice() -> None:
    sequences = [30, 10, 20, 40]
    names = [KEYS[0], KEYS[1], KEYS[2], KEYS[0]]
    data = np.concatenate([record(key, sequence=n) for key, n in zip(names, sequences, strict=True)])
    entries = parse_records(HEADER, data)
    assert entries.slots.tolist() == [1, 2, 0, 3]
    assert entries.keys == [KEYS[1], KEYS[2], KEYS[0], KEYS[0]]


def test_a_truncated_record_is_ignored() -> None:
    data = np.concatenate([record(KEYS[0]), record(KEYS[1])])
    assert parse_records(HEADER, data[:-1]).keys == [KEYS[0]]
    assert parse_records(HEADER, data[:50]).keys == []


# Payloads.


def test_a_payload_checksum_depends_on_every_byte_and_on_the_key() -> None:
    block = [np.arange(100, dtype=np.uint8), np.full(60, 7, dtype=np.uint8)]
    right = payload_checksum(HEADER, KEYS[0], block)
    assert payload_checksum(HEADER, KEYS[0], [part.copy() for part in block]) == right
    others = {
        payload_checksum(HEADER, KEYS[1], block),
        payload_checksum(HEADER, KEYS[0] + b"\0", block),
        payload_checksum(replace(HEADER, generation=1), KEYS[0], block),
        payload_checksum(replace(HEADER, fingerprint="f" * 64), KEYS[0], block),
        payload_checksum(HEADER, KEYS[0], block[::-1]),
        payload_checksum(HEADER, KEYS[0], block[:1]),
    }
    assert len(others | {right}) == 7
    for part in block:
        for i in range(part.size):
            part[i] ^= 1
            assert payload_checksum(HEADER, KEYS[0], block) != right
            part[i] ^= 1


# Names.


def test_slab_names_and_numbers_correspond() -> None:
    assert [slab_name(n) for n in (0, 17, 123456)] == ["slab-00000", "slab-00017", "slab-123456"]
    assert [slab_number(name) for name in ("slab-00000", "slab-123456")] == [0, 123456]
    for name in ("slab-1", "slab-000001", "slab-00000.old", "xslab-00000", "index", "slab-0000\u0661"):
        assert slab_number(name) is None


def test_fingerprints_are_64_hexadecimal_digits() -> None:
    assert is_fingerprint("0f" * 32)
    for name in ("0f" * 31, "0F" * 32, "0f" * 32 + "\n", "..", "0g" * 32):
        assert not is_fingerprint(name)


def test_records_are_packed_as_the_format_says() -> None:
    keys = [KEYS[0], b"k", bytes(64), b"end\0"]
    sequences, checksums = [1, MAX_SEQUENCE + 1, 0, 5], [0, 1, (1 << 64) - 1, 9]
    facts = np.array(list(zip(sequences, range(4), checksums, strict=True)), dtype=FACTS)
    rows = pack_records(HEADER, keys, facts)
    for i, row in enumerate(rows):
        sequence = min(sequences[i], MAX_SEQUENCE)
        alone = pack_record(HEADER, keys[i], sequence=sequence, stored_at=i, payload_checksum=checksums[i])
        assert row.tobytes() == alone.tobytes()
