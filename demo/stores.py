"""The stores of the demo: how each is started, what a server is given to use it, and how it is made to fail."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from demo.process import HOST, CommandedProcess, DemoError, free_ports, kill_session, start_program
from kvoffload.abc import ConfigError
from kvoffload.tiers.mooncake import config as mooncake_config
from kvoffload.tiers.object_store import config as object_store_config
from kvoffload.tiers.redis.location import Address
from kvoffload.tiers.redis.login import Login
from kvoffload.tiers.redis.stream import MAX_VALUE_BYTES, ErrorReply, Reply, command
from kvoffload.tiers.remote.client import StoreError

STORE_BYTES = 1 << 30
"""Budget of a server in a directory, and of each other store."""
START_DEADLINE_S = 60.0
REPLY_DEADLINE_S = 30.0
BUCKET = "kvoffload-demo"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}
MOONCAKE_WHEEL = "pip install --force-reinstall mooncake-transfer-engine-non-cuda"
MOONCAKE_CLIENT_TTL_S = 2
"""The master forgets the memory of a process that it has not heard of for this time."""
PROGRAMS = "demo.store_programs"
_CHANGED_EVERY, _OFFSET, _MASK = 1024, 3, 0x5A
"""The first changed byte is one of the exponent, if the bytes are those of a float32 in little-endian order."""


class StoreMissingError(DemoError):
    """This store cannot run here. The message says why, and the one line to run."""


def changed(raw: bytes) -> bytes:
    """Returns other bytes of the same length: one in every KiB differs."""
    found = np.frombuffer(raw, np.uint8).copy()
    found[_OFFSET::_CHANGED_EVERY] ^= _MASK
    return found.tobytes()


def flip(paths: Iterable[Path]) -> int:
    """Changes a byte in every KiB of each file, as a bad disk would. Returns the number of files."""
    count = 0
    for path in paths:
        raw = np.memmap(path, np.uint8, "r+")
        raw[_OFFSET::_CHANGED_EVERY] ^= _MASK
        raw.flush()
        count += 1
    return count


class Store(ABC):
    """A store that runs while this is used as a context manager."""

    name: ClassVar[str]
    """As in ``shared.json``: the kind of the tier."""
    title: ClassVar[str]
    visible_s: ClassVar[float] = 0.0
    """Time in which a server notices what another one has stored."""

    @abstractmethod
    def entry(self) -> dict[str, Any]:
        """Returns a server's entry of the option ``tiers``."""

    @abstractmethod
    def corrupt(self) -> int:
        """Changes bytes of every stored value, under its right key. Returns how many values or files were changed."""

    @abstractmethod
    def close(self) -> None:
        """Ends the store."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class DirectoryStore(Store):
    """A directory that both servers use."""

    name = "shared_dir"
    title = "a shared directory"
    visible_s = 4.0

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "dir": str(self.path), "bytes": STORE_BYTES}

    def slabs(self) -> list[Path]:
        """Returns the files with the bytes of blocks, of all servers."""
        return sorted(path for path in self.path.rglob("slab-*") if path.is_file())

    def corrupt(self) -> int:
        return flip(self.slabs())

    def close(self) -> None:
        pass


class ServerStore(Store):
    """A store of one or several processes of its own, on free ports. Their logs go to ``logs``. Raises
    StoreMissingError if it cannot run here."""

    def __init__(self, logs: Path) -> None:
        if (reason := self.missing()) is not None:
            raise StoreMissingError(reason)
        self._logs = logs
        self._port, self._admin_port = free_ports(2)
        self._running: list[subprocess.Popen[bytes] | CommandedProcess] = []
        """In the order of their start."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @staticmethod
    @abstractmethod
    def missing() -> str | None:
        """Returns why this store cannot run here and the line to run, or None if it can."""

    @abstractmethod
    def _start(self) -> None:
        """Starts all processes, and adds them to ``_running``."""

    def start(self) -> None:
        """Starts the store if it does not run."""
        if not self._running:
            self._start()

    def pids(self) -> list[int]:
        """Returns the processes that run."""
        return [each.pid for each in self._running]

    def kill(self) -> None:
        """Kills what runs."""
        while self._running:
            each = self._running.pop()
            if isinstance(each, CommandedProcess):
                each.kill()
            else:
                kill_session(each)

    def close(self) -> None:
        self.kill()

    def _wait_until(self, is_up: Callable[[], object], what: str, log: Path) -> None:
        """Waits until ``is_up`` raises no error. Raises DemoError if the last process ends before, or past the
        deadline."""
        server = self._running[-1]
        assert isinstance(server, subprocess.Popen)
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                is_up()
                return
            except (OSError, DemoError) as error:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise DemoError(f"{what} does not start ({error}); its log is {log}") from error
            time.sleep(0.05)


