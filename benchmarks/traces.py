"""Which traces the benchmarks replay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def trace_sources(otherwise: Sequence[str]) -> Sequence[str]:
    """Returns the ``*.jsonl.gz`` in the folder that KVOFFLOAD_TRACES names, or ``otherwise`` if there are none."""
    folder = os.environ.get("KVOFFLOAD_TRACES")
    found = sorted(map(str, Path(folder).glob("*.jsonl.gz"))) if folder else []
    return found or otherwise
