"""StoreWorker: verified reads, writes of what is new, one more try after a failure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.messages import Op, StoreRequest
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from kvoffload.tiers.remote.worker import MAX_ROWS, MORE_WITHIN_S, StoreWorker, ValueMemory
from tests.tiers.remote.memory_store import MemoryClient

FINGERPRINT = "5e" * 32
VALUES = ValueFormat(FINGERPRINT, "kv")
KEYS = [bytes([i]) * 36 for i in range(8)]
NAMES = [VALUES.name(key) for key in KEYS]


class Rig:
    def __init__(self, fingerprint: str = FINGERPRINT, client: MemoryClient | None = None) -> None:
        self.client = client or MemoryClient()
        rng = np.random.default_rng(0)
        self.pools = [rng.integers(0, 256, (200, nbytes), dtype=np.uint8) for nbytes in (64, 32)]
        self.pauses: list[float] = []
        self.now = 0.0
        self.worker = StoreWorker(
            self.client,
            ValueMemory(self.pools),
            ValueFormat(fingerprint, "kv"),
            lambda: self.now,
            lambda: 0.5,
            self.pauses.append,
        )

    def run(self, op: Op, keys: list[bytes], first_slot: int = 0) -> list[Outcome]:
        slots = range(first_slot, first_slot + len(keys)) if op in (Op.READ, Op.WRITE) else ()
        response = self.worker.run(StoreRequest(7, op, keys, slots))
        assert response.number == 7
        self.problem = response.problem
        return list(response.outcomes)

    def is_read(self, slot: int, source: int) -> bool:
        return all((pool[slot] == pool[source]).all() for pool in self.pools)


@pytest.mark.parametrize("nbytes", [16, 64 + 32 - 1, 64 + 32 + 1, 5000])
def test_an_intact_value_of_another_size_is_missing_and_stays(nbytes: int) -> None:
    """Of a server with the same fingerprint and other blocks. One that was cut, or changed, is corrupt."""
    rig = Rig()
    whole = np.arange(nbytes).astype(np.uint8)
    record = VALUES.record(KEYS[0], [whole])
    rig.client.values[NAMES[0]] = np.concatenate([record, whole])
    rig.run(Op.WRITE, KEYS[1:2])
    rig.client.values[NAMES[1]] = np.resize(rig.client.values[NAMES[1]], RECORD_BYTES + nbytes)
    rig.client.values[NAMES[2]] = np.concatenate([record ^ 1, whole])
    rig.client.values[NAMES[3]] = record[:100]
    assert rig.run(Op.READ, KEYS[:4], 100) == [Outcome.MISSING, Outcome.CORRUPT, Outcome.CORRUPT, Outcome.CORRUPT]


def test_a_value_that_is_replaced_meanwhile_is_read_again() -> None:
    class Healing(MemoryClient):
        def get(self, names, buffers):  # type: ignore[no-untyped-def]
            outcomes = super().get(names, buffers)
            self.values.update(good)
            return outcomes

    rig = Rig(client=Healing())
    rig.run(Op.WRITE, KEYS[:1])
    good = {NAMES[0]: rig.client.values[NAMES[0]].copy()}
    rig.client.values[NAMES[0]][-1] ^= 1
    assert rig.run(Op.READ, KEYS[:1], 100) == [Outcome.OK]
    assert rig.is_read(100, 0)


@pytest.mark.parametrize("op", [Op.LOOKUP, Op.READ])
def test_a_call_that_fails_is_tried_once_more(op: Op) -> None:
    rig = Rig()
    rig.run(Op.WRITE, KEYS[:1])
    rig.client.num_errors = 1
    assert rig.run(op, KEYS[:1], 100) == [Outcome.OK]
    assert rig.problem == ""
    assert len(rig.pauses) == 1
    rig.client.num_errors = 2
    assert rig.run(op, KEYS[:1], 100) == [Outcome.FAILED]
    assert rig.problem == "StoreError: fails on purpose"


def test_long_requests_are_moved_in_parts() -> None:
    rig = Rig()
    keys = [i.to_bytes(2, "big") for i in range(MAX_ROWS + 5)]
    assert rig.run(Op.WRITE, keys) == [Outcome.OK] * len(keys)
    assert rig.run(Op.READ, keys, 100) == [Outcome.OK] * len(keys)
    assert all(rig.is_read(100 + i, i) for i in range(len(keys)))
    assert [size for name, size in rig.client.calls if name == "get"] == [MAX_ROWS, 5]


def slow_rig(takes_s: float) -> Rig:
    """Returns a worker whose store takes so many seconds for each read."""

    class Slow(MemoryClient):
        def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
            rig.now += takes_s
            return super().get(names, buffers)

    rig = Rig(client=Slow())
    return rig


def test_a_slow_store_gets_no_further_calls_for_a_request() -> None:
    rig = slow_rig(MORE_WITHIN_S * 0.6)
    keys = [bytes([i]) * 36 for i in range(3 * MAX_ROWS)]
    rig.run(Op.WRITE, keys[:1])
    statuses = rig.run(Op.READ, keys)
    assert statuses == [Outcome.OK, *[Outcome.MISSING] * (2 * MAX_ROWS - 1), *[Outcome.FAILED] * MAX_ROWS]
    assert "too slow" in rig.problem


@pytest.mark.parametrize(("takes_s", "outcome"), [(MORE_WITHIN_S + 1, Outcome.FAILED), (1.0, Outcome.CORRUPT)])
def test_bad_bytes_that_came_too_late_are_not_removed(takes_s: float, outcome: Outcome) -> None:
    """Only what was read wrong twice is."""
    rig = slow_rig(takes_s)
    rig.run(Op.WRITE, KEYS[:1])
    rig.client.values[NAMES[0]][-1] ^= 1
    assert rig.run(Op.READ, KEYS[:1], 100) == [outcome]
