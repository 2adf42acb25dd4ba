"""Stores that send what nobody has asked for, on real sockets, and the memory of those who listen."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
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

SLOT_BYTES = 64 << 10
NUM_BLOCKS = 16
MANY = b"x" * (1 << 20)
CHUNK = b"100000\r\n" + MANY + b"\r\n"
Talk = Callable[[socket.socket], None]
START_WAIT_S = 3.0


class Hostile:
    """A server that treats every connection as ``talk`` says, until the peer closes it."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            self._talk(connection)

    def close(self) -> None:
        self._listener.close()


def endless(connection: socket.socket, data: bytes = MANY) -> None:
    while True:
        connection.sendall(data)


# Redis.


def redis(answer: Callable[[list[bytes], socket.socket], None]) -> Talk:
    """Returns a server that calls ``answer`` with the words of each command but CLIENT."""

    def talk(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            while head := lines.readline():
                words = []
                for _ in range(int(head[1:])):
                    words.append(lines.read(int(lines.readline()[1:])))
                    lines.read(2)
                if words[0] == b"CLIENT":
                    connection.sendall(b"+OK\r\n")
                else:
                    answer(words, connection)

    return talk


def redis_says(data: bytes, then: bytes = MANY, at_setup: bool = False) -> Talk:
    """Answers with ``data`` and then ``then`` for ever."""

    def answer(words: list[bytes], connection: socket.socket) -> None:
        if words[0] == b"CLUSTER" and not at_setup:
            connection.sendall(b"-ERR This instance has cluster support disabled\r\n")
            return
        if words[0] == b"EXISTS" and data.startswith(b"$"):
            connection.sendall(b":1\r\n")
            return
        connection.sendall(data)
        endless(connection, then)

    return redis(answer)


STRING = b"$8388608\r\n" + b"x" * (8 << 20) + b"\r\n"
numbers = itertools.count()


def redis_moves(words: list[bytes], connection: socket.socket) -> None:
    if words[0] == b"CLUSTER":
        port = connection.getsockname()[1]
        node = b"*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port
        connection.sendall(b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node)
    else:
        n = next(numbers)
        connection.sendall(b"-MOVED 1 127.%d.%d.%d:7000\r\n" % (n >> 16 & 255, n >> 8 & 255, n & 255))


REDIS: dict[str, Talk] = {
    "an array of strings": redis_says(b"*100000\r\n", STRING),
    "a map of strings": redis_says(b"*100000\r\n", STRING, at_setup=True),
    "a map of short strings": redis_says(b"*131072\r\n", b"$1\r\nx\r\n" * 9999, at_setup=True),
    "nested arrays": redis_says(b"", b"*100\r\n" * 9999, at_setup=True),
    "a line": redis_says(b"+"),
    "errors": redis_says(b"", b"-ERR " + b"y" * 9000 + b"\r\n"),
    "a value": redis_says(b"$536870912\r\n"),
    "garbage": redis_says(os.urandom(9999), os.urandom(99999)),
    "other addresses": redis(redis_moves),
}


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


def s3_has(body: Callable[[socket.socket], None], note: bytes = b"", error: bytes = b"") -> Talk:
    """Has every object, and answers reads with ``body`` for ever, behind the ``error`` if there is one."""

    def answer(method: str, headers: dict[str, str], connection: socket.socket) -> None:
        size = SLOT_BYTES + 128
        if method == "HEAD":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b%b\r\n" % (size, HEADERS, note))
            return
        if error:
            connection.sendall(error)
            body(connection)
        begin, end = headers.get("range", f"bytes=0-{size - 1}")[6:].split("-")
        connection.sendall(
            b"HTTP/1.1 206 Partial\r\nContent-Length: 100000000000\r\nContent-Range: bytes %b-%b/%d\r\n%b\r\n"
            % (begin.encode(), end.encode(), size, HEADERS)
        )
        body(connection)

    return s3(answer)


def s3_fails(head: bytes, body: bytes = MANY) -> Talk:
    def answer(method: str, headers: dict[str, str], connection: socket.socket) -> None:
        connection.sendall(head)
        endless(connection, body)

    return s3(answer)


S3: dict[str, Talk] = {
    "a body": s3_has(endless),
    "the body of an error": s3_has(endless, error=b"HTTP/1.1 400 Bad\r\nContent-Length: 3000000000\r\n\r\n"),
    "an error in chunks": s3_has(
        lambda connection: endless(connection, CHUNK),
        error=b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n",
    ),
    "headers": s3_fails(b"HTTP/1.1 200 OK\r\n", b"x-amz-meta-a: " + b"y" * 4000 + b"\r\n"),
    "a header": s3_fails(b"HTTP/1.1 200 OK\r\nx-amz-meta-kvoffload: "),
    "notes": s3_has(endless, b"x-amz-meta-kvoffload: " + b"z" * 300_000 + b"\r\n"),
    "garbage": s3_fails(os.urandom(9999), os.urandom(99999)),
}
MOONCAKE: dict[str, Talk] = {"anything": endless, "garbage": lambda connection: endless(connection, os.urandom(99999))}


# Those who listen.


def private_bytes(pid: int | str) -> int:
    """Returns the memory of a process that it shares with no other; 0 if there is no such process."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE


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
            for pid in self._children():
                self.client_peak = max(self.client_peak, private_bytes(pid))

    @staticmethod
    def _children() -> Iterator[int]:
        """Yields the processes of clients. Tests may have others."""
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                for pid in map(int, (task / "children").read_text().split()):
                    if b"kvoffload.tiers.remote.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        yield pid

    def serve(self, seconds: float) -> None:
        """Asks for blocks, and reads them if there are any."""
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
