"""Redis servers for tests: real ones, and one that answers as a test says."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.redis.client import RedisClient
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.redis.location import parse_url
from kvoffload.tiers.redis.login import Login
from kvoffload.tiers.redis.nodes import Nodes, NodeTimes
from tests.tiers.made import closed_later
from tests.tiers.remote.hostile import SETUP, Hostile, commands
from tests.tiers.remote.rig import pause

START_DEADLINE_S = 30.0
TIMEOUT_S = 30.0
"""Long, because other programs use the machine too."""
HOST = "127.0.0.1"


def missing() -> str:
    """Returns what the tests with Redis lack here; an empty string if nothing."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed: apt-get install redis-server"
    if importlib.util.find_spec("redis") is None:
        return "the tests' own client is not installed: pip install redis"
    return ""


needs_redis = pytest.mark.skipif(bool(missing()), reason=missing())


_started: list[subprocess.Popen[bytes]] = []


def kill_servers() -> None:
    """Kills the servers that still run."""
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()


class RedisServer:
    """``redis-server`` without persistence, on a free port or, without ``tcp``, on a Unix socket only."""

    def __init__(self, folder: Path, *options: str, tcp: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.port = free_port() if tcp else 0
        self.socket = folder / "redis.sock"
        self._options = options
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}" if self.port else f"unix://{self.socket}"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--unixsocket", str(self.socket), "--bind", HOST]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.folder), *self._options]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        _started.append(self.process)
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "redis.log").read_text()
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.socket))
                return
            time.sleep(0.005)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        pause(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def raw(self, **options: Any) -> Any:
        """Returns another client, which can do anything."""
        import redis

        return redis.Redis(unix_socket_path=str(self.socket), **options)


def make_client(url: str, timeout_s: float = TIMEOUT_S, times: NodeTimes | None = None, **options: Any) -> RedisClient:
    """Returns a client of the store at ``url``, in this process. Each call may take ``timeout_s``."""
    config = RedisConfig(url=url, **options)
    nodes = Nodes(parse_url(url).seeds, Login.from_settings(config.settings()), times)
    made = RedisClient(nodes, config.ttl_s, lookup_timeout_s=timeout_s, transfer_timeout_s=timeout_s)
    return closed_later(made)


def free_port() -> int:
    """Returns a port that no process uses, and that leaves room for a Cluster's second port."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


class FakeServer(Hostile):
    """Answers as ``script`` says: it gets each command's words, and a function that sends bytes. It may raise to close
    the connection. If the server ``answers_setup``, it answers CLUSTER and CLIENT as one that is no Cluster."""

    def __init__(
        self, script: Callable[[list[bytes], Callable[[bytes], None]], None], answers_setup: bool = True
    ) -> None:
        self._script = script
        self._answers = SETUP if answers_setup else {}
        self.commands: list[list[bytes]] = []
        super().__init__(self._converse)
        self.url = f"redis://{HOST}:{self.port}"

    def _converse(self, connection: socket.socket) -> None:
        for words in commands(connection):
            self.commands.append(words)
            if words[0] in self._answers:
                connection.sendall(self._answers[words[0]])
            else:
                self._script(words, connection.sendall)


def names(count: int, first: int = 0) -> Sequence[str]:
    return [f"kv/{'5e' * 32}/{i:072x}" for i in range(first, first + count)]


def values(count: int, *sizes: int, seed: int = 0) -> list[list[ByteArray]]:
    """Returns random values, a buffer of each size per value."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 256, size, dtype=np.uint8) for size in sizes] for _ in range(count)]


def emptied(buffers: list[list[ByteArray]]) -> list[list[ByteArray]]:
    return [[np.zeros_like(part) for part in parts] for parts in buffers]


def same(one: list[list[ByteArray]], other: list[list[ByteArray]]) -> bool:
    return all((a == b).all() for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))
