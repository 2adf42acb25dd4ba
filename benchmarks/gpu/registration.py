"""How long the driver takes to register host memory, what it delays, and how fast registered memory is copied."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np

from benchmarks.gpu import cuda
from benchmarks.gpu.decode import Decoder, percentiles
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from kvoffload.abc import ByteArray
from kvoffload.host.limits import available_memory
from kvoffload.host.pool import HostPool
from kvoffload.host.registration import Registration
from kvoffload.host.touch import Toucher
from kvoffload.transfer.cuda import driver
from tests.transfer.cuda.calls import copy

GIB = 1 << 30
SLOT = 128 << 10
SIZES = {1: ("collapsed", "touched", "fresh"), 8: ("collapsed", "touched", "fresh"), 64: ("collapsed",)}
"""In GiB, and the kinds of memory: fresh pages have never been touched, touched ones are small, collapsed ones huge."""
MEMORY_SHARE = 0.7
"""How much of the memory that is left a pool may take."""
SECONDS_PER_GIB = 0.8
"""What a pool is expected to take at most, to skip sizes for which there is no time."""
MIN_STEPS = 30
COPIED_BYTES = 1 << 30


class TimedDriver:
    """Notes how long each call took."""

    def __init__(self, inner: driver.Driver) -> None:
        self.inner = inner
        self.calls: list[float] = []

    def enter_thread(self) -> None:
        self.inner.enter_thread()

    def register(self, address: int, nbytes: int) -> None:
        begin = time.perf_counter()
        self.inner.register(address, nbytes)
        self.calls.append(time.perf_counter() - begin)

    def unregister(self, address: int) -> None:
        self.inner.unregister(address)


def run(report: Report, options: Options) -> None:
    deadline = time.monotonic() + options.seconds * 0.9
    decoder = Decoder(options)
    for gibibytes, kinds in SIZES.items():
        nbytes = options.size(gibibytes * GIB)
        if nbytes > available_memory() * MEMORY_SHARE:
            report.add(f"{gibibytes} GiB", "too little memory")
            continue
        for kind in kinds:
            if time.monotonic() + gibibytes * SECONDS_PER_GIB > deadline:
                report.add(f"{gibibytes} GiB, {kind}", "no time left")
                continue
            _register(report, options, decoder, f"{gibibytes} GiB, {kind}", nbytes, kind)


def _register(report: Report, options: Options, decoder: Decoder, what: str, nbytes: int, kind: str) -> None:
    calls = TimedDriver(driver.Driver(0))
    begin = time.perf_counter()
    data: ByteArray
    close: Callable[[], None]
    if kind == "collapsed":
        pool = HostPool(nbytes // SLOT, SLOT, calls.inner.numa_node())
        pool.wait_until_touched()
        data, close = pool.data, pool.close
    else:
        data, close = _plain_memory(nbytes)
        if kind == "touched":
            toucher = Toucher(data, collapse=False)
            toucher.wait()
            toucher.close()
    report.add(f"{what}: allocated and touched", time.perf_counter() - begin, "s")
    begin = time.perf_counter()
    registration = Registration(data, calls, lambda size: True)
    times: list[float] = []
    while registration.num_ready_slots < len(data) and time.perf_counter() - begin < options.seconds:
        times += decoder.run(1).device
    registration._thread.join()
    elapsed = time.perf_counter() - begin
    after = decoder.run(max(MIN_STEPS if not options.dry_run else 2, len(times) // 4)).device
    ready = registration.num_ready_slots
    report.must(
        f"{what}: registered", ready == len(data), f"{elapsed:.2f} s" if ready == len(data) else f"{ready} slots"
    )
    report.add(f"{what}: calls of the driver per GiB", sum(calls.calls) / (nbytes / GIB), "s")
    report.add(f"{what}: longest call", max(calls.calls, default=0.0) * 1e3, "ms")
    if times:
        report.add(f"{what}: decode p50 meanwhile", percentiles(times)["p50"] / percentiles(after)["p50"], "relative")
        report.add(f"{what}: longest decode step meanwhile", max(times), "ms")
    report.add(f"{what}: copied to the device", _speed(calls.inner, data, options), "GB/s")
    registration.release()
    begin = time.perf_counter()
    is_gone = registration.close()
    report.must(f"{what}: unregistered", is_gone, f"{time.perf_counter() - begin:.2f} s" if is_gone else "")
    del data
    close()


def _plain_memory(nbytes: int) -> tuple[ByteArray, Callable[[], None]]:
    """Returns a mapped memory file without pages yet, and what closes it."""
    fd = os.memfd_create("proof")
    os.ftruncate(fd, nbytes)
    mapped = mmap.mmap(fd, nbytes)
    os.close(fd)
    data: ByteArray = np.frombuffer(mapped, dtype=np.uint8).reshape(-1, SLOT)
    # The memory is freed with the last array that refers to it.
    return data, lambda: None


def _speed(calls: driver.Driver, data: ByteArray, options: Options) -> float:
    """Returns GB/s of copies of slots in random order."""
    number = min(len(data), max(1, options.size(COPIED_BYTES) // SLOT))
    slots = np.random.default_rng(0).permutation(len(data))[:number]
    target = cuda.empty(number * SLOT)
    targets = int(target.data_ptr()) + np.arange(number) * SLOT
    sources = int(data.ctypes.data) + slots * SLOT
    stream = cuda.new_stream()

    def once() -> int:
        copy(calls, stream.cuda_stream, targets, sources, np.full(number, SLOT))
        return number * SLOT

    return cuda.bandwidth(once, options.rounds(5))
