"""Why a request missed: a small record per request, and a bounded memory of why keys are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvoffload.base import Miss, MissReason, OffloadKey

MISS_MEMORY_ENTRIES = 1 << 16
RECORD_RING_SIZE = 4096

_REASONS = tuple(MissReason)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request asked for and found, made when its lookup is settled.

    ``tokens_asked`` is its length, ``device_tokens`` what the engine's own cache held, ``host_tokens``
    what is loaded. ``missed_key`` is the first block that was missing, in hex, or None if none was;
    ``age_s`` tells how long ago it was evicted, refused or reset.
    """

    time: float
    req_id: str
    tokens_asked: int
    device_tokens: int
    host_tokens: int
    missed_key: str | None = None
    reason: MissReason | None = None
    age_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        text = (
            f"request {self.req_id}: {self.tokens_asked} tokens asked, {self.device_tokens} on device, "
            f"{self.host_tokens} in host"
        )
        if self.missed_key is None:
            return text
        age = "" if self.age_s is None else f" {self.age_s:.1f} s ago"
        return f"{text}; first miss {self.missed_key[:16]}: {self.reason}{age}"


class MissMemory:
    """Remembers why and when keys left, in a table of fixed size.

    Direct-mapped by the key's hash: a newer key may take an older one's place, and then the older is
    reported as never stored. No object is kept per key.
    """

    def __init__(self, entries: int = MISS_MEMORY_ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        self._mask = entries - 1
        if entries < 1 or entries & self._mask:
            raise ValueError(f"entries={entries}: must be a power of two")
        self._hash = np.zeros(entries, dtype=np.int64)
        self._time = np.zeros(entries, dtype=np.float64)
        self._reason = np.zeros(entries, dtype=np.uint8)
        self._clock = clock

    def record(self, keys: Iterable[OffloadKey], reason: MissReason) -> None:
        hashes = np.fromiter(map(hash, keys), dtype=np.int64)
        at = hashes & self._mask
        self._hash[at] = hashes
        self._time[at] = self._clock()
        self._reason[at] = _REASONS.index(reason)

    def explain(self, key: OffloadKey) -> Miss:
        h = hash(key)
        at = h & self._mask
        if self._hash[at] == h:
            return Miss(_REASONS[self._reason[at]], self._clock() - float(self._time[at]))
        return Miss(MissReason.NEVER_STORED)


def count_reasons(records: Sequence[RequestRecord]) -> dict[str, int]:
    """How many records missed for each reason."""
    counts: dict[str, int] = {}
    for record in records:
        if record.reason is not None:
            counts[record.reason] = counts.get(record.reason, 0) + 1
    return counts
