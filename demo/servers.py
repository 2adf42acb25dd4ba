"""vLLM's OpenAI servers in processes of their own, what asks them, and the hand-over of a prompt from one to another.

A hand-over is what a proxy does for servers that compute prompts and servers that go on: the first is asked for one
token of the prompt, and what it says in ``kv_transfer_params`` is sent to the second with the same request. Nothing
here imports kvoffload, so that servers with any connector can be started.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from demo.process import HOST, START_DEADLINE_S, DemoError, Leader, free_ports, kill_session, start_program

PROGRAM = ("-m", "vllm.entrypoints.launchers.api_server.entry")
USUAL = ("--skip-tokenizer-init", "--enforce-eager", "--seed", "0", "--dtype", "float32")
"""A server that takes tokens, not text, and whose answers can be compared with those of another one."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
TO_HAND_OVER: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The ``kv_transfer_params`` with which a proxy asks a server to compute a prompt for another one."""
POLL_S = 0.05
RETRY_S = 0.2


class ServerProcess(Leader, Protocol):
    """The part of ``subprocess.Popen`` that is used of a server's process."""

    def poll(self) -> int | None: ...


Start = Callable[[Sequence[str], Path, Mapping[str, str]], ServerProcess]
"""Starts a command in a session of its own with a log and an environment, see ``start_program``."""


class UnreachableError(DemoError):
    """The server does not run, or ended before it had answered."""


class OverdueError(DemoError):
    """The server runs, but did not answer within the deadline."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered, with its ``kv_transfer_params``. ``cached``: tokens of the prompt not computed."""

    tokens: list[int]
    logprobs: list[float]
    total_s: float
    transfer: Mapping[str, Any]
    cached: int


class VllmServer:
    """A server on a port of its own, which may be killed and started again. As a context manager it waits until the
    server answers, and kills it in the end.

    ``transfer`` has the fields of vLLM's KVTransferConfig, None is vLLM without a connector; ``arguments`` are other
    flags. Each start has a log of its own, beside ``log``.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: Mapping[str, Any] | None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start: Start = start_program,
    ) -> None:
        self.model = str(model)
        self.log = self._log = log
        self._starts = 0
        (self.port,) = free_ports(1)
        command = [sys.executable, *PROGRAM, "--model", self.model, "--host", HOST, "--port", str(self.port), *USUAL]
        command += ["--enable-prompt-tokens-details", *arguments]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self._command = command
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._start = start
        self._process: ServerProcess | None = None
        self.start()

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the server if it does not run."""
        if not self.is_running:
            self._starts += 1
            self.log = self._log.with_stem(f"{self._log.stem}-{self._starts}")
            self._process = self._start(self._command, self.log, self._environment)

    def wait(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Waits until the server answers. Raises DemoError if it ends before, or past the deadline."""
        until = time.monotonic() + deadline_s
        while not self.is_up():
            if not self.is_running or time.monotonic() > until:
                lines = self.log.read_text(errors="replace").splitlines()[-30:]
                raise DemoError("\n".join([f"the server does not come up; the end of its log, {self.log}:", *lines]))
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kills all of the server's processes. May be called twice."""
        if self._process is not None:
            kill_session(self._process)
            self._process = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_up(self) -> bool:
        """Returns whether the server answers."""
        with contextlib.suppress(DemoError):
            self.exchange("GET", "/health", None, 5.0)
            return True
        return False

    def exchange(self, method: str, path: str, body: Any, deadline_s: float) -> bytes:
        """Returns the body of the answer. Raises UnreachableError, OverdueError, and DemoError for an error status."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=deadline_s)
        try:
            raw = None if body is None else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = response.read()
        except TimeoutError as error:
            raise OverdueError(
                f"{path}: no answer within {deadline_s:.0f} s; the server's log is {self.log}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise DemoError(f"{path}: status {response.status}: {found[:500].decode(errors='replace')}")
        return found

    def complete(
        self, prompt: Sequence[int], max_tokens: int, deadline_s: float, transfer: Mapping[str, Any] | None = None
    ) -> Answer:
        """Returns the most likely tokens after ``prompt``. ``transfer``: the request's ``kv_transfer_params``. Raises
        as ``exchange`` does."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }
        if transfer is not None:
            body["kv_transfer_params"] = dict(transfer)
        begun = time.perf_counter()
        found = json.loads(self.exchange("POST", "/v1/completions", body, deadline_s))
        total_s = time.perf_counter() - begun
        logprobs = found["choices"][0]["logprobs"]
        return Answer(
            [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]],
            logprobs["token_logprobs"],
            total_s,
            found.get("kv_transfer_params") or {},
            ((found.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )


@dataclass(frozen=True, slots=True)
class Handed:
    """The answer to a request that went through two servers. ``offered``: what the first said for the second, if
    anything. ``retries``: servers that did not answer."""

    answer: Answer
    offered: Mapping[str, Any]
    retries: int

    @property
    def is_offered(self) -> bool:
        return bool(self.offered.get("do_remote_prefill"))


class Proxy:
    """Has each prompt computed by one of ``prefill`` and handed over to one of ``decode``, in turn. If a server does
    not answer, the next one is asked; if none computes the prompt, a server of ``decode`` gets the request as it is.
    Threads may share a proxy."""

    def __init__(self, prefill: Sequence[VllmServer], decode: Sequence[VllmServer]) -> None:
        self._prefill = prefill
        self._decode = decode
        self._turns = itertools.count()

    def ask(self, prompt: Sequence[int], max_tokens: int, attempt_s: float, deadline_s: float) -> Handed:
        """Returns the answer. Raises OverdueError if a server that runs is silent for ``attempt_s``, or if no server
        has answered within ``deadline_s``."""
        until = time.monotonic() + deadline_s
        turn, retries = next(self._turns), 0
        offered: Mapping[str, Any] = {}
        for server in _from(self._prefill, turn):
            try:
                offered = server.complete(prompt, 1, attempt_s, TO_HAND_OVER).transfer
                break
            except UnreachableError:
                retries += 1
        while True:
            for server in _from(self._decode, turn):
                try:
                    return Handed(server.complete(prompt, max_tokens, attempt_s, offered or None), offered, retries)
                except UnreachableError:
                    retries += 1
            if time.monotonic() > until:
                raise OverdueError(f"no server that goes on has answered within {deadline_s:.0f} s")
            time.sleep(RETRY_S)


def _from(servers: Sequence[VllmServer], turn: int) -> list[VllmServer]:
    """Returns ``servers``, another one first each turn."""
    first = turn % len(servers)
    return [*servers[first:], *servers[:first]]
