"""Where the systems of the integrity board keep their bytes, and how these break."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers import faults, systems
from demo import stores
from demo.process import free_ports
from demo.stores import CREDENTIALS, ObjectStore, RedisStore, ServerStore

HOST_BYTES = 160 << 20
SMALL_HOST_BYTES = 24 << 20
CACHE_BYTES = 64 << 20
"""Little more than the prompts take, so that half a file is not only room that was never used."""
PEER_DISK_BYTES = 128 << 20
"""Peers begin to evict well below their limit: here none does."""
STORE_BYTES = 192 << 20
SMALL_STORE_BYTES = 24 << 20
SHARED_MEMORY = Path("/dev/shm")
OPENLAKE_BYTES = 1 << 30
OPENLAKE = """self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "{node}"
kv_agents = ["{node}"]
s3_addr = "{s3}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1
[[credentials]]
access_key = "openlake"
secret_key = "openlake"
[[nodes]]
id = 0
rpc_addr = "{node}"
disk_count = 0
[kv_slab]
capacity_gb = 1
reserve_ttl_secs = 60
"""
"""Its default configuration, with a memory of 1 GiB instead of half of the machine's."""


class NotApplicableError(Exception):
    """This fault does not exist for this system. The text says why."""


class Engine(Protocol):
    """The part of ``board_process.Running`` that a place uses."""

    def stop(self) -> None: ...
    def kill(self) -> None: ...


class Place:
    """Keeps what a system stores, until ``empty``. Files and logs of processes are in ``work``."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.host_bytes = HOST_BYTES
        """What an engine gets as host memory."""
        self.environment: dict[str, str] = {}
        """Of an engine that uses it."""
        work.mkdir(parents=True, exist_ok=True)

    def open(self) -> None:
        """Starts what runs for all cells. Raises DemoError or StartError if it cannot run here."""

    def empty(self) -> None:
        """Makes it start anew, with nothing stored."""
        raise NotImplementedError

    def keep(self) -> bool:
        """Keeps a copy of what is stored. Returns whether it can."""
        return False

    def restore(self) -> None:
        """Stores again what was kept."""
        raise NotImplementedError

    def begin(self) -> None:
        """Is called before an engine starts."""

    def stored(self, engine: Engine) -> None:
        """Is called when the first engine has stored all: shuts it down."""
        engine.stop()

    def source(self) -> dict[str, Any] | None:
        """Returns the engine that a request names as its source, None if requests name none."""
        return None

    def end(self) -> None:
        """Is called after an engine has stopped. What it stored in memory that belongs to it is lost."""

    def crash(self) -> None:
        """Is called when an engine is killed: kills what writes for it."""

    def flip(self) -> int:
        """Changes stored bytes. Returns how many bits or values."""
        raise NotImplementedError

    def truncate(self) -> int:
        raise NotApplicableError("it keeps no files")

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        """Starts it anew with little room. Yields what fills that, called when an engine has started."""
        raise NotImplementedError
        yield

    def stop_service(self) -> None:
        """Kills the processes of the cache outside the engine."""
        raise NotApplicableError("it has no server of its own")

    def start_service(self) -> None:
        """Starts them again."""
        raise NotApplicableError("it has no server of its own")

    def close(self) -> None:
        """Leaves no process and no file behind."""
        shutil.rmtree(self.work, ignore_errors=True)


class Folder(Place):
    """A folder on disk, without a server."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.folder = work / "cache"
        self._kept = work / "kept"

    def empty(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)

    def keep(self) -> bool:
        faults.copy_folder(self.folder, self._kept)
        return True

    def restore(self) -> None:
        faults.copy_folder(self._kept, self.folder)

    def flip(self) -> int:
        return faults.flip(self.folder)

    def truncate(self) -> int:
        return faults.truncate(self.folder)

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        self.empty()
        with faults.small_disk(self.folder, CACHE_BYTES + (32 << 20)) as fill:
            yield fill


class ServedFolder(Folder):
    """A folder of servers, whose memory belongs to them: they are stopped with the engine."""

    def __init__(self, work: Path, peer: systems.System) -> None:
        super().__init__(work)
        self.peer = peer
        self.folder = peer.disk_dir(work)
        self._services: Sequence[systems.Service] = []
        self._is_running = False

    def settings(self) -> systems.Settings:
        """Returns what the system is started with."""
        return self.peer.settings(self.work, HOST_BYTES, PEER_DISK_BYTES)

    def begin(self) -> None:
        if not self._is_running:
            self.start_service()
        self.environment |= self.settings().environment

    def end(self) -> None:
        for service in reversed(self._services):
            service.stop()
        self._is_running = False

    def crash(self) -> None:
        for service in self._services:
            service.kill()
        self._is_running = False

    def empty(self) -> None:
        self.crash()
        super().empty()

    def restore(self) -> None:
        self.crash()
        super().restore()

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        with super().full() as fill:
            yield fill
            self.crash()

    def stop_service(self) -> None:
        self.crash()

    def start_service(self) -> None:
        if not self._services:
            self._services = self.peer.services(self.work, HOST_BYTES, PEER_DISK_BYTES)
        for service in self._services:
            service.start()
        self._is_running = True

    def close(self) -> None:
        self.crash()
        if self._services:
            systems.remove_leftovers(self.peer, self.settings())
        super().close()


