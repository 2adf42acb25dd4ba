"""Reads traces in several formats, which are recognized by their content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvoffload.lab.readers import bailian, kv_cache_tester, libcachesim, mooncake, recorded, sharegpt, synthetic
from kvoffload.lab.readers.lines import Problems, Source
from kvoffload.lab.trace import MEMORY_BYTES, Progress, Trace, TraceError

FORMATS: dict[str, Callable[[Source, int | None], Trace]] = {
    "mooncake": mooncake.read,
    "recorded": recorded.read,
    "bailian": bailian.read,
    "kv-cache-tester": kv_cache_tester.read,
    "sharegpt": sharegpt.read,
    "libcachesim": libcachesim.read,
}
_HEAD_BYTES = 1 << 16
_PARQUET = b"PAR1"


def read_trace(
    source: str | Path,
    *,
    format: str | None = None,
    strict: bool = False,
    block_tokens: int | None = None,
    on_progress: Progress | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> Trace:
    """Returns the trace in a file, plain or compressed with gzip, or in a directory of kv-cache-tester sessions, or a
    synthetic one such as "synthetic:chat", "synthetic:agent" or "synthetic:documents?requests=5000&seed=1".

    ``format`` is one of FORMATS; by default it is guessed from the content. Invalid lines are skipped and counted; with
    ``strict`` the first one raises. ``block_tokens`` is for formats that do not define it. ``on_progress`` gets the
    share that was read. A trace whose columns take more than ``memory_bytes`` is kept in temporary files. Raises
    TraceError if no request can be read, or if there is no room for those files.
    """
    if str(source).startswith(synthetic.PREFIX):
        if format is not None:
            raise TraceError("format", format, "a synthetic trace is not read from a file", "leave it out")
        return synthetic.generate(str(source), block_tokens, memory_bytes)
    if not str(source):
        raise TraceError("trace", "", "", "give the path of a file")
    file = Source(Path(source).expanduser(), Problems(strict), on_progress, memory_bytes)
    if format is None:
        format = _guess(file)
    if format not in FORMATS:
        raise TraceError("format", format, "unknown", f"use one of {', '.join(FORMATS)}")
    file.format = format
    return FORMATS[format](file, block_tokens)


def _guess(source: Source) -> str:
    if source.path.is_dir():
        return "kv-cache-tester"
    head = source.head(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    names = source.path.name.removesuffix(".gz").rsplit(".", 1)
    suffix = names[-1].lower() if len(names) > 1 else ""
    first = head.split(b"\n", 1)[0]
    if head.startswith(_PARQUET):
        raise TraceError(
            f"{source.path}: a Parquet file; give the JSON file that it was made from (in AgentX's data sets "
            "traces.jsonl), or write its rows as JSON lines"
        )
    if head.startswith((b"{", b"[")) and b'"conversations"' in head:
        return "sharegpt"
    if first.startswith(b"{"):
        if f'"{recorded.HEADER}"'.encode() in first:
            return "recorded"
        if f'"{bailian.PARENT}"'.encode() in first:
            return "bailian"
        return "kv-cache-tester" if b'"requests"' in head else "mooncake"
    if suffix in ("jsonl", "json"):
        return "mooncake"
    if suffix == "csv" or _looks_like_csv(first):
        return "libcachesim"
    if not head:
        for _ in source.lines():
            pass
        source.empty()
    raise TraceError(
        f"{source.path}: the format is not recognized; if it is one of {', '.join(FORMATS)}, name it with "
        "--format (format=)"
    )


def _looks_like_csv(line: bytes) -> bool:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() and libcachesim.delimiter(text) in text.strip() and any(map(str.isdigit, text))
