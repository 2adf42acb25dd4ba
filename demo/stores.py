"""The stores of the demo: how each is started, what a server is given to use it, and how it is made to fail."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from demo.act import EngineProcess
from demo.process import HOST, CommandedProcess, DemoError, free_ports, kill_session, start_program
from kvoffload.abc import ConfigError
from kvoffload.tiers.disk.format import HEADER_BYTES, Header
from kvoffload.tiers.mooncake import config as mooncake_config
from kvoffload.tiers.object_store import config as object_store_config
from kvoffload.tiers.redis.location import Address
from kvoffload.tiers.redis.login import Login
from kvoffload.tiers.redis.stream import MAX_VALUE_BYTES, ErrorReply, Reply, command
from kvoffload.tiers.remote.client import StoreError

STALL_S = 30.0
SLOWDOWN = 10
DUTY_S = 0.05
"""A slowed process runs for the first tenth of each period of this length."""
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


@dataclass(frozen=True, slots=True)
class Servers:
    """Two servers that use one store. ``second`` serves the requests during a fault."""

    first: EngineProcess
    second: EngineProcess


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which a store fails. ``how`` says what is really done. Requests go on for ``lasts_s`` at least."""

    name: str
    how: str
    begin: Callable[[Servers], object]
    end: Callable[[Servers], object] = lambda servers: None
    lasts_s: float = 0.0


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
    def faults(self) -> Sequence[Fault]:
        """Returns the faults, in an order in which each finds what the one before has left."""

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

    def exchange(self) -> None:
        """Gives every slot of the slabs the bytes of the next slot: the values of other keys."""
        for slab in self.slabs():
            slot_bytes = Header.unpack(np.fromfile(slab.with_name("index"), np.uint8, HEADER_BYTES)).block_bytes
            raw = np.memmap(slab, np.uint8, "r+")
            raw[:] = np.roll(raw, -slot_bytes)
            raw.flush()

    def faults(self) -> Sequence[Fault]:
        def calls(mode: str) -> Callable[[Servers], object]:
            return lambda servers: servers.second.call("break_files", directory=str(self.path), mode=mode)

        normal = calls("normal")
        wrapped = "system calls of the second server on files of the directory"
        # Until its folder is deleted, the blocks are those of the first server.
        return (
            Fault("killed", "the first server was killed (SIGKILL)", lambda servers: servers.first.kill()),
            Fault(
                f"stalled {STALL_S:.0f} s",
                f"{wrapped} do not return (wrapped in its process)",
                calls("stalled"),
                normal,
                STALL_S,
            ),
            Fault("ten times slower", f"{wrapped} take ten times as long (wrapped)", calls("slow"), normal),
            Fault("full", f"{wrapped} that write or allocate fail with ENOSPC (wrapped)", calls("full"), normal),
            Fault("restarted empty", "the first server's folder was deleted", lambda servers: self.delete_first()),
            Fault("answering garbage", "bytes of all slab files were changed", lambda servers: self.corrupt()),
            Fault("other keys' values", "every slot got the bytes of the next", lambda servers: self.exchange()),
        )

    def delete_first(self) -> None:
        """Deletes the files of the server that came first."""
        folders = sorted({slab.relative_to(self.path).parts[0] for slab in self.slabs()})
        for path in (self.path / folders[0]).rglob("*"):
            if path.is_file():
                path.unlink()

    def close(self) -> None:
        pass


