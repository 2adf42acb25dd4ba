"""Shared parts of the readers: lines of a file that may be compressed or damaged, and checks of their fields."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import xxhash

from kvoffload.lab.trace import MEMORY_BYTES, Floats, Problem, Progress, Trace, TraceBuilder, TraceError

MAX_LINE_BYTES = 256 << 20
"""A session of kv-cache-tester is one line and can have tens of MB."""
MAX_PROBLEMS_KEPT = 100
MAX_TOKENS = 1 << 40
"""More than any request has, but small enough for sums in 64 bits."""
MAX_SECONDS = 1e12
MAX_ID = (1 << 64) - 1
PROGRESS_EVERY = 512
"""Lines between two reports of progress."""
_ELEMENTS_PER_REPORT = 16
_PIECE = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_SHOWN = 40

Parsed = TypeVar("Parsed")


class Problems:
    """The skipped lines: the first of them, and their number. With ``strict`` the first one raises TraceError."""

    def __init__(self, strict: bool = False) -> None:
        self.kept: list[Problem] = []
        self.count = 0
        self.strict = strict

    def add(self, problem: Problem) -> None:
        if self.strict:
            raise TraceError(f"{problem}. Without --strict (strict=True) such lines are skipped and counted")
        self.count += 1
        if len(self.kept) < MAX_PROBLEMS_KEPT:
            self.kept.append(problem)


class Source:
    """One file of a trace. ``on_progress`` gets the share of it that was read. A trace of more than ``memory_bytes``
    goes to files."""

    def __init__(
        self,
        path: Path,
        problems: Problems,
        on_progress: Progress | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.path = path
        self.problems = problems
        self.format = ""
        """The format that it is read as; empty until that is known."""
        self._on_progress = on_progress
        self._memory_bytes = memory_bytes

    def builder(self) -> TraceBuilder:
        """Returns what takes the requests."""
        return TraceBuilder(self._memory_bytes)

    def trace(
        self,
        rows: TraceBuilder,
        block_tokens: int,
        delays: Floats | float = 0.0,
        info: Mapping[str, object] | None = None,
    ) -> Trace:
        """Returns the trace of ``rows``, named after the file, with the problems found so far. Arguments as for
        ``TraceBuilder.build``. Raises TraceError if there is no request."""
        if rows.num_requests == 0:
            self.empty()
        problems = self.problems
        return rows.build(
            self.path.name,
            block_tokens,
            delays,
            problems=tuple(problems.kept),
            num_problems=problems.count,
            info={**(info or {}), "format": self.format},
        )

    def problem(self, line: int, reason: object) -> None:
        """Counts a skipped line. Raises TraceError if reading is strict."""
        self.problems.add(Problem(str(self.path), line, str(reason)))

    def progress(self, share: float) -> None:
        if self._on_progress is not None:
            self._on_progress(min(1.0, share))

    def head(self, size: int) -> bytes:
        """Returns the first ``size`` decompressed bytes, or fewer if no more can be read. Raises TraceError."""
        found = b""
        with _Opened(self.path) as (_, stream), contextlib.suppress(OSError, EOFError, zlib.error):
            while len(found) < size and (piece := stream.read1(size - len(found))):
                found += piece
        return found

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields line numbers, from 1, and lines that are not blank. Raises TraceError if the file cannot be opened."""
        number = 0
        with _Opened(self.path) as (raw, stream):
            size = max(1, self.path.stat().st_size)
            while True:
                number += 1
                try:
                    line = stream.readline(MAX_LINE_BYTES)
                    too_long = len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
                    rest = line
                    while too_long and rest and not rest.endswith(b"\n"):
                        rest = stream.readline(MAX_LINE_BYTES)
                except (OSError, EOFError, zlib.error) as error:
                    self.problem(number, f"the file cannot be read beyond this line: {error}")
                    break
                if not line:
                    break
                if number % PROGRESS_EVERY == 0:
                    self.progress(raw.tell() / size)
                if too_long:
                    self.problem(number, f"longer than {MAX_LINE_BYTES:,} bytes")
                elif not line.isspace():
                    yield number, line
        self.progress(1.0)

    def parsed(self, parse: Callable[[bytes], Parsed]) -> Iterator[tuple[int, Parsed]]:
        """Yields the numbers of ``lines`` and what ``parse`` returns for each; a line for which it raises ValueError is
        skipped and counted. Raises TraceError, also if ``parse`` does."""
        for number, line in self.lines():
            try:
                found = parse(line)
            except TraceError:
                raise
            except ValueError as error:
                self.problem(number, error)
            else:
                yield number, found

    def elements(self) -> Iterator[tuple[int, Any]]:
        """Yields the numbers, from 1, and the values of the elements of a JSON array, of which one is in memory at a
        time. What cannot be parsed, and all that follows it, is one problem. Raises TraceError if the file cannot be
        opened."""
        number = 1
        with _Opened(self.path) as (raw, stream):
            size = max(1, self.path.stat().st_size)
            text = _Text(stream)
            try:
                text.take("[")
                is_last = text.peek() == "]"
                while not is_last:
                    yield number, text.value()
                    if number % _ELEMENTS_PER_REPORT == 0:
                        self.progress(raw.tell() / size)
                    is_last = text.take(",]") == "]"
                    number += 1
            except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
                self.problem(number, f"the array cannot be read beyond element {number}: {error}")
        self.progress(1.0)

    def empty(self) -> NoReturn:
        """Raises TraceError that says why there is no request."""
        problems = self.problems
        if not problems.count:
            raise TraceError(f"{self.path}: the trace is empty: it has no request")
        raise TraceError(
            f"{self.path}: read as {self.format or 'a trace'}, it has no valid request: {problems.count:,} invalid, "
            f"the first: {problems.kept[0]}"
        )


