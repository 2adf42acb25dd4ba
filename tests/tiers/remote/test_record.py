"""The record of a value: every changed byte is found, and a value is good under its own key only."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat

FINGERPRINT = "5e" * 32
KEY = bytes(range(36))
HMAC_KEY = b"k" * 32
VALUES, SIGNED = ValueFormat(FINGERPRINT, "kv"), ValueFormat(FINGERPRINT, "kv", HMAC_KEY)
CHECKSUM_AT = 96
"""Where a record has the checksum of the payload."""
PARTS = [np.arange(64, dtype=np.uint8), np.arange(100, 132, dtype=np.uint8)]


def sealed(raw: bytearray) -> np.ndarray:
    """Returns the record ``raw`` with a right checksum."""
    raw[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(raw[:-8])))
    return np.frombuffer(bytes(raw), dtype=np.uint8)


def test_each_changed_byte_is_found() -> None:
    value = np.concatenate([VALUES.record(KEY, PARTS), *PARTS])
    for i in range(value.size):
        bad = value.copy()
        bad[i] ^= 0x10
        record, rest = bad[:RECORD_BYTES], bad[RECORD_BYTES:]
        assert VALUES.verify(KEY, record, [rest[:64], rest[64:]]) is Outcome.CORRUPT, i


@pytest.mark.parametrize("key", [KEY[:-1], KEY + b"\0", bytes(36), KEY[:-1] + b"\0"])
def test_the_value_of_another_key_is_bad(key: bytes) -> None:
    record = VALUES.record(key, PARTS)
    assert VALUES.verify(KEY, record, PARTS) is Outcome.CORRUPT


def test_the_value_of_another_fingerprint_is_bad_even_if_it_begins_alike() -> None:
    record = ValueFormat(FINGERPRINT[:-2] + "00").record(KEY, PARTS)
    assert VALUES.verify(KEY, record, PARTS) is Outcome.CORRUPT


def test_another_version_and_another_number_of_ranks_are_foreign() -> None:
    raw = bytearray(VALUES.record(KEY, PARTS).tobytes())
    raw[4] = 2
    assert VALUES.verify(KEY, sealed(raw), PARTS) is Outcome.MISSING
    whole = [np.concatenate(PARTS)]
    assert VALUES.verify(KEY, VALUES.record(KEY, whole), PARTS) is Outcome.MISSING


def test_a_record_that_does_not_begin_like_one_is_bad() -> None:
    raw = bytearray(VALUES.record(KEY, PARTS).tobytes())
    raw[0] ^= 1
    assert VALUES.verify(KEY, sealed(raw), PARTS) is Outcome.CORRUPT
    assert VALUES.verify(KEY, np.zeros(RECORD_BYTES, dtype=np.uint8), PARTS) is Outcome.CORRUPT


def test_a_tag_covers_every_byte_of_record_and_payload() -> None:
    value = np.concatenate([SIGNED.record(KEY, PARTS), *PARTS])
    for i in range(value.size):
        bad = value.copy()
        bad[i] ^= 0x10
        parts = [bad[RECORD_BYTES:][:64], bad[RECORD_BYTES:][64:]]
        # Whoever can write to the store can make all checksums right.
        raw = bytearray(bad[:RECORD_BYTES].tobytes())
        if i >= RECORD_BYTES:
            raw[CHECKSUM_AT : CHECKSUM_AT + 8] = struct.pack("<Q", VALUES.checksum(KEY, parts))
        forged = sealed(raw)
        verdict = SIGNED.verify(KEY, forged, parts)
        is_checksum = i >= RECORD_BYTES - 8
        assert (verdict is Outcome.OK) == (is_checksum and i < RECORD_BYTES), i


def test_forged_blocks_are_good_only_without_an_hmac_key() -> None:
    forged = VALUES.record(KEY, PARTS)
    assert VALUES.verify(KEY, forged, PARTS) is Outcome.OK
    assert SIGNED.verify(KEY, forged, PARTS) is Outcome.CORRUPT
    assert SIGNED.verify(KEY, ValueFormat(FINGERPRINT, hmac_key=b"x" * 32).record(KEY, PARTS), PARTS) is Outcome.CORRUPT


def test_names_have_prefix_namespace_and_key() -> None:
    assert VALUES.name(b"\x01\xff") == f"kv/{FINGERPRINT}/01ff"
    names = {ValueFormat(FINGERPRINT, "kv", key).name(KEY) for key in (b"", HMAC_KEY, b"x" * 32)}
    spaces = {name.split("/")[1] for name in names}
    assert len(spaces) == 3
    assert all(len(each) == 64 for each in spaces)
