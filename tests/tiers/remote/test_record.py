"""The record of a value: every changed byte is found, and a value is good under its own key only."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvoffload.tiers.remote.record import (
    RECORD_BYTES,
    Verdict,
    namespace,
    pack_record,
    payload_checksum,
    value_name,
    verify,
)

FINGERPRINT = "5e" * 32
KEY = bytes(range(36))
HMAC_KEY = b"k" * 32
CHECKSUM_AT = 96
"""Where a record has the checksum of the payload."""
PARTS = [np.arange(64, dtype=np.uint8), np.arange(100, 132, dtype=np.uint8)]


def sealed(raw: bytearray) -> np.ndarray:
    """Returns the record ``raw`` with a right checksum."""
    raw[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(raw[:-8])))
    return np.frombuffer(bytes(raw), dtype=np.uint8)


def test_what_was_packed_is_good() -> None:
    record = pack_record(FINGERPRINT, KEY, PARTS)
    assert record.size == RECORD_BYTES
    assert verify(FINGERPRINT, KEY, record, PARTS) is Verdict.GOOD


def test_each_changed_byte_is_found() -> None:
    value = np.concatenate([pack_record(FINGERPRINT, KEY, PARTS), *PARTS])
    for i in range(value.size):
        bad = value.copy()
        bad[i] ^= 0x10
        record, rest = bad[:RECORD_BYTES], bad[RECORD_BYTES:]
        assert verify(FINGERPRINT, KEY, record, [rest[:64], rest[64:]]) is Verdict.BAD, i


@pytest.mark.parametrize("key", [KEY[:-1], KEY + b"\0", bytes(36), KEY[:-1] + b"\0"])
def test_the_value_of_another_key_is_bad(key: bytes) -> None:
    record = pack_record(FINGERPRINT, key, PARTS)
    assert verify(FINGERPRINT, KEY, record, PARTS) is Verdict.BAD


def test_the_value_of_another_fingerprint_is_bad_even_if_it_begins_alike() -> None:
    record = pack_record(FINGERPRINT[:-2] + "00", KEY, PARTS)
    assert verify(FINGERPRINT, KEY, record, PARTS) is Verdict.BAD


def test_another_version_and_another_number_of_ranks_are_foreign() -> None:
    raw = bytearray(pack_record(FINGERPRINT, KEY, PARTS).tobytes())
    raw[4] = 2
    assert verify(FINGERPRINT, KEY, sealed(raw), PARTS) is Verdict.FOREIGN
    whole = [np.concatenate(PARTS)]
    assert verify(FINGERPRINT, KEY, pack_record(FINGERPRINT, KEY, whole), PARTS) is Verdict.FOREIGN


def test_a_record_that_does_not_begin_like_one_is_bad() -> None:
    raw = bytearray(pack_record(FINGERPRINT, KEY, PARTS).tobytes())
    raw[0] ^= 1
    assert verify(FINGERPRINT, KEY, sealed(raw), PARTS) is Verdict.BAD
    assert verify(FINGERPRINT, KEY, np.zeros(RECORD_BYTES, dtype=np.uint8), PARTS) is Verdict.BAD


def test_parts_are_hashed_in_order() -> None:
    assert payload_checksum(FINGERPRINT, KEY, PARTS) != payload_checksum(FINGERPRINT, KEY, PARTS[::-1])


def test_names_have_prefix_fingerprint_and_key() -> None:
    assert value_name("kv", FINGERPRINT, b"\x01\xff") == f"kv/{FINGERPRINT}/01ff"


def test_a_tag_covers_every_byte_of_record_and_payload() -> None:
    value = np.concatenate([pack_record(FINGERPRINT, KEY, PARTS, HMAC_KEY), *PARTS])
    for i in range(value.size):
        bad = value.copy()
        bad[i] ^= 0x10
        parts = [bad[RECORD_BYTES:][:64], bad[RECORD_BYTES:][64:]]
        # Whoever can write to the store can make all checksums right.
        raw = bytearray(bad[:RECORD_BYTES].tobytes())
        if i >= RECORD_BYTES:
            raw[CHECKSUM_AT : CHECKSUM_AT + 8] = struct.pack("<Q", payload_checksum(FINGERPRINT, KEY, parts))
        forged = sealed(raw)
        verdict = verify(FINGERPRINT, KEY, forged, parts, HMAC_KEY)
        is_checksum = i >= RECORD_BYTES - 8
        assert (verdict is Verdict.GOOD) == (is_checksum and i < RECORD_BYTES), i


def test_forged_blocks_are_good_only_without_an_hmac_key() -> None:
    forged = pack_record(FINGERPRINT, KEY, PARTS)
    assert verify(FINGERPRINT, KEY, forged, PARTS) is Verdict.GOOD
    assert verify(FINGERPRINT, KEY, forged, PARTS, HMAC_KEY) is Verdict.BAD
    assert verify(FINGERPRINT, KEY, pack_record(FINGERPRINT, KEY, PARTS, b"x" * 32), PARTS, HMAC_KEY) is Verdict.BAD


def test_servers_with_other_hmac_keys_have_other_names() -> None:
    spaces = {namespace(FINGERPRINT), namespace(FINGERPRINT, HMAC_KEY), namespace(FINGERPRINT, b"x" * 32)}
    assert len(spaces) == 3
    assert all(len(each) == 64 for each in spaces)
