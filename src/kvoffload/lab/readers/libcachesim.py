"""Reads CSV traces in libCacheSim's format (https://github.com/1a1a11a/libCacheSim): one request per line.

A header names the columns; without a header they are time in seconds, object id, and others. An object becomes a block
of one token; sizes are ignored, because all blocks of a pool have the same size.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence

import xxhash

from kvoffload.lab.readers.lines import MAX_ID, MAX_SECONDS, Source
from kvoffload.lab.trace import Trace, TraceError

TIMES = ("time", "timestamp", "clock_time", "real_time", "ts")
OBJECTS = ("obj_id", "object_id", "objectid", "obj", "object", "id", "key", "lbn", "lba", "block_id", "block")
DELIMITERS = ",\t;| "
MAX_CELL = 1 << 16


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """Reads the trace. Raises TraceError, also for a ``block_tokens`` other than 1."""
    if block_tokens not in (None, 1):
        raise TraceError("block_tokens", block_tokens, f"{source.path.name} has objects, not tokens", "leave it out")
    rows = source.builder()
    columns: tuple[int, int] | None = None
    for number, cells in _rows(source):
        if columns is None:
            try:
                columns = _columns(cells)
            except TraceError as error:
                raise TraceError(f"{source.path}:{number}: {error}") from None
            if columns is not None:
                continue
            columns = 0, 1
        try:
            rows.add(_time(cells, columns[0]), 1, 0, (_object(cells, columns[1]),), None)
        except ValueError as error:
            source.problem(number, error)
    return source.trace(rows, 1)


def delimiter(line: str) -> str:
    """Returns the most likely delimiter of a line: the first of DELIMITERS that it contains."""
    return next((each for each in DELIMITERS if each in line.strip()), ",")


def _rows(source: Source) -> Iterator[tuple[int, list[str]]]:
    separator = ""
    for number, line in source.lines():
        try:
            text = line.decode().strip("\r\n")
        except UnicodeDecodeError as error:
            source.problem(number, f"not UTF-8: byte {error.start + 1}")
            continue
        if text.startswith("#"):
            continue
        separator = separator or delimiter(text)
        if len(text) > MAX_CELL:
            source.problem(number, f"longer than {MAX_CELL:,} characters")
        elif '"' in text:
            try:
                yield number, next(csv.reader([text], delimiter=separator, strict=True))
            except csv.Error as error:
                source.problem(number, f"not CSV: {error}")
        else:
            yield number, text.split(separator)


def _columns(header: Sequence[str]) -> tuple[int, int] | None:
    """Returns the columns of time and object, or None if this is not a header. If several columns have a name of
    OBJECTS, the name that comes first there wins."""
    names = [name.strip().lower().replace("-", "_") for name in header]
    time = next((names.index(name) for name in TIMES if name in names), None)
    at = next((names.index(name) for name in OBJECTS if name in names), None)
    if (time is None) != (at is None):
        raise TraceError(
            f"the header has no column for {'the time' if time is None else 'the object'}: {', '.join(names)[:200]}; "
            f"name that column {TIMES[0] if time is None else OBJECTS[0]}"
        )
    return None if time is None or at is None else (time, at)


def _time(cells: Sequence[str], column: int) -> float:
    if column >= len(cells):
        raise ValueError(f"{len(cells)} columns: the time is missing")
    try:
        value = float(cells[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{cells[column][:40]!r}: not a time in seconds")
    if not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"{cells[column][:40]!r}: not a time of 0 or more")
    return value


def _object(cells: Sequence[str], column: int) -> int:
    """Returns the object's id if it is a number of 64 bits, else the hash of the id."""
    name = cells[column].strip() if column < len(cells) else ""
    if not name:
        raise ValueError("the object id is missing")
    if name.isascii() and name.isdigit() and len(name) <= 20 and (value := int(name)) <= MAX_ID:
        return value
    return xxhash.xxh3_64_intdigest(name.encode())
