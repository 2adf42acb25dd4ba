"""The record of a value: every changed byte is found, and a value is good under its own key only."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.record import RECORD_BYTES, Value, ValueFormat
from kvoffload.tiers.remote.worker import MAX_ROWS, ROWS_BYTES, ValueMemory

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


def with_byte(at: int, value: int) -> np.ndarray:
    raw = bytearray(VALUES.record(KEY, PARTS).tobytes())
    raw[at] = value
    return sealed(raw)


OTHERS = {
    **{f"key {key.hex()}": VALUES.record(key, PARTS) for key in (KEY[:-1], KEY + b"\0", bytes(36), KEY[:-1] + b"\0")},
    "a fingerprint that begins alike": ValueFormat(FINGERPRINT[:-2] + "00").record(KEY, PARTS),
    "another beginning": with_byte(0, 0),
    "zeros": np.zeros(RECORD_BYTES, dtype=np.uint8),
}
FOREIGN = {"another version": with_byte(4, 2), "another number of ranks": VALUES.record(KEY, [np.concatenate(PARTS)])}


@pytest.mark.parametrize("name", [*OTHERS, *FOREIGN])
def test_the_record_of_another_value_is_bad_and_that_of_another_server_is_foreign(name: str) -> None:
    record, verdict = (OTHERS[name], Outcome.CORRUPT) if name in OTHERS else (FOREIGN[name], Outcome.MISSING)
    assert VALUES.verify(KEY, record, PARTS) is verdict


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


# Memory in which values move: peers of a client never decide about a slot after its check.

SIZES = (4096, 64, 5000)
NUM_SLOTS = 6
MOMENTS = 9
"""More than there are before and after the looks of one check."""


def pools_with_kv() -> list[ByteArray]:
    pools = [np.zeros((NUM_SLOTS, nbytes), dtype=np.uint8) for nbytes in SIZES]
    for rank, pool in enumerate(pools):
        pool[0] = np.random.default_rng(rank).integers(0, 256, pool.shape[1])
    return pools


class VerifiesTheRow(ValueFormat):
    """Planted: verifies what peers can write, then copies it."""

    def check(self, key: bytes, value: Value, is_whole: bool) -> Outcome:
        stored = np.split(value.buffers[0][RECORD_BYTES:], np.cumsum(SIZES)[:-1])
        verdict = self.verify(key, value.record, stored)
        for part, source in zip(value.parts, stored, strict=True):
            part[:] = source
        return verdict


def loads_what_a_peer_wrote(of: type[ValueFormat], hmac_key: bytes) -> bool:
    """Writes a block and reads it into another slot, while a peer changes the row before or after one of the looks at
    bytes. Returns whether the verdict was ever GOOD with other bytes in the slot, or for bytes that lie in the row."""
    pools = pools_with_kv()
    rows = ValueMemory(pools, has_rows=True)
    (stored,) = of(FINGERPRINT, "kv", hmac_key).seal(KEY, rows.value(0, 0))
    good = stored.copy()
    value = rows.value(1, 3)
    whole = value.buffers[0]
    moments = looks = 0
    is_wrong = False

    def moment() -> None:
        nonlocal moments
        moments += 1
        if moments == change_at:
            whole[RECORD_BYTES:] ^= 0x55

    class Meddled(of):  # type: ignore[valid-type, misc]
        def checksum(self, key: bytes, parts: Sequence[ByteArray]) -> int:
            moment()
            result = super().checksum(key, parts)
            moment()
            return int(result)

        def _tag(self, body: bytes, parts: Sequence[ByteArray]) -> bytes:
            nonlocal is_wrong
            is_wrong |= any(np.shares_memory(each, rows.memory) for each in parts)
            moment()
            result = super()._tag(body, parts)
            moment()
            return bytes(result)

    for change_at in range(MOMENTS):  # noqa: B007
        moments = 0
        whole[: good.size] = good
        verdict = Meddled(FINGERPRINT, "kv", hmac_key).check(KEY, value, is_whole=True)
        looks = max(looks, moments)
        is_wrong |= verdict is Outcome.OK and any((pool[3] != pool[0]).any() for pool in pools)
    assert 0 < looks < MOMENTS
    return is_wrong


@pytest.mark.parametrize("hmac_key", [b"", b"k" * 32])
def test_what_a_peer_writes_into_a_row_is_never_loaded(hmac_key: bytes) -> None:
    assert not loads_what_a_peer_wrote(ValueFormat, hmac_key)
    assert loads_what_a_peer_wrote(VerifiesTheRow, hmac_key), "the negative control"


@pytest.mark.parametrize(
    ("payload_bytes", "num_rows"), [(64, MAX_ROWS), (ROWS_BYTES // 4, 3), (ROWS_BYTES, 1), (3 * ROWS_BYTES, 1)]
)
def test_a_call_moves_many_small_values_or_a_few_large_ones(payload_bytes: int, num_rows: int) -> None:
    rows = ValueMemory([np.zeros((1, payload_bytes), dtype=np.uint8)], has_rows=True)
    assert rows.num_rows == num_rows
    assert rows.memory.nbytes == num_rows * (RECORD_BYTES + payload_bytes)
    ranges = sorted((rows.value(row, 0).buffers[0].ctypes.data, row) for row in range(num_rows))
    assert all(b - a == RECORD_BYTES + payload_bytes for (a, _), (b, _) in pairwise(ranges))
