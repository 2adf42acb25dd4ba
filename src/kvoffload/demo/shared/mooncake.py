"""A Mooncake Store for the demo: its master from the wheel, and a process that lends memory."""

from __future__ import annotations

import importlib.util
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.demo.errors import DemoError
from kvoffload.demo.shared.processes import HOST, CommandedProcess, free_ports, kill
from kvoffload.demo.shared.stores import ServerStore, StoreMissingError
from kvoffload.tiers.mooncake.config import check_installed

WHEEL = "pip install --force-reinstall mooncake-transfer-engine-non-cuda"
SEGMENT_BYTES = 1 << 30
CLIENT_TTL_S = 2
"""The master forgets the memory of a process that it has not heard of for this time."""
START_DEADLINE_S = 60.0


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
        self._memory: CommandedProcess | None = None
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
            self._memory = CommandedProcess(
                "the process with Mooncake's memory",
                ["-m", "kvoffload.demo.shared.memory", self.address, str(SEGMENT_BYTES)],
                self._logs / "mooncake-memory.log",
            )

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

    def _command(self, do: str) -> int:
        assert self._memory is not None
        return self._memory.command({"do": do, "keys": self.keys()})

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
        if self._memory is not None:
            self._memory.kill()
        if self._master is not None:
            kill(self._master)
        self._memory = self._master = None
