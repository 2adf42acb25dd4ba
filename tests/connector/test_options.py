"""Request options: what a client may ask for its own request."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.abc import KVGroup
from tests.connector.group_rig import GroupRig
from tests.connector.rig import (
    FakeRequest,
    Rig,
    prompt,
)


@pytest.mark.parametrize("params", [[1, 2], "do_remote_decode", 7, {}, {"do_remote_decode": []}])
def test_whatever_a_client_sends_does_no_harm(params: Any) -> None:
    rig = Rig()
    request = FakeRequest("r", prompt(8), kv_transfer_params=params)
    rig.report(*rig.start(request).stores)
    assert rig.half.request_finished(request) == (False, None)
    rig.step()
    assert not rig.half.off
    assert rig.status(prompt(8)) == [0, 0]


def test_a_request_may_ask_not_to_be_stored() -> None:
    rig = GroupRig([KVGroup(4)])
    assert not rig.compute(rig.request(12, store=False)).stores
    assert rig.hit(rig.request(13)) == 0
    assert rig.compute(rig.request(12, store=True)).stores


def test_a_request_may_ask_not_to_load() -> None:
    rig = GroupRig([KVGroup(4)])
    rig.compute(rig.request(12))
    assert rig.hit(rig.request(13, load=False)) == 0
    assert rig.hit(rig.request(13)) == 12


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
        {"store": {"deep": [1, 2]}},
    ],
)
def test_an_option_that_is_not_valid_is_left_out(option: dict[str, Any]) -> None:
    rig = GroupRig([KVGroup(4)])
    assert rig.compute(rig.request(12, **option)).stores
    assert rig.hit(rig.request(13, **option)) == 12
    assert not rig.half.off


@pytest.mark.parametrize("params", [7, "kvoffload", ["kvoffload"], {"kvoffload": 7}, {"kvoffload": None}, {1: 2}])
def test_params_may_be_anything(params: Any) -> None:
    rig = GroupRig([KVGroup(4)])
    request = rig.request(12)
    request.kv_transfer_params = params
    assert rig.compute(request).stores
    assert not rig.half.off
