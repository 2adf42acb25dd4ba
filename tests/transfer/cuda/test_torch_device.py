"""TorchDevice on machines without a GPU: torch's streams and events are replaced by ones that do work at once, and the
driver by a stub that copies in host memory. What depends on a real GPU is tested in test_on_gpu.py."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, PageGroup, TransferResult, TransferSpec
from tests.transfer.cuda.conftest import StubDriver
from tests.transfer.cuda.layouts import CACHES, Cache, aligned

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from kvoffload.transfer.cuda import kernels, torch_device
from kvoffload.transfer.cuda.driver import Driver
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.cuda.torch_device import TorchDevice
from kvoffload.transfer.cuda.transfer import CudaTransfer


def host_tensor_of(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns the stub's device memory, which is host memory."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class InstantStream:
    """A stream whose work is done when it is issued."""

    def __init__(self, handle: int = 0, device: object = None) -> None:
        self.cuda_stream = handle
        self.waited: list[object] = []

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class InstantEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "times of jobs are measured"
        self.recorded = 0.0
        self.stream: InstantStream | None = None

    def record(self, stream: InstantStream) -> None:
        self.stream, self.recorded = stream, time.monotonic()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: InstantEvent) -> float:
        return 1e3 * (end.recorded - self.recorded)


class HostDevice(TorchDevice):
    """TorchDevice whose pinned memory is ordinary memory, because torch pins none without a GPU."""

    def allocate_host(self, nbytes: int) -> ByteArray:
        return aligned(nbytes)


class InstantCuda:
    """What replaces torch.cuda: the engine's stream, the one that is current, and the threads that have entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = InstantStream()
        self.current: list[InstantStream] = [self.engine]
        self.entered: list[int] = []
        monkeypatch.setattr(torch.cuda, "ExternalStream", InstantStream)
        monkeypatch.setattr(torch.cuda, "Event", InstantEvent)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current[-1])
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.entered.append(threading.get_ident()))
        monkeypatch.setattr(torch_device, "tensor_of", host_tensor_of)

    @contextlib.contextmanager
    def stream(self, stream: InstantStream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> InstantCuda:
    return InstantCuda(monkeypatch)


@pytest.fixture
def make(cuda: InstantCuda, stub: StubDriver) -> Callable[..., HostDevice]:
    """Returns a function that makes a device for groups of views."""

    def make(*groups: Sequence[Any]) -> HostDevice:
        # The engine's context is current before the device is made.
        Driver(0, stub.path).enter_thread()
        device = HostDevice([PageGroup([torch.from_numpy(view) for view in views]) for views in groups], stub.path)
        device.enter_thread()
        return device

    return make


def test_streams_are_new_ones_of_the_driver_and_not_those_that_torch_shares(
    make: Callable[..., HostDevice], stub: StubDriver
) -> None:
    device = make(CACHES["bytes"]().views)
    handles = [device.new_stream().cuda_stream for _ in range(40)]
    assert len(set(handles)) == 40
    device.close()
    assert sorted(call for call in stub.calls if call.startswith("destroy")) == sorted(
        f"destroy stream {handle:#x}" for handle in handles
    )


@pytest.mark.parametrize("name", ["layers outermost", "blocks outermost with gaps", "words of 2 bytes"])
def test_blocks_go_to_the_host_and_back(make: Callable[..., HostDevice], name: str) -> None:
    other, cache = CACHES["bytes"](), CACHES[name]()
    device = make(other.views, cache.views)
    stream, blocks = device.new_stream(), [4, 0, 3]
    rows = len(blocks) * cache.row_bytes
    staging, host = device.allocate(rows + 64), device.allocate_host(rows)
    before = cache.bytes.copy()

    def arrays(*values: int) -> list[np.ndarray]:
        return [np.array([value], np.int64) for value in values]

    device.gather(stream, 1, np.array(blocks), staging)
    device.copy(stream, *arrays(host.ctypes.data, staging, rows))
    wanted = np.concatenate([view[blocks] for view in cache.views], axis=1).ravel()
    assert np.array_equal(host, wanted)
    for view in cache.views:
        view[blocks] = 0
    device.copy(stream, *arrays(staging, host.ctypes.data, rows))
    device.scatter(stream, 1, np.array(blocks), staging)
    assert np.array_equal(cache.bytes, before)


def test_work_is_issued_on_the_given_stream(
    make: Callable[..., HostDevice], cuda: InstantCuda, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CACHES["layers outermost"]()
    device = make(cache.views)
    stream, staging = device.new_stream(), device.allocate(4 * cache.row_bytes)
    used: list[InstantStream] = []
    select = torch.index_select

    def note_and_select(*args: Any, **out: Any) -> torch.Tensor:
        used.append(cuda.current[-1])
        return select(*args, **out)

    monkeypatch.setattr(torch, "index_select", note_and_select)
    device.gather(stream, 0, np.array([1]), staging)
    assert set(used) == {stream}
    assert device.engine_stream() is cuda.engine, "the current stream is as before"


def test_events_order_streams_and_measure_time(make: Callable[..., HostDevice]) -> None:
    device = make(CACHES["bytes"]().views)
    stream, start, end = device.new_stream(), device.new_event(), device.new_event()
    assert device.is_done(start)
    device.record(start, stream)
    device.record(end, stream)
    device.wait(device.engine_stream(), end)
    assert device.engine_stream().waited == [end]
    assert 0 <= device.seconds_between(start, end) < 60


def test_memory_of_others_is_refused_by_torchs_functions(make: Callable[..., HostDevice]) -> None:
    cache = CACHES["layers outermost"]()
    device = make(cache.views)
    stream, staging = device.new_stream(), device.allocate(2 * cache.row_bytes)
    with pytest.raises(ValueError, match="not in memory that this device has allocated"):
        device.gather(stream, 0, np.array([1, 2, 3]), staging)
    device.gather(stream, 0, np.array([1, 2]), staging)


def test_a_group_without_pages_cannot_be_gathered(make: Callable[..., HostDevice]) -> None:
    device = make([], CACHES["bytes"]().views)
    with pytest.raises(ValueError, match="group 0 has no pages"):
        device.gather(device.new_stream(), 0, np.array([1]), 0)


def test_a_machine_without_a_driver_is_an_error_when_the_device_is_made(cuda: InstantCuda) -> None:
    views = [torch.from_numpy(view) for view in CACHES["bytes"]().views]
    with pytest.raises(RuntimeError, match=r"libno-such-cuda\.so cannot be loaded"):
        TorchDevice([PageGroup(views)], "libno-such-cuda.so")


def test_a_device_that_frees_nothing_is_closed_with_a_message(
    make: Callable[..., HostDevice], stub: StubDriver, caplog: pytest.LogCaptureFixture
) -> None:
    device = make(CACHES["bytes"]().views)
    device.allocate(100)
    stub.fail("cuMemFree_v2", 719)
    device.close()
    assert "could not be freed" in caplog.text


class Ready:
    """A pool that is registered."""

    boundary_slots = 4

    def __init__(self, num_slots: int) -> None:
        self.num_ready_slots = num_slots
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


class Rig:
    """CudaTransfer with its thread on a TorchDevice."""

    def __init__(self, device: TorchDevice, caches: Sequence[Cache], num_slots: int = 16) -> None:
        self.pool = np.zeros((num_slots, max(cache.row_bytes for cache in caches) + 64), np.uint8)
        self.registration = Ready(num_slots)
        tables = [page_table(PageGroup(cache.views)) for cache in caches]
        self.transfer = CudaTransfer(tables, self.pool, device, self.registration)

    def run(self, jobs: dict[int, TransferSpec], is_store: bool) -> dict[int, TransferResult]:
        for job_id, spec in jobs.items():
            self.transfer.submit(job_id, spec, is_store)
        self.transfer.before_forward()
        results: dict[int, TransferResult] = {}
        deadline = time.monotonic() + 30
        while len(results) < len(jobs) and time.monotonic() < deadline:
            self.transfer.wait_any(1.0)
            results |= {result.job_id: result for result in self.transfer.poll(busy=False)}
        return results


def job(slots: list[int], *blocks: list[int]) -> TransferSpec:
    device = DeviceSpec(np.concatenate(blocks), tuple(map(len, blocks)), (0,) * len(blocks))
    return TransferSpec("r", LoadStoreSpec("CPU", np.array(slots)), device)


@pytest.mark.parametrize("with_triton", [False, True])
def test_the_transfer_runs_on_it_with_its_thread(
    with_triton: bool,
    make: Callable[..., HostDevice],
    stub: StubDriver,
    cuda: InstantCuda,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if with_triton:
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(kernels, "kernel", interpreter.InterpretedFunction(kernels.copy_pieces))
    else:
        monkeypatch.setattr(kernels, "triton", None)
    caches = [CACHES["pages of several sizes"](), CACHES["blocks outermost, one run"]()]
    with caplog.at_level(logging.WARNING):
        rig = Rig(make(*(cache.views for cache in caches)), caches)
        before = [cache.bytes.copy() for cache in caches]
        jobs = {1: job([3, 9, 2], [5, 0], [7]), 2: job([4, 5, 6, 11], [2], [1, 2, 8])}
        stored = rig.run(jobs, is_store=True)
        for cache, blocks in zip(caches, ([5, 0, 2], [7, 1, 2, 8]), strict=True):
            for view in cache.views:
                view[blocks] = 0
        loaded = rig.run(jobs, is_store=False)
        rig.transfer.close()
    for results in (stored, loaded):
        assert [results[job_id].ok for job_id in (1, 2)] == [True, True]
        assert results[1].nbytes == 2 * caches[0].row_bytes + caches[1].row_bytes
    assert all(np.array_equal(cache.bytes, old) for cache, old in zip(caches, before, strict=True))
    assert rig.registration.is_released
    assert len(set(cuda.entered)) == 2, "the transfer's thread has entered the device"
    assert stub.calls.count("capture mode 2") == 3
    assert stub.calls[-1] == "release 100"
    assert stub.num_allocated == 0
    assert ("Triton" in caplog.text) is not with_triton
    assert len(caplog.records) == (0 if with_triton else 1)


def test_an_error_of_the_driver_reaches_the_engine(make: Callable[..., HostDevice], stub: StubDriver) -> None:
    cache = CACHES["layers outermost"]()
    rig = Rig(make(cache.views), [cache])
    stub.fail("cuMemcpyBatchAsync", 719)
    with pytest.raises(RuntimeError, match="the device failed") as error:
        rig.run({1: job([3], [5])}, is_store=True)
    assert "719" in str(error.value.__cause__)
    rig.transfer.close()
