"""Which traces the benchmarks replay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.synthetic import generate
from kvoffload.lab.readers import read_trace
from kvoffload.lab.trace import Trace


def traces(otherwise: Mapping[str, int]) -> Iterator[Trace]:
    """Yields the ``*.jsonl.gz`` in the folder that KVOFFLOAD_TRACES names; if there are none, synthetic workloads: of
    each kind so many requests as ``otherwise`` says."""
    folder = os.environ.get("KVOFFLOAD_TRACES")
    found = sorted(Path(folder).glob("*.jsonl.gz")) if folder else []
    yield from map(read_trace, found)
    if not found:
        for kind, requests in otherwise.items():
            yield generate(kind, requests)
