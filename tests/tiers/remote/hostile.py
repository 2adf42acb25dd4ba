"""Stores that send what nobody has asked for, on real sockets, and the memory of those who listen."""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from kvoffload.abc import KVGroup
from kvoffload.cache.keys import make_offload_key
from kvoffload.host.pool import HostPool
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.remote import config as remote_config
from kvoffload.tiers.remote.config import RemoteTierConfig
from tests.tiers.made import closed_later

SLOT_BYTES = 64 << 10
NUM_BLOCKS = 16
MANY = b"x" * (1 << 20)
CHUNK = b"100000\r\n" + MANY + b"\r\n"
Talk = Callable[[socket.socket], None]
START_WAIT_S = 3.0
MOST_START_S = 60.0


class Hostile:
    """A server that treats every connection as ``talk`` says, until the peer closes it."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()
        closed_later(self)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            self._talk(connection)

    def close(self) -> None:
        self._listener.close()


BYTES_PER_S = 128 << 20
"""Of all endless answers together. Otherwise what a client takes between two looks at its memory would depend on how
long a busy machine lets it wait for the second."""
PACE = threading.Lock()


def endless(connection: socket.socket, data: bytes = MANY) -> None:
    while True:
        with PACE:
            time.sleep(len(data) / BYTES_PER_S)
        connection.sendall(data)


# Redis.

STRING = b"$8388608\r\n" + b"x" * (8 << 20) + b"\r\n"


SETUP = {b"CLIENT": b"+OK\r\n", b"CLUSTER": b"-ERR This instance has cluster support disabled\r\n"}
"""The answers of a server that is no Cluster to the commands with which a connection begins."""


def commands(connection: socket.socket) -> Iterator[list[bytes]]:
    """Yields the words of each command."""
    with connection.makefile("rb") as lines:
        while head := lines.readline():
            words = []
            for _ in range(int(head[1:])):
                words.append(lines.read(int(lines.readline()[1:])))
                lines.read(2)
            yield words


def endless_strings(connection: socket.socket) -> None:
    """Redis that answers everything but the setup with an array of long strings."""
    for words in commands(connection):
        connection.sendall(SETUP.get(words[0], b"*100000\r\n"))
        if words[0] not in SETUP:
            endless(connection, STRING)


# Object stores.

HEADERS = b'ETag: "0"\r\nLast-Modified: Sun, 01 Nov 2026 00:00:00 GMT\r\n'


def s3(answer: Callable[[str, dict[str, str], socket.socket], None]) -> Talk:
    """Returns a server that calls ``answer`` with the method and the headers of each request that is not about the
    object with which clients test it."""

    def talk(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            while line := lines.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while field := lines.readline().strip():
                    name, _, value = field.decode().partition(":")
                    headers[name.lower()] = value.strip()
                lines.read(int(headers.get("content-length", 0)))
                if "connection-test" in path:
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nx-amz-meta-kvoffload: test\r\n"
                    connection.sendall(head + HEADERS + b"\r\n0")
                else:
                    answer(method, headers, connection)

    return talk


def s3_has(body: bytes, error: bytes = b"") -> Talk:
    """Has every object, and answers reads with ``body`` for ever, behind the ``error`` if there is one."""

    def answer(method: str, headers: dict[str, str], connection: socket.socket) -> None:
        size = SLOT_BYTES + 128
        if method == "HEAD":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n" % (size, HEADERS))
            return
        begin, end = headers.get("range", f"bytes=0-{size - 1}")[6:].split("-")
        head = b"HTTP/1.1 206 Partial\r\nContent-Length: 100000000000\r\nContent-Range: bytes %b-%b/%d\r\n%b\r\n"
        connection.sendall(error or head % (begin.encode(), end.encode(), size, HEADERS))
        endless(connection, body)

    return s3(answer)


def s3_endless_headers(method: str, headers: dict[str, str], connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    endless(connection, b"x-amz-meta-a: " + b"y" * 4000 + b"\r\n")


S3: dict[str, Talk] = {
    "a body": s3_has(MANY),
    "an error in chunks": s3_has(CHUNK, b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "headers": s3(s3_endless_headers),
}


# Those who listen.


def private_bytes(pid: int | str) -> int:
    """Returns the memory of a process that it shares with no other; 0 if there is no such process."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def clients() -> Iterator[int]:
    """Yields the processes of clients that this process has started. Tests may have others."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in map(int, (task / "children").read_text().split()):
                if b"kvoffload.tiers.remote.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    yield pid


class Victim:
    """A server with a tier on a store, whose memory and that of its client's process are measured all the time."""

    def __init__(self, config: RemoteTierConfig) -> None:
        self.host = HostPool(2 * NUM_BLOCKS, SLOT_BYTES)
        self.before = private_bytes("self")
        self.peak = self.client_peak = 0
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._measure, daemon=True)
        self._watch.start()
        context = TierContext([self.host.data], "5e" * 32, [self.host.handle()], groups=[KVGroup(16)])
        with mock.patch.object(remote_config, "START_WAIT_S", START_WAIT_S):
            self.tier = config.open(context)

    def _measure(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak = max(self.peak, private_bytes("self") - self.before)
            for pid in clients():
                self.client_peak = max(self.client_peak, private_bytes(pid))

    def serve(self, seconds: float) -> None:
        """Asks for blocks, and reads them if there are any, once the client's process runs."""
        deadline = time.monotonic() + MOST_START_S
        while not self.client_peak:
            assert time.monotonic() < deadline, "no process of a client was measured"
            time.sleep(0.01)
        deadline, number = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            number += 1
            keys = [make_offload_key(bytes([number % 256, i]) * 16, 0) for i in range(NUM_BLOCKS)]
            self.tier.contains(keys)
            self.tier.read(keys, np.arange(NUM_BLOCKS))
            for _ in range(20):
                self.tier.wait(0.005)
                assert not any(result.ok for result in self.tier.poll() if result.is_read)

    def close(self) -> None:
        self.tier.close()
        self._is_over.set()
        self._watch.join()
        self.host.close()
