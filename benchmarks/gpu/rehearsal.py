"""A stand-in for torch.cuda and for the driver, to run the proof on a machine without a GPU: ``install()``.

Each stream is a thread that does its work in order, beside the others, as on a device; only that work is deferred which
``cuda.launch`` and the driver's kernels and copies enqueue. Its figures say nothing about a GPU.
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
from kvoffload.transfer.cuda import cuda_device, driver
from tests.transfer.cuda.calls import NOT_READY, SUCCESS, LaunchArguments, addresses, as_c, numbers

NUM_STREAMS = 32
CYCLES_PER_SECOND = 1e9
MEMORY = 64 << 20
ALIGNMENT, POISON = 256, 0xEE
ALREADY_REGISTERED = 712
GATHER, SCATTER = 1, 2
"""Handles of the kernels."""


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
    """The calls of the driver."""

    version = "0.0"

    def __init__(self, device: int, library: str = "") -> None:
        self.copies_in_batches = True
        self._registered: set[int] = set()
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._events: dict[int, Event] = {}
        self._functions = as_c(
            {
                "copy_batch": self._copy_batch,
                "copy": lambda target, source, nbytes, stream: self._copy([(target, source, nbytes)], stream),
                "launch": self._launch,
                "record": self._record,
                "wait": self._wait,
                "query": lambda event: SUCCESS if self._events[event].query() else NOT_READY,
                "elapsed": self._elapsed,
            }
        )
        names = cuda_device.CALLS | {"copy_batch": "cuMemcpyBatchAsync"}
        self._addresses = {names[field]: address for field, address in addresses(self._functions).items()}

    def enter_thread(self) -> None:
        """Does nothing."""

    use_context = enter_thread

    @contextmanager
    def context(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        synchronize()

    def address_of(self, name: str) -> int:
        return self._addresses[name]

    @property
    def batch_address(self) -> int:
        return self._addresses["cuMemcpyBatchAsync"] if self.copies_in_batches else 0

    def attribute(self, which: int) -> int:
        return 1

    def stop_batches(self) -> None:
        self.copies_in_batches = False

    def new_stream(self) -> int:
        return new_stream().cuda_stream

    def destroy_stream(self, stream: int) -> None:
        """Does nothing: later devices get the stream again."""

    def new_event(self) -> int:
        event = Event()
        self._events[id(event)] = event
        return id(event)

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def _record(self, event: int, stream: int) -> int:
        self._events[event].record(stream_of(stream))
        return SUCCESS

    def read(self, address: int, into: int, nbytes: int) -> None:
        ctypes.memmove(into, address, nbytes)

    def write(self, address: int, source: int, nbytes: int) -> None:
        ctypes.memmove(address, source, nbytes)

    def load_module(self, code: bytes) -> int:
        return 1

    def unload_module(self, module: int) -> None:
        """Does nothing."""

    def function(self, module: int, name: str) -> int:
        return SCATTER if name.startswith("scatter") else GATHER

    # What the native loop calls.

    def _copy_batch(self, *arguments: Any) -> int:
        lists = (numbers(each, arguments[3]).tolist() for each in arguments[:3])
        return self._copy(list(zip(*lists, strict=True)), arguments[-1])

    def _copy(self, pieces: list[tuple[int, int, int]], stream: int) -> int:
        stream_of(stream).enqueue(lambda: [ctypes.memmove(*piece) for piece in pieces])
        return SUCCESS

    def _launch(self, function: int, *rest: Any) -> int:
        *_, stream, pointers, _ = rest
        return self._move_rows(function == SCATTER, LaunchArguments.of(pointers), stream)

    def _move_rows(self, is_scatter: bool, given: LaunchArguments, stream: int) -> int:
        pieces = (ctypes.c_int64 * (4 * given.num_pieces)).from_address(given.pieces)
        entries = np.ctypeslib.as_array(pieces).reshape(-1, 4).tolist()

        def work() -> None:
            for row, block in enumerate(given.blocks):
                for base, stride, nbytes, offset in entries:
                    sides = (given.staging + row * given.row_bytes + offset, base + block * stride)
                    ctypes.memmove(*(sides[::-1] if is_scatter else sides), nbytes)

        stream_of(stream).enqueue(work)
        return SUCCESS

    def _wait(self, stream: int, event: int, flags: int) -> int:
        stream_of(stream).wait_event(self._events[event])
        return SUCCESS

    def _elapsed(self, milliseconds: Any, start: int, end: int) -> int:
        milliseconds[0] = self._events[start].elapsed_time(self._events[end])
        return SUCCESS

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

    allocate_host, free_host = allocate, free

    def close(self) -> None:
        """Does nothing."""

    def numa_node(self, sysfs: Path | None = None) -> int | None:
        return None


def install() -> None:
    """Replaces torch.cuda and the driver in this process."""
    empty = torch.empty

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
        (cuda_device, {"Driver": Driver}),
    ]
    for place, names in replacements:
        for name, replacement in names.items():
            setattr(place, name, replacement)
