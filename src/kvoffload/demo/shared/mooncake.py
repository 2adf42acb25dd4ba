"""A Mooncake Store for the demo: its master from the wheel, and a process that lends memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import select
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.demo.errors import DemoError
from kvoffload.demo.shared.stores import ServerStore, StoreMissingError
from kvoffload.tiers.mooncake.config import check_installed

HOST = "127.0.0.1"
WHEEL = "pip install --force-reinstall mooncake-transfer-engine-non-cuda"
SEGMENT_BYTES = 1 << 30
CLIENT_TTL_S = 2
"""The master forgets the memory of a process that it has not heard of for this time."""
START_DEADLINE_S = 60.0
REPLY_DEADLINE_S = 120.0


def missing() -> str | None:
    """Returns why no Mooncake Store can run here and the line to run, or None if one can."""
    try:
        check_installed()
    except ConfigError as error:
        return str(error).partition(": ")[2]
    if not _master().is_file():
        return f"the wheel has no mooncake_master; run {WHEEL}"
    return None


def _master() -> Path:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("mooncake_master")


def free_ports(count: int) -> list[int]:
    """Returns ports that no process uses now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


class MooncakeStore(ServerStore):
    """``mooncake_master`` and a process with the memory, on free ports. Logs go to ``logs``."""

    name = "mooncake"
    title = "Mooncake Store"
    processes = "mooncake_master and the process with the memory were"
    how_full = "a third client put values until the store was full"
    how_empty = "both processes were killed and started again"

    def __init__(self, logs: Path) -> None:
        super().__init__()
        problem = missing()
        if problem is not None:
            raise StoreMissingError(problem)
        self._logs = logs
        self._port, self._admin_port = free_ports(2)
        self._master: subprocess.Popen[bytes] | None = None
        self._memory: subprocess.Popen[str] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "master": self.address}

    def start(self) -> None:
        """Starts what does not run."""
        if self._master is None:
            with (self._logs / "mooncake-master.log").open("ab") as log:
                self._master = subprocess.Popen(
                    [
                        str(_master()),
                        f"-rpc_port={self._port}",
                        f"-metrics_port={self._admin_port}",
                        f"-client_ttl={CLIENT_TTL_S}",
                    ],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_for_master()
        if self._memory is None:
            with (self._logs / "mooncake-memory.log").open("ab") as log:
                self._memory = subprocess.Popen(
                    [sys.executable, "-m", "kvoffload.demo.shared.memory", self.address, str(SEGMENT_BYTES)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            self._reply(START_DEADLINE_S)

    def _wait_for_master(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            assert self._master is not None
            try:
                self._admin("/health")
                return
            except OSError as error:
                if self._master.poll() is not None or time.monotonic() > deadline:
                    log = self._logs / "mooncake-master.log"
                    raise DemoError(f"mooncake_master does not start ({error}); its log is {log}") from error
            time.sleep(0.1)

    def _admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{HOST}:{self._admin_port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def keys(self) -> list[str]:
        """Returns the keys of kvoffload's values."""
        return sorted(key for key in self._admin("/get_all_keys").split() if key.startswith("kvoffload/"))

    def _reply(self, deadline_s: float) -> str:
        assert self._memory is not None
        assert self._memory.stdout is not None
        if not select.select([self._memory.stdout], [], [], deadline_s)[0] or not (
            line := self._memory.stdout.readline()
        ):
            raise DemoError(f"the process with Mooncake's memory fails; see {self._logs / 'mooncake-memory.log'}")
        return line.strip()

    def _command(self, do: str) -> int:
        assert self._memory is not None
        assert self._memory.stdin is not None
        self._memory.stdin.write(json.dumps({"do": do, "keys": self.keys()}) + "\n")
        self._memory.stdin.flush()
        return int(self._reply(REPLY_DEADLINE_S))

    def corrupt(self) -> int:
        return self._command("corrupt")

    def exchange(self) -> int:
        return self._command("exchange")

    def fill(self) -> int:
        return self._command("fill")

    def drain(self) -> int:
        return self._command("empty")

    def pids(self) -> list[int]:
        return [child.pid for child in (self._master, self._memory) if child is not None]

    def kill(self) -> None:
        """Kills what runs."""
        for child in (self._memory, self._master):
            if child is not None:
                child.kill()
                child.wait()
                for pipe in (child.stdin, child.stdout):
                    if pipe is not None:
                        with contextlib.suppress(OSError):
                            pipe.close()
        self._memory = self._master = None