class SessionStarts:
    """When sessions start whose file does not say it: each at a time derived from its name, uniformly distributed over
    the length of the longest session."""

    def __init__(self) -> None:
        self._shares: list[float] = []
        """The start of each session, as a share of the longest one's length."""
        self._counts: list[int] = []
        self._longest_s = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, name: bytes, requests: int, length_s: float) -> None:
        """Adds a session, whose ``requests`` follow those of the sessions before it."""
        self._shares.append(xxhash.xxh3_64_intdigest(name, seed=1) / 2**64)
        self._counts.append(requests)
        self._longest_s = max(self._longest_s, length_s)

    def delays(self) -> Floats | float:
        """Returns what to add to the time of each request; a single session starts at 0."""
        return np.repeat(np.array(self._shares) * self._longest_s, self._counts) if len(self) > 1 else 0.0


class _Opened:
    """A context manager that opens a file and yields its raw stream, for progress, and its decompressed stream."""

    def __init__(self, path: Path) -> None:
        try:
            # The file is opened twice, and opening a pipe may block forever.
            if not stat.S_ISREG(path.stat().st_mode):
                raise TraceError(f"{path}: not a regular file; write the trace to one")
            self._raw = path.open("rb")
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            is_gzip = self._raw.read(2) == _GZIP_MAGIC
            self._raw.seek(0)
        except OSError as error:
            self._raw.close()
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
        self._stream: io.BufferedReader[Any] = self._raw
        if is_gzip:
            self._stream = io.BufferedReader(gzip.GzipFile(fileobj=self._raw))

    def __enter__(self) -> tuple[io.BufferedReader[Any], io.BufferedReader[Any]]:
        return self._raw, self._stream

    def __exit__(self, *_: object) -> None:
        self._raw.close()


