"""vLLM's OpenAI server in a session of its own: what a client, a scraper and a process manager see of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
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
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from vllm_harness import DEADLINE_S, ENVIRONMENT, Child, Runner, eventually, kill_session

HOST = "127.0.0.1"
README = Path(__file__).parents[2] / "README.md"
_TINY = [7, 8, 9]
"""A prompt that fills no block."""


def readme_flag() -> str:
    """The value of ``--kv-transfer-config`` that README.md tells people to use, as it stands there."""
    (flag,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", README.read_text(), re.DOTALL)
    return str(flag)


def flag(connector: str = "KVOffloadConnector", **options: Any) -> str:
    """The same with ``options``, and perhaps a connector that misbehaves."""
    config = json.loads(readme_flag())
    config["kv_connector"] = connector
    config["kv_connector_extra_config"] = options
    config["kv_connector_module_path"] = connector_module(connector)
    return json.dumps(config)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


class Server:
    """A server that is starting, or a started one: a context manager that waits until it answers, and ends it.

    ``kv_transfer_config`` is the flag's value, None for vLLM by itself. With ``run`` its processes are forked from a
    warm parent; without, they are new ones, as those of people are.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        kv_transfer_config: str | None,
        arguments: Sequence[str] = (),
        run: Runner | None = None,
    ) -> None:
        self.model = str(model)
        self._log = log
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", HOST, "--port", str(port), "--skip-tokenizer-init", "--enforce-eager", "--seed", "0"]
        command += ["--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--max-model-len", "512"]
        command += ["--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-num-batched-tokens", "1024", *arguments]
        if kv_transfer_config is not None:
            command += ["--kv-transfer-config", kv_transfer_config]
        environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
        if run is not None:
            self.process: Child | subprocess.Popen[bytes] = run.parent(environment).start(command, environment, log)
        else:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        self.access: dict[str, Any] = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        """What a client of it is made with."""
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
        """SIGKILL to what is left of it."""
        self.client.close()
        kill_session(self.process)

    def wait(self) -> bool:
        """Until it answers, or has ended: then False."""
        settled = eventually(lambda: self.process.poll() is not None or self._healthy(), DEADLINE_S)
        return settled and self.process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/health") is not None
        return False

    # What a client does.

    def complete(self, prompt: list[int], rank: int | None = None, **changes: Any) -> list[Any]:
        """Tokens and their logprobs, by the data-parallel engine ``rank`` if it is given."""
        return _answer(self.client.completions.create(**self.request(prompt, rank, changes)))

    def request(self, prompt: list[int], rank: int | None, changes: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``completions.create`` that ask for it."""
        body = {"return_tokens_as_token_ids": True, "ignore_eos": True, **changes}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": body.pop("max_tokens", MAX_TOKENS),
            "temperature": 0,
            "logprobs": 1,
            "extra_headers": {} if rank is None else {"X-data-parallel-rank": str(rank)},
            "extra_body": body,
        }

    def round(self, prompts: Sequence[list[int]], **changes: Any) -> list[Any]:
        """Every prompt once, all at the same time; what was answered."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, **changes), prompts))

    def post(self, path: str) -> dict[str, Any]:
        """The JSON that an empty POST is answered with."""
        return dict(json.loads(self._open(urllib.request.Request(self.url + path, method="POST"))))

    def get(self, path: str) -> str:
        return self._open(urllib.request.Request(self.url + path))

    def _open(self, request: urllib.request.Request) -> str:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{request.full_url}: {error.code} {error.read().decode()}") from error

    def forget_device_blocks(self) -> None:
        """Empties the device's cache and leaves the host's."""
        assert eventually(lambda: self.post("/reset_prefix_cache")["success"])

    # What a scraper sees.

    def metrics(self, rank: int | None = None) -> dict[str, float]:
        """What ``scrape`` finds when the server has told of all it has done: a tiny request makes it step."""
        self.complete(_TINY, rank, max_tokens=4)
        return self.scrape(rank)

    def scrape(self, rank: int | None = None) -> dict[str, float]:
        """kvoffload's metrics by their names in METRICS, those with a reason as ``misses:REASON``, of one data-parallel
        engine where there are several."""
        samples = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                of_engine = sample.labels.get("engine") == str(rank or 0)
                if of_engine and sample.name.startswith("kvoffload:") and not sample.name.endswith("_created"):
                    name = sample.name.removeprefix("kvoffload:").removesuffix("_total")
                    reason = sample.labels.get("reason")
                    samples[f"{name}:{reason}" if reason else name] = sample.value
        return samples

    def kinds(self) -> dict[str, str]:
        """Every metric of kvoffload in the exposition, and whether it is a counter or a gauge."""
        families = text_string_to_metric_families(self.get("/metrics"))
        kinds = {f.name.removeprefix("kvoffload:"): f.type for f in families if f.name.startswith("kvoffload:")}
        return {name: kind for name, kind in kinds.items() if not name.endswith("_created")}

    def growth(self, action: Callable[[], Any], rank: int | None = None) -> tuple[Any, dict[str, float]]:
        """What ``action`` returned, and by how much each metric grew meanwhile."""
        before = self.metrics(rank)
        result = action()
        after = self.metrics(rank)
        after["asked_tokens"] -= len(_TINY)
        return result, {name: value - before.get(name, 0) for name, value in after.items()}

    # What the machine sees.

    def processes(self) -> Iterator[Path]:
        """/proc/PID of every live process in its session."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    yield process

    def pools(self) -> dict[int, int]:
        """Bytes of each host pool that its processes hold, by inode."""
        return {number: size for process in self.processes() for number, size in memory_files(process).items()}


class Clients:
    """Clients in a thread of their own, each of which asks ``server`` for its prompts, one after the other."""

    def __init__(self, server: Server, prompts: Iterable[Iterable[list[int]]]) -> None:
        self._server = server
        self._client = AsyncOpenAI(**server.access)
        self._ended = False
        self.answers: list[tuple[list[int], list[Any]]] = []
        """Prompts and what was answered."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._asking = [asyncio.run_coroutine_threadsafe(self._ask(each), self._loop) for each in prompts]

    async def _ask(self, prompts: Iterable[list[int]]) -> None:
        for prompt in prompts:
            if self._ended:
                return
            response = await self._client.completions.create(**self._server.request(prompt, None, {}))
            self.answers.append((prompt, _answer(response)))

    def end(self) -> None:
        """Ends when every request under way is answered. Raises what a client's request has raised."""
        self._ended = True
        try:
            for asking in self._asking:
                asking.result(DEADLINE_S)
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """Closes every connection, with requests under way."""
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
    """Inode and bytes of each of kvoffload's memory files that a process, /proc/PID, has open."""
    found = {}
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:kvoffload" in os.readlink(descriptor):
                    status = descriptor.stat()
                    found[status.st_ino] = status.st_size
    return found


def named_segments(process: Path) -> set[Path]:
    """What a process has mapped that has a name in /dev/shm."""
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text().splitlines()
        paths = {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
        return {path for path in paths if path.exists()}
    return set()


def abstract_sockets() -> dict[int, list[str]]:
    """kvoffload's listening sockets by process id."""
    found: dict[int, list[str]] = {}
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        match = re.search(r"@kvoffload/(\d+)/(\S+)", line)
        if match:
            found.setdefault(int(match[1]), []).append(match[2])
    return found
