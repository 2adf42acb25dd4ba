"""The systems of ``make peers``: what they are started with, and what is said of those that fail."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.peers.systems import (
    KVOffload,
    KVOffloadTier,
    Service,
    SimpleCPU,
    StartError,
    System,
    VLLMOffloading,
    failure,
    wait_for_port,
)
from demo.process import free_ports, kill_session, session_pids, start_program


def test_a_service_that_ends_is_reported(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    service = Service("store", [sys.executable, "-c", "raise OSError('port taken')"], port, tmp_path, os.environ)
    with pytest.raises(StartError, match=r"^store: OSError: port taken$"):
        service.start()


def test_the_cause_is_found_in_vllms_log() -> None:
    log = textwrap.dedent("""
        (EngineCore pid=7) ERROR 11-22 06:21:34 [core.py:1044] Traceback (most recent call last):
        (EngineCore pid=7) ERROR 11-22 06:21:34 [core.py:1044] Exception: only supported on GPUs
        (APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above.
    """)
    assert failure(log) == "Exception: only supported on GPUs"
    assert failure("starting\nlibrdmacm.so.1: cannot open\n") == "librdmacm.so.1: cannot open"
    assert failure("") == "no output"
    assert failure("\x1b[31m[06:25] Store ERROR:\x1b[0m no handler\nwaiting\n") == "no handler"


def test_a_kill_takes_the_children_too(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    process = start_program([sys.executable, "-c", code], tmp_path / "log")
    deadline = time.monotonic() + 60
    while len(session_pids(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(session_pids(process.pid)) == 2
    kill_session(process)
    assert session_pids(process.pid) == []


def test_a_port_is_awaited_no_longer_than_its_process_lives(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = start_program([sys.executable, "-c", "pass"], tmp_path / "log")
    assert not wait_for_port(port, process, deadline_s=600.0)
    assert process.poll() is not None


def test_settings_have_the_budgets(tmp_path: Path) -> None:
    def options(system: System) -> str:
        return json.dumps(system.settings(tmp_path, 1000, 2000).connector)

    assert options(System()) == "null"
    for system in KVOffload(), KVOffload(for_faults=True):
        assert '"host_bytes": 1000' in options(system)
        assert '"disk_bytes": 2000' in options(system)
    for kind in VLLMOffloading, KVOffloadTier, SimpleCPU:
        assert '"cpu_bytes_to_use": 1000' in options(kind())
    assert '"bytes": 2000' in options(KVOffloadTier())
    assert '"disk_capacity_bytes": 2000' in options(SimpleCPU())


def test_each_engine_has_shared_memory_of_its_own(tmp_path: Path) -> None:
    system = VLLMOffloading()
    assert len({system.settings(tmp_path, 1, 1).leftovers[0][1] for _ in range(3)}) == 3