class RedisStore(ServerStore):
    """``redis-server`` or ``valkey-server`` without persistence."""

    name = "redis"
    title = "Redis"

    @staticmethod
    def program() -> str | None:
        """Returns the path of the server, or None if there is none here."""
        return next(filter(None, map(shutil.which, ("redis-server", "valkey-server"))), None)

    @staticmethod
    def missing() -> str | None:
        return None if RedisStore.program() else "there is no redis-server here; run apt-get install redis-server"

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "url": f"redis://{HOST}:{self._port}"}

    def _start(self) -> None:
        log = self._logs / "redis-server.log"
        options = ["--bind", HOST, "--port", str(self._port), "--save", "", "--appendonly", "no"]
        memory = ["--maxmemory", str(STORE_BYTES), "--maxmemory-policy", "allkeys-lru"]
        self._running.append(start_program([str(self.program()), *options, *memory], log))
        self._wait_until(lambda: self._ask([b"PING"]), "redis-server", log)

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
            raise DemoError(f"redis-server does not answer ({error}); its log is in {self._logs}") from error

    def values(self) -> dict[bytes, bytes]:
        """Returns the values of kvoffload's blocks by name."""
        (names,) = self._ask([b"KEYS", b"kvoffload/*"])
        assert isinstance(names, list)
        blocks = sorted(name for name in names if isinstance(name, bytes) and b"/identities/" not in name)
        replies = self._ask(*[(b"GET", name) for name in blocks])
        return {name: raw for name, raw in zip(blocks, replies, strict=True) if isinstance(raw, bytes)}

    def corrupt(self) -> int:
        return len(self._ask(*[(b"SET", name, changed(raw)) for name, raw in self.values().items()]))


class MooncakeStore(ServerStore):
    """``mooncake_master`` from the wheel, and a process with the memory."""

    name = "mooncake"
    title = "Mooncake Store"

    @staticmethod
    def missing() -> str | None:
        try:
            mooncake_config.check_installed()
        except ConfigError as error:
            return str(error).partition(": ")[2]
        return None if _mooncake_master().is_file() else f"the wheel has no mooncake_master; run {MOONCAKE_WHEEL}"

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "master": self.address}

    def _start(self) -> None:
        log = self._logs / "mooncake-master.log"
        ports = [f"-rpc_port={self._port}", f"-metrics_port={self._admin_port}"]
        master = [str(_mooncake_master()), *ports, f"-client_ttl={MOONCAKE_CLIENT_TTL_S}"]
        self._running.append(start_program(master, log))
        self._wait_until(lambda: self._admin("/health"), "mooncake_master", log)
        config = {"master": self.address, "segment_bytes": STORE_BYTES}
        memory = CommandedProcess(["-m", PROGRAMS, "mooncake"], self._logs / "mooncake-memory.log", config)
        self._running.append(memory)
        memory.receive(START_DEADLINE_S)

    def _admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{HOST}:{self._admin_port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def corrupt(self) -> int:
        keys = sorted(key for key in self._admin("/get_all_keys").split() if key.startswith("kvoffload/"))
        memory = self._running[-1]
        assert isinstance(memory, CommandedProcess)
        return int(memory.call("corrupt", keys=keys))


def _mooncake_master() -> Path:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("mooncake_master")


class ObjectStore(ServerStore):
    """moto, which answers as Amazon S3 does, with one bucket. Servers that are started while it runs have credentials
    in their environment."""

    name = "object_store"
    title = "an object store (moto)"

    def __init__(self, logs: Path) -> None:
        self._environment = {name: os.environ.get(name) for name in CREDENTIALS}
        super().__init__(logs)
        os.environ.update(CREDENTIALS)

    @staticmethod
    def missing() -> str | None:
        try:
            object_store_config.check_installed()
        except ConfigError as error:
            return str(error).partition(": ")[2]
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
            return "moto is not installed; run pip install 'moto[server]'"
        return None

    def entry(self) -> dict[str, Any]:
        return {"kind": self.name, "url": f"s3://{BUCKET}/cache", "endpoint": f"http://{HOST}:{self._port}"}

    def _start(self) -> None:
        config = {"port": self._port, "bucket": BUCKET}
        moto = CommandedProcess(["-m", PROGRAMS, "s3"], self._logs / "object-store.log", config)
        self._running.append(moto)
        moto.receive(START_DEADLINE_S)

    def corrupt(self) -> int:
        (moto,) = self._running
        assert isinstance(moto, CommandedProcess)
        return int(moto.call("corrupt"))

    def close(self) -> None:
        super().close()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


STORES: dict[str, Callable[[Path, Path], Store]] = {
    "shared_dir": lambda directory, logs: DirectoryStore(directory),
    "redis": lambda directory, logs: RedisStore(logs),
    "mooncake": lambda directory, logs: MooncakeStore(logs),
    "object_store": lambda directory, logs: ObjectStore(logs),
}
"""How each store is made, from a directory for its values and one for its logs."""


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Sends a signal to those processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
