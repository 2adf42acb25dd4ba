"""Transfers that misbehave on purpose keep the contract of the transfer below them, also where it copies later."""

from __future__ import annotations

import pytest

from kvoffload.abc import PageGroup, Transfer, TransferResult
from kvoffload.native import load
from tests.sim.faults import SlowTransfer, ThreadedTransfer
from tests.transfer.cuda.plain_device import ENGINE
from tests.transfer.cuda.test_transfer import Rig, apart
from tests.transfer.specs import spec_of

pytestmark = pytest.mark.skipif(load("_transfer") is None, reason="needs native code")


@pytest.fixture
def rig() -> Rig:
    """A transfer that copies on a thread of its own, to a device that has not reached any event yet."""
    rig = Rig(PageGroup(apart()), with_threads=True)
    rig.device.held = True
    return rig


def ended(transfer: Transfer) -> list[TransferResult]:
    results: list[TransferResult] = []
    while not results:
        transfer.wait_any(0.1)
        results = transfer.poll(busy=False)
    return results


def test_a_slow_transfer_reports_a_job_that_ends_after_it_was_polled(rig: Rig) -> None:
    slow = SlowTransfer(rig.transfer, seed=0, chance=1.0)
    slow.submit(1, spec_of([3], ([5], 0)), is_store=True)
    assert slow.poll(busy=False) == []
    rig.device.release()
    assert [(result.job_id, result.ok) for result in ended(slow)] == [(1, True)]
    assert rig.slot(3) == rig.block(5)
    slow.close()


def test_a_fence_of_a_slow_transfer_reaches_the_transfer_below(rig: Rig) -> None:
    slow = SlowTransfer(rig.transfer, seed=0, chance=1.0)
    slow.submit(1, spec_of([3], ([5], 0)), is_store=True)
    slow.poll(busy=False)
    rig.device.waits.clear()
    slow.wait([1], [5])
    assert any(stream == ENGINE for stream, _ in rig.device.waits)
    rig.device.release()
    slow.close()


def test_a_fence_of_a_threaded_transfer_waits_for_copies_that_end_later(rig: Rig) -> None:
    threaded = ThreadedTransfer(rig.transfer)
    threaded.submit(1, spec_of([3], ([5], 0)), is_store=True)
    threaded.wait_any(0.1)
    assert threaded.poll(busy=False) == []
    rig.device.release()
    threaded.wait([1])
    assert [result.job_id for result in threaded.poll(busy=False)] == [1]
    assert rig.slot(3) == rig.block(5)
    threaded.close()
