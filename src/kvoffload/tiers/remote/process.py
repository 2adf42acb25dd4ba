"""ChildProcess: the client of a store in a process of its own."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from kvoffload.printable import printable
from kvoffload.tiers.limited_log import LimitedLog
from kvoffload.tiers.remote.link import StoreProcess
from kvoffload.tiers.remote.messages import Kind, Response, Setup, StoreRequest, Unframer, frame

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 8 << 20
"""Messages that the process has not taken yet."""
MAX_LINE_BYTES = 2000
"""A longer line of the process's output is cut there."""
MAX_NOTES = 64
"""Lines of one note."""
LAST_LINES = 20
"""Lines of output that are logged when the process ends with an error."""
RECEIVE_BYTES = 1 << 18
KILL_DEADLINE_S = 2.0
"""How long ``close`` waits for a process that was killed."""


def starter(setup: Setup, name: str) -> Callable[[], ChildProcess]:
    """Returns a function that starts a process of the client. ``name`` is for the log, which all of them share."""
    notes, output = LimitedLog(logger, time.monotonic), LimitedLog(logger, time.monotonic)
    return lambda: ChildProcess(setup, name, notes, output)


class ChildProcess(StoreProcess):
    """Starts ``kvoffload.tiers.remote.child`` with ``setup`` and talks to it over a socket, without blocking.

    The process maps the host pools, runs the client and computes checksums. It ends with this process, however that
    ends, and gets no signal of its terminal. ``notes`` and ``output`` are the logs for what it says, under ``name``.

    A thread starts it, which takes milliseconds, and longer if the interpreter is on a medium that is slow, and logs
    its output. The thread lives as long as the process, which the kernel ends when the thread that has started it ends.
    """

    is_ready = False

    def __init__(self, setup: Setup, name: str, notes: LimitedLog, output: LimitedLog) -> None:
        self._name = name
        self._notes, self._output = notes, output
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._starting = threading.Lock()
        """Held while ``_process`` is assigned, so that a process that is killed meanwhile does not stay."""
        self._started = threading.Event()
        """Set when there is a process, or there will be none."""
        self._unframer = Unframer()
        self._unsent = bytearray()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        thread = threading.Thread(target=self._run, args=(theirs,), name="kvoffload-remote-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._socket.close()
            theirs.close()
            raise
        self._send(Kind.SETUP, setup.pack())

    @property
    def pid(self) -> int | None:
        """The process id, None if there is no process yet."""
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._started.is_set() and (self._process is None or self._process.poll() is not None)

    def submit(self, request: StoreRequest) -> bool:
        if len(self._unsent) > MAX_UNSENT_BYTES:
            return False
        self._send(Kind.REQUEST, request.pack())
        return True

    def _send(self, kind: Kind, body: bytes) -> None:
        self._unsent += frame(kind, body)
        self._send_on()

    def _send_on(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # The process ended.

    def poll(self) -> list[Response]:
        responses: list[Response] = []
        self._send_on()
        while not self._is_killed:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return responses
            except OSError:
                data = b""
            if not data:
                # The process closed its end, and may hang before it exits.
                self.kill()
                break
            for kind, body in self._unframer.feed(data):
                if kind is Kind.RESPONSE:
                    responses.append(Response.unpack(body))
                elif kind is Kind.READY:
                    self.is_ready = True
                elif kind is Kind.NOTE:
                    # The text may come from a peer of the client.
                    notes = [printable(line, MAX_LINE_BYTES) for line in body.split(b"\n", MAX_NOTES)[:MAX_NOTES]]
                    self._notes.warning("%s: %s", self._name, "\n".join(notes))
        self._socket.close()
        return responses

    def wait(self, timeout_s: float) -> None:
        if self._is_killed:
            self._has_ended_within(timeout_s)
            return
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def kill(self) -> None:
        # A forked copy of the engine has this object too, and must not end the process of the original.
        if os.getpid() == self._owner:
            with self._starting:
                self.is_ready, self._is_killed = False, True
                if self._process is not None:
                    self._process.kill()

    def close(self, timeout_s: float) -> bool:
        """Responses are left for ``poll``."""
        if self.is_ready:
            self._socket.shutdown(socket.SHUT_WR)
        else:
            self.kill()
        if not self._has_ended_within(timeout_s):
            self.kill()
        return self._has_ended_within(KILL_DEADLINE_S)

    def _has_ended_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if not self._started.wait(timeout_s):
            return False
        try:
            if self._process is not None:
                self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _run(self, theirs: socket.socket) -> None:
        try:
            with theirs:
                process = self._start(theirs.fileno())
        except Exception as error:
            self._output.warning(
                "%s: the store's client cannot be started (%s); blocks of the store are misses until a start succeeds",
                self._name,
                error,
            )
        else:
            with self._starting:
                self._process = process
                if self._is_killed:
                    process.kill()
        finally:
            self._started.set()
        if self._process is not None:
            self._read_output(self._process)

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "kvoffload.tiers.remote.child", str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[descriptor],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        """Logs the output of the process, a line now and then, and its last lines. So the process never waits for a
        reader."""
        output = process.stdout
        if output is None:
            return
        last: deque[str] = deque(maxlen=LAST_LINES)
        with output:
            while line := output.readline(MAX_LINE_BYTES):
                last.append(printable(line.rstrip(), MAX_LINE_BYTES))
                self._output.warning("%s: output of the store's client: %s", self._name, last[-1])
        # Reaps the process even if nobody polls it any more.
        process.wait()
        if process.returncode and last:
            logger.warning(
                "kvoffload: %s: the store's client ended with an error; its last output:\n%s",
                self._name,
                "\n".join(last),
            )
