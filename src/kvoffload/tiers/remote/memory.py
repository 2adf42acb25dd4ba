"""Where the bytes of values lie while a client moves them: in the slots of the pools, or in rows of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.record import RECORD_BYTES, Value

MAX_ROWS = 64
"""Values moved by one call of a client."""
ROWS_BYTES = 32 << 20
"""Memory for values that one call of a client moves through rows; at least one value."""


class ValueMemory(ABC):
    """Memory for ``num_rows`` values at a time, whose payloads belong into slots of the host pools. One thread uses
    it."""

    num_rows: int

    @abstractmethod
    def value(self, row: int, slot: int) -> Value:
        """Returns the memory of a value in ``row`` whose payload belongs into ``slot`` of every pool. The value that
        the row had before must not be used any more."""


class SeparateBuffers(ValueMemory):
    """A value is a buffer for its record, and the slots themselves: only for clients whose peers cannot write there."""

    num_rows = MAX_ROWS

    def __init__(self, pools: Sequence[ByteArray]) -> None:
        self._pools = pools
        self._records = np.zeros((self.num_rows, RECORD_BYTES), dtype=np.uint8)

    def value(self, row: int, slot: int) -> Value:
        return Value(self._records[row], [pool[slot] for pool in self._pools])


class ValueRows(ValueMemory):
    """A value is one buffer in memory of its own, as long as the record and the slots together. The format of the
    values copies between it and the slots. ``memory``: all of it."""

    def __init__(self, pools: Sequence[ByteArray], most_bytes: int = ROWS_BYTES) -> None:
        self._pools = pools
        value_bytes = RECORD_BYTES + sum(pool.shape[1] for pool in pools)
        self.num_rows = max(1, min(MAX_ROWS, most_bytes // value_bytes))
        self.memory: ByteArray = np.zeros(self.num_rows * value_bytes, dtype=np.uint8)

    def value(self, row: int, slot: int) -> Value:
        whole = self.memory.reshape(self.num_rows, -1)[row]
        return Value(whole[:RECORD_BYTES], [pool[slot] for pool in self._pools], whole)
