"""A request trace as arrays: arrival times, lengths, and the chain of blocks of each request."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.abc import ConfigError, Hints, OffloadKey
from kvoffload.cache.keys import make_offload_key
from kvoffload.native import load

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.void]
Progress = Callable[[float], None]
"""Gets the share of some work that is done."""

PREFILL_SPEED = "prefill_tokens_per_s"
"""The entry of ``info`` with the speed at which the recorded server computed prompts, if it measured that."""
UNKNOWN = -1
"""The session or tenant of a request whose trace does not say."""
_FIRST_SESSION = 2
"""See ``Hints.session``."""
KEY = np.dtype("V20")
_DIGEST_BYTES = 8
DIGEST = np.dtype([("digest", "<u8"), ("rest", "V12")])
"""A key, split where its bytes distinguish it well enough: they are a hash."""


class TraceError(ConfigError):
    """A trace cannot be used. The message names the file, and the line if a line is the cause."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that was skipped, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Trace:
    """``num_requests`` requests, ordered by time, and the chain of blocks of each.

    Blocks are numbered from 0 in the order in which they first occur. Equal numbers mean an equal prefix up to and
    including that block. ``ids[b]`` is the id of block b in the file: the same in all traces of one source.
    """

    name: str
    block_tokens: int
    """Tokens per block."""
    times: Floats
    """Arrival times in seconds, ascending."""
    input_tokens: Ints
    """Lengths of the prompts. The last block of a prompt may be incomplete."""
    output_tokens: Ints
    offsets: Ints
    """Shape (num_requests + 1,): request r has ``blocks[offsets[r]:offsets[r + 1]]``."""
    blocks: Ints
    """The chains of all requests, each head first: the prompt's blocks, then the output's if the trace has them."""
    prompt_blocks: Ints
    """How many of each request's blocks belong to its prompt, including an incomplete last one."""
    ids: npt.NDArray[np.uint64]
    sessions: Ints
    """The session of each request: equal numbers, at least 0, for the turns of one conversation or agent; UNKNOWN if
    the trace does not say."""
    tenants: Ints
    """The tenant of each request, an index into ``tenant_names``; UNKNOWN if the trace does not say."""
    returns_in: Floats
    """What the client of each request knew at its end of its session's next one: the seconds until then, infinite if
    there is none; NaN if the trace does not say."""
    retains: Floats
    """For how many seconds each request has had its blocks retained, 0 to end that; NaN if the trace does not say."""
    tenant_names: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    """The first of the lines that were skipped."""
    num_problems: int = 0
    """How many lines were skipped."""
    info: dict[str, object] = field(default_factory=dict)
    """Further properties from the file, such as the cache sizes of a recorded server."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The tokens per second at which the recorded server computed prompts, None if the trace does not say."""
        speed = self.info.get(PREFILL_SPEED)
        return speed if isinstance(speed, float) else None

    @property
    def num_requests(self) -> int:
        return len(self.times)

    @property
    def num_accesses(self) -> int:
        return len(self.blocks)

    @property
    def num_distinct(self) -> int:
        return len(self.ids)

    @property
    def num_sessions(self) -> int:
        """How many sessions its requests belong to; 0 if none says."""
        return _num_known(self.sessions)

    @property
    def num_tenants(self) -> int:
        """How many tenants its requests belong to; 0 if none says."""
        return _num_known(self.tenants)

    @property
    def has_hints(self) -> bool:
        return not (np.isnan(self.returns_in).all() and np.isnan(self.retains).all())

    def hints(self, request: int) -> Hints | None:
        """Returns what the client of a request knew; None if the trace does not say."""
        session, returns_in, retain_s = (
            column[request].item() for column in (self.sessions, self.returns_in, self.retains)
        )
        if session == UNKNOWN and math.isnan(returns_in) and math.isnan(retain_s):
            return None
        return Hints(
            None if session == UNKNOWN else _FIRST_SESSION + session,
            returns_in == math.inf,
            returns_in if returns_in < math.inf else None,
            retain_s=None if math.isnan(retain_s) else retain_s,
        )

    @cached_property
    def keys(self) -> Keys:
        """One OffloadKey per distinct block, made from its id: the same in every run."""
        digest = xxhash.xxh3_128_digest
        made = [make_offload_key(digest(block_id.to_bytes(8, "little")), 0) for block_id in self.ids.tolist()]
        return np.frombuffer(b"".join(made), dtype=KEY)

    @cached_property
    def digests(self) -> npt.NDArray[np.uint64]:
        """The first 64 bits of each key, ascending."""
        return np.sort(self.keys.view(DIGEST)["digest"])

    def keys_of(self, blocks: Ints) -> list[OffloadKey]:
        """Returns the key of each of ``blocks``, made anew by each call."""
        keys: list[OffloadKey] = self.keys[blocks].tolist()
        return keys

    def ranks_of(self, keys: Sequence[OffloadKey]) -> Ints:
        """Returns the rank of each of the trace's ``keys``, below ``num_distinct``. Two keys share one only if
        the first 64 bits of both agree."""
        return ranks(self.digests, keys)

    def chain(self, request: int) -> Ints:
        chain: Ints = self.blocks[self.offsets[request] : self.offsets[request + 1]]
        return chain

    def between(self, start: float, end: float) -> Trace:
        """Returns a trace of the requests between two fractions of the time from the first request to the last."""
        first, last = (self.times[0], self.times[-1]) if self.num_requests else (0.0, 0.0)
        low = int(np.searchsorted(self.times, first + start * (last - first))) if start > 0 else 0
        high = int(np.searchsorted(self.times, first + end * (last - first))) if end < 1 else self.num_requests
        offsets = self.offsets[low : high + 1]
        blocks, ids = renumber(self.ids[self.blocks[offsets[0] : offsets[-1]]])
        parts = {name: getattr(self, name)[low:high] for name in _BY_REQUEST}
        return replace(self, **parts, offsets=offsets - offsets[0], blocks=blocks, ids=ids)


