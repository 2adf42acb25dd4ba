"""The functions of the CUDA driver that the native loop calls, as functions of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, POINTER, c_float, c_int, c_int32, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.calls import MAX_BLOCKS, DriverCalls, Kernel
from kvoffload.transfer.cuda.cuda_device import CALLS, CudaDevice
from kvoffload.transfer.cuda.driver import Driver, DriverError

SUCCESS, INVALID_VALUE, NOT_READY, LAUNCH_FAILED = 0, 1, 600, 719
MAX_COPIES = 1024
"""The copies of one batch."""
NUMBERS, SIZES = POINTER(c_uint64), POINTER(c_size_t)
SIGNATURES: dict[str, Any] = {
    "copy_batch": CFUNCTYPE(c_int, NUMBERS, NUMBERS, SIZES, c_size_t, POINTER(c_int), SIZES, c_size_t, SIZES, c_void_p),
    "copy": CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p),
    "launch": CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p),
    "record": CFUNCTYPE(c_int, c_void_p, c_void_p),
    "wait": CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint),
    "query": CFUNCTYPE(c_int, c_void_p),
    "elapsed": CFUNCTYPE(c_int, POINTER(c_float), c_void_p, c_void_p),
}
"""By the fields of DriverCalls."""


def as_c(functions: Mapping[str, Callable[..., int]]) -> dict[str, Any]:
    """Returns functions of C, by the fields of DriverCalls, that return what ``functions`` do. One that raises returns
    the code of a failed launch. They live as long as the result."""

    def guarded(function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except Exception:
                return LAUNCH_FAILED

        return call

    return {name: SIGNATURES[name](guarded(function)) for name, function in functions.items()}


def addresses(functions: Mapping[str, Any]) -> dict[str, int]:
    """Returns the addresses of functions of C."""
    return {name: ctypes.cast(function, c_void_p).value or 0 for name, function in functions.items()}


def call(driver: Driver, field: str, *arguments: Any) -> int:
    """Calls a function of the driver, by its field of DriverCalls, in this thread. Raises DriverError."""
    address = driver.batch_address if field == "copy_batch" else driver.address_of(CALLS[field])
    code = int(SIGNATURES[field](address)(*arguments))
    if code not in (SUCCESS, NOT_READY):
        raise DriverError(field, "CUDA error", code)
    return code


def is_done(driver: Driver, event: int) -> bool:
    return call(driver, "query", event) == SUCCESS


def copy(driver: Driver, stream: int, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
    """Enqueues copies as the native loop does: in batches, if the driver has them."""
    if not driver.copies_in_batches:
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            call(driver, "copy", target, source, size, stream)
        return
    for first in range(0, len(sizes), MAX_COPIES):
        lists = [np.ascontiguousarray(each[first : first + MAX_COPIES]) for each in (targets, sources, sizes)]
        kinds: tuple[Any, ...] = (NUMBERS, NUMBERS, SIZES)
        pointers = [each.ctypes.data_as(kind) for each, kind in zip(lists, kinds, strict=True)]
        attributes, zero, failed = (c_int * 6)(1, 0, 0, 0, 0, 1), c_size_t(0), c_size_t(0)
        call(driver, "copy_batch", *pointers, len(lists[0]), attributes, zero, 1, failed, stream)


def launch(driver: Driver, kernel: Kernel, function: int, stream: int, blocks: Numbers, staging: int) -> None:
    """Enqueues a function of ``kernel`` for at most MAX_BLOCKS device blocks, as the native loop does.

    ``staging``: where their rows begin, a multiple of 16.
    """
    arguments = (
        *(c_uint64(each) for each in (kernel.pieces, staging, kernel.row_bytes)),
        *(c_uint32(each) for each in (kernel.num_pieces, len(blocks))),
        (c_int32 * MAX_BLOCKS)(*blocks.tolist()),
    )
    programs = min(kernel.max_programs, max(1, round(len(blocks) / kernel.rows_per_program)))
    pointers = (c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
    call(driver, "launch", function, programs, 1, 1, kernel.threads, 1, 1, 0, stream, pointers, None)


def numbers(pointer: Any, count: int) -> Numbers:
    """Returns the first numbers of an argument of a batch."""
    return np.array(pointer[:count], np.int64)


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """The arguments of the kernels."""

    pieces: int
    staging: int
    row_bytes: int
    num_pieces: int
    blocks: list[int]

    @classmethod
    def of(cls, pointers: Any) -> LaunchArguments:
        pieces, staging, row_bytes = (c_uint64.from_address(pointers[i]).value for i in range(3))
        num_pieces, num_rows = (c_uint32.from_address(pointers[i]).value for i in range(3, 5))
        return cls(pieces, staging, row_bytes, num_pieces, (c_int32 * num_rows).from_address(pointers[5])[:])


class WrappedDevice(CudaDevice):
    """Passes every call on to ``inner``, and those of the native loop to the driver: the base class of devices with a
    fault or a delay. Methods with the names of the driver's functions, see DriverCalls, return the driver's code."""

    def __init__(self, inner: CudaDevice) -> None:
        self.inner = inner
        self.calls = inner.native_calls()
        self.real = {
            name: signature(getattr(self.calls, name))
            for name, signature in SIGNATURES.items()
            if getattr(self.calls, name)
        }
        """The driver's functions."""
        self.scatters = {kernel.scatter for kernel in self.calls.kernels if kernel is not None}
        self._functions = as_c({name: getattr(self, name) for name in self.real})

    def enter_thread(self) -> None:
        self.inner.enter_thread()

    def new_stream(self) -> int:
        return self.inner.new_stream()

    def engine_stream(self) -> int:
        return self.inner.engine_stream()

    def new_event(self) -> int:
        return self.inner.new_event()

    def allocate(self, nbytes: int) -> int:
        return self.inner.allocate(nbytes)

    def allocate_host(self, nbytes: int) -> ByteArray:
        return self.inner.allocate_host(nbytes)

    def native_calls(self) -> DriverCalls:
        return DriverCalls(**{"copy_batch": 0} | addresses(self._functions), kernels=self.calls.kernels)

    def close(self) -> None:
        self.inner.close()

    def before_copies(self, stream: int, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        """Called before copies are passed on."""

    def before_launch(self, stream: int, is_scatter: bool) -> None:
        """Called before a launch is passed on."""

    def copy_batch(self, *arguments: Any) -> int:
        self.before_copies(arguments[-1], *(numbers(each, arguments[3]) for each in arguments[:3]))
        return int(self.real["copy_batch"](*arguments))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.before_copies(stream, *(np.array([each], np.int64) for each in (target, source, nbytes)))
        return int(self.real["copy"](target, source, nbytes, stream))

    def launch(self, function: int, *arguments: Any) -> int:
        self.before_launch(arguments[-3], function in self.scatters)
        return int(self.real["launch"](function, *arguments))

    def record(self, event: int, stream: int) -> int:
        return int(self.real["record"](event, stream))

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        return int(self.real["wait"](stream, event, flags))

    def query(self, event: int) -> int:
        return int(self.real["query"](event))

    def elapsed(self, milliseconds: Any, start: int, end: int) -> int:
        return int(self.real["elapsed"](milliseconds, start, end))
