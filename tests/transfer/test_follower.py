"""A rank whose KV another one stores loads from that one's pool, and stores nothing."""

from __future__ import annotations

import numpy as np

from kvoffload.abc import ByteArray, PageGroup
from kvoffload.transfer.follower import FollowerTransfer
from kvoffload.transfer.inline import InlineTransfer
from tests.transfer.specs import job

from .test_inline import make_pool, noise


def cache() -> list[ByteArray]:
    return [noise(12, 16)]


def test_what_the_leader_has_stored_is_loaded() -> None:
    leading, following = cache(), [np.zeros_like(view) for view in cache()]
    pool = make_pool(leading, 1)
    leader = InlineTransfer([PageGroup(leading)], pool)
    follower = FollowerTransfer(InlineTransfer([PageGroup(following)], pool))
    for transfer in (leader, follower):
        transfer.submit(1, job([4, 2], [7, 3]), True)
        (result,) = transfer.poll(busy=False)
        assert (result.job_id, result.ok, result.nbytes) == (1, True, 32 if transfer is leader else 0)
    follower.submit(2, job([4, 2], [0, 1]), False)
    (result,) = follower.poll(busy=False)
    assert (result.job_id, result.ok, result.nbytes) == (2, True, 32)
    np.testing.assert_array_equal(following[0][[0, 1]], leading[0][[7, 3]])


def test_nothing_is_stored() -> None:
    views = cache()
    pool = make_pool(views, 1)
    transfer = FollowerTransfer(InlineTransfer([PageGroup(views)], pool))
    transfer.submit(1, job([4], [7]), True)
    transfer.wait([1])
    transfer.wait_any(60)
    assert [result.job_id for result in transfer.poll(busy=True)] == [1]
    assert transfer.poll(busy=False) == []
    assert not pool.any()
