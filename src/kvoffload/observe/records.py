"""One record per request: what it asked for, what it found where, why it missed; and summaries of many records, by
reason and over time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np

from kvoffload.abc import MissReason, RetainRefusal
from kvoffload.printable import printable

RECORD_RING_SIZE = 4096
"""How many records a server keeps, the newest."""
MAX_PERIODS = 1000
_DAY_S = 86_400
_PERIODS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, _DAY_S)
_WANTED_PERIODS = 12

# Bounds of fields that are read from outside.
_MAX_TIME = 253_402_300_799.0
"""The last second of the year 9999."""
_MAX_TOKENS = 1 << 48
_MAX_TEXT = 1 << 12
_MAX_RULES = 32
_MAX_TIERS = 32
DISK = "disk"
"""Name of the disk tier, unless another tier has it."""


@dataclass(slots=True, unsafe_hash=True)
class RequestRecord:
    """What one request asked for and found. It is made once the request's lookup has ended. The fields from
    ``stored_tokens`` on are set when the request has ended, and do not count when records are compared.

    ``tokens_asked`` is the length of its prompt, ``device_tokens`` what the engine's own cache held, ``host_tokens``
    what was loaded from host memory, and ``disk_tokens`` what was read from lower tiers for it and then loaded;
    ``tier_tokens`` says how many of these each tier delivered, by its name. ``missed_in`` is the tier that held the
    missing block. ``missed_key`` is the first missing block in hex, or None if all were found; ``age_s`` is how long
    ago that block was evicted, refused or reset. ``policy`` is set for a miss under a self-tuning policy: the ``rule``
    that it followed then, and the ``scores`` of all its rules. ``tenant`` is the name of a configured tenant, or
    "other"; None if there are none. ``engine`` is the name of an engine that offloads to host memory itself and has
    kvoffload below that: then ``device_tokens`` is what was found on the device or there, ``host_tokens`` is 0, and
    only whole blocks count.
    """

    time: float
    req_id: str
    tokens_asked: int
    device_tokens: int
    host_tokens: int
    missed_key: str | None = None
    reason: MissReason | None = None
    age_s: float | None = None
    disk_tokens: int = 0
    policy: Mapping[str, Any] | None = field(default=None, hash=False)
    tier_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    missed_in: str | None = None
    tenant: str | None = None
    engine: str | None = None
    saved_s: float | None = field(default=None, compare=False)
    """How long the engine would have computed what was loaded, by its measured speed; None while that is unknown."""
    stored_tokens: int = field(default=0, compare=False)
    """Tokens of the blocks that it has stored in host memory itself."""
    retained_tokens: int = field(default=0, compare=False)
    """Tokens of the blocks that are retained for it, in the tier ``retained_in``."""
    retained_in: str | None = field(default=None, compare=False)
    retain_refused: RetainRefusal | None = field(default=None, compare=False)
    """Why none are, although it has asked for that."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RequestRecord:
        """Returns the record that ``to_dict`` made. The source need not be trusted; unknown fields are ignored.

        Raises ValueError, which names the field, if one is missing or impossible.
        """
        needed = {each.name for each in fields(cls) if each.default is each.default_factory is MISSING}
        read: dict[str, Any] = {}
        for name, (is_right, kind, wanted) in _READ.items():
            value = data.get(name)
            if name in needed or value is not None:
                if not is_right(value):
                    raise _wrong(data, name, wanted)
                read[name] = kind(value)
        record = cls(**read)
        if sum(record.tier_tokens.values()) != record.disk_tokens:
            raise _wrong({"tier_tokens": {}, **data}, "tier_tokens", "what adds up to disk_tokens")
        if record.tokens_missing < 0:
            raise ValueError(f"tokens_asked={record.tokens_asked}: fewer than the tokens found")
        return record

    @property
    def tokens_missing(self) -> int:
        """Tokens that no tier had."""
        return self.tokens_asked - self.device_tokens - self.host_tokens - self.disk_tokens

    @property
    def device_sufficed(self) -> bool:
        """Whether no block was missing and none had to be loaded, because the engine's own cache held them."""
        return self.reason is None and self.device_tokens > 0 and not self.host_tokens and not self.disk_tokens


def in_tier(tier: str) -> str:
    """Returns where a block is that ``tier`` holds, in words. Another process may have made up the name."""
    return "on disk" if tier == DISK else f"in {printable(tier)}"


