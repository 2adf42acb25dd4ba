"""Runs engines in child processes, under deadlines, and collects what they report."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from kvoffload.demo.errors import DemoError
from kvoffload.demo.protocol import ActConfig, ActSummary, EngineInfo, RequestResult

START_DEADLINE_S = 600.0
"""Time for vLLM to start, load the model and warm up. Large models take minutes."""
REQUEST_DEADLINE_S = 120.0
EXIT_DEADLINE_S = 30.0
LOG_LINES_SHOWN = 15
ENGINE = (sys.executable, "-m", "kvoffload.demo.engine")


@dataclass(slots=True)
class ActResult:
    """Everything that one act reported."""

    info: EngineInfo
    requests: list[RequestResult] = field(default_factory=list)
    summary: ActSummary = field(default_factory=lambda: ActSummary(0.0))
    """Without the control."""
    control: list[RequestResult] = field(default_factory=list)
    """The same requests once more, if they were repeated with corrupted loads."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is used."""

    pid: int
    stdin: IO[bytes] | None

    def wait(self, timeout: float | None = None) -> int: ...


def start_process(command: Sequence[str], replies: int, log: Path, environment: Mapping[str, str]) -> Process:
    """Starts ``command`` in a session of its own, with a pipe as its input, its output in ``log``, and the descriptor
    ``replies`` open."""
    with log.open("wb") as log_file:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            pass_fds=(replies,),
            start_new_session=True,
            env=environment,
        )


class EngineProcess:
    """An engine in a child process, which carries out one command after the other. Its output goes to ``log``.

    As a context manager it leaves no process behind. Methods raise DemoError, with the end of the log, if the engine
    fails or is silent past a deadline.
    """

    def __init__(self, config: ActConfig, log: Path, command: tuple[str, ...] = ENGINE) -> None:
        self.log = log
        self.info: EngineInfo | None = None
        """What the engine said when it was ready."""
        read_fd, write_fd = os.pipe()
        self._replies = os.fdopen(read_fd, "rb", buffering=0)
        self._lines = self._read_lines()
        try:
            self._child = start_process([*command, str(write_fd)], write_fd, log, _environment(config))
        except BaseException:
            self._replies.close()
            raise
        finally:
            os.close(write_fd)
        self._send(asdict(config))

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_ready(self) -> EngineInfo:
        """Returns once the engine has started and warmed up."""
        if self.info is None:
            self.info = EngineInfo(**self._receive(START_DEADLINE_S))
        return self.info

    def call(self, do: str, **arguments: Any) -> Any:
        """Carries out the command ``do`` and returns the reply. See ``Engine`` in ``engine`` for the commands."""
        self.wait_ready()
        self._send({"do": do, **arguments})
        return self._receive(REQUEST_DEADLINE_S)

    def visit(self, index: int) -> RequestResult | None:
        """Asks the question of a visit. Returns None if an earlier act has asked it."""
        reply = self.call("visit", index=index)
        return None if reply is None else RequestResult(**reply)

    def repeat(self, index: int) -> RequestResult:
        """Asks the last question about a document once more."""
        return RequestResult(**self.call("repeat", index=index))

    def ask(self, index: int, document: int, load: bool = True) -> RequestResult:
        """Asks the first question about a document, as if it had not been asked before. Without ``load`` the whole
        prompt is computed, whatever any cache has of it."""
        return RequestResult(**self.call("ask", index=index, document=document, load=load))

    def end(self) -> ActSummary:
        """Shuts the engine down as a server does, and returns the summary."""
        summary = ActSummary(**self.call("end"))
        # It ends when there are no more commands.
        self._close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(EXIT_DEADLINE_S)
        return summary

    def kill(self) -> None:
        """Ends every process of the engine at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(EXIT_DEADLINE_S)
        self._close_input()
        self._replies.close()

    def _close_input(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        # An engine that has ended is noticed when it does not reply.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()

    def _receive(self, deadline_s: float) -> Any:
        self._deadline_s = deadline_s
        line = next(self._lines, None)
        if line is None:
            raise DemoError(_failure(self.log, "the engine ended too early"))
        return json.loads(line)

    def _read_lines(self) -> Iterator[bytes]:
        """Yields the engine's lines until their end. Raises DemoError if a line takes longer than its deadline."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while True:
                until = time.monotonic() + self._deadline_s
                while b"\n" not in buffer:
                    if not selector.select(max(0.0, until - time.monotonic())):
                        raise DemoError(_failure(self.log, f"the engine was silent for {self._deadline_s:.0f} s"))
                    chunk = os.read(self._replies.fileno(), 1 << 16)
                    if not chunk:
                        return
                    buffer += chunk
                line, _, buffer = buffer.partition(b"\n")
                yield line


def run_act(
    config: ActConfig,
    log: Path,
    on_ready: Callable[[EngineInfo], None],
    on_request: Callable[[RequestResult], None],
    command: tuple[str, ...] = ENGINE,
    with_control: bool = False,
) -> ActResult:
    """Runs all visits of ``config`` in an engine of their own, and calls back as it progresses.

    ``with_control`` then repeats the requests with corrupted loads. They must be the last ones about their documents.
    Raises DemoError, with the end of ``log``, if the engine fails or is silent past a deadline. In any case no process
    of the act is left behind.
    """
    with EngineProcess(config, log, command) as engine:
        result = ActResult(engine.wait_ready())
        on_ready(result.info)
        for index in range(len(config.visits)):
            request = engine.visit(index)
            if request is not None:
                result.requests.append(request)
                on_request(request)
        if with_control:
            result.summary = ActSummary(**engine.call("summary"))
            engine.call("corrupt_loads")
            for request in result.requests:
                result.control.append(engine.repeat(request.index))
                on_request(result.control[-1])
            engine.end()
        else:
            result.summary = engine.end()
    return result


def _environment(config: ActConfig) -> dict[str, str]:
    """Returns the environment of the engine, which runs in one process and fetches nothing from the network."""
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(config.device_cache_gib)),
    }


def _failure(log: Path, what: str) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return "\n".join([f"{what}; the end of its log, {log}:", *(f"  {line}" for line in lines)])
