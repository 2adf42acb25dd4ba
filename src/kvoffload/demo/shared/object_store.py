"""An object store for the demo: moto in a process of its own, which answers as Amazon S3 does."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.demo.shared.processes import HOST, CommandedProcess, free_ports
from kvoffload.demo.shared.stores import ServerStore, StoreMissingError
from kvoffload.tiers.object_store.config import check_installed

BUCKET = "kvoffload-demo"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}


def missing() -> str | None:
    """Returns why no object store can run here and the line to run, or None if one can."""
    try:
        check_installed()
    except ConfigError as error:
        return str(error).partition(": ")[2]
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        return "moto is not installed; run pip install 'moto[server]'"
    return None


class ObjectStore(ServerStore):
    """moto with one bucket, on a free port. Its log goes to ``logs``. Servers that are started while it runs have
    credentials in their environment."""

    name = "object_store"
    title = "an object store (moto)"
    processes = "moto was"
    how_full = "every PUT was answered with 507 QuotaExceeded, in front of moto"
    how_empty = "every object was deleted"
    how_killed = ", empty,"

    def __init__(self, logs: Path) -> None:
        super().__init__()
        problem = missing()
        if problem is not None:
            raise StoreMissingError(problem)
        self._logs = logs
        (self._port,) = free_ports(1)
        self._process: CommandedProcess | None = None
        self._environment = {name: os.environ.get(name) for name in CREDENTIALS}
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        os.environ.update(CREDENTIALS)

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "url": f"s3://{BUCKET}/cache", "endpoint": f"http://{HOST}:{self._port}"}

    def start(self) -> None:
        """Starts it, if it does not run, with an empty bucket."""
        if self._process is None:
            self._process = CommandedProcess(
                "moto",
                ["-m", "kvoffload.demo.shared.s3", str(self._port), BUCKET],
                self._logs / "object-store.log",
            )

    def command(self, do: str) -> int:
        """Runs a command of ``kvoffload.demo.shared.s3``."""
        assert self._process is not None
        return self._process.command({"do": do})

    def corrupt(self) -> int:
        return self.command("corrupt")

    def exchange(self) -> int:
        return self.command("exchange")

    def fill(self) -> int:
        return self.command("fill")

    def drain(self) -> int:
        return self.command("drain")

    def clear(self) -> int:
        return self.command("empty")

    def pids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def kill(self) -> None:
        """Kills what runs."""
        if self._process is not None:
            self._process.kill()
        self._process = None

    def close(self) -> None:
        super().close()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
