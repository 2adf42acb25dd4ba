"""Where the recorded traces of real servers are, which some tests replay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TRACES = Path(os.environ.get("KVOFFLOAD_TRACES") or "no-folder-of-traces")
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="KVOFFLOAD_TRACES names no folder")
