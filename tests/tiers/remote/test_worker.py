"""StoreWorker: verified reads, writes of what is new, one more try after a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.abc import ByteArray
from kvoffload.host.pool import PoolHandle
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.messages import (
    MAX_MESSAGE_BYTES,
    MAX_PROBLEM_BYTES,
    Kind,
    MessageError,
    Op,
    Response,
    Setup,
    StoreRequest,
    Unframer,
    frame,
)
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


# Messages arrive as they were sent, however the stream is cut; nonsense is refused.

KEY_LISTS = st.lists(st.binary(min_size=1, max_size=64), max_size=8)


@given(st.integers(0, 2**63), st.sampled_from(Op), KEY_LISTS, st.data())
def test_requests_arrive_as_they_were(number: int, op: Op, keys: list[bytes], data: st.DataObject) -> None:
    has_slots = op in (Op.READ, Op.WRITE)
    slots = [data.draw(st.integers(0, 2**40)) for _ in keys] if has_slots else []
    request = StoreRequest(number, op, keys, slots)
    assert StoreRequest.unpack(request.pack()) == request


@given(st.integers(0, 2**63), st.lists(st.sampled_from(Outcome)), st.floats(0, 1e9), st.text(max_size=99))
def test_responses_arrive_as_they_were(number: int, statuses: list[Outcome], begun: float, problem: str) -> None:
    response = Response(number, statuses, begun, begun + 1, problem)
    assert Response.unpack(response.pack()) == response


def test_a_long_problem_is_cut() -> None:
    problem = Response.unpack(Response(1, [Outcome.OK], 0, 1, "ä" * 9999).pack()).problem
    assert problem.startswith("ää")
    assert len(problem.encode()) <= MAX_PROBLEM_BYTES + 3


@given(st.binary(max_size=60))
def test_nonsense_is_refused_or_read_but_nothing_else(data: bytes) -> None:
    for kind in (StoreRequest, Response):
        with contextlib.suppress(MessageError):
            kind.unpack(data)


def test_a_request_needs_a_slot_per_key() -> None:
    with pytest.raises(MessageError, match="1 slots for 2 keys"):
        StoreRequest.unpack(StoreRequest(1, Op.READ, [b"a", b"b"], [3]).pack())


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=6), st.integers(1, 30))
def test_a_stream_may_be_cut_anywhere(messages: list[tuple[Kind, bytes]], size: int) -> None:
    stream = b"".join(frame(kind, body) for kind, body in messages)
    unframer = Unframer()
    found = [each for at in range(0, len(stream), size) for each in unframer.feed(stream[at : at + size])]
    assert found == messages


@pytest.mark.parametrize(
    "start", [frame(Kind.NOTE)[:4] + b"\x63", (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little") + b"\0"]
)
def test_a_stream_that_makes_no_sense_is_refused(start: bytes) -> None:
    with pytest.raises(MessageError):
        list(Unframer().feed(start))


def test_a_setup_arrives_as_it_was() -> None:
    handle = PoolHandle("boot", 1, 2, 3, 4, 4096)
    setup = Setup("module:function", {"a": 1, "b": "c"}, (handle, handle), 4, "5e" * 32, "kv", {"dtype": "bfloat16"})
    assert Setup.unpack(setup.pack()) == setup
