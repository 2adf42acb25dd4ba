"""Reads sessions of kv-cache-tester (https://github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md), and
the AgentX traces in the same format (https://huggingface.co/semianalysisai, data sets cc-traces-weka-...).

A session is a JSON object: ``{"id", "block_size": 64, "hash_id_scope": "local" or "global", "tool_tokens",
"system_tokens", "requests": [...]}``. A source is a directory with one session per file, a file with one session, or a
file with one session per line. A request is ``{"t": seconds since the session's start, "in": tokens, "out": tokens,
"hash_ids": [...]}``. One with ``"type": "subagent"`` has its own ``"requests"`` instead, which are a session of their
own; their times count from its start (kv-cache-tester) or from the session's (AgentX).

The format does not define whether an id names a block or a whole prefix, so this reader chains ids: a block is named by
all ids up to its end. Incomplete blocks are left out. Sessions of local scope have their own ids. The tools and the
system prompt at the head of a session are assumed to equal those of other sessions with the same lengths; everything
else belongs to one session. AgentX traces since June 2026 have no such lengths, so their sessions share nothing.
Sessions do not say when they began, so each starts at a time derived from its name, uniformly distributed over the
length of the longest session.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import xxhash

from kvoffload.lab.readers.lines import (
    MAX_TOKENS,
    Source,
    block_ids,
    parse_object,
    positive_or,
    seconds,
    units_in,
    whole,
)
from kvoffload.lab.trace import Trace, TraceBuilder, TraceError

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
MAX_FILES = 1 << 20
MAX_NESTING = 8
_JITTER_S = 1e-6
_LONGEST_NAME = 1024


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """Reads the sessions. ``block_tokens`` must be a multiple of their own block size, the default. Raises
    TraceError."""
    rows = TraceBuilder()
    shares: list[float] = []
    """When each session starts, as a share of the length of the longest one."""
    counts: list[int] = []
    longest_s = 0.0
    size: int | None = None
    for file, number, data in _sessions(source):
        try:
            unit, scope = whole(data, "block_size", 1), data.get("hash_id_scope", "local")
            if scope not in ("local", "global"):
                raise ValueError(f"hash_id_scope={str(scope)[:40]!r}: not local or global")
            if not isinstance(data.get("requests"), list):
                raise ValueError("requests is not a list")
        except ValueError as error:
            file.problem(number, error)
            continue
        size = size or positive_or(block_tokens, unit)
        per_block = units_in(size, unit, file.path)
        before = rows.num_requests
        session = _Session(file, number, data, unit, per_block, rows)
        session.read(data["requests"], session.name)
        shares.append(xxhash.xxh3_64_intdigest(session.name_bytes, seed=1) / 2**64)
        counts.append(rows.num_requests - before)
        longest_s = max(longest_s, session.latest)
    if size is None:
        source.empty()
    delays = np.repeat(np.array(shares) * longest_s, counts) if len(shares) > 1 else 0.0
    return source.trace(rows, size, delays, {"sessions": len(shares)})


class _Session:
    def __init__(
        self, file: Source, number: int, data: Mapping[str, Any], unit: int, per_block: int, rows: TraceBuilder
    ) -> None:
        self._file = file
        self._number = number
        self._unit = unit
        self._per_block = per_block
        self._rows = rows
        self.latest = 0.0
        """The latest time of its requests, after its start."""
        self.name = str(data.get("id", f"{file.path.name}:{number}"))[:_LONGEST_NAME]
        self.name_bytes = self.name.encode("utf-8", "replace")
        is_local = data.get("hash_id_scope") != "global"
        self._own = xxhash.xxh3_64_digest(self.name_bytes) if is_local else b""
        self._tools, self._system = (
            most if is_local and type(most := data.get(key)) is int and 0 < most <= MAX_TOKENS else 0
            for key in ("tool_tokens", "system_tokens")
        )
        self._shared: dict[int, bytes] = {}
        """The name of each block of tools or system prompt, by its id: the same in all sessions that share it."""

    def read(self, entries: list[Any], name: str, base: float = 0.0, where: str = "", depth: int = 0) -> None:
        """Reads the requests of the session ``name``. ``base`` is added to their times; ``where`` names the list in
        errors."""
        ids: list[int] = []
        names: list[int] = []
        for index, entry in enumerate(entries):
            place = f"{where}request {index}"
            try:
                if not isinstance(entry, dict):
                    raise ValueError("not a JSON object")
                at = seconds(entry, "t")
                if entry.get("type") == "subagent":
                    self._subagent(entry, at, f"{name}/{entry.get('agent_id', index)}", base, place, depth)
                    continue
                tokens, output, new = whole(entry, "in", 1), whole(entry, "out"), block_ids(entry)
            except ValueError as error:
                self._file.problem(self._number, f"{place}: {error}")
                continue
            if not self._shared:
                self._shared = self._tools_and_system(new)
            names = self._chain(new, ids, names)
            ids = new
            # The producer of AgentX traces counts fewer tokens than blocks for some short prompts.
            whole_blocks = min(len(new), tokens // self._unit) // self._per_block
            self._rows.add(
                base + at,
                tokens,
                output,
                names[self._per_block - 1 :: self._per_block][:whole_blocks],
                None,
                name,
            )
            self.latest = max(self.latest, base + at)

    def _subagent(self, entry: Mapping[str, Any], at: float, name: str, base: float, place: str, depth: int) -> None:
        inner = entry.get("requests")
        if not isinstance(inner, list):
            raise ValueError("requests is not a list")
        if depth == MAX_NESTING:
            raise ValueError(f"subagents are nested more than {MAX_NESTING} deep")
        times = [each["t"] for each in inner if isinstance(each, dict) and type(each.get("t")) in (int, float)]
        # No request is earlier than the start of its subagent.
        relative = bool(times) and min(times) < at - _JITTER_S
        self.read(inner, name[:_LONGEST_NAME], base + at if relative else base, f"{place}, ", depth + 1)

    def _tools_and_system(self, first: list[int]) -> dict[int, bytes]:
        names = {}
        for position, each in enumerate(first[: (self._tools + self._system) // self._unit]):
            in_tools = (position + 1) * self._unit <= self._tools
            names[each] = struct.pack("<QQQQ", position, self._tools, 0 if in_tools else self._system, self._unit)
        return names

    def _chain(self, new: list[int], ids: list[int], names: list[int]) -> list[int]:
        """Returns the name of each prefix of ``new``. ``names`` are those of the prefixes of ``ids``."""
        found = names[: _common(new, ids)]
        last = found[-1] if found else 0
        shared, own, digest = self._shared, self._own, xxhash.xxh3_64_intdigest
        for each in new[len(found) :]:
            name = shared.get(each) or own + each.to_bytes(8, "little")
            last = digest(last.to_bytes(8, "little") + name)
            found.append(last)
        return found


def _common(a: list[int], b: list[int]) -> int:
    """Returns the length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sessions(source: Source) -> Iterator[tuple[Source, int, dict[str, Any]]]:
    for file in _files(source):
        try:
            yield from _sessions_in(file)
        except TraceError as error:
            if file is source:
                raise
            file.problem(1, error)


def _files(source: Source) -> Iterator[Source]:
    if not source.path.is_dir():
        yield source
        return
    paths = sorted(path for path in source.path.iterdir() if path.name.endswith(SUFFIXES))[:MAX_FILES]
    if not paths:
        raise TraceError(f"{source.path}: the directory has no sessions (files named *.json or *.json.gz)")
    for number, path in enumerate(paths, 1):
        yield Source(path, source.problems)
        source.progress(number / len(paths))


def _sessions_in(file: Source) -> Iterator[tuple[Source, int, dict[str, Any]]]:
    """Yields one session per line, or one that spans all lines."""
    file.check_kind()
    lines = file.lines()
    first = list(islice(lines, 1))
    if first and _parsed(first[0][1]) is None:
        first += lines
        together = b"".join(line for _, line in first)
        if _parsed(together) is not None:
            first = [(first[0][0], together)]
    for number, text in chain(first, lines):
        try:
            yield file, number, parse_object(text)
        except ValueError as error:
            file.problem(number, error)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        return parse_object(text)
    except ValueError:
        return None
