"""Runs one act in a child process, under deadlines, and collects what it reports."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.demo.errors import DemoError
from kvoffload.demo.protocol import ActConfig, ActSummary, EngineInfo, RequestResult

START_DEADLINE_S = 600.0
"""Time for vLLM to start, load the model and warm up. Large models take minutes."""
REQUEST_DEADLINE_S = 120.0
EXIT_DEADLINE_S = 30.0
LOG_LINES_SHOWN = 15


@dataclass(slots=True)
class ActResult:
    """Everything that one act reported."""

    info: EngineInfo
    requests: list[RequestResult] = field(default_factory=list)
    summary: ActSummary = field(default_factory=lambda: ActSummary(0.0))


def run_act(
    config: ActConfig,
    log: Path,
    on_ready: Callable[[EngineInfo], None],
    on_request: Callable[[RequestResult], None],
    command: tuple[str, ...] = (sys.executable, "-m", "kvoffload.demo.engine"),
) -> ActResult:
    """Runs an act and calls back as it progresses. The engine's output goes to ``log``.

    Raises DemoError, with the end of the log, if the engine fails or is silent past a deadline. In any case no process
    of the act is left behind.
    """
    result: ActResult | None = None
    done = False
    for kind, message in _messages(config, log, command):
        if kind == "info":
            result = ActResult(EngineInfo(**message))
            on_ready(result.info)
        elif kind == "request" and result is not None:
            request = RequestResult(**message)
            result.requests.append(request)
            on_request(request)
        elif kind == "summary" and result is not None:
            result.summary = ActSummary(**message)
            done = True
    if result is None or not done:
        raise DemoError(_failure(log, "the engine ended too early"))
    return result


def _messages(config: ActConfig, log: Path, command: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Starts the engine, sends it the configuration, and yields its messages until it ends."""
    read_fd, write_fd = os.pipe()
    with log.open("wb") as log_file, os.fdopen(read_fd, "rb", buffering=0):
        try:
            child = subprocess.Popen(
                [*command, str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                start_new_session=True,
                env=_environment(config),
            )
        finally:
            os.close(write_fd)
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps(asdict(config)).encode())
            for line in _lines(read_fd, log):
                message = json.loads(line)
                yield message.pop("kind"), message
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(EXIT_DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(EXIT_DEADLINE_S)


def _lines(fd: int, log: Path) -> Iterator[bytes]:
    """Yields the lines of a pipe until its end. Raises DemoError if a line takes longer than its deadline."""
    buffer = b""
    deadline_s = START_DEADLINE_S
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        until = time.monotonic() + deadline_s
        while True:
            if not selector.select(max(0.0, until - time.monotonic())):
                raise DemoError(_failure(log, f"the engine was silent for {deadline_s:.0f} s"))
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            yield from lines
            if lines:
                deadline_s = REQUEST_DEADLINE_S
                until = time.monotonic() + deadline_s


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
