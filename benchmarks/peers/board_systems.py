"""The systems of the integrity board: for each what an engine is given to use it, and where it keeps its bytes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import systems
from benchmarks.peers.board_places import (
    CACHE_BYTES,
    S3,
    Folder,
    Mooncake,
    OpenLake,
    OtherEngine,
    Place,
    Redis,
    ServedFolder,
    StorePlace,
)
from demo.stores import BUCKET, CREDENTIALS

ADDED = Path(sys.prefix) / "peers"
"""Has a folder for each package that ``make peers`` installs for one system only."""
REGION_PREFIX = f"board-{os.getpid()}-"
LOAD_DEADLINE_MS = 20_000
LOOKUP_DEADLINE_MS = 5_000
"""Both are long, so that a busy machine does not turn answers from the cache into misses."""
_engine_numbers = itertools.count()

Connector = dict[str, Any]
"""The fields of vLLM's KVTransferConfig."""


@dataclass(frozen=True, slots=True)
class System:
    """A cache as an engine uses it."""

    id: str
    """What ``--only`` takes, and the folder of its logs."""
    name: str
    connector: Callable[[Any], Connector]
    """Is called with the place before each start of an engine."""
    place: Callable[[Path], Place]
    notes: Sequence[str] = ()
    """What a reader must know about how it ran."""
    is_control: bool = False
    """Whether wrong answers under flipped bits are what it is there to show. It runs no other fault."""
    packages: Sequence[str] = ()
    """Names of its packages, the first of which must be installed."""
    refusal: str | None = None
    """What the engine's log says if the engine runs on without this cache."""
    added: str | None = None
    """Name of its folder in ADDED."""
    python: Callable[[], str] = field(default=lambda: sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_apart: bool = False
    """Whether it waits more than it computes, so that it runs beside the others."""

    def paths(self) -> list[str]:
        """Returns the folders that its engine looks for modules in, besides those of this Python."""
        return [] if self.added is None else [str(ADDED / self.added)]

    def versions(self) -> dict[str, str]:
        """Returns the versions of its packages, as far as they are installed."""
        found = importlib.metadata.distributions(path=[*self.paths(), *sys.path])
        all_versions = {each.metadata["Name"]: each.version for each in found}
        return {name: all_versions[name] for name in self.packages if name in all_versions}

    def missing(self) -> str | None:
        """Returns why it cannot run here, or None."""
        if self.packages and self.packages[0] not in self.versions():
            return f"{self.packages[0]} is not installed; run make peers"
        return None


# kvoffload as the connector.


def entry(kind: str, place: Place) -> dict[str, Any]:
    """Returns the entry of kvoffload's option ``tiers``."""
    if isinstance(place, StorePlace):
        return place.store.entry()
    assert isinstance(place, Folder)
    return {"kind": kind, "dir": str(place.folder), "bytes": CACHE_BYTES}


def kvoffload(kind: str, place: Place, name: str = "KVOffloadConnector", module: str = "kvoffload.vllm") -> Connector:
    options = {
        "host_bytes": place.host_bytes,
        "tiers": [entry(kind, place)],
        "load_deadline_ms": LOAD_DEADLINE_MS,
        "lookup_deadline_ms": LOOKUP_DEADLINE_MS,
        "load_only_if_faster": False,
    }
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


# vLLM's own offloading with one tier below its host memory.


def offloading(secondary: Callable[[Any], dict[str, Any]], place: Place) -> Connector:
    settings = systems.VLLMWithTier(secondary(place)).settings(place.work, place.host_bytes, CACHE_BYTES)
    assert settings.connector is not None
    engine_id = f"{REGION_PREFIX}{next(_engine_numbers)}"
    if isinstance(place, OtherEngine):
        place.started(engine_id)
    return {**settings.connector, "engine_id": engine_id}


def as_it_is(place: Folder) -> Connector:
    """vLLM's own offloading without anything of this benchmark."""
    settings = systems.VLLMAsIs().settings(place.folder, place.host_bytes, CACHE_BYTES)
    assert settings.connector is not None
    return settings.connector


def tier(
    kind: str, place: Place, name: str = "KVOffloadTier", module: str = "kvoffload.vllm.secondary_tier"
) -> dict[str, Any]:
    deadlines = {"load_deadline_ms": LOAD_DEADLINE_MS, "lookup_deadline_ms": LOOKUP_DEADLINE_MS}
    return {"type": name, "module_path": module, "tier": entry(kind, place), **deadlines}


def fs(place: Folder) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(place.folder)}


