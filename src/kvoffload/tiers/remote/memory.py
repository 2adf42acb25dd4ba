"""ValueMemory: where the bytes of values lie while a client moves them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.record import RECORD_BYTES, Value

MAX_ROWS = 64
"""Values moved by one call of a client."""
ROWS_BYTES = 32 << 20
"""Memory for values that one call of a client moves through rows; at least one value."""


class ValueMemory:
    """Memory for ``num_rows`` values at a time, whose payloads belong into slots of ``pools``. One thread uses it.

    A value is a buffer for its record, and the slots themselves. With ``has_rows``, for clients whose peers can write
    to that memory, it is one buffer as long as all of these together; the format of the values copies between it and
    the slots. ``memory``: the buffers of all rows.
    """

    def __init__(self, pools: Sequence[ByteArray], has_rows: bool = False, most_bytes: int = ROWS_BYTES) -> None:
        self._pools = pools
        self._has_rows = has_rows
        row_bytes = RECORD_BYTES + has_rows * sum(pool.shape[1] for pool in pools)
        self.num_rows = max(1, min(MAX_ROWS, most_bytes // row_bytes))
        self.memory: ByteArray = np.zeros((self.num_rows, row_bytes), dtype=np.uint8)

    def value(self, row: int, slot: int) -> Value:
        """Returns the memory of a value in ``row`` whose payload belongs into ``slot`` of every pool. The value that
        the row had before must not be used any more."""
        whole = self.memory[row]
        return Value(whole[:RECORD_BYTES], [pool[slot] for pool in self._pools], whole if self._has_rows else None)
