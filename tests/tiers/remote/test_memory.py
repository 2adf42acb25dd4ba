"""Memory in which values move, and that peers of a client never decide about a slot after its check."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.record import RECORD_BYTES, Value, ValueFormat
from kvoffload.tiers.remote.worker import MAX_ROWS, ROWS_BYTES, ValueMemory

FINGERPRINT = "5e" * 32
KEY = bytes(36)
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
