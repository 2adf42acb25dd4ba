"""SIGKILL to a serving engine: all that kvoffload held goes with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Not "vllm": from tests/ on sys.path this directory itself could be imported under that name.
pytest.importorskip("vllm.version")
from vllm_harness import DEADLINE_S, Child, Runner, differences, eventually, kill_session

pytestmark = pytest.mark.vllm

POOL_BYTES = 2 << 30
SHM = Path("/dev/shm")


def session_of(child: Child) -> Iterator[Path]:
    """/proc/PID of every live process in a child's session."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == child.pid and state != "Z":
                yield process


def pools(process: Path) -> list[Path]:
    """Its descriptors of host pools."""
    found = []
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if "kvoffload" in os.readlink(descriptor):
                found.append(descriptor)
    return found


def named_segments(process: Path) -> set[Path]:
    """What it has mapped that has a name in /dev/shm."""
    lines = (process / "maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHM}/" in line}
    return {path for path in paths if path.exists()}


def shared_bytes() -> int:
    """The machine's shared memory: every memfd counts."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) * 1024


def test_a_killed_server_leaves_nothing(run: Runner, expected: list[Any]) -> None:
    """With the engine and its worker in processes of their own, as ``vllm serve`` has them."""
    before = shared_bytes()
    child, result = run.start("endless", multiprocessing=True, connector={"host_bytes": POOL_BYTES})
    try:
        assert eventually(lambda: result.exists() or child.poll() is not None, DEADLINE_S)
        assert child.poll() is None, result.with_suffix(".log").read_text()[-6000:]
        processes = list(session_of(child))
        held = [descriptor for process in processes for descriptor in pools(process)]
        assert held
        for descriptor in held:
            assert os.stat(descriptor).st_nlink == 0, "the pool has a name on disk"
            assert os.stat(descriptor).st_size <= POOL_BYTES
        assert shared_bytes() > before + POOL_BYTES // 2
        named = set().union(*map(named_segments, processes))
        for process in processes:
            # Python's resource tracker lives on: it removes vLLM's own segments, which do have names.
            if "resource_tracker" not in (process / "cmdline").read_text():
                os.kill(int(process.name), signal.SIGKILL)
        assert eventually(lambda: not list(session_of(child)))
    finally:
        kill_session(child)
    assert eventually(lambda: shared_bytes() < before + POOL_BYTES // 2)
    assert not [path for path in named if path.exists()]
    assert not [path for path in SHM.iterdir() if "kvoffload" in path.name]
    for answers in json.loads(result.read_text())["outputs"]:
        assert differences(answers, expected) == []