def _num_known(numbers: Ints) -> int:
    return len(np.unique(numbers[numbers != UNKNOWN]))


def plain_ranks(digests: npt.NDArray[np.uint64], keys: Sequence[OffloadKey]) -> Ints:
    """Returns for each key how many of ``digests``, which ascend, are less than the digest that it begins with."""
    joined = b"".join([key[:_DIGEST_BYTES] for key in keys])
    return digests.searchsorted(np.frombuffer(joined, dtype=np.uint64))


ranks = plain_ranks
if not TYPE_CHECKING and (native := load("_cache")) is not None:
    ranks = native.ranks


_COLUMNS = {
    "times": "d",
    "input_tokens": "q",
    "output_tokens": "q",
    "prompt_blocks": "q",
    "sessions": "q",
    "tenants": "q",
    "returns_in": "d",
    "retains": "d",
    "lengths": "q",
    "chains": "Q",
}
_BY_REQUEST = _COLUMNS.keys() - {"lengths", "chains"}


class TraceBuilder:
    """Makes a trace of requests that are added one after the other."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        self._sessions: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        """The number of each name."""

    def add(
        self,
        time: float,
        input_tokens: int,
        output_tokens: int,
        chain: Collection[int],
        prompt_blocks: int | None,
        session: str | None = None,
        tenant: str | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Adds a request. ``prompt_blocks``: None for the length of the chain. ``session`` and ``tenant`` are names,
        ``hints`` what its client knew, without the session; None if the trace does not say."""
        columns, length = self._columns, len(chain)
        columns["times"].append(time)
        columns["input_tokens"].append(input_tokens)
        columns["output_tokens"].append(output_tokens)
        columns["lengths"].append(length)
        columns["prompt_blocks"].append(length if prompt_blocks is None else prompt_blocks)
        columns["sessions"].append(_number(self._sessions, session))
        columns["tenants"].append(_number(self._tenants, tenant))
        known = Hints() if hints is None else hints
        returns_in = math.inf if known.drop else known.likely_return_s
        columns["returns_in"].append(math.nan if returns_in is None else returns_in)
        columns["retains"].append(math.nan if known.retain_s is None else known.retain_s)
        columns["chains"].extend(chain)
        self.num_requests += 1

    def build(self, name: str, block_tokens: int, start: float = 0.0, **more: Any) -> Trace:
        """Returns the trace, and forgets the requests. Their times count from ``start``. Its ``info`` gets
        ``out_of_order``: how many requests have an earlier time than the one before."""
        raw: dict[str, Any] = {key: np.array(column, dtype=column.typecode) for key, column in self._columns.items()}
        self._columns.clear()
        raw["times"] -= start
        out_of_order = int(np.count_nonzero(raw["times"][1:] < raw["times"][:-1]))
        chains, lengths = raw.pop("chains"), raw.pop("lengths")
        if out_of_order:
            order = np.argsort(raw["times"], kind="stable")
            starts = (np.cumsum(lengths) - lengths)[order]
            raw, lengths = {key: column[order] for key, column in raw.items()}, lengths[order]
            moves = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
            chains = chains[np.arange(len(chains)) + moves]
        blocks, ids = renumber(chains)
        return Trace(
            name,
            block_tokens,
            **raw,
            offsets=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths))),
            blocks=blocks,
            ids=ids,
            tenant_names=tuple(self._tenants),
            **{**more, "info": {**more.get("info", {}), "out_of_order": out_of_order}},
        )


def _number(numbers: dict[str, int], name: str | None) -> int:
    """Returns the number of ``name``, a new one if it has none yet."""
    return UNKNOWN if name is None else numbers.setdefault(name, len(numbers))


def renumber(ids: npt.NDArray[np.uint64]) -> tuple[Ints, npt.NDArray[np.uint64]]:
    """Returns block numbers in the order of first occurrence, and the id of each number."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], distinct[order]
