"""What only a CUDA device can show: CudaDevice keeps the contract of Device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvoffload.abc import PageGroup
from kvoffload.host.pool import HostPool
from tests.transfer.cuda.layouts import CACHES, Cache

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from benchmarks.gpu.cuda import make_device
from kvoffload.transfer.cuda.driver import Driver, DriverError

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = "cuda:0"
SLEEP_CYCLES = 1_000_000_000
"""About half a second of a GPU: long enough that work behind it has not begun when the host looks at it."""
GIB = 1 << 30


def on_gpu(cache: Cache) -> list[torch.Tensor]:
    """Returns the cache's views of a copy of its bytes on the device."""
    data, start = torch.from_numpy(cache.bytes).to(GPU), cache.bytes.ctypes.data
    return [
        data.as_strided(view.shape, (view.strides[0], 1), view.__array_interface__["data"][0] - start)
        for view in cache.views
    ]


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Rig:
    """A CudaDevice of one group, with memory for ``rows`` blocks."""

    def __init__(self, views: list[torch.Tensor], rows: int = 8) -> None:
        self.views = views
        self.device = make_device([PageGroup(views)])
        self.device.enter_thread()
        self.row_bytes = sum(view.shape[1] for view in views)
        self.staging = self.device.allocate(rows * self.row_bytes)
        self.blocks = numbers()
        self.host = self.device.allocate_host(rows * self.row_bytes)
        self.stream = self.device.new_stream()
        # The stream does not wait for what was issued before it.
        torch.cuda.synchronize()

    def choose(self, blocks: list[int]) -> None:
        self.blocks = numbers(*blocks)

    def to_host(self, num_rows: int) -> None:
        address, nbytes = self.host.ctypes.data, num_rows * self.row_bytes
        self.device.copy(self.stream, numbers(address), numbers(self.staging), numbers(nbytes))

    def to_device(self, num_rows: int) -> None:
        address, nbytes = self.host.ctypes.data, num_rows * self.row_bytes
        self.device.copy(self.stream, numbers(self.staging), numbers(address), numbers(nbytes))

    def finish(self) -> None:
        event = self.device.new_event()
        self.device.record(event, self.stream)
        deadline = time.monotonic() + 60
        while not self.device.is_done(event):
            assert time.monotonic() < deadline
            time.sleep(1e-3)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_blocks_go_to_the_host_and_back(make: Callable[[], Cache]) -> None:
    cache = make()
    views, blocks = on_gpu(cache), [3, 0, 2]
    rig = Rig(views)
    before = [view.clone() for view in views]
    rig.choose(blocks)
    rig.device.gather(rig.stream, 0, rig.blocks, rig.staging)
    rig.to_host(3)
    rig.finish()
    wanted = np.concatenate([view[blocks] for view in cache.views], axis=1).ravel()
    assert np.array_equal(rig.host[: len(wanted)], wanted)
    for view in views:
        view[blocks] = 0
    torch.cuda.synchronize()
    rig.to_device(3)
    rig.device.scatter(rig.stream, 0, rig.blocks, rig.staging)
    rig.finish()
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))


def test_a_cache_of_40_gib_is_addressed_in_64_bits() -> None:
    num_blocks, page = 20 * GIB // (1 << 20), 1 << 20
    if torch.cuda.mem_get_info(GPU)[0] < 45 * GIB:
        pytest.skip("needs 45 GiB of free device memory")
    whole = torch.empty((2, num_blocks, page), dtype=torch.uint8, device=GPU)
    blocks = [num_blocks - 1, 5000, 4095, 4096, 0]
    for layer in range(2):
        for block in blocks:
            whole[layer, block] = torch.randint(256, (page,), dtype=torch.uint8, device=GPU)
    rig = Rig(list(whole))
    rig.choose(blocks)
    rig.device.gather(rig.stream, 0, rig.blocks, rig.staging)
    rig.to_host(len(blocks))
    rig.finish()
    wanted = torch.cat([whole[layer, blocks] for layer in range(2)], dim=1).cpu().numpy().ravel()
    assert np.array_equal(rig.host[: len(wanted)], wanted)
    before = whole[:, blocks].clone()
    whole[:, blocks] = 0
    torch.cuda.synchronize()
    rig.device.scatter(rig.stream, 0, rig.blocks, rig.staging)
    rig.finish()
    assert torch.equal(whole[:, blocks], before)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_an_event_only_if_it_was_made_to(waits: bool) -> None:
    """Without the wait, the stream reads bytes from before the work of the other one: the test can see that."""
    views = on_gpu(CACHES["layers outermost"]())
    rig = Rig(views)
    rig.choose([2])
    torch.cuda.synchronize()
    for view in views:
        view[2] = 1
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    for view in views:
        view[2] = 9
    event = rig.device.new_event()
    assert rig.device.is_done(event)
    rig.device.record(event, rig.device.engine_stream())
    assert not rig.device.is_done(event)
    if waits:
        rig.device.wait(rig.stream, event)
    rig.device.gather(rig.stream, 0, rig.blocks, rig.staging)
    rig.to_host(1)
    rig.finish()
    assert set(rig.host[: rig.row_bytes].tolist()) == ({9} if waits else {1})