class StorePlace(Place):
    """One of the demo's stores, which runs from ``open`` to ``close``."""

    store: ServerStore

    def make(self) -> ServerStore:
        raise NotImplementedError

    def open(self) -> None:
        self.store = self.make()

    def empty(self) -> None:
        self.store.kill()
        self.store.start()

    def flip(self) -> int:
        return self.store.corrupt()

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        self.empty()
        self.store.fill()
        yield lambda: None
        self.store.drain()

    def stop_service(self) -> None:
        self.store.kill()

    def start_service(self) -> None:
        self.store.start()

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        super().close()


class Redis(StorePlace):
    def make(self) -> ServerStore:
        return RedisStore(self.work)


class S3(StorePlace):
    """moto."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.environment = dict(CREDENTIALS)

    def make(self) -> ServerStore:
        return ObjectStore(self.work)


class Mooncake(StorePlace):
    """The memory of a Mooncake Store, which a process of its own owns."""

    store: stores.MooncakeStore

    def make(self) -> ServerStore:
        return stores.MooncakeStore(self.work, prefix="")

    def empty(self) -> None:
        self.store.segment_bytes = STORE_BYTES
        super().empty()

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        self.store.segment_bytes = SMALL_STORE_BYTES
        super().empty()
        yield lambda: None


class OpenLake(Place):
    """The memory of ``openlaked``, which runs beside the engines."""

    def __init__(self, work: Path, package: Path) -> None:
        super().__init__(work)
        self._program = package / "openlake_client" / "openlaked"
        self._service: systems.Service | None = None
        self.node = ""
        """Its address."""

    def open(self) -> None:
        # Its agent listens at the port after that of the node.
        node, s3 = free_ports(2)
        self.node = f"{systems.HOST}:{node}"
        config = self.work / "openlake.toml"
        config.write_text(OPENLAKE.format(node=self.node, s3=f"{systems.HOST}:{s3}"))
        self._program.chmod(0o755)
        command = [str(self._program), "--config", str(config)]
        self._service = systems.Service("openlaked", command, node, self.work, systems.environment())
        self._service.start()

    def empty(self) -> None:
        self.stop_service()
        self.start_service()

    def flip(self) -> int:
        assert self._service is not None
        assert self._service.process is not None
        return faults.flip_memory(self._service.process.pid, OPENLAKE_BYTES // 2)

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        raise NotApplicableError("its memory is 1 GiB at least")
        yield

    def stop_service(self) -> None:
        if self._service is not None:
            self._service.kill()

    def start_service(self) -> None:
        if self._service is not None:
            self._service.start()

    def close(self) -> None:
        self.stop_service()
        super().close()


class OtherEngine(Place):
    """The host memory of the first engine, which goes on running and is named as the source by each request."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.environment = {"UCX_TLS": "tcp,shm,self"}
        self.port = 0
        """At which the engine that starts next listens."""
        self._engine_id = ""
        self._source: dict[str, Any] | None = None
        self._holder: Engine | None = None

    def begin(self) -> None:
        (self.port,) = free_ports(1)

    def started(self, engine_id: str) -> None:
        """Is told the name of the engine that starts. The first one since ``empty`` is that which holds the blocks."""
        if self._source is None:
            self._engine_id = engine_id
            self._source = {"remote_host": systems.HOST, "remote_port": self.port}

    def stored(self, engine: Engine) -> None:
        self._holder = engine

    def source(self) -> dict[str, Any] | None:
        return self._source

    def empty(self) -> None:
        self.stop_service()
        self._source = None

    def flip(self) -> int:
        return sum(faults.flip_file(path) for path in SHARED_MEMORY.glob(f"vllm_offload_{self._engine_id}*"))

    def truncate(self) -> int:
        raise NotApplicableError("its blocks are in the memory of an engine")

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        self.empty()
        self.host_bytes = SMALL_HOST_BYTES
        try:
            yield lambda: None
        finally:
            self.host_bytes = HOST_BYTES

    def stop_service(self) -> None:
        # Requests still name it.
        if self._holder is not None:
            self._holder.kill()
            self._holder = None

    def start_service(self) -> None:
        """Does nothing: an engine that starts again has lost what it held, and its port may be another's."""

    def close(self) -> None:
        self.empty()
        super().close()


def remove_regions(prefix: str) -> None:
    """Removes the shared memory that killed engines, whose names begin with ``prefix``, have left."""
    for path in SHARED_MEMORY.glob(f"vllm_offload_{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
