"""A Mooncake Store for tests: a real master, and a process that contributes memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.process import free_ports
from kvoffload.abc import ConfigError
from kvoffload.tiers.mooncake.config import check_installed
from tests.tiers.remote.rig import pause

START_DEADLINE_S = 60.0


def missing() -> str:
    """Returns what the tests with Mooncake Store lack here; an empty string if nothing."""
    try:
        check_installed()
    except ConfigError as error:
        return str(error)
    return ""


needs_mooncake = pytest.mark.skipif(bool(missing()), reason=missing())


class Master:
    """The store's master on free ports."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self._metrics_port = free_ports(2)
        self._log = folder / "master.log"
        self._options = options
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        hosts = ("-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1")
        ports = (f"-rpc_port={self.port}", f"-metrics_port={self._metrics_port}")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([program, *hosts, *ports, *self._options], stdout=log, stderr=log)
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self._log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.02)
        raise AssertionError("the master does not answer")

    def ask(self, method: str, path: str, body: object = None) -> str:
        """Returns the answer of the master's HTTP interface."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._metrics_port}{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        pause(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


SEGMENT = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextlib.contextmanager
def segment(master: Master, nbytes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process that contributes ``nbytes`` to the store."""
    command = [sys.executable, "-c", SEGMENT, master.address, str(nbytes)]
    quiet = {**os.environ, "GLOG_minloglevel": "3"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()