class ServerStore(Store):
    """A store of one or several processes of its own, on free ports. Their logs go to ``logs``. Raises
    StoreMissingError if it cannot run here."""

    processes: ClassVar[str]
    """What these are, with a verb: "redis-server was"."""
    how_full: ClassVar[str]
    how_empty: ClassVar[str]
    how_killed: ClassVar[str] = ""
    """What is really done so that the store is full, restarted empty, or killed."""

    def __init__(self, logs: Path) -> None:
        if (reason := self.missing()) is not None:
            raise StoreMissingError(reason)
        self._logs = logs
        self._port, self._admin_port = free_ports(2)
        self._running: list[subprocess.Popen[bytes] | CommandedProcess] = []
        """In the order of their start."""
        self._throttle: Throttle | None = None
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

    @abstractmethod
    def fill(self) -> object:
        """The store has no room from now on."""

    @abstractmethod
    def drain(self) -> object:
        """Ends what ``fill`` has begun."""

    @abstractmethod
    def exchange(self) -> int:
        """Gives each key the value of the next, and the last that of the first. Returns how many."""

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

    def clear(self) -> None:
        """Restarts the store, empty."""
        self.kill()
        self.start()

    def faults(self) -> Sequence[Fault]:
        processes = self.processes
        return (
            Fault(
                f"stalled {STALL_S:.0f} s",
                f"{processes} stopped (SIGSTOP)",
                lambda servers: send(self.pids(), signal.SIGSTOP),
                lambda servers: send(self.pids(), signal.SIGCONT),
                STALL_S,
            ),
            Fault(
                "ten times slower",
                f"{processes} allowed to run for a tenth of the time (SIGSTOP and SIGCONT every 50 ms)",
                lambda servers: self._slow_down(),
                lambda servers: self._speed_up(),
            ),
            Fault("full", self.how_full, lambda servers: self.fill(), lambda servers: self.drain()),
            Fault("restarted empty", self.how_empty, lambda servers: self.clear()),
            Fault(
                "killed",
                f"{processes} killed (SIGKILL), and started again{self.how_killed} after the requests",
                lambda servers: self.kill(),
                lambda servers: self.start(),
            ),
            # These come last, because corrupt blocks that are found pause the tier again and again, longer each time.
            Fault("answering garbage", "bytes of all values were changed", lambda servers: self.corrupt()),
            Fault("other keys' values", "each key got the value of the next", lambda servers: self.exchange()),
        )

    def _slow_down(self) -> None:
        self._throttle = Throttle(self.pids())

    def _speed_up(self) -> None:
        if self._throttle is not None:
            self._throttle.close()
            self._throttle = None

    def close(self) -> None:
        self._speed_up()
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
    processes = "redis-server was"
    how_full = "the server got maxmemory 1mb and maxmemory-policy noeviction"
    how_empty = "redis-server was killed and started again"

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

    def _replace(self, values: dict[bytes, bytes]) -> int:
        """Puts other values under their names. Returns how many."""
        return len(self._ask(*[(b"SET", name, raw) for name, raw in values.items()]))

    def corrupt(self) -> int:
        return self._replace({name: changed(raw) for name, raw in self.values().items()})

    def exchange(self) -> int:
        values = self.values()
        names = list(values)
        return self._replace({name: values[after] for name, after in zip(names, names[1:] + names[:1], strict=True)})

    def fill(self) -> object:
        return self._ask(
            [b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction"], [b"CONFIG", b"SET", b"maxmemory", b"1mb"]
        )

    def drain(self) -> object:
        memory = b"%d" % STORE_BYTES
        return self._ask(
            [b"CONFIG", b"SET", b"maxmemory", memory], [b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru"]
        )


class MooncakeStore(ServerStore):
    """``mooncake_master`` from the wheel, and a process with the memory."""

    name = "mooncake"
    title = "Mooncake Store"
    processes = "mooncake_master and the process with the memory were"
    how_full = "a third client put values until the store was full"
    how_empty = "both processes were killed and started again"

    def __init__(self, logs: Path, prefix: str = "kvoffload/") -> None:
        self.segment_bytes = STORE_BYTES
        """The memory that the store has from its next start on."""
        self._prefix = prefix
        """Of the keys of all values that ``corrupt`` and ``exchange`` change."""
        super().__init__(logs)

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
        config = {"master": self.address, "segment_bytes": self.segment_bytes}
        memory = CommandedProcess(["-m", PROGRAMS, "mooncake"], self._logs / "mooncake-memory.log", config)
        self._running.append(memory)
        memory.receive(START_DEADLINE_S)

    def _admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{HOST}:{self._admin_port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def _do(self, what: str) -> int:
        keys = sorted(key for key in self._admin("/get_all_keys").split() if key.startswith(self._prefix))
        memory = self._running[-1]
        assert isinstance(memory, CommandedProcess)
        return int(memory.call(what, keys=keys))

    def corrupt(self) -> int:
        return self._do("corrupt")

    def exchange(self) -> int:
        return self._do("exchange")

    def fill(self) -> object:
        return self._do("fill")

    def drain(self) -> object:
        return self._do("drain")


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
    processes = "moto was"
    how_full = "every PUT was answered with 507 QuotaExceeded, in front of moto"
    how_empty = "every object was deleted"
    how_killed = ", empty,"

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

    def do(self, what: str) -> int:
        """Runs a command of ``store_programs.S3``."""
        (moto,) = self._running
        assert isinstance(moto, CommandedProcess)
        return int(moto.call(what))

    def corrupt(self) -> int:
        return self.do("corrupt")

    def exchange(self) -> int:
        return self.do("exchange")

    def fill(self) -> object:
        return self.do("fill")

    def drain(self) -> object:
        return self.do("drain")

    def clear(self) -> None:
        self.do("clear")

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


class Throttle:
    """Lets processes run for one part in SLOWDOWN of the time, by signals, until it is closed."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        running = DUTY_S / SLOWDOWN
        while not self._ended.is_set():
            send(self._pids, signal.SIGSTOP)
            self._ended.wait(DUTY_S - running)
            send(self._pids, signal.SIGCONT)
            self._ended.wait(running)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        send(self._pids, signal.SIGCONT)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    """Sends a signal to those processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
