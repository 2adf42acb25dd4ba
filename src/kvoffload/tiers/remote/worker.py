"""StoreWorker: answers requests with a store's client, which moves bytes in ValueMemory. It runs in the client's
process."""

from __future__ import annotations

import random as random_module
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.abc import ByteArray, Keys
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.messages import Op, Response, StoreRequest
from kvoffload.tiers.remote.record import RECORD_BYTES, Value, ValueFormat

MAX_ROWS = 64
"""Values moved by one call of a client."""
ROWS_BYTES = 32 << 20
"""Memory for values that one call of a client moves through rows; at least one value."""
RETRY_WITHIN_S = 1.0
"""Lookups and reads that fail sooner are repeated once: a lost connection is replaced by then."""
MORE_WITHIN_S = 4.0
"""Further calls of the client for one request begin only within this time. With the longest call it stays below the
deadline of transfers, see ``link``."""
RETRY_PAUSE_S = 0.2
"""The longest pause before the repetition; pauses are random, so that servers do not come back all at once."""
TOO_SLOW = "the store is too slow"


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


class StoreWorker:
    """Moves blocks between host slots and the store of ``client``, through ``memory``.

    The checksums are computed here, so they cost the engine nothing. One thread uses a worker at a time; several
    workers may share a client, but not a memory. ``random`` returns numbers from 0 to 1, ``pause`` waits for so many
    seconds, by default not at all.
    """

    def __init__(
        self,
        client: StoreClient,
        memory: ValueMemory,
        values: ValueFormat,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random_module.random,
        pause: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._client = client
        self._memory = memory
        self._values = values
        self._clock = clock
        self._random = random
        self._pause = pause
        self._begun = 0.0
        """When the request under way began."""

    def run(self, request: StoreRequest) -> Response:
        """Returns the response to ``request``. Does not raise: an exception of the client fails the keys."""
        self._begun = begun = self._clock()
        outcomes, problem = self._try(request.op, request.keys, request.slots)
        failed = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.FAILED]
        if failed and request.op in (Op.LOOKUP, Op.READ) and self._clock() - begun < RETRY_WITHIN_S:
            self._pause(self._random() * RETRY_PAUSE_S)
            keys, slots = [request.keys[i] for i in failed], [request.slots[i] for i in failed if request.slots]
            again, problem = self._try(request.op, keys, slots)
            for i, outcome in zip(failed, again, strict=True):
                outcomes[i] = outcome
        return Response(request.number, outcomes, begun, self._clock(), problem)

    @property
    def _is_late(self) -> bool:
        return self._clock() - self._begun > MORE_WITHIN_S

    def _try(self, op: Op, keys: Keys, slots: Sequence[int]) -> tuple[list[Outcome], str]:
        """Returns an outcome per key, and the cause if the client raised an exception, or took too long."""
        outcomes: list[Outcome] = []
        problem = ""
        step = max(1, len(keys) if op is Op.LOOKUP else self._memory.num_rows)
        try:
            for start in range(0, len(keys), step):
                if start and self._is_late:
                    raise StoreError(TOO_SLOW)
                outcomes += self._run(op, keys[start : start + step], slots[start : start + step])
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        return outcomes + [Outcome.FAILED] * (len(keys) - len(outcomes)), problem

    def _run(self, op: Op, keys: Keys, slots: Sequence[int]) -> list[Outcome]:
        names = [self._values.name(key) for key in keys]
        if op is Op.READ:
            return self._read(keys, names, slots)
        if op is Op.WRITE:
            return self._write(keys, names, slots)
        return self._client.exists(names) if op is Op.LOOKUP else self._client.remove(names)

    def _read(self, keys: Keys, names: Sequence[str], slots: Sequence[int]) -> list[Outcome]:
        outcomes = self._get(keys, names, slots)
        bad = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.CORRUPT]
        if bad:
            # Another server may have replaced the value meanwhile, or the transfer went wrong.
            again = [Outcome.FAILED] * len(bad)
            if not self._is_late:
                again = self._get([keys[i] for i in bad], [names[i] for i in bad], [slots[i] for i in bad])
            for i, outcome in zip(bad, again, strict=True):
                outcomes[i] = outcome
            corrupt = [i for i in bad if outcomes[i] is Outcome.CORRUPT]
            removed = frozenset(self._client.distrust([names[i] for i in corrupt]))
            for i in corrupt:
                outcomes[i] = Outcome.CORRUPT if names[i] in removed else Outcome.MISSING
        return outcomes

    def _get(self, keys: Keys, names: Sequence[str], slots: Sequence[int]) -> list[Outcome]:
        values = [self._memory.value(row, slot) for row, slot in enumerate(slots)]
        for value in values:
            value.record[:] = 0
        outcomes = self._client.get(names, [value.buffers for value in values])
        return [
            self._values.check(key, value, outcome is Outcome.OK)
            if outcome in (Outcome.OK, Outcome.OTHER_SIZE)
            else outcome
            for key, outcome, value in zip(keys, outcomes, values, strict=True)
        ]

    def _write(self, keys: Keys, names: Sequence[str], slots: Sequence[int]) -> list[Outcome]:
        found = self._client.exists(names)
        outcomes: list[Outcome] = [Outcome.HELD if outcome is Outcome.OK else outcome for outcome in found]
        new = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.MISSING]
        if new:
            values = [self._memory.value(row, slots[i]) for row, i in enumerate(new)]
            buffers = [self._values.seal(keys[i], value) for i, value in zip(new, values, strict=True)]
            if self._is_late:
                raise StoreError(TOO_SLOW)
            stored = self._client.put([names[i] for i in new], buffers)
            for i, outcome in zip(new, stored, strict=True):
                outcomes[i] = outcome
        return outcomes
