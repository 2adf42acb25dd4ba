"""Tests on a CUDA device. With KVOFFLOAD_GPU_REHEARSAL=1 they run on a stand-in that keeps streams apart."""

from __future__ import annotations

import importlib.util
import os

import pytest

IS_REHEARSAL = os.environ.get("KVOFFLOAD_GPU_REHEARSAL") == "1"
HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_*.py"]

if HAS_TORCH and IS_REHEARSAL:
    from benchmarks.gpu import rehearsal

    rehearsal.install()


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """Skips tests that need a GPU where there is none."""
    from benchmarks.gpu import cuda

    if not cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def real_device() -> None:
    """Skips tests of what only a GPU does."""
    if IS_REHEARSAL:
        pytest.skip("needs a CUDA device, not its rehearsal")


@pytest.fixture(scope="session")
def warm_device() -> None:
    """Runs each kind of work once, because a kernel's first launch may wait for the whole device."""
    import numpy as np

    from benchmarks.gpu import cuda
    from benchmarks.gpu.rig import Layout, make_views, rig
    from kvoffload.abc import PageGroup

    cuda.sleep(0.0)
    with rig([PageGroup(make_views(Layout.MERGED, 4, 4, 4096))], 4) as r:
        r.fill(0, np.arange(4), 1)
        r.write(0, np.arange(4), r.rows(0, np.arange(4)))
        r.look(0, np.arange(4))
        for copy in (r.store, r.load):
            assert r.result(copy(np.arange(4), np.arange(4))).ok
    cuda.synchronize()
