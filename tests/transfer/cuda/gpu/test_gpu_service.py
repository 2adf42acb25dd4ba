"""CudaTransfer in an engine's process: captured graphs, failures, and the end, on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import cuda
from benchmarks.gpu.rig import Layout, Rig, block_numbers, make_views, registered_pool, rig, slot_bytes
from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda import driver
from tests.transfer.cuda.calls import LAUNCH_FAILED, WrappedDevice

pytestmark = pytest.mark.cuda

BLOCKS = 32


def group_of(page: int = 4096, blocks: int = BLOCKS) -> PageGroup:
    return PageGroup(make_views(Layout.MERGED, 4, blocks, page))


def check_that_the_device_works() -> None:
    value = cuda.empty(1024)
    cuda.launch(lambda: value.fill_(7))
    cuda.synchronize()
    assert bool((value == 7).all())


def test_graphs_are_captured_while_copies_and_registration_run() -> None:
    group = group_of(page=64 << 10, blocks=256)
    num_slots = 64 if cuda.DEVICE == "cpu" else 4096
    data, total = cuda.empty(1 << 20), cuda.empty(1 << 20)
    data.fill_(1)
    total.fill_(0)
    with registered_pool(num_slots, slot_bytes([group]), wait=False) as (pool, registration):
        r = Rig([group], pool.data, registration)
        jobs = []
        for step in range(20):
            blocks = np.random.default_rng(step).permutation(256)[:32]
            jobs.append(r.store(np.arange(32), blocks))
            r.transfer.before_forward()
            graph = cuda.capture(lambda: total.add_(data))
            graph.replay()
            r.poll()
        assert all(r.result(job).ok for job in jobs)
        registration._thread.join()
        assert registration.num_ready_slots == num_slots
        cuda.synchronize()
        # Once before the capture, and once by the graph.
        assert bool((total == 40).all())
        r.close()


CAPTURED_BESIDE_A_THREAD = """
import threading, torch
from benchmarks.gpu import cuda
event, stopped, failed = cuda.record(), threading.Event(), []
def ask():
    while not stopped.is_set():
        try:
            event.query()
        except Exception as error:
            failed.append(error)
            return
data = cuda.empty(1 << 20)
thread = threading.Thread(target=ask)
thread.start()
try:
    cuda.capture(lambda: [data.add_(1) for _ in range(2000)])
except Exception as error:
    failed.append(error)
stopped.set()
thread.join()
print("failed" if failed else "captured")
"""


def test_a_thread_that_does_not_relax_its_mode_breaks_a_capture(real_device: None) -> None:
    """The control of the test before: captures notice what other threads call."""
    done = subprocess.run([sys.executable, "-c", CAPTURED_BESIDE_A_THREAD], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "failed", done.stderr


class FailsLater(WrappedDevice):
    """A planted fault: some launches work, later ones fail."""

    left = 3

    def launch(self, function: int, *arguments: Any) -> int:
        self.left -= 1
        return LAUNCH_FAILED if self.left < 0 else super().launch(function, *arguments)


def test_an_error_reaches_poll_and_the_engine_goes_on() -> None:
    with rig([group_of()], 8, FailsLater) as r:

        def store_until_it_fails() -> None:
            for i in range(10):
                assert r.result(r.store(block_numbers([i % 8]), block_numbers([i]))).ok

        with pytest.raises(RuntimeError, match="the device failed"):
            store_until_it_fails()
        check_that_the_device_works()


def test_an_error_of_the_driver_is_not_left_for_the_engine() -> None:
    memory = np.zeros(4 << 20, np.uint8)
    page = memory[-memory.ctypes.data % 4096 :]
    registrar = driver.Driver(0)
    registrar.register(int(page.ctypes.data), 1 << 20)
    try:
        with pytest.raises(driver.DriverError):
            registrar.register(int(page.ctypes.data), 1 << 20)
        check_that_the_device_works()
    finally:
        registrar.unregister(int(page.ctypes.data))


def test_a_transfer_is_closed_while_it_copies() -> None:
    group = group_of(page=64 << 10, blocks=256)
    with rig([group], 256) as r:
        for _ in range(8):
            r.store(np.arange(256), np.arange(256))
        r.transfer.before_forward()
    check_that_the_device_works()
