"""Request options: what a client may ask for its own request."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.abc import Hints, KVGroup, MissReason
from kvoffload.connector.options import (
    MAX_EXPECTED_S,
    MAX_SESSION_CHARS,
    OPTIONS,
    PARAM,
    UNKNOWN,
    RequestOptions,
    session_number,
)
from tests.connector.group_rig import GroupRig
from tests.connector.rig import FakeRequest, Rig, prompt

SPACE = b"namespace"


@pytest.mark.parametrize(
    "params", [[1, 2], "do_remote_decode", 7, {}, {"do_remote_decode": []}, {PARAM: 7}, {PARAM: None}, {1: 2}]
)
def test_whatever_a_client_sends_does_no_harm(params: Any) -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(8), kv_transfer_params=params)
    rig.report(*rig.start(request).stores)
    assert rig.half.request_finished(request)[0] is False
    rig.step()
    assert not rig.half.off
    assert rig.status(prompt(8)) == [0, 0]


def test_a_request_may_ask_not_to_be_stored() -> None:
    rig = GroupRig([KVGroup(4)])
    assert not rig.compute(rig.request(12, store=False)).stores
    assert rig.hit(rig.request(13)) == 0
    assert rig.compute(rig.request(12, store=True)).stores


@pytest.mark.parametrize("is_of_engine", [True, False])
def test_a_request_that_may_not_load_is_not_looked_up(is_of_engine: bool) -> None:
    """Neither while another loads the same blocks, nor while a lower tier has not answered. Its blocks are stored."""
    rig = Rig(options={"engine_options": lambda request: {"load": False} if is_of_engine else {}})
    sent = {"load": is_of_engine}  # What the engine forbids, no client can allow.
    request = FakeRequest("r", prompt(9), {PARAM: sent})
    rig.manager.unknown = True
    stored = rig.start(request).stores
    assert len(stored) == 1
    assert rig.manager.lookups == []
    assert rig.half.records[-1].reason is MissReason.NOT_LOOKED_UP
    assert rig.half.records[-1].missed_key is not None
    rig.report(*stored)
    rig.manager.unknown = False
    assert rig.look_up(FakeRequest("again", prompt(9), {PARAM: sent})) == (0, False)
    assert rig.manager.lookups == []


@pytest.mark.parametrize("name", ["load", "store"])
def test_neither_client_nor_engine_allows_what_the_other_forbids(name: str) -> None:
    for client, engine in [(True, False), (False, True), (False, False)]:
        assert getattr(RequestOptions.from_params({PARAM: {name: client}}, {name: engine}), name) is False
    assert getattr(RequestOptions.from_params({PARAM: {name: True}}, {name: True}), name) is True


@pytest.mark.parametrize(("client", "engine"), [(9, 4), (4, 9), (None, 4), (4, None), (-1, 4), (4, -1)])
def test_neither_client_nor_engine_allows_more_tokens_than_the_other(client: int | None, engine: int | None) -> None:
    assert RequestOptions.from_params({PARAM: {"max_tokens": client}}, {"max_tokens": engine}).max_tokens == 4


def test_a_request_may_cap_its_tokens() -> None:
    rig = GroupRig([KVGroup(4)])
    rig.compute(rig.request(20, max_tokens=11))
    assert len(rig.stored()[0]) == 2
    assert rig.hit(rig.request(21)) == 8
    assert rig.hit(rig.request(21, max_tokens=7)) == 4
    assert rig.hit(rig.request(21, max_tokens=0)) == 0


@pytest.mark.parametrize(
    "option",
    [
        {"store": "no"},
        {"load": 0},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"max_tokens": "8"},
        {"unknown": 1},
        {"session": 7},
        {"session": ""},
        {"session": "s" * (MAX_SESSION_CHARS + 1)},
        {"session": ["s"]},
        {"drop": 1},
        {"drop": "yes"},
        {"expect_return_s": True},
        {"expect_return_s": "60"},
        {"expect_return_s": -1},
        {"expect_return_s": float("nan")},
        {"expect_return_s": float("inf")},
        {"expect_return_s": 10**400},
        {"expect_return_s": {"deep": [60]}},
        {"store": {"deep": [1, 2]}},
    ],
)
def test_an_option_that_is_not_valid_is_left_out(option: dict[str, Any]) -> None:
    rig = GroupRig([KVGroup(4)])
    assert rig.compute(rig.request(12, **option)).stores
    assert rig.hit(rig.request(13, **option)) == 12
    assert not rig.half.off
    (name,) = option
    assert rig.half.metrics.snapshot()[f"ignored_options:{name if name in OPTIONS else UNKNOWN}"] == 2
    assert RequestOptions.from_params({PARAM: option}).hints(SPACE) is None


def test_names_of_unknown_options_are_not_labels() -> None:
    """A client could make as many time series as it likes."""
    rig = GroupRig([KVGroup(4)])
    rig.compute(rig.request(12, **{f"option {i}": i for i in range(5000)}, drop=0))
    counts = rig.half.metrics.snapshot()
    ignored = {name: count for name, count in counts.items() if name.startswith("ignored_options")}
    assert ignored == {"ignored_options:unknown": 1, "ignored_options:drop": 1}


# Hints.


@pytest.mark.parametrize(
    ("option", "hints"),
    [
        ({"drop": True}, Hints(drop=True)),
        ({"drop": False}, None),
        ({"expect_return_s": 0}, Hints(expect_return_s=0)),
        ({"expect_return_s": 1.5, "drop": False}, Hints(expect_return_s=1.5)),
        ({"expect_return_s": MAX_EXPECTED_S}, Hints(expect_return_s=MAX_EXPECTED_S)),
        ({"session": "s" * MAX_SESSION_CHARS}, Hints(session_number("s" * MAX_SESSION_CHARS, SPACE))),
        ({"session": "\ud800", "store": False}, Hints(session_number("\ud800", SPACE))),
    ],
)
def test_hints_are_read(option: dict[str, Any], hints: Hints | None) -> None:
    assert RequestOptions.from_params({PARAM: option}).hints(SPACE) == hints


def test_sessions_of_two_tenants_are_not_the_same() -> None:
    assert session_number("s", b"one") != session_number("s", b"other")


def test_the_number_of_a_session_is_in_its_range() -> None:
    numbers = {session_number(str(i), SPACE) for i in range(1000)}
    assert len(numbers) == 1000
    assert all(2 <= number < 1 << 63 for number in numbers)


def test_the_engine_may_name_the_session_and_the_client_counts_more() -> None:
    named = {"session": "of the engine", "drop": True}
    options = RequestOptions.from_params(None, named)
    assert options.hints(SPACE) == Hints(session_number("of the engine", SPACE), drop=True)
    options = RequestOptions.from_params({PARAM: {"session": "mine", "drop": False}}, named)
    assert options.hints(SPACE) == Hints(session_number("mine", SPACE))
    options = RequestOptions.from_params({PARAM: {"session": 7}}, {"session": "of the engine", "other": 1})
    assert options.hints(SPACE) == Hints(session_number("of the engine", SPACE))
    assert options.ignored == ("session",)


@pytest.mark.parametrize("drop", [True, False])
def test_the_blocks_of_a_session_that_ends_leave_first(drop: bool) -> None:
    """``drop=False`` is the control."""
    rig = GroupRig([KVGroup(4)], num_host_blocks=9)
    old, ending = rig.request(12), rig.request(13, first=100, session="s", drop=drop)
    for request in (old, ending):
        rig.compute(request)
        rig.finish(request)
    rig.compute(rig.request(20, first=200))
    assert rig.hit(rig.request(13)) == (12 if drop else 4)
    assert rig.hit(rig.request(14, first=100)) == (4 if drop else 12)
    assert rig.half.metrics.snapshot().get("early_evictions", 0) == (2 if drop else 0)
