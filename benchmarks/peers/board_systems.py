"""The systems of the integrity board: what each is given to start, where it keeps its bytes, and how these break."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers import faults, systems
from demo import stores
from demo.stores import CREDENTIALS, ObjectStore, RedisStore, ServerStore, StoreMissingError

HOST_BYTES = 160 << 20
CACHE_BYTES = 64 << 20
"""Little more than the prompts take, so that half a file is not only room that was never used."""
PEER_DISK_BYTES = 128 << 20
"""Peers begin to evict well below their limit: here none does."""
STORE_BYTES = 192 << 20
SMALL_STORE_BYTES = 24 << 20
LOAD_DEADLINE_MS = 20_000
LOOKUP_DEADLINE_MS = 5_000
"""Both are long, so that a busy machine does not turn answers from the cache into misses."""


class NotApplicableError(Exception):
    """This fault does not exist for this system. The text says why."""


class System:
    """A cache, and how an engine uses it. What it stores is kept until ``empty``."""

    name = ""
    note = ""
    """What a reader must know about how it ran."""
    is_control = False
    """Whether wrong answers under flipped bits are what it is there to show. It runs no other fault."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.environment: Mapping[str, str] = {}
        work.mkdir(parents=True, exist_ok=True)

    @classmethod
    def python(cls) -> str:
        """Returns the Python that runs its engine."""
        return sys.executable

    def missing(self) -> str | None:
        """Returns why it cannot run here, or None."""
        return None

    def connector(self) -> dict[str, Any]:
        """Returns the fields of ``KVTransferConfig``."""
        raise NotImplementedError

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

    def end(self) -> None:
        """Is called after an engine has stopped. What it stored in memory that belongs to it is lost."""

    def crash(self) -> None:
        """Is called when an engine is killed: kills what writes for it."""

    def flip(self) -> int:
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
        """Leaves no process behind."""


class FolderSystem(System):
    """A cache in a folder, without a server of its own."""

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


class KVOffloadDisk(FolderSystem):
    name = "kvoffload, disk tier"
    connector_class = ("KVOffloadConnector", "kvoffload.vllm")

    def tiers(self) -> list[dict[str, Any]]:
        return [{"kind": "disk", "dir": str(self.folder), "bytes": CACHE_BYTES}]

    def connector(self) -> dict[str, Any]:
        name, module = self.connector_class
        return {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host_bytes": HOST_BYTES,
                "tiers": self.tiers(),
                "load_deadline_ms": LOAD_DEADLINE_MS,
                "load_only_if_faster": False,
            },
        }


class UnverifiedKVOffloadDisk(KVOffloadDisk):
    name = "control: kvoffload without verification"
    note = "kvoffload's disk tier with the comparison of checksums taken out: it must answer wrongly."
    is_control = True
    connector_class = ("UnverifiedKVOffloadConnector", "benchmarks.peers.board_unverified")


class KVOffloadSharedDir(KVOffloadDisk):
    name = "kvoffload, shared directory"

    def tiers(self) -> list[dict[str, Any]]:
        return [{"kind": "shared_dir", "dir": str(self.folder), "bytes": CACHE_BYTES}]


class PeerSystem(FolderSystem):
    """A system of ``make peers`` with its disk, started as there."""

    peer: systems.System

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.folder = self.peer.disk_dir(work)
        self._given: list[systems.Settings] = []

    def connector(self) -> dict[str, Any]:
        settings = self.peer.settings(self.work, HOST_BYTES, PEER_DISK_BYTES)
        self._given.append(settings)
        assert settings.connector is not None
        return settings.connector

    def close(self) -> None:
        # Engines and servers that were killed leave memory behind.
        for settings in self._given:
            systems.remove_leftovers(self.peer, settings)


class VLLMOwn(PeerSystem):
    """vLLM's own offloading as it is."""

    name = "vLLM's own offloading, fs tier"
    peer = systems.VLLMAsIs()


class VLLMOwnOnCPU(PeerSystem):
    name = "vLLM's own offloading, fs tier, copies of this benchmark"
    note = (
        "vLLM starts its own offloading on GPUs only. Here its connector, manager and fs tier ran unchanged, with a "
        "worker of kvoffload that copies between device and host memory (`kvoffload.vllm.host_spec`)."
    )
    peer = systems.VLLM()


class ServedDisk(PeerSystem):
    """A peer with servers of its own, whose memory belongs to them, and with files."""

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self._services: list[systems.Service] = []
        self._is_running = False

    def begin(self) -> None:
        if not self._is_running:
            self.start_service()

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
        super().close()


class LMCacheDisk(ServedDisk):
    name = "LMCache, multi-process mode, disk"
    note = "LMCache's server was stopped with the engine, so that a second engine finds what is on disk only."
    peer = systems.LMCache()

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        # In one process, vLLM's search for Triton kernels fails at a module that LMCache has imported.
        self.environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

    @classmethod
    def python(cls) -> str:
        return cls.peer.python()

    def missing(self) -> str | None:
        if importlib.util.find_spec("lmcache") is None:
            return "lmcache is not installed"
        return None


class StoreSystem(System):
    """A cache in one of the demo's stores, which runs from ``missing`` to ``close``."""

    store: ServerStore

    @classmethod
    def make(cls, logs: Path) -> ServerStore:
        raise NotImplementedError

    def missing(self) -> str | None:
        try:
            self.store = self.make(self.work)
        except StoreMissingError as error:
            return str(error)
        return None

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