@dataclass(frozen=True, slots=True)
class ReasonSummary:
    """The requests that missed for one reason; ``reason`` None: the requests that missed no block.

    ``tokens_missing`` counts their tokens that no tier had. ``median_age_s`` is the median time between the loss of
    the block and the request, in seconds, or None if no record has it. ``tiers``: how many of the missing blocks each
    lower tier held.
    """

    reason: MissReason | None
    requests: int
    tokens_missing: int
    median_age_s: float | None
    tiers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Period:
    """What the requests of one period of time asked for and found, in tokens.

    ``start`` is in seconds since 1970. ``misses`` counts requests by the reason of their first missing block.
    """

    start: float
    length_s: float
    requests: int
    tokens_asked: int
    device_tokens: int
    host_tokens: int
    misses: Mapping[MissReason, int]
    disk_tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[RequestRecord], start: float, length_s: float) -> Period:
        return cls(
            start,
            length_s,
            misses=dict(Counter(record.reason for record in records if record.reason is not None)),
            disk_tokens=sum(record.disk_tokens for record in records),
            **found_by(records),
        )


def found_by(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Returns how many ``requests`` there are, their ``tokens_asked``, and the tokens that they found where."""
    names = ("tokens_asked", "device_tokens", "host_tokens")
    tiers: Counter[str] = Counter()
    for record in records:
        tiers.update(record.tier_tokens)
    sums = {name: sum(getattr(record, name) for record in records) for name in names}
    return {"requests": len(records), **sums, "tier_tokens": dict(tiers)}


def by_reason(records: Iterable[RequestRecord]) -> list[ReasonSummary]:
    """Returns one entry per reason that occurs, the one with the most missing tokens first; requests without a miss
    come last."""
    groups: dict[MissReason | None, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(record.reason, []).append(record)
    found = []
    for reason, group in groups.items():
        ages = [record.age_s for record in group if record.age_s is not None]
        median = float(np.median(ages)) if ages else None
        tiers = Counter(record.missed_in for record in group if record.missed_in is not None)
        missing = sum(record.tokens_missing for record in group)
        found.append(ReasonSummary(reason, len(group), missing, median, dict(tiers)))
    return sorted(found, key=lambda each: (each.reason is None, -each.tokens_missing, -each.requests))


def over_time(records: Sequence[RequestRecord], every_s: int | None = None) -> list[Period]:
    """Returns every period of ``every_s`` seconds from the first record to the last, also those without requests.

    Periods begin at multiples of their length. Without ``every_s``, a length is chosen that gives about twelve.
    Raises ValueError if there would be more than MAX_PERIODS.
    """
    if not records:
        return []
    first, last = min(record.time for record in records), max(record.time for record in records)
    if every_s is None:
        wanted = (last - first) / _WANTED_PERIODS
        days = math.ceil(wanted / _DAY_S) * _DAY_S
        every_s = next((length for length in _PERIODS_S if length >= wanted), days)
    begin, end = int(first // every_s), int(last // every_s)
    if end - begin >= MAX_PERIODS:
        raise ValueError(f"{end - begin + 1:,} periods of {every_s} s: there may be at most {MAX_PERIODS:,}")
    groups: list[list[RequestRecord]] = [[] for _ in range(begin, end + 1)]
    for record in records:
        groups[int(record.time // every_s) - begin].append(record)
    return [Period.of(group, (begin + i) * every_s, every_s) for i, group in enumerate(groups)]


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MAX_TIME


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKENS


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_by_tier(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) <= _MAX_TIERS
        and all(_is_text(tier) and _is_count(tokens) for tier, tokens in value.items())
    )


def _is_policy(value: Any) -> bool:
    rule, scores = (value.get("rule"), value.get("scores")) if isinstance(value, Mapping) else (None, None)
    return (
        isinstance(rule, str)
        and isinstance(scores, Mapping)
        and rule in scores
        and len(scores) <= _MAX_RULES
        and all(map(_is_time, scores.values()))
    )


def _wrong(data: Mapping[str, Any], field: str, wanted: str) -> ValueError:
    if field not in data:
        return ValueError(f"{field} is missing")
    return ValueError(f"{field}={ascii(data[field])[:40]}: not {wanted}")


_Reader: TypeAlias = tuple[Callable[[Any], bool], Callable[[Any], Any], str]
_READ: Mapping[str, _Reader] = {
    **dict.fromkeys(("time", "age_s", "saved_s"), (_is_time, float, "a number of seconds")),
    **dict.fromkeys(
        ("req_id", "missed_key", "missed_in", "tenant", "engine", "retained_in"),
        (_is_text, str, f"a string of at most {_MAX_TEXT:,} characters"),
    ),
    **dict.fromkeys(
        ("tokens_asked", "device_tokens", "host_tokens", "disk_tokens", "stored_tokens", "retained_tokens"),
        (_is_count, int, "a number of tokens"),
    ),
    "reason": (tuple(MissReason).__contains__, MissReason, "a reason that this version of kvoffload knows"),
    "retain_refused": (tuple(RetainRefusal).__contains__, RetainRefusal, "a reason that this version knows"),
    "policy": (_is_policy, dict, f"a rule and the scores of at most {_MAX_RULES} rules"),
    "tier_tokens": (_is_by_tier, dict, f"tokens by name of at most {_MAX_TIERS} tiers"),
}
"""What is checked of each field of a record, its type, and what it must be, in words."""
