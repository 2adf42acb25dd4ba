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
from kvoffload.transfer.cuda.calls import DriverCalls
from kvoffload.transfer.cuda.device import Device

SUCCESS, INVALID_VALUE, NOT_READY, LAUNCH_FAILED = 0, 1, 600, 719
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


class WrappedDevice(Device):
    """Passes every call on to ``inner``, and those of the native loop to the driver: the base class of devices with a
    fault or a delay. Methods with the names of the driver's functions, see DriverCalls, return the driver's code."""

    def __init__(self, inner: Device) -> None:
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
