"""Where the bytes of values lie while a client moves them: records beside the slots of the pools."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.host.mapping import HUGE_PAGE, map_over, reserve_addresses
from kvoffload.tiers.remote.record import RECORD_BYTES, Value

MAX_ROWS = 64
"""Values moved by one call of a client."""
MAX_WINDOW_BYTES = 64 << 20
"""Bytes of values moved by one call through a window; at least one value."""


class ValueMemory(ABC):
    """Memory for ``num_rows`` values at a time, whose payloads are slots of the host pools. One thread uses it."""

    num_rows: int

    @abstractmethod
    def registered(self) -> Sequence[ByteArray]:
        """Returns the memory of this object in which buffers lie, for ``StoreClient.register``."""

    @abstractmethod
    def value(self, row: int, slot: int) -> Value:
        """Returns the memory of a value in ``row`` whose payload is in ``slot`` of every pool. The value that the row
        had before must not be used any more."""


class SeparateBuffers(ValueMemory):
    """A value is a buffer for its record, and one per slot. The pools are registered by others."""

    num_rows = MAX_ROWS

    def __init__(self, pools: Sequence[ByteArray]) -> None:
        self._pools = pools
        self._records = np.zeros((self.num_rows, RECORD_BYTES), dtype=np.uint8)

    def registered(self) -> Sequence[ByteArray]:
        return [self._records]

    def value(self, row: int, slot: int) -> Value:
        record, parts = self._records[row], [pool[slot] for pool in self._pools]
        return Value(record, parts, [record, *parts])


class Window(ValueMemory):
    """A value is one buffer, whatever the number of ranks, and its payload is not copied: each row is a range of
    addresses in which a page with the record is followed by the slots, mapped there when the row gets them.

    ``files`` are the pools' memory files and ``slot_bytes`` their slots' sizes, multiples of the page size. Where the
    first slot is in huge pages, it is mapped by huge pages: rows are aligned for that.
    """

    def __init__(self, pools: Sequence[ByteArray], files: Sequence[int]) -> None:
        self._pools = pools
        self._files = files
        payload_bytes = sum(pool.shape[1] for pool in pools)
        self.num_rows = max(1, min(MAX_ROWS, MAX_WINDOW_BYTES // payload_bytes))
        self._row_bytes = -(-(payload_bytes + mmap.PAGESIZE) // HUGE_PAGE) * HUGE_PAGE
        # The record of a row is in the page before its slots, so that they begin at a huge page.
        self._memory = reserve_addresses((self.num_rows + 1) * self._row_bytes)

    @staticmethod
    def fits(pools: Sequence[ByteArray]) -> bool:
        """Returns whether slots of ``pools`` can be mapped one by one."""
        return all(pool.shape[1] % mmap.PAGESIZE == 0 for pool in pools)

    def registered(self) -> Sequence[ByteArray]:
        return [self._memory]

    def value(self, row: int, slot: int) -> Value:
        begin = at = (row + 1) * self._row_bytes
        for pool, file in zip(self._pools, self._files, strict=True):
            nbytes = pool.shape[1]
            map_over(self._memory[at : at + nbytes], file, slot * nbytes, populate=True)
            at += nbytes
        whole = self._memory[begin - RECORD_BYTES : at]
        return Value(whole[:RECORD_BYTES], [pool[slot] for pool in self._pools], [whole])
