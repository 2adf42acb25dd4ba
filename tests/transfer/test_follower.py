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
    for transfer in (follower, leader):
        transfer.submit(1, job([4, 2], [7, 3]), True)
        (result,) = transfer.poll(busy=False)
        assert (result.job_id, result.ok, result.nbytes) == (1, True, 32 if transfer is leader else 0)
        assert transfer.poll(busy=False) == []
        assert pool.any() == (transfer is leader)
    follower.submit(2, job([4, 2], [0, 1]), False)
    (result,) = follower.poll(busy=False)
    assert (result.job_id, result.ok, result.nbytes) == (2, True, 32)
    np.testing.assert_array_equal(following[0][[0, 1]], leading[0][[7, 3]])
