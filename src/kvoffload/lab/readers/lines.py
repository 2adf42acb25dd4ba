"""What the readers share: lines of a file that may be compressed or broken, and the checks of their fields."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from kvoffload.lab.trace import Problem, TraceError

MAX_LINE_BYTES = 256 << 20
"""The longest sessions of kv-cache-tester, each one line, have tens of MB."""
MAX_PROBLEMS_KEPT = 100
MAX_TOKENS = 1 << 40
"""More than a request has, and few enough for sums in 64 bits."""
MAX_SECONDS = 1e12
MAX_ID = (1 << 64) - 1
PROGRESS_EVERY = 512
"""Lines."""
_GZIP_MAGIC = b"\x1f\x8b"
_SHOWN = 40

Progress = Callable[[float], None]


class Problems:
    """Lines that were left out: the first of them, and how many. ``strict``: the first raises TraceError."""

    def __init__(self, strict: bool = False) -> None:
        self.kept: list[Problem] = []
        self.count = 0
        self.strict = strict

    def add(self, problem: Problem) -> None:
        if self.strict:
            raise TraceError(f"{problem}. Without strict such lines are left out and counted")
        self.count += 1
        if len(self.kept) < MAX_PROBLEMS_KEPT:
            self.kept.append(problem)


class Source:
    """One file of a trace. ``on_progress`` is given the share of it that was read."""

    def __init__(self, path: Path, problems: Problems, on_progress: Progress | None = None) -> None:
        self.path = path
        self.problems = problems
        self._on_progress = on_progress

    def problem(self, line: int, reason: object) -> None:
        """Counts a line that is left out. Raises TraceError if that must not be."""
        self.problems.add(Problem(str(self.path), line, str(reason)))

    def progress(self, share: float) -> None:
        if self._on_progress is not None:
            self._on_progress(min(1.0, share))

    def head(self, size: int) -> bytes:
        """The first ``size`` bytes, decompressed; fewer if no more can be read. Raises TraceError."""
        found = b""
        with _Opened(self.path) as (_, stream), contextlib.suppress(OSError, EOFError, zlib.error):
            while len(found) < size and (piece := stream.read1(size - len(found))):
                found += piece
        return found

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbers, from 1, and lines that are not blank. Raises TraceError if the file cannot be opened."""
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
                    self.problem(number, f"the file cannot be read from here on: {error}")
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

    def refuse_if_empty(self, requests: int) -> None:
        """Raises TraceError if there is no request."""
        if requests == 0:
            self.empty()

    def empty(self) -> NoReturn:
        problems = self.problems
        if not problems.count:
            raise TraceError(f"{self.path}: an empty trace: there is no request in it")
        raise TraceError(
            f"{self.path}: no request in it can be read: {problems.count:,} wrong, first {problems.kept[0]}"
        )


class _Opened:
    """A file as bytes as they are and as bytes decompressed. A context manager."""

    def __init__(self, path: Path) -> None:
        try:
            # Read twice, its head and all of it; and opening a pipe may take for ever.
            if not stat.S_ISREG(path.stat().st_mode):
                raise TraceError(f"{path}: not a file; write the trace to one")
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not JSON: {name}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object that ``text`` is. Raises ValueError."""
    try:
        found = _DECODER.decode(text.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        # Of what the decoder refuses itself; else Python refuses to make a number of so many digits.
        raise error if str(error).startswith("not JSON") else ValueError("a number of thousands of digits") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def seconds(data: Mapping[str, Any], field: str, unit: float = 1.0) -> float:
    """A point in time, in units of ``unit`` seconds. Raises ValueError."""
    value = data.get(field)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MAX_SECONDS / unit:
        raise wrong(data, field, "a time, 0 or more")
    return float(value) * unit


def whole(data: Mapping[str, Any], field: str, least: int = 0, most: int = MAX_TOKENS) -> int:
    """A whole number of at least ``least``. Raises ValueError."""
    value = data.get(field)
    if type(value) is not int or not least <= value <= most:
        raise wrong(data, field, f"a whole number, {least} or more")
    return value


def block_ids(data: Mapping[str, Any], field: str = "hash_ids") -> list[int]:
    """A list of numbers in [0, 2**64). Raises ValueError."""
    value = data.get(field)
    if not isinstance(value, list):
        raise wrong(data, field, "a list of block ids")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_ID):
        bad = next(each for each in value if type(each) is not int or not 0 <= each <= MAX_ID)
        raise ValueError(f"{field} holds {_shown(bad)}: not a whole number in [0, 2**64)")
    return value


def prefix_ids(data: Mapping[str, Any], field: str = "hash_ids") -> list[int]:
    """``block_ids`` of which each names a prefix, so that none comes twice. Raises ValueError."""
    value = block_ids(data, field)
    if len(set(value)) != len(value):
        twice = next(each for i, each in enumerate(value) if each in value[:i])
        raise ValueError(f"{field} holds {twice} twice: each id names another prefix of the prompt")
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


def out_of_order(times: list[float]) -> int:
    """How many requests come before the one that stands before them."""
    return sum(a > b for a, b in pairwise(times))


def positive_or(block_tokens: int | None, default: int) -> int:
    """``block_tokens`` if it is given. Raises TraceError if it is no whole number of 1 or more."""
    if block_tokens is None:
        return default
    if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_TOKENS:
        raise TraceError(f"block_tokens={block_tokens!r}: must be a whole number, 1 or more")
    return block_tokens


def finite(text: str) -> float:
    """The number that ``text`` is. Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
