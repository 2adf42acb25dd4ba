"""An object store for the demo: moto in a process of its own, which answers as Amazon S3 does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.demo.errors import DemoError
from kvoffload.demo.shared.mooncake import free_ports
from kvoffload.demo.shared.s3 import HOST
from kvoffload.demo.shared.stores import STALL_S, Fault, Store, StoreMissingError, Throttle, send
from kvoffload.tiers.object_store.config import check_installed

BUCKET = "kvoffload-demo"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}
REPLY_DEADLINE_S = 120.0


def missing() -> str | None:
    """Returns why no object store can run here and the line to run, or None if one can."""
    try:
        check_installed()
    except ConfigError as error:
        return str(error).partition(": ")[2]
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        return "moto is not installed; run pip install 'moto[server]'"
    return None


class ObjectStore(Store):
    """moto with one bucket, on a free port. Its log goes to ``logs``. Servers that are started while it runs have
    credentials in their environment."""

    name = "object_store"
    title = "an object store (moto)"

    def __init__(self, logs: Path) -> None:
        problem = missing()
        if problem is not None:
            raise StoreMissingError(problem)
        self._logs = logs
        (self._port,) = free_ports(1)
        self._process: subprocess.Popen[str] | None = None
        self._throttle: Throttle | None = None
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
            with (self._logs / "object-store.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "kvoffload.demo.shared.s3", str(self._port), BUCKET],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            self._reply()

    def _reply(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], REPLY_DEADLINE_S)[0] or not (
            line := self._process.stdout.readline()
        ):
            raise DemoError(f"moto fails; see {self._logs / 'object-store.log'}")
        return line.strip()

    def command(self, do: str) -> int:
        """Runs a command of ``kvoffload.demo.shared.s3``."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do}) + "\n")
        self._process.stdin.flush()
        return int(self._reply())

    def corrupt(self) -> int:
        return self.command("corrupt")

    def faults(self) -> Sequence[Fault]:
        return (
            Fault(
                f"stalled {STALL_S:.0f} s",
                "moto was stopped (SIGSTOP)",
                lambda servers: send(self._pids(), signal.SIGSTOP),
                lambda servers: send(self._pids(), signal.SIGCONT),
                STALL_S,
            ),
            Fault(
                "ten times slower",
                "moto ran for a tenth of the time (SIGSTOP and SIGCONT every 50 ms)",
                lambda servers: self._slow_down(),
                lambda servers: self._speed_up(),
            ),
            Fault(
                "full",
                "every PUT was answered with 507 QuotaExceeded, in front of moto",
                lambda servers: self.command("fill"),
                lambda servers: self.command("drain"),
            ),
            Fault("restarted empty", "every object was deleted", lambda servers: self.command("empty")),
            Fault(
                "killed",
                "moto was killed (SIGKILL), and started again, empty, after the requests",
                lambda servers: self.kill(),
                lambda servers: self.start(),
            ),
            # These come last, because corrupt blocks that are found pause the tier again and again, longer each time.
            Fault("answering garbage", "bytes of all objects were changed", lambda servers: self.command("corrupt")),
            Fault(
                "other keys' values",
                "each object got the bytes of the next",
                lambda servers: self.command("exchange"),
            ),
        )

    def _pids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def _slow_down(self) -> None:
        self._throttle = Throttle(self._pids())

    def _speed_up(self) -> None:
        if self._throttle is not None:
            self._throttle.close()
            self._throttle = None

    def kill(self) -> None:
        """Kills what runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._process = None

    def close(self) -> None:
        self._speed_up()
        self.kill()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