def obj(place: S3) -> dict[str, Any]:
    store = {
        "bucket": BUCKET,
        "endpoint_override": place.store.entry()["endpoint"],
        "access_key": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        "region": "us-east-1",
        "scheme": "http",
    }
    return {"type": "obj", "store_config": store}


def p2p(place: OtherEngine) -> dict[str, Any]:
    return {"type": "p2p", "host": systems.HOST, "port": place.port, "num_threads": 1}


def lifeboat(place: Folder) -> dict[str, Any]:
    disk = {"name": "disk", "type": "filesystem", "enabled": True, "path": str(place.folder), "capacity_gb": 1}
    config = {
        "storage": {"tiers": [{**disk, "min_free_gb": 0}]},
        "control_plane": {"enabled": False},
        "dashboard": {"enabled": False},
    }
    return {
        "type": "LifeboatTier",
        "module_path": "lifeboat_cache.integrations.vllm_tier",
        "lifeboat_config": config,
    }


# Other connectors.


def simple(options: Callable[[Folder], dict[str, Any]], place: Folder) -> Connector:
    """vLLM's SimpleCPUOffloadConnector."""
    config = {"cpu_bytes_to_use": place.host_bytes, **options(place)}
    return {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": config}


def simple_disk(place: Folder) -> dict[str, Any]:
    return {
        "kv_offload_backend": "disk",
        "disk_path": str(place.folder / "blocks"),
        "disk_capacity_bytes": CACHE_BYTES,
    }


def mooncake(place: Mooncake) -> Connector:
    config = place.work / "mooncake.json"
    options = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": place.store.address,
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 64 << 20,
    }
    config.write_text(json.dumps(options))
    place.environment = {"MOONCAKE_CONFIG_PATH": str(config)}
    return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


def served(place: ServedFolder) -> Connector:
    connector = place.settings().connector
    assert connector is not None
    return connector


def lmcache(place: Folder) -> Connector:
    """LMCache in the engine's process."""
    options = {
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": place.host_bytes / 2**30,
        "lmcache.local_disk": f"file://{place.folder}/",
        "lmcache.max_local_disk_size": 2 * CACHE_BYTES / 2**30,
    }
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": options}


