"""Messages arrive as they were sent, however the stream is cut; nonsense is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

KEYS = st.lists(st.binary(min_size=1, max_size=64), max_size=8)


@given(st.integers(0, 2**63), st.sampled_from(Op), KEYS, st.data())
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
