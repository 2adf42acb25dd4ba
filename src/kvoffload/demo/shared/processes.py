"""Processes that the stores of the demo consist of."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.demo.errors import DemoError

HOST = "127.0.0.1"
REPLY_DEADLINE_S = 120.0


def free_ports(count: int) -> list[int]:
    """Returns ports that no process uses now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def kill(process: subprocess.Popen[Any]) -> None:
    """Kills ``process`` and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class CommandedProcess:
    """A Python program that prints one line when it has started, and one number for each command, a line of JSON.

    ``arguments`` are those of ``python``. ``title`` names the program in errors; its log is the file ``log``. Raises
    DemoError if it does not start in time.
    """

    def __init__(self, title: str, arguments: Sequence[str], log: Path) -> None:
        self._title = title
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        try:
            self._reply()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def command(self, request: object) -> int:
        """Returns the answer to ``request``. Raises DemoError if there is none in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure() from error
        return int(self._reply())

    def _reply(self) -> str:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], REPLY_DEADLINE_S)[0] or not (line := output.readline()):
            raise self._failure()
        return line.strip()

    def _failure(self) -> DemoError:
        return DemoError(f"{self._title} fails; see {self._log}")

    def kill(self) -> None:
        kill(self._process)
