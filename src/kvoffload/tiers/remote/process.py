"""ProcessChannel: the client of a store in a process of its own."""

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

from kvoffload.printable import printable
from kvoffload.tiers.limited_log import LimitedLog
from kvoffload.tiers.remote.link import ChannelState, StoreChannel
from kvoffload.tiers.remote.messages import Kind, MessageError, Response, Setup, StoreRequest, Unframer, frame

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


class ProcessChannel(StoreChannel):
    """Starts ``kvoffload.tiers.remote.child`` with ``setup`` and talks to it over a socket, without blocking.

    The process maps the host pools, runs the client and computes checksums. It ends with this process, however that
    ends, and gets no signal of its terminal. ``name`` is for the log.
    """

    def __init__(self, setup: Setup, name: str) -> None:
        self._setup = setup
        self._name = name
        self._child: _Child | None = None
        self._state = ChannelState.DOWN
        self._unframer = Unframer()
        self._unsent = bytearray()
        self._notes = LimitedLog(logger, time.monotonic)
        self._output = LimitedLog(logger, time.monotonic)
        self._closed = False

    @property
    def state(self) -> ChannelState:
        return self._state

    @property
    def pid(self) -> int | None:
        """The process id, None if there is no process yet or any more."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        if self._closed or self._state is not ChannelState.DOWN:
            return
        self._unframer, self._unsent = Unframer(), bytearray()
        try:
            self._child = _Child(self._name, self._output)
        except (OSError, RuntimeError) as error:
            self._notes.warning(
                "%s: the store's client cannot be started (%s); blocks of the store are misses until a start succeeds",
                self._name,
                error,
            )
            return
        self._state = ChannelState.STARTING
        self._unsent += frame(Kind.SETUP, self._setup.pack())
        self._send()

    def submit(self, request: StoreRequest) -> bool:
        if self._state is not ChannelState.READY or len(self._unsent) > MAX_UNSENT_BYTES:
            return False
        self._unsent += frame(Kind.REQUEST, request.pack())
        self._send()
        return True

    def _send(self) -> None:
        if self._child is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._child.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # The process ended; ``poll`` notices it.

    def poll(self) -> list[Response]:
        if self._child is None:
            return []
        # In this order: after its end, all that the process sent can be received.
        has_ended = self._child.has_ended()
        responses = self._receive() if self._state is not ChannelState.ENDING else []
        if has_ended:
            self._child.socket.close()
            self._child, self._state = None, ChannelState.DOWN
        elif self._unsent:
            self._send()
        return responses

    def _receive(self) -> list[Response]:
        responses: list[Response] = []
        child = self._child
        while child is not None:
            try:
                data = child.socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                # The process closed its end, and may hang before it exits.
                if self._state is not ChannelState.ENDING and not self._closed:
                    self.kill()
                break
            try:
                for kind, body in self._unframer.feed(data):
                    if kind is Kind.RESPONSE:
                        responses.append(Response.unpack(body))
                    elif kind is Kind.READY:
                        self._state = ChannelState.READY
                    elif kind is Kind.NOTE:
                        # The text may come from a peer of the client.
                        notes = [printable(line, MAX_LINE_BYTES) for line in body.split(b"\n", MAX_NOTES)[:MAX_NOTES]]
                        self._notes.warning("%s: %s", self._name, "\n".join(notes))
            except MessageError as error:
                self._notes.warning(
                    "%s: malformed message of the store's client (%s); its process is killed and restarts",
                    self._name,
                    error,
                )
                self.kill()
                break
        return responses

    def wait(self, timeout_s: float) -> None:
        if self._child is None:
            time.sleep(timeout_s)
            return
        poller = select.poll()
        poller.register(self._child.socket, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._state = ChannelState.ENDING

    def close(self, timeout_s: float) -> bool:
        """Lets the process finish the requests under way and leave the store; kills it after ``timeout_s``. Responses
        are left for ``poll``."""
        self._closed = True
        if self._child is None:
            return True
        if self._state is ChannelState.READY:
            self._child.socket.shutdown(socket.SHUT_WR)
        else:
            self._child.kill()
        if not self._child.wait(timeout_s):
            self._child.kill()
        return self._child.wait(KILL_DEADLINE_S)


class _Child:
    """One process, its socket, and a thread that starts it and logs its output.

    Starting a process takes milliseconds, and longer if the interpreter is on a medium that is slow. The thread lives
    as long as the process, which the kernel ends when the thread that has started it ends.
    """

    def __init__(self, name: str, log: LimitedLog) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._name = name
        self._log = log
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._starting = threading.Lock()
        """Held while ``_process`` is assigned, so that a process that is killed meanwhile does not stay."""
        self._started = threading.Event()
        """Set when there is a process, or there will be none."""
        thread = threading.Thread(target=self._run, args=(theirs,), name="kvoffload-remote-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.socket.close()
            theirs.close()
            raise

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def has_ended(self) -> bool:
        if not self._started.is_set():
            return False
        return self._process is None or self._process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end of the process for up to ``timeout_s``. Returns whether it ended."""
        deadline = time.monotonic() + timeout_s
        if not self._started.wait(timeout_s):
            return False
        try:
            if self._process is not None:
                self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        # A forked copy of the engine has this object too, and must not end the process of the original.
        if os.getpid() == self._owner:
            with self._starting:
                self._is_killed = True
                if self._process is not None:
                    self._process.kill()

    def _run(self, theirs: socket.socket) -> None:
        try:
            with theirs:
                process = self._start(theirs.fileno())
        except Exception as error:
            self._log.warning(
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
                self._log.warning("%s: output of the store's client: %s", self._name, last[-1])
        # Reaps the process even if the channel is not polled any more.
        process.wait()
        if process.returncode and last:
            logger.warning(
                "kvoffload: %s: the store's client ended with an error; its last output:\n%s",
                self._name,
                "\n".join(last),
            )
