"""CudaDevice over the emulator: what it tries at start, what it does without, and whose context it uses."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.native import load
from kvoffload.transfer.cuda.calls import DriverCalls
from kvoffload.transfer.cuda.cuda_device import CALLS, CudaDevice
from kvoffload.transfer.cuda.driver import Driver
from kvoffload.transfer.cuda.pages import LayerRun, PageTable
from kvoffload.transfer.cuda.slots import Unregistered
from kvoffload.transfer.cuda.start_check import CopiesHang
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.transfer.cuda.calls import SIGNATURES, addresses, as_c, call
from tests.transfer.cuda.emulator import Count, Emulator, Memory, bytes_at

pytestmark = pytest.mark.skipif(load("_transfer") is None, reason="needs native code")

NUM_BLOCKS, PAGE = 5, 96
INVALID_VALUE, ILLEGAL_ADDRESS, NOT_READY, NOT_SUPPORTED = 1, 700, 600, 801
DEFAULT_STREAM = 0
DEVICE_PAGE = 2 << 20


class Rig:
    """A cache of two layers on the device, and the bytes that it held before a CudaDevice was made for it."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.driver = Driver(0, emulator.path)
        with self.driver.context():
            base = self.driver.allocate(2 * NUM_BLOCKS * PAGE)
        self.cache = bytes_at(base, 2 * NUM_BLOCKS * PAGE)
        self.cache[:] = np.random.default_rng(0).integers(0, 256, len(self.cache), np.uint8)
        self.before = self.cache.copy()
        runs = [LayerRun(base + layer * NUM_BLOCKS * PAGE, PAGE, PAGE, layer * PAGE) for layer in range(2)]
        self.table = PageTable(tuple(runs), 2 * PAGE, NUM_BLOCKS)

    def make(self, kind: type[CudaDevice] = CudaDevice, **options: Any) -> CudaDevice:
        return kind([self.table], 0, lambda: DEFAULT_STREAM, library=self.emulator.path, **options)

    def current_context(self) -> int | None:
        found = ctypes.c_void_p()
        assert ctypes.CDLL(self.emulator.path).cuCtxGetCurrent(ctypes.byref(found)) == 0
        return found.value

    def set_context(self, context: int | None) -> None:
        assert ctypes.CDLL(self.emulator.path).cuCtxSetCurrent(ctypes.c_void_p(context)) == 0


@pytest.fixture
def rig(emulator: Emulator) -> Rig:
    return Rig(emulator)


