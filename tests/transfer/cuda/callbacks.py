"""A device for the native loop: C functions with the CUDA driver's signatures that call a simulated device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_float, c_int, c_int32, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from kvoffload.transfer.cuda.calls import MAX_BLOCKS, DriverCalls, Kernel
from kvoffload.transfer.cuda.device import Addresses, Device, Event, Stream
from kvoffload.transfer.cuda.pages import PageTable
from tests.sim.faults import WrappedDevice

SUCCESS, INVALID_VALUE, NOT_READY, LAUNCH_FAILED = 0, 1, 600, 719
THREADS, MAX_PROGRAMS = 256, 16
ROWS_PER_PROGRAM = 2
ORDER_STREAM, PREFER_OVERLAP = 1, 1

NUMBERS, SIZES = POINTER(c_uint64), POINTER(c_size_t)
COPY_BATCH = CFUNCTYPE(c_int, NUMBERS, NUMBERS, SIZES, c_size_t, POINTER(c_int), SIZES, c_size_t, SIZES, c_void_p)
COPY = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)
LAUNCH = CFUNCTYPE(c_int, c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p)
RECORD = CFUNCTYPE(c_int, c_void_p, c_void_p)
WAIT = CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint)
QUERY = CFUNCTYPE(c_int, c_void_p)
ELAPSED = CFUNCTYPE(c_int, POINTER(c_float), c_void_p, c_void_p)


class CallbackDevice(WrappedDevice):
    """Gives streams and events of ``inner`` handles, and DriverCalls that do what ``inner`` does.

    A call in which ``inner`` raises returns the code of a failed launch, or the error's ``code``; ``on_error`` gets the
    error. The first groups, ``num_without_kernels``, have none. ``refuses_batches``: batches return INVALID_VALUE.
    """

    def __init__(
        self,
        inner: Device,
        tables: Sequence[PageTable],
        on_error: Callable[[Exception], None] = lambda error: None,
        num_without_kernels: int = 0,
    ) -> None:
        super().__init__(inner)
        self.refuses_batches = False
        self.num_batches = 0
        self._tables = tables
        self._on_error = on_error
        self._num_without_kernels = num_without_kernels
        self._objects: dict[int, Any] = {}
        self._engine = self._handle(inner.engine_stream())
        self._functions = {
            "copy_batch": COPY_BATCH(self._copy_batch),
            "copy": COPY(self._copy),
            "launch": LAUNCH(self._launch),
            "record": RECORD(lambda event, stream: self._run(self.inner.record, event, stream)),
            "wait": WAIT(lambda stream, event, flags: self._run(self.inner.wait, stream, event)),
            "query": QUERY(self._query),
            "elapsed": ELAPSED(self._elapsed),
        }

    def new_stream(self) -> Stream:
        return self._handle(self.inner.new_stream())

    def engine_stream(self) -> Stream:
        return self._engine

    def new_event(self) -> Event:
        return self._handle(self.inner.new_event())

    def native_calls(self) -> DriverCalls:
        addresses = {name: ctypes.cast(each, c_void_p).value or 0 for name, each in self._functions.items()}
        kernels = [self._kernel(g) if g >= self._num_without_kernels else None for g in range(len(self._tables))]
        return DriverCalls(**addresses, kernels=kernels)

    def _handle(self, of: Any) -> int:
        self._objects[len(self._objects) + 1] = of
        return len(self._objects)

    def _kernel(self, group: int) -> Kernel | None:
        table = self._tables[group]
        if not table.runs:
            return None
        # Nothing is behind these numbers, which only tell groups and directions apart.
        first = (group + 1) << 12
        return Kernel(
            gather=first,
            scatter=first + 1,
            pieces=first + 2,
            num_pieces=len(table.runs),
            row_bytes=table.device_block_bytes,
            threads=THREADS,
            max_programs=MAX_PROGRAMS,
            rows_per_program=ROWS_PER_PROGRAM,
        )

    def _run(self, function: Callable[..., object], *handles: int) -> int:
        try:
            function(*(self._objects[each] for each in handles))
        except Exception as error:
            return self._code(error)
        return SUCCESS

    def _code(self, error: Exception) -> int:
        self._on_error(error)
        return int(getattr(error, "code", LAUNCH_FAILED))

    def _copy_batch(self, *arguments: Any) -> int:
        targets, sources, sizes, count, attributes, first, num_attributes, _, stream = arguments
        try:
            assert count > 0
            assert (first[0], num_attributes) == (0, 1)
            assert attributes[:6] == [ORDER_STREAM, 0, 0, 0, 0, PREFER_OVERLAP]
            if self.refuses_batches:
                return INVALID_VALUE
            self.num_batches += 1
            self.inner.copy(self._objects[stream], *(_numbers(each[:count]) for each in (targets, sources, sizes)))
        except Exception as error:
            return self._code(error)
        return SUCCESS

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        try:
            self.inner.copy(self._objects[stream], *(_numbers([each]) for each in (target, source, size)))
        except Exception as error:
            return self._code(error)
        return SUCCESS

    def _launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, arguments, extra = rest
        try:
            group, is_scatter = (function >> 12) - 1, function & 1
            table = self._tables[group]
            pieces, staging, row_bytes = (c_uint64.from_address(arguments[i]).value for i in range(3))
            num_pieces, num_rows = (c_uint32.from_address(arguments[i]).value for i in range(3, 5))
            blocks = (c_int32 * MAX_BLOCKS).from_address(arguments[5])[:num_rows]
            assert 0 < num_rows <= MAX_BLOCKS
            assert (pieces, num_pieces) == (((group + 1) << 12) + 2, len(table.runs))
            assert row_bytes == table.device_block_bytes
            assert 1 <= sizes[0] <= min(MAX_PROGRAMS, num_rows // ROWS_PER_PROGRAM + 1)
            assert sizes[1:] == [1, 1, THREADS, 1, 1, 0]
            assert not extra
            move = self.inner.scatter if is_scatter else self.inner.gather
            move(self._objects[stream], group, _numbers(blocks), staging)
        except Exception as error:
            return self._code(error)
        return SUCCESS

    def _query(self, event: int) -> int:
        try:
            return SUCCESS if self.inner.is_done(self._objects[event]) else NOT_READY
        except Exception as error:
            return self._code(error)

    def _elapsed(self, milliseconds: Any, start: int, end: int) -> int:
        try:
            milliseconds[0] = 1e3 * self.inner.seconds_between(self._objects[start], self._objects[end])
        except Exception as error:
            return self._code(error)
        return SUCCESS


def _numbers(values: Sequence[int]) -> Addresses:
    return np.array(values, np.int64)