class _Text:
    """The text of a stream, read as far as needed. Its methods raise ValueError, and what the stream raises."""

    def __init__(self, stream: io.BufferedReader[Any]) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._text = ""
        self._at = 0

    def peek(self) -> str:
        """Skips blanks. Returns the next character, or "" at the end."""
        while True:
            found = _NOT_BLANK.search(self._text, self._at)
            self._at = len(self._text) if found is None else found.start()
            if found is not None or not self._read_more():
                return self._text[self._at : self._at + 1]

    def take(self, wanted: str) -> str:
        """Skips blanks and one of the characters ``wanted``, and returns it."""
        found = self.peek()
        if not found or found not in wanted:
            raise ValueError(f"not JSON: {found!r} instead of {' or '.join(wanted)}")
        self._at += 1
        return found

    def value(self) -> Any:
        """Skips blanks and a JSON value, and returns it."""
        self.peek()
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                # Perhaps the value is not complete.
                if not self._read_more():
                    raise ValueError(f"not JSON: {error.msg}") from None

    def _read_more(self) -> bool:
        """Reads as much again as is left, so that the total work is linear. Returns whether there was any."""
        left = len(self._text) - self._at
        if left > MAX_LINE_BYTES:
            raise ValueError(f"longer than {MAX_LINE_BYTES:,} characters")
        piece = self._stream.read(max(_PIECE, left))
        self._text = self._text[self._at :] + self._decode(piece, final=not piece)
        self._at = 0
        return bool(piece)


_NOT_BLANK = re.compile(r"\S")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError."""
    try:
        found = _DECODER.decode(text.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        # Either from _refuse_constant, or Python refuses to parse a number with so many digits.
        raise error if str(error).startswith("not JSON") else ValueError("a number of thousands of digits") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def seconds(data: Mapping[str, Any], field: str, unit: float = 1.0) -> float:
    """Returns a time in seconds from a field in units of ``unit`` seconds. Raises ValueError."""
    value = data.get(field)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MAX_SECONDS / unit:
        raise wrong(data, field, "a time, 0 or more")
    return float(value) * unit


def whole(data: Mapping[str, Any], field: str, least: int = 0) -> int:
    """Returns a whole number of at least ``least``. Raises ValueError."""
    value = data.get(field)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise wrong(data, field, f"a whole number, {least} or more")
    return value


def block_ids(data: Mapping[str, Any], field: str = "hash_ids") -> list[int]:
    """Returns a list of numbers in [0, 2**64). Raises ValueError."""
    value = data.get(field)
    if not isinstance(value, list):
        raise wrong(data, field, "a list of block ids")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_ID):
        bad = next(each for each in value if type(each) is not int or not 0 <= each <= MAX_ID)
        raise ValueError(f"{field} contains {_shown(bad)}: not a whole number in [0, 2**64)")
    return value


def prefix_ids(data: Mapping[str, Any], field: str = "hash_ids") -> list[int]:
    """Returns ``block_ids`` that each name a prefix, so none may repeat. Raises ValueError."""
    value = block_ids(data, field)
    if len(set(value)) != len(value):
        twice = next(each for i, each in enumerate(value) if each in value[:i])
        raise ValueError(f"{field} contains {twice} twice: each id must name another prefix of the prompt")
    return value


def wrong(data: Mapping[str, Any], field: str, wanted: str) -> ValueError:
    if field not in data:
        return ValueError(f"{field} is missing")
    return ValueError(f"{field}={_shown(data[field])}: not {wanted}")


def _shown(value: object) -> str:
    try:
        text = ascii(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def optional_name(data: Mapping[str, Any], field: str) -> str | None:
    """Returns the name in a field that is a string or a whole number, or None if there is none. Raises ValueError."""
    value = data.get(field)
    if value is not None and type(value) not in (str, int):
        raise wrong(data, field, "a string or a whole number")
    return None if value is None else str(value)


def positive_or(block_tokens: int | None, default: int) -> int:
    """Returns ``block_tokens``, or the default if it is None. Raises TraceError unless it is a positive number."""
    if block_tokens is None:
        return default
    if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_TOKENS:
        raise TraceError("block_tokens", block_tokens, "must be a whole number, 1 or more")
    return block_tokens


def units_in(size: int, unit: int, path: Path) -> int:
    """Returns how many blocks of ``unit`` tokens, those of the file, a block of ``size`` tokens has. Raises
    TraceError unless that is a whole number."""
    if size % unit:
        raise TraceError("block_tokens", size, f"blocks of {path.name} have {unit} tokens", "use a multiple of that")
    return size // unit