def test_batches_and_kernels_are_tried_and_the_cache_keeps_its_bytes(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    device = rig.make()
    assert device.batches
    assert has_kernel(device)
    assert rig.emulator.count(Count.BATCHES) == 4, "of pages and of rows, in both directions"
    assert rig.emulator.count(Count.LAUNCHES) == 2
    assert np.array_equal(rig.cache, rig.before)
    assert caplog.messages == rig.emulator.problems == []
    calls = device.native_calls()
    assert all(getattr(calls, field) for field in ("copy_batch", *CALLS))
    device.close()
    device.close()
    assert rig.emulator.num_bytes(Memory.PINNED) == 0
    assert rig.emulator.num_bytes(Memory.DEVICE) == len(rig.cache), "all but the cache is freed"


def has_kernel(device: CudaDevice) -> bool:
    return device.native_calls().kernels[0] is not None


class Faulty(CudaDevice):
    """Its driver has the fault in ``change``, which gets a function of DriverCalls and its arguments."""

    function = ""

    def change(self, real: Callable[..., int], *arguments: Any) -> int:
        raise NotImplementedError

    def native_calls(self) -> DriverCalls:
        calls = super().native_calls()
        address = getattr(calls, self.function)
        if not address:
            return calls
        self.planted = as_c({self.function: lambda *given: self.change(SIGNATURES[self.function](address), *given)})
        changed: dict[str, Any] = addresses(self.planted)
        return dataclasses.replace(calls, **changed)


class LosesAByteOfBatches(Faulty):
    function = "copy_batch"

    def change(self, real: Callable[..., int], *arguments: Any) -> int:
        sizes = arguments[2]
        sizes[0] -= 1
        return real(*arguments)


class ExchangesGatheredBlocks(Faulty):
    """Device blocks are gathered in the wrong order."""

    function = "launch"
    is_gather = True

    def change(self, real: Callable[..., int], *arguments: Any) -> int:
        kernel = self._kernels[0]
        assert kernel is not None
        if (arguments[0] == kernel.gather) is self.is_gather:
            blocks = (ctypes.c_int32 * 3).from_address(arguments[-2][5])
            blocks[0], blocks[2] = blocks[2], blocks[0]
        return real(*arguments)


class ExchangesScatteredRows(ExchangesGatheredBlocks):
    is_gather = False


@pytest.mark.parametrize(
    ("fault", "batches", "gathers", "warning"),
    [
        (LosesAByteOfBatches, False, True, "batched copies do not work with CUDA 12.8.*wrong bytes.*newer driver"),
        (ExchangesGatheredBlocks, True, False, "kernel does not work with CUDA 12.8.*bytes came from"),
        (ExchangesScatteredRows, True, False, "kernel does not work with CUDA 12.8.*bytes came to"),
    ],
)
def test_what_copies_wrong_bytes_is_not_used(
    rig: Rig, fault: type[Faulty], batches: bool, gathers: bool, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = rig.make(fault)
    assert (device.batches, has_kernel(device)) == (batches, gathers)
    (message,) = caplog.messages
    assert re.search(warning, message)
    assert np.array_equal(rig.cache, rig.before)


@pytest.mark.parametrize(
    ("function", "code", "batches", "gathers"),
    [
        ("cuMemcpyBatchAsync", INVALID_VALUE, False, True),
        ("cuMemcpyBatchAsync", NOT_SUPPORTED, False, True),
        ("cuMemcpyBatchAsync", 999, False, True),
        ("cuModuleLoadData", 218, True, False),
        ("cuModuleGetFunction", 500, True, False),
        ("cuLaunchKernel", INVALID_VALUE, True, False),
    ],
)
def test_what_the_driver_refuses_is_not_used(
    rig: Rig, function: str, code: int, batches: bool, gathers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig.emulator.fail(function, code)
    device = rig.make()
    assert (device.batches, has_kernel(device)) == (batches, gathers)
    (message,) = caplog.messages
    assert "CUDA 12.8" in message
    assert np.array_equal(rig.cache, rig.before)


def test_a_batch_that_ends_the_context_is_an_error_with_a_remedy(rig: Rig) -> None:
    rig.emulator.fail("cuMemcpyBatchAsync", ILLEGAL_ADDRESS, is_sticky=True)
    with pytest.raises(RuntimeError, match=r"cuMemcpyBatchAsync.*CUDA 12\.8 may help"):
        rig.make()


def test_copies_that_hang_are_an_error_and_their_memory_is_not_freed(rig: Rig) -> None:
    """To free it would wait for them."""
    rig.emulator.fail("cuEventQuery", NOT_READY)
    with pytest.raises(CopiesHang, match=r"did not end within 0\.01 s.*newer driver"):
        rig.make(check_deadline_s=0.01)
    assert rig.emulator.num_bytes(Memory.PINNED) > 0
    assert rig.emulator.num_bytes(Memory.DEVICE) > len(rig.cache)
    assert not any("destroy" in call for call in rig.emulator.calls)
    rig.driver.synchronize()
    assert np.array_equal(rig.cache, rig.before), "what hangs may end while the engine serves"


@pytest.mark.parametrize("other", [False, True])
def test_the_engine_s_thread_keeps_its_context(rig: Rig, other: bool) -> None:
    with rig.driver.context():
        own = rig.current_context()
    assert own is not None
    found: list[int | None] = []

    def work() -> None:
        rig.set_context(own + 1 if other else None)
        device = rig.make()
        device.allocate(8)
        device.allocate_host(8)
        event, stream = device.new_event(), device.new_stream()
        if not other:
            call(rig.driver, "record", event, stream)
        found.append(rig.current_context())
        rig.set_context(None)
        device.close()
        found.append(rig.current_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [own + 1 if other else own, None], "a thread without a context gets the device's"
    assert rig.emulator.num_bytes(Memory.PINNED) == 0, "freed by a thread without a context"


SERVICE = """
import logging, sys, time
from types import ModuleType, SimpleNamespace
import numpy as np
logging.basicConfig(level=logging.INFO, format="%(message)s")
import kvoffload
# The adapter's module without its package, which imports vLLM; a torch whose engine works on the default stream.
package = ModuleType("kvoffload.vllm")
package.__path__ = [kvoffload.__path__[0] + "/vllm"]
stream = SimpleNamespace(cuda_stream=0)
sys.modules["kvoffload.vllm"] = package
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda device: stream))
from kvoffload.abc import DeviceSpec, LoadStoreSpec, PageGroup, TransferSpec
from kvoffload.host.pool import HostPool
from kvoffload.transfer.cuda.driver import LIBRARY, Driver
from kvoffload.vllm.cuda import make_cuda_transfer
from tests.transfer.cuda.emulator import PROFILES, Emulator, bytes_at

emulator, driver = Emulator(LIBRARY, PROFILES[sys.argv[1]]), Driver(0)
driver.enter_thread()
base = driver.allocate(2 * 4 * 64)
cache = bytes_at(base, 2 * 4 * 64).reshape(2, 4, 64)
cache[:] = np.random.default_rng(0).integers(0, 256, cache.shape, np.uint8)

class Pages:
    shape, device = (4, 64), SimpleNamespace(type="cuda", index=None)
    def __init__(self, layer): self.layer = layer
    def __len__(self): return 4
    def data_ptr(self): return base + self.layer * 4 * 64
    def stride(self, axis): return 64

pool = HostPool(8, 128)
transfer = make_cuda_transfer([PageGroup([Pages(0), Pages(1)])], pool.data, pool)
blocks = np.array([3, 1])
spec = TransferSpec("r", LoadStoreSpec("CPU", np.array([5, 2])), DeviceSpec(blocks, (2,), (0,)))
transfer.submit(1, spec, True)
transfer.before_forward()
deadline = time.monotonic() + 60
while not (results := transfer.poll(True)):
    transfer.wait_any(1)
    assert time.monotonic() < deadline
assert [(result.job_id, result.ok) for result in results] == [(1, True)], results
assert np.array_equal(pool.data[[5, 2]], cache[:, [3, 1]].swapaxes(0, 1).reshape(2, 128))
transfer.close()
pool.close()
print("registered", sum(call.startswith("register ") for call in emulator.calls), emulator.problems)
"""


@pytest.mark.parametrize(("name", "registers"), [("H100", True), ("WSL2", False)])
def test_a_device_that_cannot_copy_registered_memory_is_served_through_a_buffer(
    emulator_library: Path, name: str, registers: bool
) -> None:
    """As the vLLM adapter makes it, in a process whose libcuda.so.1 is the emulator."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(emulator_library.parent)}
    command = [sys.executable, "-c", SERVICE, name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"registered {int(registers)} []\n"
    assert "blocks are copied with CUDA 12.8" in done.stderr
    assert ("cannot copy registered host memory" in done.stderr) is not registers


class CountsAllocations(CudaDevice):
    """``taken``: what the driver takes, which gives whole pages to each allocation of a page or more."""

    taken = 0

    def allocate(self, nbytes: int) -> int:
        self.taken += -(-nbytes // DEVICE_PAGE) * DEVICE_PAGE
        return super().allocate(nbytes)


@pytest.mark.parametrize(("num_groups", "most"), [(1, 68 << 20), (3, 70 << 20)])
def test_staging_memory_is_what_the_log_says(
    rig: Rig, num_groups: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    tables = [rig.table] * num_groups
    device = CountsAllocations(tables, 0, lambda: DEFAULT_STREAM, library=rig.emulator.path)
    device.taken = 0
    caplog.set_level(logging.INFO)
    pool = np.zeros((8, 4096), np.uint8)
    transfer = CudaTransfer(tables, pool, device, Unregistered(), with_threads=False)
    assert 0 < device.taken <= most
    assert f"{device.taken >> 20} MiB of device memory, taken now" in caplog.text
    transfer.close()
