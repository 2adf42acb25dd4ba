"""A device without streams: work is done when it is issued, in numpy memory. It records the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Addresses, Device, Event, Stream
from kvoffload.transfer.cuda.pages import PageTable


@dataclass(eq=False)
class PlainEvent:
    recorded: int = 0
    held: bool = False
    stream: Stream = None


class PlainDevice(Device):
    """``calls``: the operations and how large they were. While ``held`` is True no event that is recorded is reached;
    ``release`` reaches them all. ``raise_in``: the operation that fails."""

    def __init__(self, tables: Sequence[PageTable]) -> None:
        self.tables = tables
        self.calls: list[tuple[str, int]] = []
        self.held = False
        self.raise_in = ""
        self.threads = 0
        self.closed = 0
        self.clock = 0
        self.memory: list[ByteArray] = []
        self.events: list[PlainEvent] = []
        self.waits: list[tuple[Stream, Event]] = []
        self.streams = 0

    def _call(self, name: str, size: int) -> None:
        self.calls.append((name, size))
        if name == self.raise_in:
            raise RuntimeError(f"the driver failed in {name}")

    def enter_thread(self) -> None:
        self.threads += 1

    def new_stream(self) -> Stream:
        self.streams += 1
        return self.streams

    def engine_stream(self) -> Stream:
        return "engine"

    def new_event(self) -> Event:
        self.events.append(PlainEvent())
        return self.events[-1]

    def record(self, event: Event, stream: Stream) -> None:
        self.clock += 1
        event.recorded, event.held, event.stream = self.clock, self.held, stream

    def wait(self, stream: Stream, event: Event) -> None:
        self.waits.append((stream, event))

    def is_done(self, event: Event) -> bool:
        self._call("is_done", 0)
        return not event.held

    def release(self) -> None:
        self.held = False
        for event in self.events:
            event.held = False

    def seconds_between(self, start: Event, end: Event) -> float:
        return float(end.recorded - start.recorded)

    def _allocate(self, nbytes: int) -> ByteArray:
        memory = np.full(nbytes + 256, 0xEE, dtype=np.uint8)
        self.memory.append(memory)
        skipped = -memory.ctypes.data % 256
        return memory[skipped : skipped + nbytes]

    def allocate(self, nbytes: int) -> int:
        return int(self._allocate(nbytes).ctypes.data)

    def allocate_host(self, nbytes: int) -> ByteArray:
        return self._allocate(nbytes)

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._call("copy", len(sizes))
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self._call("gather", len(blocks))
        for row, page in self._pages(group, blocks, staging):
            ctypes.memmove(row[0], page, row[1])

    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self._call("scatter", len(blocks))
        for row, page in self._pages(group, blocks, staging):
            ctypes.memmove(page, row[0], row[1])

    def _pages(self, group: int, blocks: Numbers, staging: int) -> list[tuple[tuple[int, int], int]]:
        assert staging % 16 == 0
        table = self.tables[group]
        return [
            ((staging + i * table.device_block_bytes + run.offset, run.nbytes), run.base + block * run.stride)
            for i, block in enumerate(blocks.tolist())
            for run in table.runs
        ]

    def close(self) -> None:
        self.closed += 1
