"""Processes in sessions of their own: started, asked under deadlines, and killed with all that they have started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
START_DEADLINE_S = 600.0
"""Time for vLLM to start, load the model and warm up. Large models take minutes."""
REPLY_DEADLINE_S = 120.0
EXIT_DEADLINE_S = 30.0
KILL_DEADLINE_S = 300.0
LOG_LINES_SHOWN = 15


class DemoError(Exception):
    """The demo could not run. The message tells the user why, and what to do."""


class EngineError(DemoError):
    """A process did not answer."""


class RaisedError(EngineError):
    """A command has raised. ``error`` is its type and message."""

    def __init__(self, message: str, error: str) -> None:
        super().__init__(message)
        self.error = error


class SilentError(EngineError):
    """A process was silent past a deadline."""


class EndedError(EngineError):
    """A process has ended."""


class Leader(Protocol):
    """The part of ``subprocess.Popen`` that is used of a process that leads a session."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Process(Leader, Protocol):
    """The same of a process that is asked."""

    stdin: IO[bytes] | None


Start = Callable[[Sequence[str], int, Path, Mapping[str, str]], Process]


def start_process(command: Sequence[str], replies: int, log: Path, environment: Mapping[str, str]) -> Process:
    """Starts ``command`` in a session of its own, with a pipe as its input, its output in ``log``, and the descriptor
    ``replies`` open."""
    with log.open("ab") as log_file:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            pass_fds=(replies,),
            start_new_session=True,
            env=environment,
        )


def with_demo(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environment`` for a process that finds the demo, the tests and the benchmarks, none of which are
    installed."""
    paths = [str(ROOT), environment.get("PYTHONPATH")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class CommandedProcess:
    """A Python program that carries out one command after the other: a line of JSON on its input is a command, a line
    on the descriptor in its last argument the reply. It sends one when it has started.

    ``arguments`` are those of ``python``. Each method raises EngineError, with the end of ``log``, if the program
    fails or is silent past a deadline. As a context manager it leaves no process behind.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        start: Start = start_process,
    ) -> None:
        self.log = log
        reading, writing = os.pipe()
        self._replies = os.fdopen(reading, "rb", buffering=0)
        self._buffer = b""
        environment = with_demo(os.environ if environment is None else environment)
        try:
            self._child = start([python, *arguments, str(writing)], writing, log, environment)
        except BaseException:
            self._replies.close()
            raise
        finally:
            os.close(writing)
        if config is not None:
            self._write(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    def call(self, do: str, deadline_s: float | None = None, **arguments: Any) -> Any:
        """Carries out the command ``do`` and returns the reply."""
        self.send(do, **arguments)
        return self.receive(REPLY_DEADLINE_S if deadline_s is None else deadline_s)

    def send(self, do: str, **arguments: Any) -> None:
        """Sends a command. Its reply must be received, unless the process is killed."""
        self._write({"do": do, **arguments})

    def receive(self, deadline_s: float) -> Any:
        until = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            if not select.select([self._replies], [], [], max(0.0, until - time.monotonic()))[0]:
                raise SilentError(self._failure(f"silent for {deadline_s:.0f} s"))
            chunk = os.read(self._replies.fileno(), 1 << 16)
            if not chunk:
                raise EndedError(self._failure("it ended too early"))
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if isinstance(reply, dict) and reply.keys() == {"error"}:
            raise RaisedError(self._failure(reply["error"]), reply["error"])
        return reply

    def status(self, deadline_s: float = 0.0) -> int | None:
        """Waits for the end. Returns the exit status, negative for a signal, or None past the deadline."""
        try:
            return self._child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, deadline_s: float = EXIT_DEADLINE_S) -> int | None:
        """Closes the input, at which the program ends. Returns its exit status, None past the deadline."""
        self._close_input()
        return self.status(deadline_s)

    def kill(self) -> None:
        """Kills every process of the session. May be called twice."""
        kill_session(self._child)
        self._close_input()
        self._replies.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        # A process that has ended is noticed when it does not reply.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()

    def _close_input(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()

    def _failure(self, what: str) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join([f"{what}; the end of its log, {self.log}:", *(f"  {line}" for line in lines)])


class Served:
    """What answers the commands of a CommandedProcess: each public method is one, with its arguments, and what it
    returns is the reply."""

    def ready(self) -> Any:
        """Returns what is sent when this has started."""
        return None

    def step(self) -> bool:
        """Does some of the work that is left, while there is no command. Returns whether there was any."""
        return False

    def close(self) -> None:
        """Is called at the end."""


def serve(make: Callable[..., Served]) -> None:
    """The other side of a CommandedProcess: ``make`` gets the fields of the first line of standard input, and what it
    returns carries out the command ``{"do": NAME, ...}`` of each further line.

    Each reply is a line of JSON to the open file descriptor that the program's last argument names; standard output and
    error are for the log. ``{"error": ...}`` says what was raised, after which the program ends.
    """
    out = os.fdopen(int(sys.argv[-1]), "w", encoding="utf-8", buffering=1)
    served = None
    try:
        served = make(**json.loads(sys.stdin.readline()))
        out.write(json.dumps(served.ready()) + "\n")
        while True:
            while not select.select([sys.stdin], [], [], 0)[0] and served.step():
                pass
            line = sys.stdin.readline()
            if not line:
                return
            command = json.loads(line)
            out.write(json.dumps(getattr(served, command.pop("do"))(**command)) + "\n")
    except BaseException as error:
        out.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise
    finally:
        # Whoever has started this process may have ended without another command.
        if served is not None:
            served.close()


def start_program(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts a program without input in a session of its own. Its output is appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )


def free_ports(count: int) -> list[int]:
    """Returns ports that no process uses now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def session_pids(session: int) -> list[int]:
    """Returns the ids of the running processes of a session, in whatever process group they are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return sorted(found)


def kill_session(process: Leader, deadline_s: float = KILL_DEADLINE_S) -> None:
    """Kills every process in the session that ``process`` leads, and waits until none is left: memory may take a while
    to return. Raises EngineError past the deadline."""
    until = time.monotonic() + deadline_s
    # A process that has only just been forked does not lead a session yet.
    process.kill()
    while pids := session_pids(process.pid):
        if time.monotonic() > until:
            raise EngineError(f"the processes {pids} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait(max(0.0, until - time.monotonic()))
