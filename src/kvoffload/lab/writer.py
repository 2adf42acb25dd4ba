"""Writes a trace in the format that servers record (see ``kvoffload.lab.readers.recorded``)."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.lab.readers.mooncake import MILLISECOND
from kvoffload.lab.trace import PREFILL_SPEED, UNKNOWN, Trace, TraceError
from kvoffload.observe.trace import HEADER, VERSION

COMPRESSION = 6
_DECIMALS = 3
"""Of a timestamp in milliseconds."""


def write_trace(trace: Trace, path: str | Path, *, force: bool = False) -> int:
    """Writes ``trace`` to the file ``path``, compressed if its name ends with .gz. Returns the size of the file, in
    bytes.

    A replay of the file has the same results. Blocks keep their ids and tenants their names; sessions become numbers.
    The file gets its name when it is complete, and only its owner may read it. Raises TraceError if the file exists,
    unless ``force``, or if it cannot be written.
    """
    path = Path(path).expanduser()
    if path.exists() and (not force or not path.is_file()):
        raise TraceError(f"{path}: exists; name another file, or replace a file with force=True")
    try:
        with ExitStack() as stack:
            # Files are made with mode 0600.
            fd, name = tempfile.mkstemp(prefix=".kvoffload-trace-", dir=path.parent)
            stack.callback(Path(name).unlink, missing_ok=True)
            with os.fdopen(fd, "wb") as raw:
                if path.name.endswith(".gz"):
                    with gzip.GzipFile(filename="", mode="wb", compresslevel=COMPRESSION, fileobj=raw, mtime=0) as file:
                        file.writelines(_lines(trace))
                else:
                    raw.writelines(_lines(trace))
                raw.flush()
                os.fsync(fd)
                size = raw.tell()
            os.replace(name, path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}; name a file in a folder with room") from error
    return size


def _lines(trace: Trace) -> Iterator[bytes]:
    header = {HEADER: VERSION, "started": 0.0, "block_tokens": trace.block_tokens, "converted_from": trace.name}
    speed = trace.prefill_tokens_per_s
    yield _line(header if speed is None else {**header, PREFILL_SPEED: speed})
    timestamps = np.round(trace.times / MILLISECOND, _DECIMALS)
    columns = (timestamps, trace.input_tokens, trace.output_tokens, trace.prompt_blocks, trace.sessions, trace.tenants)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for request, (at, inputs, outputs, prompt_blocks, session, tenant) in enumerate(rows):
        line: dict[str, Any] = {
            "timestamp": int(at) if at.is_integer() else at,
            "input_length": inputs,
            "output_length": outputs,
            "hash_ids": trace.ids[trace.chain(request)].tolist(),
        }
        if prompt_blocks != inputs // trace.block_tokens:
            line["prompt_blocks"] = prompt_blocks
        if session != UNKNOWN:
            line["session"] = session
        if tenant != UNKNOWN:
            line["tenant"] = trace.tenant_names[tenant]
        yield _line(line)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
