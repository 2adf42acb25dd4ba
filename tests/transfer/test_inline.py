"""InlineTransfer: bytes that are stored and loaded again are unchanged, also by the rank that only loads."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, PageGroup, TransferSpec
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.transfer import inline
from kvoffload.transfer.follower import FollowerTransfer
from kvoffload.transfer.inline import InlineTransfer
from tests.clock import Clock
from tests.transfer.specs import job

BLOCKS = 12


def noise(*shape: int) -> ByteArray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def merged_layers() -> list[ByteArray]:
    """Returns three layers of one array."""
    return list(noise(3, BLOCKS, 16))


def make_pool(views: Sequence[ByteArray], factor: int, num_slots: int = 6) -> ByteArray:
    block_bytes = sum(view.shape[1] for view in views)
    return np.zeros((num_slots, padded_slot_bytes(block_bytes * factor)), dtype=np.uint8)


def block(views: Sequence[ByteArray], i: int) -> bytes:
    return b"".join(view[i].tobytes() for view in views)


def run(transfer: InlineTransfer, spec: TransferSpec, is_store: bool, job_id: int = 1) -> bool:
    transfer.submit(job_id, spec, is_store)
    (result,) = transfer.poll(busy=False)
    assert result.job_id == job_id
    return result.ok


@pytest.mark.parametrize("is_store", [True, False])
def test_an_inconsistent_job_fails_and_copies_nothing(is_store: bool, caplog: pytest.LogCaptureFixture) -> None:
    views = merged_layers()
    pool = make_pool(views, 2)
    pool[:] = 0x55
    device_before, pool_before = np.stack(views), pool.copy()
    with caplog.at_level(logging.CRITICAL):
        assert not run(InlineTransfer([PageGroup(views, 2)], pool), job([0, 6], [1, 2, 3, 4]), is_store)
    assert (np.stack(views) == device_before).all()
    assert (pool == pool_before).all()


@pytest.mark.parametrize(("busy", "per_poll"), [(True, 3), (False, 8)])
def test_a_busy_step_copies_for_a_share_of_its_time(busy: bool, per_poll: int) -> None:
    views = merged_layers()
    pool = make_pool(views, 1, num_slots=8)
    clock = Clock()
    transfer = InlineTransfer([PageGroup(views)], pool, clock, piece_bytes=1)
    transfer.submit(1, job(range(4), range(4)), is_store=True)
    transfer.submit(2, job(range(4, 8), range(4, 8)), is_store=True)
    copied, ended = [], []
    for _ in range(3):
        clock.tick = 0
        transfer.before_forward()
        clock.now += 2.5 / inline.BUSY_SHARE
        # A piece takes a second. After the second one there is time for a third.
        clock.tick = 1 / 3
        ended.append([result.job_id for result in transfer.poll(busy)])
        copied.append(int(np.count_nonzero(pool.any(axis=1))))
    assert copied == [min(8, (i + 1) * per_poll) for i in range(3)]
    assert ended == ([[], [1], [2]] if busy else [[1, 2], [], []])
    assert [pool[i, :48].tobytes() for i in range(8)] == [block(views, i) for i in range(8)]


@pytest.mark.parametrize(
    ("blocks", "jobs", "polls"),
    [
        pytest.param(3, [([0, 1], True), ([], True), ([2, 3], True)], [[1, 2], [3], []], id="several jobs"),
        pytest.param(0, [([0, 1], True), ([2, 3], False), ([4], False)], [[], [2], [3], [], [1]], id="loads go first"),
        *(
            pytest.param(blocks, [(range(4), True)], [[]] * (num_polls - 1) + [[1]], id=f"{blocks} blocks")
            for blocks, num_polls in ((1, 4), (1.5, 2), (3, 2), (4, 1), (100, 1))
        ),
    ],
)
def test_a_piece_is_as_many_whole_blocks_as_it_needs(blocks: float, jobs: Any, polls: list[list[int]]) -> None:
    views = merged_layers()
    piece_bytes = max(1, int(blocks * len(block(views, 0))))
    transfer = InlineTransfer([PageGroup(views)], make_pool(views, 1), Clock(), piece_bytes)
    for job_id, (slots, is_store) in enumerate(jobs, 1):
        transfer.submit(job_id, job(slots, slots), is_store)
    assert [[result.job_id for result in transfer.poll(busy=True)] for _ in polls] == polls


def test_waiting_finishes_only_the_given_jobs() -> None:
    views = merged_layers()
    pool = make_pool(views, 1)
    transfer = InlineTransfer([PageGroup(views)], pool)
    for i in range(3):
        transfer.submit(i, job([i], [i]), is_store=True)
    transfer.wait([1, 99])
    assert pool.any(axis=1).tolist() == [False, True, False, False, False, False]
    transfer.wait_any(0.0)
    assert sorted(result.job_id for result in transfer.poll(busy=False)) == [0, 1, 2]


def test_waiting_finishes_a_job_that_a_busy_step_began() -> None:
    views = merged_layers()
    pool = make_pool(views, 1)
    transfer = InlineTransfer([PageGroup(views)], pool, Clock(), piece_bytes=1)
    transfer.submit(1, job(range(5), range(5)), is_store=True)
    assert transfer.poll(busy=True) == []
    transfer.wait([1])
    assert [pool[i, :48].tobytes() for i in range(5)] == [block(views, i) for i in range(5)]
    assert [result.nbytes for result in transfer.poll(busy=True)] == [5 * 48]


def test_slots_that_are_too_small_for_a_block_are_refused() -> None:
    views = merged_layers()
    with pytest.raises(ValueError):
        InlineTransfer([PageGroup(views)], np.zeros((4, 47), dtype=np.uint8))


def test_layers_live_as_long_as_the_transfer() -> None:
    views = sorted((noise(BLOCKS, 16) for _ in range(2)), key=lambda view: view.ctypes.data)
    transfer = InlineTransfer([PageGroup(views)], make_pool(views, 1))
    alive = [weakref.ref(view) for view in views]
    del views
    gc.collect()
    assert all(ref() is not None for ref in alive), "the transfer would copy from freed memory"
    transfer.close()


def test_a_follower_loads_what_the_leader_has_stored_and_stores_nothing() -> None:
    leading, following = [noise(BLOCKS, 16)], [np.zeros((BLOCKS, 16), dtype=np.uint8)]
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
