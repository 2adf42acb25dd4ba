"""The systems that are compared: how each is started, and what an engine is given to use it.

Every system gets the same engine, the same budgets in bytes, and the settings that its own documentation recommends.
What cannot be started raises ``StartError`` with the system's own message.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.process import HOST, ROOT, free_ports, kill_session, start_program

SERVICE_START_S = 180.0
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_PLUGINS": "",
}
LMCACHE_PYTHON = "PEERS_LMCACHE_PYTHON"
"""Environment variable: the Python of the virtual environment with LMCache. ``make peers`` sets it."""
MOONCAKE_BUFFER = 64 << 20
"""Of the engine for its own requests. The guide's 4 GB is for a server with more memory than this run has."""
MOONCAKE_SMALL_BUCKETS = {
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
}
"""Makes ``mooncake_client`` write every block at once. By default it writes 256 MiB or 500 blocks, never less."""
PATIENT = {"load_deadline_ms": 20_000, "lookup_deadline_ms": 5_000}
"""Deadlines with which a busy machine turns no answer from the cache into a miss."""
_EXCEPTION = re.compile(r"(?:^|[\s:])((?:\w+\.)*\w*(?:Error|Exception|Refused|Exit)\b: .+)$")
_ERROR = re.compile(r"\bERROR:\s*(.+)$")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:.]+ \[[^]]*\] )?")
_FOLLOWING = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered an issue")
"""Messages that only say that another process has failed."""


class StartError(Exception):
    """The system cannot be started. The message is its own."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is given besides its own arguments.

    Attributes:
        connector: The fields of vLLM's KVTransferConfig, None for vLLM alone.
        leftovers: Directories, and patterns of files there, that killed processes leave behind.
    """

    connector: dict[str, Any] | None
    environment: dict[str, str] = field(default_factory=dict)
    leftovers: Sequence[tuple[Path, str]] = ()

    def clean(self) -> None:
        """Removes what was left behind."""
        for directory, pattern in self.leftovers:
            for path in directory.glob(pattern):
                path.unlink(missing_ok=True)