def test_time_between_events_is_that_of_the_work() -> None:
    rig = Rig(on_gpu(CACHES["bytes"]()))
    start, end = rig.device.new_event(), rig.device.new_event()
    with torch.cuda.stream(torch.cuda.ExternalStream(rig.stream)):
        rig.device.record(start, rig.stream)
        torch.cuda._sleep(SLEEP_CYCLES)
        rig.device.record(end, rig.stream)
    rig.finish()
    # No GPU has a clock of more than 4 GHz.
    assert SLEEP_CYCLES / 4e9 < rig.device.seconds_between(start, end) < 30


def test_issuing_does_not_wait_for_the_device() -> None:
    rig = Rig(on_gpu(CACHES["layers outermost"]()))
    rig.choose([1, 2])
    with torch.cuda.stream(torch.cuda.ExternalStream(rig.stream)):
        torch.cuda._sleep(SLEEP_CYCLES)
    rig.device.gather(rig.stream, 0, rig.blocks, rig.staging)
    rig.to_host(2)
    event = rig.device.new_event()
    rig.device.record(event, rig.stream)
    assert not rig.device.is_done(event), "a call has waited for the sleeping stream"
    rig.finish()


@pytest.mark.parametrize("count", [1, 300, 3000])
def test_batches_of_small_copies_in_both_directions(count: int) -> None:
    rig = Rig(on_gpu(CACHES["bytes"]()))
    rng = np.random.default_rng(count)
    order, size = rng.permutation(count), 4096
    memory, back = rig.device.allocate(count * size), rig.device.allocate_host(count * size)
    host = rig.device.allocate_host(count * size)
    host[:] = rng.integers(0, 256, len(host), np.uint8)
    at, sizes = size * np.arange(count), np.full(count, size)
    rig.device.copy(rig.stream, memory + at, host.ctypes.data + size * order, sizes)
    rig.device.copy(rig.stream, back.ctypes.data + at, memory + at, sizes)
    rig.finish()
    assert np.array_equal(back.reshape(count, size), host.reshape(count, size)[order])


def test_registered_memory_is_copied_and_errors_do_not_reach_the_engine() -> None:
    rig = Rig(on_gpu(CACHES["bytes"]()))
    driver = Driver(0)
    driver.enter_thread()
    pool = HostPool(64, 1 << 20)
    assert pool.wait_until_touched(pool.data.nbytes)
    address = pool.data.ctypes.data
    driver.register(address, 32 << 20)
    driver.register(address + (32 << 20), 32 << 20)
    with pytest.raises(DriverError, match="ALREADY_REGISTERED"):
        driver.register(address, 1 << 20)
    assert float(torch.ones(4, device=GPU).sum()) == 4, "the engine's next kernel runs"
    pool.data[:] = 7
    memory = rig.device.allocate(64 << 20)
    slots = np.arange(64) << 20
    rig.device.copy(rig.stream, memory + slots, address + slots, np.full(64, 1 << 20))
    rig.finish()
    pool.data[:] = 0
    rig.device.copy(rig.stream, address + slots, memory + slots, np.full(64, 1 << 20))
    rig.finish()
    assert (pool.data == 7).all()
    for half in range(2):
        driver.unregister(address + half * (32 << 20))
    node = driver.numa_node()
    assert node is None or node >= 0
    driver.close()
    pool.close()


def test_another_thread_copies_while_a_graph_is_captured() -> None:
    cache = CACHES["layers outermost"]()
    rig = Rig(on_gpu(cache))
    begun, stop, problems = threading.Event(), threading.Event(), []
    num_done = 0

    def copy() -> None:
        nonlocal num_done
        try:
            rig.device.enter_thread()
            while not stop.is_set() or not num_done:
                rig.device.gather(rig.stream, 0, rig.blocks, rig.staging)
                rig.to_host(2)
                rig.device.scatter(rig.stream, 0, rig.blocks, rig.staging)
                rig.finish()
                num_done += 1
                begun.set()
        except Exception as error:
            problems.append(error)
            begun.set()

    rig.choose([1, 2])
    thread = threading.Thread(target=copy)
    thread.start()
    begun.wait(60)
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(1, device=GPU)
    with torch.cuda.graph(graph):
        at_begin = num_done
        deadline = time.monotonic() + 30
        while num_done < at_begin + 3 and not problems and time.monotonic() < deadline:
            total += 1
            time.sleep(1e-3)
    stop.set()
    thread.join(60)
    assert problems == []
    assert num_done >= at_begin + 3, "the thread has copied during the capture"
    graph.replay()
    torch.cuda.synchronize()
    assert total.item() > 0
