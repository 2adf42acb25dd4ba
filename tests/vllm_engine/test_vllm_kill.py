"""SIGKILL to a running engine frees everything that kvoffload held."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import DEADLINE_S, Runner, differences, eventually

from demo.process import kill_session, session_pids

pytestmark = pytest.mark.vllm

POOL_BYTES = 2 << 30
SHM = Path("/dev/shm")


def pools(process: Path) -> list[Path]:
    """Returns the descriptors of host pools that ``process`` has open."""
    found = []
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if "kvoffload" in os.readlink(descriptor):
                found.append(descriptor)
    return found


def named_segments(process: Path) -> set[Path]:
    """Returns the files in /dev/shm that ``process`` has mapped."""
    lines = (process / "maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHM}/" in line}
    return {path for path in paths if path.exists()}


def shared_bytes() -> int:
    """Returns the bytes of shared memory of the machine, which include all memory files."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) * 1024


def test_a_killed_server_leaves_nothing(run: Runner, expected: list[Any]) -> None:
    """The engine and its worker run in processes of their own, as with ``vllm serve``."""
    before = shared_bytes()
    child, result = run.start("endless", multiprocessing=True, connector={"host_bytes": POOL_BYTES})
    try:
        assert eventually(lambda: result.exists() or child.poll() is not None, DEADLINE_S)
        assert child.poll() is None, result.with_suffix(".log").read_text()[-6000:]
        processes = [Path(f"/proc/{pid}") for pid in session_pids(child.pid)]
        held = [descriptor for process in processes for descriptor in pools(process)]
        assert held
        for descriptor in held:
            assert os.stat(descriptor).st_nlink == 0, "the pool has a name on disk"
            assert os.stat(descriptor).st_size <= POOL_BYTES
        assert shared_bytes() > before + POOL_BYTES // 2
        named = set().union(*map(named_segments, processes))
        for process in processes:
            # Python's resource tracker stays alive: it removes the segments of vLLM, which have names.
            if "resource_tracker" not in (process / "cmdline").read_text():
                os.kill(int(process.name), signal.SIGKILL)
        assert eventually(lambda: not [Path(f"/proc/{pid}") for pid in session_pids(child.pid)])
    finally:
        kill_session(child)
    assert eventually(lambda: shared_bytes() < before + POOL_BYTES // 2)
    assert not [path for path in named if path.exists()]
    assert not [path for path in SHM.iterdir() if "kvoffload" in path.name]
    for answers in json.loads(result.read_text())["outputs"]:
        assert differences(answers, expected) == []
