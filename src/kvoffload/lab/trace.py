"""A request trace as arrays: arrival times, lengths, and the chain of blocks of each request.

The arrays of a long trace are in files of a temporary folder, which are mapped: then memory does not bound the trace.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.abc import ConfigError, Hints, OffloadKey
from kvoffload.cache.keys import make_offload_key
from kvoffload.lab.columns import PIECE, Folder, map_file, pieces, renumber, renumber_in_files
from kvoffload.native import load

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.void]
Progress = Callable[[float], None]
"""Gets the share of some work that is done."""

MEMORY_BYTES = 256 << 20
"""Columns that are larger than this together go to files. To number the blocks takes about seven times as much."""
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
    """Tokens per block; 1 if the trace has no tokens."""
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
    folder: Folder | None = None
    """Where the arrays are, if they are in files."""

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
        return self._made("keys", KEY, self._fill_keys)

    def _fill_keys(self, keys: Keys) -> None:
        xxh = xxhash.xxh3_128_digest
        for start in range(0, len(keys), PIECE):
            ids = self.ids[start : start + PIECE].tolist()
            made = b"".join([make_offload_key(xxh(block_id.to_bytes(8, "little")), 0) for block_id in ids])
            keys[start : start + len(ids)] = np.frombuffer(made, dtype=KEY)

    @cached_property
    def digests(self) -> npt.NDArray[np.uint64]:
        """The first 64 bits of each key, ascending."""
        return self._made("digests", np.dtype(np.uint64), self._fill_digests)

    def _fill_digests(self, digests: npt.NDArray[np.uint64]) -> None:
        for start in range(0, len(digests), PIECE):
            digests[start : start + PIECE] = self.keys[start : start + PIECE].view(DIGEST)["digest"]
        digests.sort()

    def _made(self, name: str, dtype: np.dtype[Any], fill: Callable[[Any], None]) -> npt.NDArray[Any]:
        """Returns an array with an entry for each distinct block, made by ``fill`` unless its file exists."""
        folder = self.folder
        if folder is not None and folder.has(name):
            return folder.get(name, dtype)
        # A file gets its name when it is complete.
        array = _new(folder, f"unfinished-{name}", dtype, self.num_distinct)
        fill(array)
        if folder is not None:
            folder.rename(f"unfinished-{name}", name)
        return array

    def save(self, folder: Folder) -> None:
        """Writes what is not in ``folder`` yet, for ``load_trace``. Raises TraceError if there is no room for it."""
        try:
            for name in _ARRAYS:
                if not folder.has(name):
                    folder.save(name, getattr(self, name))
        except OSError as error:
            raise _no_room(error) from error

    def keys_of(self, blocks: Ints) -> list[OffloadKey]:
        """Returns the key of each of ``blocks``. They are made anew by each call, so no more are in memory than are in
        use."""
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
        blocks, ids, folder = self.blocks[offsets[0] : offsets[-1]], self.ids, None
        if self.folder is None:
            blocks, ids = renumber(ids[blocks])
        else:
            folder = Folder()
            named = folder.new("named", np.uint64, len(blocks))
            for at in range(0, len(blocks), PIECE):
                named[at : at + PIECE] = ids[blocks[at : at + PIECE]]
            blocks, ids = renumber_in_files(named, folder)
            folder.remove("named")
        return replace(
            self,
            times=self.times[low:high],
            input_tokens=self.input_tokens[low:high],
            output_tokens=self.output_tokens[low:high],
            offsets=offsets - offsets[0],
            blocks=blocks,
            prompt_blocks=self.prompt_blocks[low:high],
            sessions=self.sessions[low:high],
            tenants=self.tenants[low:high],
            returns_in=self.returns_in[low:high],
            retains=self.retains[low:high],
            ids=ids,
            folder=folder,
        )


def _num_known(numbers: Ints) -> int:
    return len(np.unique(numbers[numbers != UNKNOWN]))


def plain_ranks(digests: npt.NDArray[np.uint64], keys: Sequence[OffloadKey]) -> Ints:
    """Returns for each key how many of ``digests``, which ascend, are less than the digest that it begins with."""
    joined = b"".join([key[:_DIGEST_BYTES] for key in keys])
    return digests.searchsorted(np.frombuffer(joined, dtype=np.uint64))


ranks = plain_ranks
if not TYPE_CHECKING and (native := load("_cache")) is not None:
    ranks = native.ranks


_ARRAYS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(
        ("input_tokens", "output_tokens", "offsets", "blocks", "prompt_blocks", "sessions", "tenants"),
        np.dtype(np.int64),
    ),
    **dict.fromkeys(("ids", "digests"), np.dtype(np.uint64)),
    **dict.fromkeys(("times", "returns_in", "retains"), np.dtype(np.float64)),
    "keys": KEY,
}
"""What ``Trace.save`` writes."""


def load_trace(path: Path, name: str, block_tokens: int, tenant_names: Sequence[str] = ()) -> Trace:
    """Returns a trace whose arrays ``Trace.save`` has written to the folder ``path``. They take no memory of their own,
    in however many processes the trace is loaded."""
    folder = Folder(path)
    made = ("keys", "digests")
    arrays: dict[str, Any] = {each: folder.get(each, dtype) for each, dtype in _ARRAYS.items() if each not in made}
    return Trace(name, block_tokens, **arrays, tenant_names=tuple(tenant_names), folder=folder)


class _Ids(Iterable[int], Sized, Protocol):
    """The ids of a chain."""


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
_ENTRY_BYTES = 8


class TraceBuilder:
    """Makes a trace of requests that are added one after the other.

    As soon as its columns take more than ``memory_bytes``, they go to files, and so do the arrays of the trace.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self.num_requests = 0
        self._memory_bytes = memory_bytes
        self._pending: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        """The columns, or what is not in their files yet."""
        self._folder: Folder | None = None
        self._sessions: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        """The number of each name."""

    def add(
        self,
        time: float,
        input_tokens: int,
        output_tokens: int,
        chain: _Ids,
        prompt_blocks: int | None,
        session: str | None = None,
        tenant: str | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Adds a request. ``prompt_blocks``: None for the length of the chain. ``session`` and ``tenant`` are names,
        ``hints`` what its client knew, without the session; None if the trace does not say. Raises
        TraceError if the disk is full."""
        columns, length = self._pending, len(chain)
        columns["times"].append(time)
        columns["input_tokens"].append(input_tokens)
        columns["output_tokens"].append(output_tokens)
        columns["lengths"].append(length)
        columns["prompt_blocks"].append(length if prompt_blocks is None else prompt_blocks)
        columns["sessions"].append(_number(self._sessions, session))
        columns["tenants"].append(_number(self._tenants, tenant))
        returns_in, retain_s = (None, None) if hints is None else (hints.returns_in_s, hints.retain_s)
        columns["returns_in"].append(math.nan if returns_in is None else returns_in)
        columns["retains"].append(math.nan if retain_s is None else retain_s)
        columns["chains"].extend(chain)
        self.num_requests += 1
        pending = len(columns["chains"]) + len(columns["times"]) * (len(columns) - 1)
        if pending * _ENTRY_BYTES > (self._memory_bytes if self._folder is None else PIECE * _ENTRY_BYTES):
            try:
                self._write()
            except OSError as error:
                raise _no_room(error) from error

    def _write(self) -> None:
        self._folder = self._folder or Folder()
        for name, column in self._pending.items():
            with (self._folder.path / name).open("ab") as file:
                column.tofile(file)
            del column[:]

    def build(self, name: str, block_tokens: int, delays: Floats | float = 0.0, **more: Any) -> Trace:
        """Returns the trace, and forgets the requests. ``delays`` are added to their times. Its ``info`` gets
        ``out_of_order``: how many requests have an earlier time than the one before. Raises TraceError if the disk is
        full."""
        try:
            return self._build(name, block_tokens, delays, **more)
        except OSError as error:
            raise _no_room(error) from error

    def _build(self, name: str, block_tokens: int, delays: Floats | float, **more: Any) -> Trace:
        folder = self._folder
        if folder is None:
            raw = {key: np.array(column, dtype=column.typecode) for key, column in self._pending.items()}
            self._pending.clear()
        else:
            self._write()
            raw = {key: map_file(folder.path / key, code, writable=True) for key, code in _COLUMNS.items()}
        raw["times"] += delays
        out_of_order = int(np.count_nonzero(raw["times"][1:] < raw["times"][:-1]))
        offsets = _offsets(raw["lengths"], folder, "unsorted-offsets" if out_of_order else "offsets")
        if out_of_order:
            order = np.argsort(raw["times"], kind="stable")
            before, raw["lengths"] = offsets, raw["lengths"][order]
            offsets = _offsets(raw["lengths"], folder, "offsets")
            ids = _new(folder, "sorted-chains", np.uint64, len(raw["chains"]))
            for first, end in pieces(offsets):
                moves = np.repeat(before[order[first:end]] - offsets[first:end], raw["lengths"][first:end])
                to = np.arange(offsets[first], offsets[end])
                ids[offsets[first] : offsets[end]] = raw["chains"][to + moves]
            raw["chains"] = ids
            for key in _COLUMNS.keys() - {"lengths", "chains"}:
                raw[key][:] = raw[key][order]
        blocks, ids = renumber(raw["chains"]) if folder is None else renumber_in_files(raw["chains"], folder)
        if folder is not None:
            folder.remove("lengths", "chains", "unsorted-offsets", "sorted-chains")
        return Trace(
            name,
            block_tokens,
            raw["times"],
            raw["input_tokens"],
            raw["output_tokens"],
            offsets,
            blocks,
            raw["prompt_blocks"],
            ids,
            raw["sessions"],
            raw["tenants"],
            raw["returns_in"],
            raw["retains"],
            tuple(self._tenants),
            folder=folder,
            **{**more, "info": {**more.get("info", {}), "out_of_order": out_of_order}},
        )


def _number(numbers: dict[str, int], name: str | None) -> int:
    """Returns the number of ``name``, a new one if it has none yet."""
    return UNKNOWN if name is None else numbers.setdefault(name, len(numbers))


def _new(folder: Folder | None, name: str, dtype: npt.DTypeLike, length: int) -> npt.NDArray[Any]:
    return np.zeros(length, dtype=dtype) if folder is None else folder.new(name, dtype, length)


def _offsets(lengths: Ints, folder: Folder | None, name: str) -> Ints:
    offsets: Ints = _new(folder, name, np.int64, len(lengths) + 1)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _no_room(error: OSError) -> TraceError:
    where = error.filename or "the temporary directory"
    return TraceError(
        f"{where}: {error.strerror}: the trace does not fit into memory, so it needs room there, about 40 bytes per "
        "block access; set TMPDIR to a directory on a disk with more room"
    )
