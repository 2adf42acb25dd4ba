"""Reads traces in several formats, which are recognized by their content."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kvoffload.lab.readers import bailian, mooncake, recorded
from kvoffload.lab.readers.lines import BOM, Source
from kvoffload.lab.trace import Progress, Trace, TraceError
from kvoffload.observe.trace import HEADER
from kvoffload.printable import printable

FORMATS: dict[str, Callable[[Source, int | None], Trace]] = {
    "mooncake": mooncake.read,
    "recorded": recorded.read,
    "bailian": bailian.read,
}
_HEAD_BYTES = 1 << 16
_SHOWN = 60
_NAMES = b'"hash_ids"'
_SESSION = b'"requests"'
_TEXT = re.compile(rb'"(conversations|messages|text_input|prompt|text|content)"\s*:\s*["\[]')
_DELIMITER = re.compile(rb"[,;\t\[{]")
_COUNTS = re.compile(rb"tokens|_length|_len\b|\b[io]sl\b", re.IGNORECASE)


def read_trace(
    source: str | Path,
    *,
    format: str | None = None,
    skip_bad_lines: bool = False,
    block_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> Trace:
    """Returns the trace in a file, plain or compressed with gzip.

    ``format`` is one of FORMATS; by default it is guessed from the content. Lines that cannot be used are skipped and
    counted; more than MAX_BAD_SHARE of them raise, unless ``skip_bad_lines``. ``block_tokens`` is for formats that do
    not define it. ``on_progress`` gets the share that was read. Raises TraceError if the file is no trace.
    """
    if not str(source):
        raise TraceError("trace", "", "", "give the path of a file")
    file = Source(Path(source).expanduser(), skip_bad_lines, on_progress)
    if format not in (None, *FORMATS):
        raise TraceError("format", format, "unknown", f"use one of {', '.join(FORMATS)}")
    file.check_kind()
    file.format = format or _guess(file)
    return FORMATS[file.format](file, block_tokens)


def _guess(source: Source) -> str:
    head = source.head(_HEAD_BYTES).lstrip(BOM + b" \t\r\n")
    first = head.split(b"\n", 1)[0]
    if not head:
        for _ in source.lines():
            pass
        source.empty()
    if first.startswith(b"{"):
        if f'"{HEADER}"'.encode() in first:
            return "recorded"
        if f'"{bailian.PARENT}"'.encode() in first:
            return "bailian"
    if _NAMES in head and first.startswith(b"["):
        raise TraceError(f"{source.path}: one JSON array; write one object per line: jq -c '.[]' FILE > FILE.jsonl")
    if _NAMES in head and _SESSION not in head:
        return "mooncake"
    raise TraceError(f"{source.path}: {_what(head, first)}")


def _what(head: bytes, first: bytes) -> str:
    if _NAMES in head:
        return f"sessions with lists of requests; write one request per line, as in {', '.join(FORMATS)}"
    if b"hash_ids" in head:
        return (
            "has hash_ids, and is not JSON; write one object per line, such as "
            '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}'
        )
    if head.startswith((b"{", b"[")) and _TEXT.search(head):
        return (
            "text without block names: a trace has the blocks of each prompt; examples/convert_trace.py makes a trace "
            "of text, with a tokenizer"
        )
    if _COUNTS.search(head if head.startswith((b"{", b"[")) else first) and _DELIMITER.search(first):
        return (
            "token counts without block names: they do not say which prompts begin alike, so nobody can tell what a "
            "cache would find; record a trace of your server (record_trace), or use one with hash_ids"
        )
    return (
        f'the format is not recognized; it begins with "{printable(first, _SHOWN)}". If it is one of '
        f"{', '.join(FORMATS)}, name it with --format (format=)"
    )
