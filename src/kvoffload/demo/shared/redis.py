"""A Redis server for the demo."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffload.demo.errors import DemoError
from kvoffload.demo.shared.processes import HOST, free_ports
from kvoffload.demo.shared.stores import ServerStore, StoreMissingError
from kvoffload.tiers.redis.location import Address
from kvoffload.tiers.redis.login import Login
from kvoffload.tiers.redis.stream import MAX_VALUE_BYTES, ErrorReply, Reply, command
from kvoffload.tiers.remote.client import StoreError

PROGRAMS = ("redis-server", "valkey-server")
MEMORY_BYTES = 1 << 30
POLICY = "allkeys-lru"
START_DEADLINE_S = 60.0
REPLY_DEADLINE_S = 30.0


def program() -> str | None:
    """Returns the path of the server, or None if there is none here."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class RedisStore(ServerStore):
    """``redis-server`` or ``valkey-server`` without persistence, on a free port. Its log goes to ``logs``."""

    name = "redis"
    title = "Redis"
    processes = "redis-server was"
    how_full = "the server got maxmemory 1mb and maxmemory-policy noeviction"
    how_empty = "redis-server was killed and started again"

    def __init__(self, logs: Path) -> None:
        super().__init__()
        found = program()
        if found is None:
            raise StoreMissingError("there is no redis-server here; run apt-get install redis-server")
        self._program = found
        self._log = logs / "redis-server.log"
        self._port = free_ports(1)[0]
        self._server: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "url": f"redis://{HOST}:{self._port}"}

    def start(self) -> None:
        """Starts the server if it does not run."""
        if self._server is not None:
            return
        memory = ("--maxmemory", str(MEMORY_BYTES), "--maxmemory-policy", POLICY)
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [self._program, "--bind", HOST, "--port", str(self._port), "--save", "", "--appendonly", "no", *memory],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self._ask([b"PING"])
                return
            except DemoError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def _ask(self, *commands: Sequence[bytes]) -> list[Reply]:
        """Returns the replies of the server, on a new connection. Raises DemoError, also for a reply that is an
        error."""
        try:
            login = Login(username="", password_file=None, database=0, tls=None)
            stream = login.connect(Address(HOST, self._port), time.monotonic() + REPLY_DEADLINE_S)
            try:
                replies = []
                for words in commands:
                    stream.send([command(*words)])
                    replies.append(stream.reply(MAX_VALUE_BYTES))
                    if isinstance(replies[-1], ErrorReply):
                        raise DemoError(f"redis-server answers {replies[-1].text}")
                return replies
            finally:
                stream.close()
        except StoreError as error:
            raise DemoError(f"redis-server does not answer ({error}); its log is {self._log}") from error

    def values(self) -> dict[bytes, bytes]:
        """Returns the values of kvoffload's blocks by name."""
        (names,) = self._ask([b"KEYS", b"kvoffload/*"])
        assert isinstance(names, list)
        blocks = sorted(name for name in names if isinstance(name, bytes) and b"/identities/" not in name)
        replies = self._ask(*[(b"GET", name) for name in blocks])
        return {name: raw for name, raw in zip(blocks, replies, strict=True) if isinstance(raw, bytes)}

    def _replace(self, values: dict[bytes, bytes]) -> int:
        """Puts other values under their names. Returns how many."""
        return len(self._ask(*[(b"SET", name, raw) for name, raw in values.items()]))

    def corrupt(self) -> int:
        return self._replace({name: _changed(raw) for name, raw in self.values().items()})

    def exchange(self) -> int:
        """Puts the value of the next name under each, and that of the first under the last."""
        values = self.values()
        names = list(values)
        return self._replace(dict(zip(names, [values[name] for name in [*names[1:], *names[:1]]], strict=True)))

    def fill(self) -> None:
        """The server has no room from now on, and evicts nothing."""
        self._ask([b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction"], [b"CONFIG", b"SET", b"maxmemory", b"1mb"])

    def drain(self) -> None:
        """The server has room again, and evicts."""
        memory = b"%d" % MEMORY_BYTES
        self._ask([b"CONFIG", b"SET", b"maxmemory", memory], [b"CONFIG", b"SET", b"maxmemory-policy", POLICY.encode()])

    def pids(self) -> list[int]:
        return [] if self._server is None else [self._server.pid]

    def kill(self) -> None:
        """Kills the server if it runs."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def _changed(raw: bytes) -> bytes:
    """Returns other bytes of the same length."""
    changed = bytearray(raw)
    changed[3::1024] = bytes(byte ^ 0x5A for byte in changed[3::1024])
    return bytes(changed)
