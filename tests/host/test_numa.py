"""The pool's memory policy: it belongs to the memory file, and a container that forbids it does not keep the pool."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

import pytest

from kvoffload.abc import ByteArray
from kvoffload.host import numa
from kvoffload.host.limits import cpuset_nodes
from kvoffload.host.pool import HostPool

NUM_BLOCKS, SLOT = 64, 8192


def policy(slots: ByteArray) -> str:
    """Returns the memory policy of the mapping that begins with ``slots``."""
    lines = (line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines())
    return {words[0]: words[1] for words in lines}[f"{slots.ctypes.data:x}"]


@pytest.fixture
def node() -> int:
    nodes = cpuset_nodes()
    if not nodes or not Path("/proc/self/numa_maps").exists():
        pytest.skip("this machine does not say where its memory is")
    return min(nodes)


def is_allowed(node: int) -> bool:
    """Whether this process may set memory policies; containers often forbid it."""
    pool = HostPool(1, SLOT, node)
    found = policy(pool.data)
    pool.close()
    return found != "default"


def test_the_policy_holds_for_the_file_and_not_only_for_this_mapping(
    node: int, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_allowed(node):
        pytest.skip("this process may not set memory policies")
    with caplog.at_level(logging.INFO):
        pool = HostPool(NUM_BLOCKS, SLOT, node)
    again = pool.handle().open()
    again[0] = 1
    assert policy(pool.data) == policy(again) == f"prefer:{node}"
    assert f"allocated on NUMA node {node}" in caplog.text
    del again
    pool.close()


def test_without_a_node_there_is_no_policy(node: int) -> None:
    pool = HostPool(NUM_BLOCKS, SLOT)
    assert policy(pool.data) == "default"
    pool.close()


def test_where_policies_are_forbidden_the_processors_of_the_node_allocate(
    node: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, during = os.sched_getaffinity(0), list[set[int]]()
    allocate = os.posix_fallocate

    def note(fd: int, offset: int, size: int) -> None:
        during.append(os.sched_getaffinity(0))
        allocate(fd, offset, size)

    one = min(before)
    monkeypatch.setattr(os, "posix_fallocate", note)
    monkeypatch.setattr(platform, "machine", lambda: "none")
    monkeypatch.setattr(numa, "_processors", lambda node: frozenset({one, 10_000}))
    with caplog.at_level(logging.INFO):
        HostPool(NUM_BLOCKS, SLOT, node).close()
    assert during == [{one}]
    assert os.sched_getaffinity(0) == before
    assert f"by the processors of NUMA node {node}" in caplog.text


def test_a_node_that_is_out_of_reach_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    pool = HostPool(NUM_BLOCKS, SLOT, 1000)
    assert os.fstat(pool.fd).st_blocks * 512 >= pool.nbytes
    assert os.sched_getaffinity(0) == before
    assert "--cap-add SYS_NICE" in caplog.text
    pool.close()
