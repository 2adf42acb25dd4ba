"""The CUDA device of this process, as the parts of the proof use it: all calls of torch.cuda are here.

``rehearsal`` replaces some of it to run the parts on a machine without a GPU.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.pages import page_table

Tensor: TypeAlias = Any
Event: TypeAlias = Any
Graph: TypeAlias = Any

DEVICE = "cuda"
PEAK_BYTES = 256 << 20
CALIBRATION_CYCLES = 20_000_000


def is_available() -> bool:
    return bool(torch.cuda.is_available())


def launch(work: Callable[[], object]) -> None:
    """Runs ``work``, which enqueues operations on the current stream."""
    work()


def properties() -> Any:
    return torch.cuda.get_device_properties(0)


def make_device(groups: Sequence[PageGroup]) -> CudaDevice:
    """Returns the device for ``groups`` as the vLLM adapter makes it."""
    return CudaDevice(
        [page_table(group) for group in groups],
        0,
        lambda: int(torch.cuda.current_stream().cuda_stream),
    )


def synchronize() -> None:
    torch.cuda.synchronize()


def free_memory() -> int:
    """Returns the bytes of device memory that no process has taken."""
    return int(torch.cuda.mem_get_info()[0])


def empty_cache() -> None:
    torch.cuda.empty_cache()


def empty(shape: tuple[int, ...] | int, dtype: Any = torch.uint8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def zeros(shape: tuple[int, ...]) -> Tensor:
    """Returns words of 64 bits."""
    return torch.zeros(shape, dtype=torch.int64, device=DEVICE)


def zero() -> Tensor:
    """Returns a counter."""
    return zeros(())


def pinned(nbytes: int) -> Tensor:
    """Returns page-locked host memory, with its pages in memory."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)


def send(array: Any) -> Tensor:
    """Enqueues the copy of a numpy array to the device on the current stream, without waiting for it."""
    source = torch.from_numpy(array)
    if DEVICE == "cpu":
        return source.clone()
    return source.pin_memory().to(DEVICE, non_blocking=True)


def record() -> Event:
    """Returns a new event at the end of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream())
    return event


def seconds_between(start: Event, end: Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


@functools.cache
def _cycles_per_second() -> float:
    # An idle device has a slow clock.
    torch.cuda._sleep(10 * CALIBRATION_CYCLES)
    start = record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end = record()
    end.synchronize()
    return CALIBRATION_CYCLES / seconds_between(start, end)


def sleep(seconds: float, stream: Any = None) -> None:
    """Lets the current stream, or that with the handle ``stream``, do nothing for a while. The calling thread does not
    wait, except at the first call."""
    cycles = int(seconds * _cycles_per_second())
    with torch.cuda.stream(torch.cuda.ExternalStream(stream) if stream else torch.cuda.current_stream()):
        torch.cuda._sleep(cycles)


def capture(work: Callable[[], object]) -> Graph:
    """Returns ``work`` as a graph, captured in global mode as vLLM does: what a capture forbids, no thread may call."""
    torch.cuda.current_stream().synchronize()  # ``work`` runs once beside it, and must not meet what it did before.
    stream = new_stream()
    with torch.cuda.stream(stream):
        launch(work)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
        launch(work)
    return graph


def new_stream() -> Any:
    return torch.cuda.Stream()


@contextmanager
def beside() -> Iterator[None]:
    """Makes a new stream current."""
    with torch.cuda.stream(new_stream()):
        yield


def bandwidth(copies: Callable[[], int], rounds: int = 5) -> float:
    """Returns GB/s: the median of rounds, with the wall clock around ``copies``, which returns its bytes."""
    figures = []
    for _ in range(rounds + 1):
        synchronize()
        begin = time.perf_counter()
        nbytes = copies()
        synchronize()
        figures.append(nbytes / (time.perf_counter() - begin) / 1e9)
    return statistics.median(figures[1:])


def memory_rate(nbytes: int) -> float:
    """Returns GB/s of the device's memory, reads and writes together, in a copy on the device."""
    source, target = empty(nbytes), empty(nbytes)

    def once() -> int:
        for _ in range(8):
            launch(lambda: target.copy_(source))
        return 16 * nbytes

    return bandwidth(once)


def memcpy_peaks(nbytes: int = PEAK_BYTES) -> dict[str, float]:
    """Returns GB/s of large copies of page-locked memory: to the device, from it, and both at once (their sum)."""
    host, back = pinned(nbytes), pinned(nbytes)
    target, source = empty(nbytes), empty(nbytes)
    repeats = 4

    def load() -> int:
        launch(lambda: target.copy_(host, non_blocking=True))
        return nbytes

    def store() -> int:
        launch(lambda: back.copy_(source, non_blocking=True))
        return nbytes

    def both() -> int:
        for run in (load, store):
            with beside():
                for _ in range(repeats):
                    run()
        return 2 * repeats * nbytes

    return {
        "load": bandwidth(lambda: sum(load() for _ in range(repeats))),
        "store": bandwidth(lambda: sum(store() for _ in range(repeats))),
        "both": bandwidth(both),
    }
