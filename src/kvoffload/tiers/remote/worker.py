"""StoreWorker: answers requests with a store's client. It runs in the client's process."""

from __future__ import annotations

import random as random_module
import time
from collections.abc import Callable, Sequence

from kvoffload.abc import OffloadKey
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.memory import ValueMemory
from kvoffload.tiers.remote.messages import Op, Response, Status, StoreRequest
from kvoffload.tiers.remote.record import ValueFormat, Verdict

RETRY_WITHIN_S = 1.0
"""Lookups and reads that fail sooner are repeated once: a lost connection is replaced by then."""
MORE_WITHIN_S = 4.0
"""Further calls of the client for one request begin only within this time. With the longest call it stays below the
deadline of transfers, see ``link``."""
RETRY_PAUSE_S = 0.2
"""The longest pause before the repetition; pauses are random, so that servers do not come back all at once."""

_STATUS = {
    Outcome.OK: Status.OK,
    Outcome.MISSING: Status.MISSING,
    Outcome.HELD: Status.HELD,
    Outcome.FULL: Status.FULL,
    Outcome.AWAY: Status.AWAY,
    Outcome.FAILED: Status.FAILED,
}
_VERDICTS = {Verdict.GOOD: Status.OK, Verdict.FOREIGN: Status.MISSING, Verdict.BAD: Status.CORRUPT}


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

    def run(self, request: StoreRequest) -> Response:
        """Returns the response to ``request``. Does not raise: an exception of the client fails the keys."""
        begun = self._clock()
        statuses, problem = self._try(request.op, request.keys, request.slots, begun)
        failed = [i for i, status in enumerate(statuses) if status is Status.FAILED]
        if failed and request.op in (Op.LOOKUP, Op.READ) and self._clock() - begun < RETRY_WITHIN_S:
            self._pause(self._random() * RETRY_PAUSE_S)
            keys, slots = [request.keys[i] for i in failed], [request.slots[i] for i in failed if request.slots]
            again, problem = self._try(request.op, keys, slots, begun)
            for i, status in zip(failed, again, strict=True):
                statuses[i] = status
        return Response(request.number, statuses, begun, self._clock(), problem)

    def _try(self, op: Op, keys: Sequence[OffloadKey], slots: Sequence[int], begun: float) -> tuple[list[Status], str]:
        """Returns a status per key, and the cause if the client raised an exception, or took too long since
        ``begun``."""
        statuses: list[Status] = []
        step = max(1, len(keys) if op is Op.LOOKUP else self._memory.num_rows)
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            if start and self._clock() - begun > MORE_WITHIN_S:
                return statuses + [Status.FAILED] * (len(keys) - len(statuses)), "the store is too slow"
            try:
                statuses += self._run(op, keys[part], slots[part], begun)
            except Exception as error:
                return statuses + [Status.FAILED] * (len(keys) - len(statuses)), f"{type(error).__name__}: {error}"
        return statuses, ""

    def _run(self, op: Op, keys: Sequence[OffloadKey], slots: Sequence[int], begun: float) -> list[Status]:
        names = [self._values.name(key) for key in keys]
        if op is Op.READ:
            return self._read(keys, names, slots, begun)
        if op is Op.WRITE:
            return self._write(keys, names, slots, begun)
        outcomes = self._client.exists(names) if op is Op.LOOKUP else self._client.remove(names)
        return [_STATUS[outcome] for outcome in outcomes]

    def _read(
        self, keys: Sequence[OffloadKey], names: Sequence[str], slots: Sequence[int], begun: float
    ) -> list[Status]:
        statuses = self._get(keys, names, slots)
        bad = [i for i, status in enumerate(statuses) if status is Status.CORRUPT]
        if bad:
            # Another server may have replaced the value meanwhile, or the transfer went wrong.
            again = [Status.FAILED] * len(bad)
            if self._clock() - begun <= MORE_WITHIN_S:
                again = self._get([keys[i] for i in bad], [names[i] for i in bad], [slots[i] for i in bad])
            for i, status in zip(bad, again, strict=True):
                statuses[i] = status
            corrupt = [i for i in bad if statuses[i] is Status.CORRUPT]
            removed = frozenset(self._client.distrust([names[i] for i in corrupt]))
            for i in corrupt:
                statuses[i] = Status.CORRUPT if names[i] in removed else Status.MISSING
        return statuses

    def _get(self, keys: Sequence[OffloadKey], names: Sequence[str], slots: Sequence[int]) -> list[Status]:
        """Reads blocks and verifies them."""
        values = [self._memory.value(row, slot) for row, slot in enumerate(slots)]
        for value in values:
            value.record[:] = 0
        statuses = []
        outcomes = self._client.get(names, [value.buffers for value in values])
        for key, outcome, value in zip(keys, outcomes, values, strict=True):
            if outcome in (Outcome.OK, Outcome.OTHER_SIZE):
                statuses.append(_VERDICTS[self._values.check(key, value, outcome is Outcome.OK)])
            else:
                statuses.append(_STATUS[outcome])
        return statuses

    def _write(
        self, keys: Sequence[OffloadKey], names: Sequence[str], slots: Sequence[int], begun: float
    ) -> list[Status]:
        statuses = [Status.HELD if found is Outcome.OK else _STATUS[found] for found in self._client.exists(names)]
        new = [i for i, status in enumerate(statuses) if status is Status.MISSING]
        if new:
            values = [self._memory.value(row, slots[i]) for row, i in enumerate(new)]
            buffers = [self._values.seal(keys[i], value) for i, value in zip(new, values, strict=True)]
            if self._clock() - begun > MORE_WITHIN_S:
                raise StoreError("the store is too slow")
            outcomes = self._client.put([names[i] for i in new], buffers)
            for i, outcome in zip(new, outcomes, strict=True):
                statuses[i] = _STATUS[outcome]
        return statuses
