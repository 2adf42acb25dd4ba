"""A pool that is registered through the CUDA driver's functions, with a stand-in for the driver."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.abc import PageGroup
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.host.pool import HostPool
from kvoffload.host.registration import Registration
from kvoffload.native import load
from kvoffload.transfer.cuda.driver import Driver
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.transfer.cuda.emulator import Emulator
from tests.transfer.cuda.plain_device import PlainDevice
from tests.transfer.specs import job

MIB = 1 << 20


@pytest.fixture
def pool() -> HostPool:
    return HostPool(12, MIB)


def register(pool: HostPool, emulator: Emulator) -> Registration:
    driver = Driver(0, emulator.path)
    registration = Registration(
        pool.data, driver, pool.wait_until_touched, chunk_bytes=8 * MIB, min_chunk_bytes=2 * MIB
    )
    pool.before_close(registration.close)
    registration.wait_until_ended()
    return registration


def calls(emulator: Emulator) -> list[str]:
    return [call for call in emulator.calls if "register" in call]


class BrokenWatch:
    """A watch over weights that cannot read them."""

    def accept(self) -> None:
        pass

    def begin(self) -> None:
        raise OSError("the weights cannot be read")

    def poll(self) -> bool | None:
        return False

    def are_same(self) -> bool:
        return True


@pytest.mark.skipif(load("_transfer") is None, reason="needs native code")
def test_a_worker_that_gives_up_in_service_leaves_the_pool_registered(pool: HostPool, emulator: Emulator) -> None:
    registration = register(pool, emulator)
    pages = np.ones((4, MIB), np.uint8)
    tables = [page_table(PageGroup([pages]))]
    transfer = CudaTransfer(tables, pool.data, PlainDevice(tables), registration, with_threads=False)
    worker = OffloadingConnectorWorker(transfer)
    spec = job(range(6, 10), range(4))
    reports: list[WorkerReport] = []
    for step in (StepMeta(stores={1: spec}), StepMeta(), StepMeta()):
        with worker.step(step, reports.append):
            while transfer.advance():
                pass
    assert pool.data[6:10].all(), "copied into slots of both chunks"
    worker.weights.watch = BrokenWatch()
    with worker.step(StepMeta(stores={2: spec}), reports.append):
        pass
    assert reports[-1].broken
    assert "unregister" not in calls(emulator)
    worker.shutdown()
    pool.close()
    assert calls(emulator) == [f"register {8 * MIB} flags 1", f"register {4 * MIB} flags 1", "unregister", "unregister"]
