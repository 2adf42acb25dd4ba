"""A device without streams: work is done when it is issued, in numpy memory. It records the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.cuda.calls import MAX_BLOCKS, DriverCalls, Kernel
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.pages import PageTable
from tests.transfer.cuda.calls import INVALID_VALUE, NOT_READY, SUCCESS, LaunchArguments, addresses, as_c, numbers

ENGINE = 1
"""The engine's stream."""
THREADS, MAX_PROGRAMS, ROWS_PER_PROGRAM = 256, 16, 2
ORDER_STREAM, PREFER_OVERLAP = 1, 1


@dataclass(eq=False)
class PlainEvent:
    recorded: int = 0
    held: bool = False
    stream: int = 0


class PlainDevice(CudaDevice):
    """``calls``: the operations and how large they were. While ``held`` is True no event that is recorded is reached;
    ``release`` reaches them all. ``raise_in``: the operation that fails. ``refuses_batches``: batches return
    INVALID_VALUE."""

    def __init__(self, tables: Sequence[PageTable]) -> None:
        self.tables = tables
        self.calls: list[tuple[str, int]] = []
        self.held = False
        self.raise_in = ""
        self.refuses_batches = False
        self.num_batches = 0
        self.threads = 0
        self.closed = 0
        self.memory: list[ByteArray] = []
        self.events: list[PlainEvent] = []
        self.waits: list[tuple[int, PlainEvent]] = []
        self._clock = 0
        self._num_streams = ENGINE
        self._functions = as_c(
            {
                "copy_batch": self._copy_batch,
                "copy": lambda target, source, size, stream: self.copy([target], [source], [size]),
                "launch": self._launch,
                "record": self._record,
                "wait": self._wait,
                "query": self._query,
                "elapsed": self._elapsed,
            }
        )

    def _call(self, name: str, size: int) -> None:
        self.calls.append((name, size))
        if name == self.raise_in:
            raise RuntimeError(f"the driver failed in {name}")

    def enter_thread(self) -> None:
        self.threads += 1

    def new_stream(self) -> int:
        self._num_streams += 1
        return self._num_streams

    def engine_stream(self) -> int:
        return ENGINE

    def new_event(self) -> int:
        self.events.append(PlainEvent())
        return len(self.events)

    def release(self) -> None:
        self.held = False
        for event in self.events:
            event.held = False

    def _allocate(self, nbytes: int) -> ByteArray:
        memory = np.full(nbytes + 256, 0xEE, dtype=np.uint8)
        self.memory.append(memory)
        skipped = -memory.ctypes.data % 256
        return memory[skipped : skipped + nbytes]

    def allocate(self, nbytes: int) -> int:
        return int(self._allocate(nbytes).ctypes.data)

    def allocate_host(self, nbytes: int) -> ByteArray:
        return self._allocate(nbytes)

    def native_calls(self) -> DriverCalls:
        kernels = [self._kernel(g) for g in range(len(self.tables))]
        return DriverCalls(**addresses(self._functions), kernels=kernels)

    def close(self) -> None:
        self.closed += 1

    def _kernel(self, group: int) -> Kernel | None:
        table = self.tables[group]
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

    # The driver's functions.

    def _record(self, event: int, stream: int) -> int:
        self._clock += 1
        at = self.events[event - 1]
        at.recorded, at.held, at.stream = self._clock, self.held, stream
        return SUCCESS

    def _wait(self, stream: int, event: int, flags: int) -> int:
        self.waits.append((stream, self.events[event - 1]))
        return SUCCESS

    def _query(self, event: int) -> int:
        self._call("query", 0)
        return NOT_READY if self.events[event - 1].held else SUCCESS

    def _elapsed(self, milliseconds: Any, start: int, end: int) -> int:
        milliseconds[0] = 1e3 * (self.events[end - 1].recorded - self.events[start - 1].recorded)
        return SUCCESS

    def _copy_batch(self, *arguments: Any) -> int:
        targets, sources, sizes, count, attributes, first, num_attributes, _, _ = arguments
        assert count > 0
        assert (first[0], num_attributes) == (0, 1)
        assert attributes[:6] == [ORDER_STREAM, 0, 0, 0, 0, PREFER_OVERLAP]
        if self.refuses_batches:
            return INVALID_VALUE
        self.num_batches += 1
        return self.copy(*(numbers(each, count).tolist() for each in (targets, sources, sizes)))

    def copy(self, targets: list[int], sources: list[int], sizes: list[int]) -> int:
        self._call("copy", len(sizes))
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return SUCCESS

    def _launch(self, function: int, *rest: Any) -> int:
        *sizes, _, pointers, extra = rest
        group, is_scatter = (function >> 12) - 1, function & 1
        table, given = self.tables[group], LaunchArguments.of(pointers)
        num_rows = len(given.blocks)
        assert 0 < num_rows <= MAX_BLOCKS
        assert (given.pieces, given.num_pieces) == (((group + 1) << 12) + 2, len(table.runs))
        assert given.row_bytes == table.device_block_bytes
        assert given.staging % 16 == 0
        assert 1 <= sizes[0] <= min(MAX_PROGRAMS, num_rows // ROWS_PER_PROGRAM + 1)
        assert sizes[1:] == [1, 1, THREADS, 1, 1, 0]
        assert not extra
        self._call("scatter" if is_scatter else "gather", num_rows)
        for i, block in enumerate(given.blocks):
            for run in table.runs:
                sides = (given.staging + i * given.row_bytes + run.offset, run.base + block * run.stride)
                ctypes.memmove(*(sides[::-1] if is_scatter else sides), run.nbytes)
        return SUCCESS
