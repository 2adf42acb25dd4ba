"""Shared parts of the readers: lines of a file that may be compressed or damaged, and checks of their fields."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvoffload.lab.trace import Problem, Progress, Trace, TraceBuilder, TraceError
from kvoffload.units import counted

MAX_LINE_BYTES = 256 << 20
MAX_PROBLEMS_KEPT = 100
MAX_BAD_SHARE = 0.01
"""More lines than this that cannot be used are an error: the file is damaged, or no trace."""
MAX_TOKENS = 1 << 40
"""More than any request has, but small enough for sums in 64 bits."""
MAX_SECONDS = 1e12
MAX_ID = (1 << 64) - 1
PROGRESS_EVERY = 512
"""Lines between two reports of progress."""
_GZIP_MAGIC = b"\x1f\x8b"
_SHOWN = 40
_REASONS = 3
_HEAD_BYTES = 512
BOM = b"\xef\xbb\xbf"
_KINDS = (
    (rb"\x28\xb5\x2f\xfd|\xfd7zXZ\x00|BZh[1-9]1AY&SY", "packed with zstd, xz or bzip2", "unpack it"),
    (rb"PK\x03\x04|(?s:.{257}ustar)", "an archive", "unpack it, and give the trace that was in it"),
    (rb"PAR1", "a Parquet file", "give the JSON file that it was made from"),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the trace itself", "get that with git lfs pull"),
    (rb"(?i)\s*<(!doctype |html)", "a page of a web site, not a trace", "download the file itself"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16", "write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
)
"""How files begin that are no trace, what they are, and what to do."""

Parsed = TypeVar("Parsed")


class Source:
    """The file of a trace. ``skips``: whether any number of lines may be useless. ``on_progress`` gets the share of it
    that was read."""

    def __init__(self, path: Path, skips: bool, on_progress: Progress | None = None) -> None:
        self.path = path
        self.format = ""
        """The format that it is read as; empty until that is known."""
        self.problems: list[Problem] = []
        """The first of the lines that cannot be used."""
        self.num_problems = 0
        self.num_torn = 0
        """How many of them a killed server had not written to their end."""
        self._ends_early = False
        """Whether an unknown number of lines cannot be read."""
        self._skips = skips
        self._on_progress = on_progress

    def check_kind(self) -> None:
        """Raises TraceError if the file is of a known kind that is not read, such as an archive."""
        head = self.head(_HEAD_BYTES)
        for pattern, what, fix in _KINDS:
            if re.match(pattern, head):
                raise TraceError(f"{self.path}: {what}; {fix}")

    def trace(
        self, rows: TraceBuilder, block_tokens: int, start: float = 0.0, info: Mapping[str, object] | None = None
    ) -> Trace:
        """Returns the trace of ``rows``, named after the file, with the problems found so far. Arguments as for
        ``TraceBuilder.build``. Raises TraceError if there is no request, or if too few lines can be used."""
        if rows.num_requests == 0:
            self.empty()
        bad, total = self.num_problems - self.num_torn, self.num_problems + rows.num_requests
        if not self._skips and (self._ends_early or bad > MAX_BAD_SHARE * total):
            reasons = "; ".join(map(str, self.problems[:_REASONS]))
            raise TraceError(
                f"{self.path}: read as {self.format}, {self.num_problems:,} of {counted(total, 'line')} cannot be "
                f"used: {reasons}. To go on with the others, give --skip-bad-lines (skip_bad_lines=True)"
            )
        return rows.build(
            self.path.name,
            block_tokens,
            start,
            problems=tuple(self.problems),
            num_problems=self.num_problems,
            info={**(info or {}), "format": self.format},
        )

    def problem(self, line: int, reason: object) -> None:
        """Counts a line that cannot be used."""
        self.num_problems += 1
        if self.num_problems <= MAX_PROBLEMS_KEPT:
            self.problems.append(Problem(str(self.path), line, str(reason)))

    def progress(self, share: float) -> None:
        if self._on_progress is not None:
            self._on_progress(min(1.0, share))

    def head(self, size: int) -> bytes:
        """Returns the first ``size`` decompressed bytes, or fewer if no more can be read. Raises TraceError."""
        found = b""
        with _opened(self.path) as (_, stream), contextlib.suppress(OSError, EOFError, zlib.error):
            while len(found) < size and (piece := stream.read1(size - len(found))):
                found += piece
        return found

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields line numbers, from 1, and lines that are not blank. Raises TraceError if the file cannot be opened."""
        number = 0
        with _opened(self.path) as (raw, stream):
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
                    self._ends_early = True
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

    def parsed(self, parse: Callable[[bytes], Parsed]) -> Iterator[Parsed]:
        """Yields what ``parse`` returns for each of ``lines``; a line for which it raises ValueError is skipped and
        counted. Raises TraceError."""
        for number, line in self.lines():
            try:
                yield parse(line)
            except ValueError as error:
                self.problem(number, error)

    def empty(self) -> NoReturn:
        """Raises TraceError that says why there is no request."""
        if not self.num_problems:
            raise TraceError(f"{self.path}: the trace is empty: it has no request")
        raise TraceError(
            f"{self.path}: read as {self.format or 'a trace'}, it has no valid request: {self.num_problems:,} "
            f"invalid, the first: {self.problems[0]}"
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, io.BufferedIOBase]]:
    """Opens a file, and yields its raw stream, for progress, and its decompressed stream. Raises TraceError."""
    try:
        # The file is opened twice, and opening a pipe may block forever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(f"{path}: not a regular file; write the trace to one")
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    with raw:
        is_gzip = False
        with contextlib.suppress(OSError):  # the first line cannot be read, either
            is_gzip = raw.peek(2).startswith(_GZIP_MAGIC)
        yield raw, io.BufferedReader(gzip.GzipFile(fileobj=raw)) if is_gzip else raw


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError."""
    try:
        found = _DECODER.decode(text.removeprefix(BOM).decode())
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


def block_ids(data: Mapping[str, Any]) -> list[int]:
    """Returns the field ``hash_ids``, a list of numbers in [0, 2**64). Raises ValueError."""
    value = data.get("hash_ids")
    if not isinstance(value, list):
        raise wrong(data, "hash_ids", "a list of block ids")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_ID):
        bad = next(each for each in value if type(each) is not int or not 0 <= each <= MAX_ID)
        raise ValueError(f"hash_ids contains {_shown(bad)}: not a whole number in [0, 2**64)")
    return value


def prefix_ids(data: Mapping[str, Any]) -> list[int]:
    """Returns ``block_ids`` that each name a prefix, so none may repeat. Raises ValueError."""
    value = block_ids(data)
    if len(set(value)) != len(value):
        repeated = next(each for each, count in Counter(value).items() if count > 1)
        raise ValueError(f"hash_ids contains {repeated} twice: each id must name another prefix of the prompt")
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