class MooncakeSystem(StoreSystem):
    """A cache in the memory of a Mooncake Store, which a process of its own owns."""

    store: stores.MooncakeStore

    @classmethod
    def make(cls, logs: Path) -> stores.MooncakeStore:
        return stores.MooncakeStore(logs, prefix="")

    def empty(self) -> None:
        self.store.segment_bytes = STORE_BYTES
        super().empty()

    @contextlib.contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        self.store.segment_bytes = SMALL_STORE_BYTES
        super().empty()
        yield lambda: None


class KVOffloadMooncake(MooncakeSystem):
    name = "kvoffload, Mooncake Store"
    note = "There is no disk: bits are flipped in the store's memory, and the store is full."

    def connector(self) -> dict[str, Any]:
        return {
            "kv_connector": "KVOffloadConnector",
            "kv_connector_module_path": "kvoffload.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host_bytes": HOST_BYTES,
                "tiers": [{"kind": "mooncake", "master": self.store.address}],
                "load_deadline_ms": LOAD_DEADLINE_MS,
                "lookup_deadline_ms": LOOKUP_DEADLINE_MS,
                "load_only_if_faster": False,
            },
        }


class MooncakeConnector(MooncakeSystem):
    name = "Mooncake's connector in vLLM"
    note = KVOffloadMooncake.note

    def connector(self) -> dict[str, Any]:
        config = self.work / "mooncake.json"
        config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": self.store.address,
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "standalone-store",
                    "global_segment_size": 0,
                    "local_buffer_size": 64 << 20,
                }
            )
        )
        self.environment = {"MOONCAKE_CONFIG_PATH": str(config)}
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


class MooncakeDisk(ServedDisk):
    name = "Mooncake's connector in vLLM, disk"
    note = (
        "The store's processes were stopped with the engine, so that a second engine finds what is on disk only. Each "
        "block was a file of its own: by default Mooncake writes 256 MiB or 500 blocks at once, and less never."
    )
    peer = systems.Mooncake(one_block_per_bucket=True)

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.environment = self.peer.settings(work, HOST_BYTES, PEER_DISK_BYTES).environment

    def missing(self) -> str | None:
        return stores.MooncakeStore.missing()


class InVLLM(System):
    """vLLM's own offloading with a tier of kvoffload below its host memory."""

    module = "kvoffload.vllm.secondary_tier"
    tier_class = "KVOffloadTier"

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self._given: list[tuple[systems.VLLM, systems.Settings]] = []

    def tier(self) -> dict[str, Any]:
        """Returns the entry of the option ``tier``."""
        raise NotImplementedError

    def connector(self) -> dict[str, Any]:
        deadlines = {"load_deadline_ms": LOAD_DEADLINE_MS, "lookup_deadline_ms": LOOKUP_DEADLINE_MS}
        entry = {"type": self.tier_class, "module_path": self.module, "tier": self.tier(), **deadlines}
        peer = systems.VLLMWithTier(entry)
        settings = peer.settings(self.work, HOST_BYTES, CACHE_BYTES)
        self._given.append((peer, settings))
        assert settings.connector is not None
        return settings.connector

    def close(self) -> None:
        super().close()
        for peer, settings in self._given:
            systems.remove_leftovers(peer, settings)


class TierDisk(InVLLM, FolderSystem):
    name = "kvoffload's tier in vLLM's own offloading, disk"
    kind = "disk"

    def tier(self) -> dict[str, Any]:
        return {"kind": self.kind, "dir": str(self.folder), "bytes": CACHE_BYTES}


class UnverifiedTierDisk(TierDisk):
    name = "control: kvoffload's tier without verification"
    note = "kvoffload's tier in vLLM's own offloading with the comparison of checksums taken out."
    is_control = True
    module = "benchmarks.peers.board_unverified"
    tier_class = "UnverifiedKVOffloadTier"


class TierSharedDir(TierDisk):
    name = "kvoffload's tier in vLLM's own offloading, shared directory"
    kind = "shared_dir"


class TierRedis(InVLLM, StoreSystem):
    name = "kvoffload's tier in vLLM's own offloading, Redis"
    note = "Bytes are changed in the server's memory, which it loses when it restarts."

    @classmethod
    def make(cls, logs: Path) -> ServerStore:
        return RedisStore(logs)

    def tier(self) -> dict[str, Any]:
        return self.store.entry()


class TierObjectStore(TierRedis):
    name = "kvoffload's tier in vLLM's own offloading, object store (moto)"

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        self.environment = CREDENTIALS

    @classmethod
    def make(cls, logs: Path) -> ServerStore:
        return ObjectStore(logs)


class TierMooncake(InVLLM, MooncakeSystem):
    name = "kvoffload's tier in vLLM's own offloading, Mooncake Store"
    note = KVOffloadMooncake.note

    def tier(self) -> dict[str, Any]:
        return {"kind": "mooncake", "master": self.store.address}


SYSTEMS: tuple[type[System], ...] = (
    KVOffloadDisk,
    UnverifiedKVOffloadDisk,
    KVOffloadSharedDir,
    KVOffloadMooncake,
    VLLMOwn,
    VLLMOwnOnCPU,
    TierDisk,
    UnverifiedTierDisk,
    TierSharedDir,
    TierRedis,
    TierObjectStore,
    TierMooncake,
    MooncakeConnector,
    MooncakeDisk,
    LMCacheDisk,
)
