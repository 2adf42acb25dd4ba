"""vLLM's OpenAI server in a session of its own, seen by clients, metric scrapers and process managers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from driver import BLOCK_SIZE, DEVICE_BLOCKS, MAX_TOKENS, connector_module
from vllm_harness import DEADLINE_S, ENVIRONMENT, Child, Runner, eventually

from demo.process import HOST, free_ports, kill_session, session_pids, start_program
from kvoffload.observe.metrics import METRICS

README = Path(__file__).parents[2] / "README.md"
_TINY = [7, 8, 9]
"""A prompt shorter than a block."""


def readme_flag() -> str:
    """Returns the value of ``--kv-transfer-config`` in README.md, that of kvoffload's own connector."""
    flags = re.findall(r"--kv-transfer-config '(\{.*?\})'", README.read_text(), re.DOTALL)
    (flag,) = (each for each in flags if '"KVOffloadConnector"' in each)
    return str(flag)


def flag(connector: str = "KVOffloadConnector", **options: Any) -> str:
    """Returns the value of ``--kv-transfer-config`` for ``connector`` with ``options``."""
    config = json.loads(readme_flag())
    config["kv_connector"] = connector
    config["kv_connector_extra_config"] = options
    config["kv_connector_module_path"] = connector_module(connector)
    return json.dumps(config)


class Server:
    """A server. As a context manager it waits until the server answers, and ends it.

    ``kv_transfer_config`` is the flag's value, or None for vLLM without kvoffload. With ``run`` its processes are
    forked from a warm parent, otherwise they are new processes, as in production. ``rank`` is the one of several
    data-parallel engines that is asked if a call names none.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        kv_transfer_config: str | None,
        arguments: Sequence[str] = (),
        run: Runner | None = None,
        rank: int | None = None,
    ) -> None:
        from openai import OpenAI

        self.model, self._rank = str(model), rank
        self._log = log
        (port,) = free_ports(1)
        self.url = f"http://{HOST}:{port}"
        command = ["-m", "vllm.entrypoints.launchers.api_server.entry", "--model", self.model]
        command += ["--host", HOST, "--port", str(port), "--skip-tokenizer-init", "--enforce-eager", "--seed", "0"]
        command += ["--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--max-model-len", "512"]
        command += ["--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-num-batched-tokens", "1024", *arguments]
        if kv_transfer_config is not None:
            command += ["--kv-transfer-config", kv_transfer_config]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
        if run is not None:
            self.process: Child | subprocess.Popen[bytes] = run.parent(environment).start(command, environment, log)
        else:
            self.process = start_program([sys.executable, *command], log, environment)
        self.access: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        """Arguments for clients of this server."""
        self.client = OpenAI(timeout=DEADLINE_S, **self.access)

    def __enter__(self) -> Self:
        try:
            assert self.wait(), f"the server does not come up:\n{self.log()[-6000:]}"
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Sends SIGKILL to all processes that are left."""
        self.client.close()
        kill_session(self.process)

    def wait(self) -> bool:
        """Waits until the server answers or has ended. Returns whether it answers."""
        settled = eventually(lambda: self.process.poll() is not None or self._healthy(), DEADLINE_S)
        return settled and self.process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/health") is not None
        return False

    # What clients do.

    def complete(self, prompt: list[int], rank: int | None = None, **changes: Any) -> list[Any]:
        """Returns tokens and logprobs, computed by the data-parallel engine ``rank`` if it is given."""
        return _answer(self.client.completions.create(**self.request(prompt, rank, changes)))

    def request(self, prompt: list[int], rank: int | None, changes: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``completions.create`` for ``prompt``."""
        body = {"return_tokens_as_token_ids": True, "ignore_eos": True, **changes}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": body.pop("max_tokens", MAX_TOKENS),
            "temperature": 0,
            "logprobs": 1,
            "extra_headers": self._headers(rank),
            "extra_body": body,
        }

    def _headers(self, rank: int | None) -> dict[str, str]:
        rank = self._rank if rank is None else rank
        return {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def round(self, prompts: Sequence[list[int]], **changes: Any) -> list[Any]:
        """Runs every prompt once, all at the same time, and returns the answers."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, **changes), prompts))

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Sends a POST, by default an empty one, and returns the JSON of the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        return dict(json.loads(self._open(request)))

    def get(self, path: str) -> str:
        return self._open(urllib.request.Request(self.url + path))

    def _open(self, request: urllib.request.Request) -> str:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{request.full_url}: {error.code} {error.read().decode()}") from error

    def forget_device_blocks(self) -> None:
        """Empties the cache of the device but not that of the host."""
        assert eventually(lambda: self.post("/reset_prefix_cache")["success"])

    # What scrapers see.

    def metrics(self, rank: int | None = None) -> dict[str, float]:
        """Returns ``scrape()`` after a tiny request, whose steps publish everything that was counted before."""
        self.complete(_TINY, rank, max_tokens=4)
        return self.scrape(rank)

    def scrape(self, rank: int | None = None) -> dict[str, float]:
        """Returns the metrics by their names in METRICS, those with labels as ``NAME:LABEL``. ``rank`` selects one of
        several data-parallel engines."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                of_engine = sample.labels.get("engine") == str(rank or 0)
                if of_engine and sample.name.startswith("kvoffload:") and not sample.name.endswith("_created"):
                    name = sample.name.removeprefix("kvoffload:").removesuffix("_total")
                    label = ",".join(sample.labels[each] for each in METRICS[name].labels)
                    samples[f"{name}:{label}" if label else name] = sample.value
        return samples

    def kinds(self) -> dict[str, str]:
        """Returns the kind, counter or gauge, of every metric of kvoffload that the server exposes."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics"))
        kinds = {f.name.removeprefix("kvoffload:"): f.type for f in families if f.name.startswith("kvoffload:")}
        return {name: kind for name, kind in kinds.items() if not name.endswith("_created")}

    def growth(self, action: Callable[[], Any], rank: int | None = None) -> tuple[Any, dict[str, float]]:
        """Runs ``action``. Returns its result, and by how much each metric grew."""
        before = self.metrics(rank)
        result = action()
        after = self.metrics(rank)
        after["asked_tokens"] -= len(_TINY)
        return result, {name: value - before.get(name, 0) for name, value in after.items()}

    # What the operating system sees.

    def processes(self) -> Iterator[Path]:
        """Returns /proc/PID of every live process in the server's session."""
        return (Path(f"/proc/{pid}") for pid in session_pids(self.process.pid))

    def pools(self) -> dict[int, int]:
        """Returns the bytes of each host pool that the server holds, by inode."""
        return {number: size for process in self.processes() for number, size in memory_files(process).items()}


