"""A stand-in for torch.cuda and for the driver, to run the proof on a machine without a GPU: ``install()``.

Each stream is a thread that does its work in order, beside the others, as on a device; only that work is deferred which
``cuda.launch``, kernels of TorchDevice and copies of the driver enqueue. Its figures say nothing about a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu import cuda
from kvoffload.transfer.cuda import driver, kernels, torch_device
from kvoffload.transfer.cuda.device import Addresses

NUM_STREAMS = 32
CYCLES_PER_SECOND = 1e9
MEMORY = 64 << 20
ALIGNMENT, POISON = 256, 0xEE
ALREADY_REGISTERED = 712


class Stream:
    """A thread that does work in order."""

    numbers = itertools.count(16)
    all: list[Stream] = []

    def __init__(self) -> None:
        self.cuda_stream = next(self.numbers)
        self.captured: list[Callable[[], object]] | None = None
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self.all.append(self)
        threading.Thread(target=self._run, name=f"stream-{self.cuda_stream}", daemon=True).start()

    def enqueue(self, work: Callable[[], object]) -> None:
        (self._work.put if self.captured is None else self.captured.append)(work)

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.enqueue(event.mark.reached.wait)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError("work on a stream failed") from error

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except BaseException as error:
                self._error = error


class Mark:
    """A point in a stream."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time = 0.0

    def reach(self) -> None:
        self.time = time.perf_counter()
        self.reached.set()


class Event:
    """A point in a stream that can be recorded again."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        mark = self.mark = Mark()
        (stream or current_stream()).enqueue(mark.reach)

    def query(self) -> bool:
        return self.mark is None or self.mark.reached.is_set()

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark.reached.wait()

    def elapsed_time(self, end: Event) -> float:
        assert self.mark is not None
        assert end.mark is not None
        return (end.mark.time - self.mark.time) * 1e3


class Graph:
    """Work that was enqueued on a stream while ``torch.cuda.graph`` captured it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        for work in self.work:
            current_stream().enqueue(work)


_thread = threading.local()


@functools.cache
def _default_stream() -> Stream:
    return Stream()


@functools.cache
def _pool() -> Iterator[Stream]:
    return itertools.cycle([Stream() for _ in range(NUM_STREAMS)])


def new_stream(device: object = None) -> Stream:
    """Returns one of a few streams, as torch does."""
    return next(_pool())


def stream_of(handle: int, device: object = None) -> Stream:
    return next(each for each in Stream.all if each.cuda_stream == handle)


def current_stream(device: object = None) -> Stream:
    return getattr(_thread, "stream", None) or _default_stream()


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    before, _thread.stream = current_stream(), stream
    try:
        yield
    finally:
        _thread.stream = before


@contextmanager
def graph(into: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    with use_stream(stream):
        stream.captured = into.work
        try:
            yield
        finally:
            stream.captured = None


def synchronize(device: object = None) -> None:
    for stream in list(Stream.all):
        stream.synchronize()


def _sleep(cycles: int) -> None:
    current_stream().enqueue(lambda: time.sleep(cycles / CYCLES_PER_SECOND))


class Driver:
    """The calls of the driver for streams, copies and memory."""

    copies_in_batches = True

    def __init__(self, device: int, library: str = "") -> None:
        self._registered: set[int] = set()
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}

    def enter_thread(self) -> None:
        """Does nothing."""

    def new_stream(self) -> int:
        return new_stream().cuda_stream

    def destroy_stream(self, stream: int) -> None:
        """Does nothing: later devices get the stream again."""

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        stream_of(stream).enqueue(lambda: [ctypes.memmove(*piece) for piece in pieces])

    def register(self, address: int, nbytes: int) -> None:
        if address in self._registered:
            raise driver.DriverError("register", "already registered", ALREADY_REGISTERED)
        self._registered.add(address)

    def unregister(self, address: int) -> None:
        self._registered.remove(address)

    def allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
        address = -(-int(memory.ctypes.data) // ALIGNMENT) * ALIGNMENT
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        synchronize()
        del self._memory[address]

    def close(self) -> None:
        """Does nothing."""

    def numa_node(self, sysfs: Path | None = None) -> int | None:
        return None


def _tensor_of(address: int, nbytes: int, device: object) -> Any:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def install() -> None:
    """Replaces torch.cuda, the driver and Triton in this process."""
    copy, empty = kernels.TorchCopier.copy, torch.empty

    def deferred(*arguments: Any, **options: Any) -> None:
        current_stream().enqueue(lambda: copy(*arguments, **options))

    def pageable(*shape: Any, pin_memory: bool = False, **options: Any) -> Any:
        return empty(*shape, **options)

    replacements: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "Stream": new_stream,
                "ExternalStream": stream_of,
                "Event": Event,
                "CUDAGraph": Graph,
                "graph": graph,
                "stream": use_stream,
                "current_stream": current_stream,
                "synchronize": synchronize,
                "set_device": lambda device: None,
                "is_available": lambda: True,
                "_sleep": _sleep,
                "mem_get_info": lambda: (MEMORY, MEMORY),
                "empty_cache": lambda: None,
                "get_device_properties": lambda device: SimpleNamespace(
                    name="no GPU: a rehearsal", total_memory=MEMORY, major=0, minor=0, multi_processor_count=0
                ),
            },
        ),
        (torch, {"empty": pageable}),
        (
            cuda,
            {"DEVICE": "cpu", "CALIBRATION_CYCLES": 2_000_000, "launch": lambda work: current_stream().enqueue(work)},
        ),
        (driver, {"Driver": Driver}),
        (torch_device, {"Driver": Driver, "tensor_of": _tensor_of}),
        (kernels, {"triton": None}),
        (kernels.TorchCopier, {"copy": deferred}),
    ]
    for place, names in replacements:
        for name, replacement in names.items():
            setattr(place, name, replacement)