def openlake(place: OpenLake) -> Connector:
    options = {
        "openlake_nodes": [place.node],
        "openlake_device": "local",
        "openlake_min_external_lookup_tokens": 0,
    }
    return {
        "kv_connector": "OpenLakeConnector",
        "kv_connector_module_path": "openlake_client.openlake_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


IN_MEMORY = (
    "Bytes are changed in the server's memory, which it loses when it restarts. *Full disk*: it has little memory."
)
MOTO = "The server is moto, which loses all when it restarts. *Full disk*: it answers every PUT with status 507."
KINDS: dict[str, tuple[str, Callable[[Path], Place], tuple[str, ...]]] = {
    "disk": ("disk", Folder, ()),
    "shared_dir": ("shared directory", Folder, ()),
    "redis": ("Redis", Redis, (IN_MEMORY,)),
    "object_store": ("object store", S3, (MOTO,)),
    "mooncake": ("Mooncake Store", Mooncake, (IN_MEMORY,)),
}
"""kvoffload's kinds of tiers: title, place and notes."""
COPIES = (
    "vLLM starts its own offloading on GPUs only. Here its connector, manager and tier ran unchanged, with a worker of "
    "kvoffload that copies between device and host memory (`kvoffload.vllm.host_spec`)."
)
STOPPED = "Its servers were stopped with the engine, so that a second engine finds what is on disk only."
UNVERIFIED = "benchmarks.peers.board_unverified"
LMCACHE = systems.LMCache()
MOONCAKE = systems.Mooncake(one_block_per_bucket=True)
MOONCAKE_PACKAGES = ("mooncake-transfer-engine-non-cuda",)
NIXL_PACKAGES = ("nixl-cu12",)

SYSTEMS: tuple[System, ...] = (
    *(
        System(f"kvoffload-{kind}", f"kvoffload, {title}", partial(kvoffload, kind), place, notes)
        for kind, (title, place, notes) in KINDS.items()
    ),
    *(
        System(
            f"tier-{kind}",
            f"kvoffload's tier in vLLM's own offloading, {title}",
            partial(offloading, partial(tier, kind)),
            place,
            notes,
        )
        for kind, (title, place, notes) in KINDS.items()
    ),
    System(
        "control",
        "control: kvoffload without verification",
        partial(kvoffload, "disk", name="UnverifiedKVOffloadConnector", module=UNVERIFIED),
        Folder,
        ("kvoffload's disk tier with the comparison of checksums taken out: it must answer wrongly.",),
        is_control=True,
    ),
    System(
        "control-tier",
        "control: kvoffload's tier without verification",
        partial(offloading, partial(tier, "disk", name="UnverifiedKVOffloadTier", module=UNVERIFIED)),
        Folder,
        ("kvoffload's tier in vLLM's own offloading with the comparison of checksums taken out.",),
        is_control=True,
    ),
    System("vllm-as-is", "vLLM's own offloading, fs tier, as it is", as_it_is, Folder),
    System("vllm-fs", "vLLM's own offloading, fs tier", partial(offloading, fs), Folder, (COPIES,)),
    System(
        "vllm-obj-as-is",
        "vLLM's own offloading, obj tier, NIXL's defaults",
        partial(offloading, obj),
        S3,
        (COPIES,),
        packages=NIXL_PACKAGES,
    ),
    System(
        "vllm-obj",
        "vLLM's own offloading, obj tier",
        partial(offloading, obj),
        S3,
        (COPIES, MOTO, "NIXL's telemetry was on, without which this tier fails at its first write."),
        packages=NIXL_PACKAGES,
        environment={"NIXL_TELEMETRY_ENABLE": "y"},
    ),
    System(
        "vllm-p2p",
        "vLLM's own offloading, p2p tier",
        partial(offloading, p2p),
        OtherEngine,
        (
            COPIES,
            "The first engine goes on running, with what it has stored in its host memory, and the second names it in "
            "each request (`remote_kv_source`). *Store restarted*, *store down*: the first engine is killed and stays "
            "away. *Full disk*: it has little host memory.",
        ),
        packages=NIXL_PACKAGES,
        # Each request that names an engine that is dead waits half a minute.
        is_apart=True,
    ),
    System("vllm-simple", "vLLM's SimpleCPUOffloadConnector", partial(simple, lambda place: {}), Folder),
    System("vllm-simple-disk", "vLLM's SimpleCPUOffloadConnector, disk", partial(simple, simple_disk), Folder),
    System(
        "mooncake",
        "Mooncake's connector in vLLM",
        mooncake,
        Mooncake,
        (IN_MEMORY,),
        packages=MOONCAKE_PACKAGES,
    ),
    System(
        "mooncake-disk",
        "Mooncake's connector in vLLM, disk",
        served,
        partial(ServedFolder, peer=MOONCAKE),
        (
            STOPPED,
            "Each block was a file of its own: by default Mooncake writes 256 MiB or 500 blocks at once, never less.",
        ),
        packages=MOONCAKE_PACKAGES,
    ),
    System(
        "lmcache-mp",
        "LMCache, multi-process mode, disk",
        served,
        partial(ServedFolder, peer=LMCACHE),
        (STOPPED,),
        packages=("lmcache",),
        python=LMCACHE.python,
    ),
    System(
        "lmcache",
        "LMCache in the engine's process, disk",
        lmcache,
        Folder,
        packages=("lmcache",),
        refusal="No supported cpu connector found",
        python=LMCACHE.python,
    ),
    System(
        "lifeboat",
        "Lifeboat Cache's tier in vLLM's own offloading, disk",
        partial(offloading, lifeboat),
        Folder,
        (COPIES,),
        packages=("lifeboatcache",),
        added="lifeboatcache",
    ),
    System(
        "openlake",
        "OpenLake's connector",
        openlake,
        partial(OpenLake, package=ADDED / "openlake-vllm"),
        (
            "Bits are flipped in the memory of its server, `openlaked`, which it loses when it restarts. By default it "
            "looks nothing up for prompts under 1,000 tokens: here `openlake_min_external_lookup_tokens` was 0.",
        ),
        packages=("openlake-vllm",),
        added="openlake-vllm",
    ),
)