class Clients:
    """Clients in a thread of their own. Each sends its prompts to ``server``, one after the other."""

    def __init__(self, server: Server, prompts: Iterable[Iterable[list[int]]]) -> None:
        self._server = server
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(**server.access)
        self.answers: list[tuple[list[int], list[Any]]] = []
        """Prompts and their answers."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._asking = [asyncio.run_coroutine_threadsafe(self._ask(each), self._loop) for each in prompts]

    async def _ask(self, prompts: Iterable[list[int]]) -> None:
        for prompt in prompts:
            response = await self._client.completions.create(**self._server.request(prompt, None, {}))
            self.answers.append((prompt, _answer(response)))

    def hang_up(self) -> None:
        """Closes all connections without waiting for answers."""
        for asking in self._asking:
            asking.cancel()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(DEADLINE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _answer(response: Any) -> list[Any]:
    logprobs = response.choices[0].logprobs
    return [[int(token.removeprefix("token_id:")) for token in logprobs.tokens], logprobs.token_logprobs]


def memory_files(process: Path) -> dict[int, int]:
    """Returns inode and bytes of kvoffload's memory files that ``process``, a /proc/PID, has open."""
    found = {}
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:kvoffload" in os.readlink(descriptor):
                    status = descriptor.stat()
                    found[status.st_ino] = status.st_size
    return found


def named_segments(process: Path) -> set[Path]:
    """Returns the files in /dev/shm that ``process``, a /proc/PID, has mapped."""
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text().splitlines()
        paths = {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
        return {path for path in paths if path.exists()}
    return set()


def record_sockets() -> dict[int, list[Path]]:
    """Returns kvoffload's listening sockets by process id."""
    found: dict[int, list[Path]] = {}
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        match = re.search(r"(/\S*/kvoffload(?:-\d+)?/(\d+)-\S+)$", line)
        if match:
            found.setdefault(int(match[2]), []).append(Path(match[1]))
    return found
