"""A process that has imported vLLM once, and forks a child for each program: ``python warm.py LISTENER LOCK``.

Several processes are its clients: it accepts connections at the socket with the descriptor LISTENER. Each sends JSON
objects, one per line, and gets a line in answer to each. A line with ``argv`` forks a child that runs that program as
Python runs its own arguments (a path, or ``-m`` and a module), in a session of its own and with exactly the given
``environment``; the answer has the child's ``pid``. Its input is ``input``, its output goes to ``log``, each path in
``descriptors`` is open for writing, as the descriptor with its number. A line with ``pid`` asks for that child's exit
``code``, negative for a signal, null while it runs. The process ends with its last client, and holds the lock of
LOCK, a file, while it looks whether there is another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import math
import multiprocessing
import os
import runpy
import select
import socket
import sys
from multiprocessing import resource_tracker
from types import SimpleNamespace
from typing import IO, Any

MODULES = (
    "transformers.models.gemma3",
    "transformers.models.lfm2",
    "transformers.models.llama",
    "transformers.models.qwen3_next",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.lfm2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_next",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.spec_decode.draft_model",
    "kvoffload.vllm",
    "demo.corrupted",
    "faulty_connectors",
)
"""Modules that children use. Some versions of vLLM lack some of them."""
LOST_AFTER_MS = 20
"""After so long a process looks whether a message is there of which it was not notified."""


def warm_up() -> None:
    """Imports MODULES. Raises RuntimeError if this starts a thread, because forked children would lack it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        offer_triton()
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.model_executor.models import registry

        # vLLM inspects the class of a model in a process of its own, to avoid an import in this process.
        registry._run_in_subprocess = lambda look: look()
    reduce_in_the_kernel()
    read_in_the_kernel()
    # Garbage collection in children need not visit what was imported here.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"importing vLLM has started {threads - 1} threads: children cannot be forked")


def offer_triton() -> None:
    """Makes vLLM use Triton, which its newer model runner needs. vLLM asks for a backend for CPUs, but Triton's
    interpreter runs without one."""
    from triton.backends import Backend, backends

    class Driver:
        is_active = staticmethod(lambda: True)

        def get_current_target(self) -> SimpleNamespace:
            return SimpleNamespace(backend="cpu")

    backends["cpu"] = Backend(compiler=None, driver=Driver)


def reduce_in_the_kernel() -> None:
    """Makes tensor-parallel ranks wait for each other in the kernel. In shared memory they would spin, and on a busy
    machine take the CPU time of the rank that they wait for."""
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        share = CpuCommunicator._all_group_ranks_share_shm_group_name
        # The groups of a pipeline have no alternative.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda group: (
            not group.unique_name.startswith("tp") and share(group)
        )


def read_in_the_kernel() -> None:
    """Makes processes of an engine wait in the kernel for each other's messages. After each message they would ask for
    the next one for a second without a pause, and on a busy machine take the CPU time of the process that sends it."""
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        wait = SpinCondition.wait

        def wait_in_the_kernel(condition: Any, timeout_ms: int | None = None) -> None:
            condition.last_read = -math.inf
            # The first notifications are lost while sockets connect.
            wait(condition, min(timeout_ms or LOST_AFTER_MS, LOST_AFTER_MS))

        SpinCondition.wait = wait_in_the_kernel


_get_context = multiprocessing.get_context


def fork_context(method: str | None = None) -> Any:
    """Returns a context that forks, so that children are as warm as this process. vLLM's CPU platform asks for new
    processes because threads of OpenMP do not survive a fork, but no such threads exist here."""
    # A child uses its parent's resource tracker, which outlives the child and removes its shared memory.
    resource_tracker.ensure_running()
    return _get_context("fork")


def become(request: dict[str, Any], leading: int) -> None:
    """Turns this forked process into the requested one. Closes ``leading`` as soon as it leads a session and has opened
    its files."""
    os.setsid()
    for target, path, flags in (
        (0, request["input"], os.O_RDONLY),
        (1, request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        *((int(number), path, os.O_WRONLY) for number, path in request["descriptors"].items()),
    ):
        descriptor = os.open(path, flags, 0o644)
        if target == leading:
            leading = os.dup(leading)
        if descriptor != target:
            os.dup2(descriptor, target)
            os.close(descriptor)
    os.dup2(1, 2)
    os.close(leading)
    os.environ.clear()
    os.environ.update(request["environment"])
    multiprocessing.get_context = fork_context
    sys.argv = request["argv"]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def serve(listener: socket.socket, lock: str) -> tuple[dict[str, Any], int] | None:
    """Forks children until there is no client any more, then returns None. In a child it returns its request, and the
    descriptor to close when it leads a session."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        clients: dict[socket.socket, IO[str]] = {}
        while True:
            if not clients:
                with open(lock) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    if not select.select([listener], [], [], 0)[0]:
                        os.unlink(listener.getsockname())
                        return None
            for ready in select.select([listener, *clients], [], [])[0]:
                if ready is listener:
                    client = stack.enter_context(listener.accept()[0])
                    clients[client] = stack.enter_context(client.makefile("rw"))
                elif not (line := clients[ready].readline()):
                    clients.pop(ready).close()
                    ready.close()
                elif "argv" in (request := json.loads(line)):
                    waiting, leading = os.pipe()
                    pid = os.fork()
                    if pid == 0:
                        os.close(waiting)
                        return request, leading
                    os.close(leading)
                    os.read(waiting, 1)
                    os.close(waiting)
                    answer: dict[str, Any] = {"pid": pid}
                    print(json.dumps(answer), file=clients[ready], flush=True)
                else:
                    done, status = os.waitpid(request["pid"], os.WNOHANG)
                    answer = {"code": os.waitstatus_to_exitcode(status) if done else None}
                    print(json.dumps(answer), file=clients[ready], flush=True)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    warm_up()
    child = serve(listener, sys.argv[2])
    if child is not None:
        become(*child)


if __name__ == "__main__":
    main()