class Service:
    """A process that a system needs beside the engine. It is ready when it listens on ``port``."""

    def __init__(self, name: str, command: Sequence[str], port: int, work: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self._log = work / f"{name}.log"
        self._command, self._port, self._work, self._env = command, port, work, env

    def start(self) -> None:
        self.process = start_program(self._command, self._log, self._env, cwd=self._work)
        if not wait_for_port(self._port, self.process, SERVICE_START_S):
            self.kill()
            raise StartError(f"{self.name}: {failure(self._log.read_text(errors='replace'))}")

    def stop(self, stop_s: float = 15.0) -> None:
        """Ends the process with SIGTERM, and what is left of its session with SIGKILL past the deadline."""
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(stop_s)
            self.kill()

    def kill(self) -> None:
        if self.process is not None:
            kill_session(self.process)


class System:
    """vLLM alone, and the base of the others."""

    name = "vllm"
    """What ``--only`` takes, and the folder of its logs."""
    title = "vLLM alone"
    packages: Sequence[str] = ()
    """Names of its packages, any of which must be installed."""
    notes: Sequence[str] = ()
    """What a reader must know about how it ran."""
    is_control = False
    """Whether wrong answers under flipped bits are what it is there to show. It runs no other fault."""
    cache_bytes = 64 << 20
    """Budget on disk when faults are planted: little more than the prompts take, so that half a file is not only room
    that was never used."""

    def __init__(self, for_faults: bool = False) -> None:
        self.for_faults = for_faults
        """Whether it must load and write whatever the time, as faults need it."""

    def python(self) -> str:
        """Returns the Python that runs the engine."""
        return sys.executable

    def versions(self) -> dict[str, str]:
        return package_versions(self.python(), self.packages)

    def missing(self) -> str | None:
        """Returns why it cannot run here, or None."""
        if self.packages and not self.versions():
            return f"{self.packages[0]} is not installed; run make peers"
        return None

    def disk_dir(self, work: Path) -> Path:
        return work / "disk"

    def services(self, work: Path, host_bytes: int, disk_bytes: int) -> list[Service]:
        """Returns the services that must run before the engine. Called before ``settings``."""
        return []

    def settings(self, work: Path, host_bytes: int, disk_bytes: int) -> Settings:
        return Settings(None)


class KVOffload(System):
    name = "kvoffload"
    title = "kvoffload"
    connector, module = "KVOffloadConnector", "kvoffload.vllm"

    def settings(self, work: Path, host_bytes: int, disk_bytes: int) -> Settings:
        options: dict[str, Any] = {
            "host_bytes": host_bytes,
            "disk_dir": str(self.disk_dir(work)),
            "disk_bytes": disk_bytes,
        }
        if self.for_faults:
            options |= {**PATIENT, "load_only_if_faster": False}
        return Settings(connector_of(self.connector, options, self.module))


class Unverified(KVOffload):
    """The control: kvoffload without verification."""

    name = "control"
    title = "control: kvoffload without verification"
    notes = ("The comparison of checksums is taken out: this must answer wrongly.",)
    is_control = True
    connector, module = "UnverifiedConnector", "benchmarks.peers.unverified"


class VLLMOffloading(System):
    """vLLM's OffloadingConnector with its managers and its fs tier, and with a worker of kvoffload that copies."""

    name = "vllm-fs"
    title = "vLLM's own offloading, fs tier"
    notes = (
        "vLLM starts its own offloading on GPUs only. Here its connector, manager and tier ran unchanged, with a "
        "worker of kvoffload that copies between device and host memory (`kvoffload.vllm.host_spec`).",
    )

    def settings(self, work: Path, host_bytes: int, disk_bytes: int) -> Settings:
        engine_id = f"peers-{uuid.uuid4().hex[:12]}"
        options = {
            "cpu_bytes_to_use": host_bytes,
            "spec_name": "HostTieringSpec",
            "spec_module_path": "kvoffload.vllm.host_spec",
            "secondary_tiers": [self.secondary(self.disk_dir(work), disk_bytes)],
        }
        connector = connector_of("OffloadingConnector", options) | {"engine_id": engine_id}
        return Settings(connector, leftovers=[(Path("/dev/shm"), f"vllm_offload_{engine_id}*")])

    def secondary(self, disk_dir: Path, disk_bytes: int) -> dict[str, Any]:
        """Returns the entry of the tier below host memory."""
        # This tier has no limit: the budget cannot be given.
        return {"type": "fs", "root_dir": str(disk_dir)}


class KVOffloadTier(VLLMOffloading):
    """The same with kvoffload's disk tier in the place of vLLM's own."""

    name = "kvoffload-tier"
    title = "kvoffload's disk tier in vLLM's own offloading"

    def secondary(self, disk_dir: Path, disk_bytes: int) -> dict[str, Any]:
        entry = {"kind": "disk", "dir": str(disk_dir), "bytes": disk_bytes}
        tier = {"type": "KVOffloadTier", "module_path": "kvoffload.vllm.secondary_tier", "tier": entry}
        return tier | PATIENT if self.for_faults else tier


class SimpleCPU(System):
    """vLLM's SimpleCPUOffloadConnector."""

    name = "vllm-simple"
    title = "vLLM's SimpleCPUOffloadConnector, disk"

    def settings(self, work: Path, host_bytes: int, disk_bytes: int) -> Settings:
        options = {
            "cpu_bytes_to_use": host_bytes,
            "kv_offload_backend": "disk",
            "disk_path": str(self.disk_dir(work) / "blocks"),
            "disk_capacity_bytes": disk_bytes,
        }
        return Settings(connector_of("SimpleCPUOffloadConnector", options))


class Mooncake(System):
    """Mooncake Store over TCP on this machine: ``mooncake_master``, and ``mooncake_client``, which owns the memory and
    the files."""

    name = "mooncake"
    title = "Mooncake's connector in vLLM, disk"
    packages = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
    notes = (
        "Its servers were stopped with the engine, so that a second engine finds what is on disk only. Each block was "
        "a file of its own: by default Mooncake writes 256 MiB or 500 blocks at once, never less.",
    )
    cache_bytes = 128 << 20

    def services(self, work: Path, host_bytes: int, disk_bytes: int) -> list[Service]:
        done = subprocess.run(
            [self.python(), "-c", "import mooncake.store; print(mooncake.__path__[0])"], capture_output=True, text=True
        )
        if done.returncode:
            raise StartError(failure(done.stderr))
        programs = Path(done.stdout.split()[-1])
        port, metrics, owner, client = free_ports(4)
        master = f"{HOST}:{port}"
        config = {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master,
            "global_segment_size": 0,
            "local_buffer_size": MOONCAKE_BUFFER,
            "protocol": "tcp",
            "device_name": "",
            "enable_offload": True,
        }
        (work / "mooncake.json").write_text(json.dumps(config, indent=2) + "\n")
        variables = environment() | {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.disk_dir(work)),
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(disk_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(disk_bytes),
            **(MOONCAKE_SMALL_BUCKETS if self.for_faults else {}),
        }
        master_command = [f"-rpc_port={port}", f"-metrics_port={metrics}", "-enable_offload=true"]
        owner_command = [f"-host={HOST}:{owner}", f"-port={client}", f"-master_server_address={master}"]
        owner_command += ["-metadata_server=P2PHANDSHAKE", "-protocol=tcp", f"-global_segment_size={host_bytes}"]
        owner_command += ["-enable_offload=true"]
        return [
            Service("mooncake_master", [str(programs / "mooncake_master"), *master_command], port, work, variables),
            Service("mooncake_client", [str(programs / "mooncake_client"), *owner_command], client, work, variables),
        ]

    def settings(self, work: Path, host_bytes: int, disk_bytes: int) -> Settings:
        variables = {"MOONCAKE_CONFIG_PATH": str(work / "mooncake.json"), "VLLM_HOST_IP": HOST}
        return Settings(connector_of("MooncakeStoreConnector", {}), variables)


class LMCache(System):
    """LMCache in multi-process mode: ``lmcache server`` and its connector, in an environment of their own."""

    name = "lmcache"
    title = "LMCache, multi-process mode, disk"
    packages = ("lmcache",)
    notes = ("Its server was stopped with the engine, so that a second engine finds what is on disk only.",)
    cache_bytes = 128 << 20

    def python(self) -> str:
        return os.path.abspath(os.environ.get(LMCACHE_PYTHON, ROOT / ".venv-peers-lmcache" / "bin" / "python"))

    def services(self, work: Path, host_bytes: int, disk_bytes: int) -> list[Service]:
        port, http, prometheus = free_ports(3)
        self._port = port
        command = [str(Path(self.python()).with_name("lmcache")), "server", "--host", HOST, "--port", str(port)]
        command += ["--http-port", str(http), "--prometheus-port", str(prometheus)]
        command += ["--l1-size-gb", str(host_bytes / 2**30), "--eviction-policy", "LRU"]
        # Its connector chooses the transfer by the engine if the device is a CPU, which the server needs to know.
        # A pool in shared memory saves the copies through a socket; it cannot be allocated lazily.
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", self._shm(), "--no-l1-use-lazy"]
        adapter = {
            "type": "fs_native",
            "base_path": str(self.disk_dir(work)),
            "max_capacity_gb": disk_bytes / 2**30,
            "eviction": {"eviction_policy": "LRU"},
        }
        return [Service("lmcache", [*command, "--l2-adapter", json.dumps(adapter)], port, work, environment())]

    def settings(self, work: Path, host_bytes: int, disk_bytes: int) -> Settings:
        options = {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": self._port}
        return Settings(connector_of("LMCacheMPConnector", options), leftovers=[(Path("/dev/shm"), f"*{self._shm()}*")])

    def _shm(self) -> str:
        return f"peers-{os.getpid()}-{self._port}"


KINDS = (System, VLLMOffloading, SimpleCPU, LMCache, Mooncake, KVOffloadTier, KVOffload)
NAMES = [kind.name for kind in KINDS]


def make_systems(only: Iterable[str] = (), for_faults: bool = False) -> list[System]:
    """Returns the systems with these names, or all. vLLM alone is always the first; the control of the faults comes
    with kvoffload."""
    names = {System.name, *(only or NAMES)}
    kinds = [*KINDS, Unverified] if for_faults and KVOffload.name in names else KINDS
    return [kind(for_faults) for kind in kinds if kind.name in names or kind.is_control]


def connector_of(name: str, options: Mapping[str, Any], module: str | None = None) -> dict[str, Any]:
    """Returns the fields of vLLM's KVTransferConfig."""
    fields = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(options)}
    return fields if module is None else fields | {"kv_connector_module_path": module}


def environment() -> dict[str, str]:
    """Returns the environment variables of every engine and service."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


def package_versions(python: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the versions of packages in the virtual environment of ``python``."""
    folders = [str(path) for path in Path(python).parents[1].glob("lib/python*/site-packages")]
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions(path=folders)}
    return {name: found[name] for name in names if name in found}


def wait_for_port(port: int, process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    """Waits until ``process`` listens on ``port``. Returns False if it ends before, or if the deadline passes."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return True
        time.sleep(0.1)
    return False


def failure(log: str) -> str:
    """Returns the message with which a program has failed: the last error in its log, or its last line."""
    return last_error(log) or next((line for line in reversed(_lines(log)) if line), "no output")


def last_error(log: str) -> str:
    """Returns the last exception in a log that names a cause, or the last line that is an error; empty without any."""
    lines = _lines(log)
    found = [match[1] for line in lines if (match := _EXCEPTION.search(line))]
    causes = [message for message in found if not any(word in message for word in _FOLLOWING)]
    errors = [match[1] for line in lines if (match := _ERROR.search(line))]
    return next((messages[-1] for messages in (causes, found, errors) if messages), "")


def _lines(log: str) -> list[str]:
    return [_PREFIX.sub("", line).strip() for line in _COLOUR.sub("", log).splitlines()]
