"""Runs ``driver.py`` in child processes and compares their answers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from driver import MAX_TOKENS, PROMPTS

from demo import model
from demo.process import kill_session, start_program

DRIVER = Path(__file__).with_name("driver.py")
WARM = Path(__file__).with_name("warm.py")
DEADLINE_S = 400
TOLERANCE = 1e-4
CUDA_TOLERANCE = 1e-2
HAS_CUDA = Path("/dev/nvidiactl").exists()
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread that may run on any core: threads that wait for each other are very slow on a busy machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # By default vLLM compiles a part of its sampler, which takes seconds per process.
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables of every process that runs vLLM."""
DISK_BYTES = 32 << 20
FOUND = re.compile(r"found ([\d,]+) blocks of this model there")
POOL = {"host_bytes": "64MiB"}
"""Options with room for all blocks of the driver's prompts."""


TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Environment variables of engines with two ranks. Other variables of vLLM count as other software."""
PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "pipeline": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
}
FEW = 6
"""Number of prompts on two ranks, whose steps take three times as long as those of one."""


GEMMA3: dict[str, Any] = {
    "model_kind": "gemma3",
    "max_tokens": 48,
    "engine": {"num_gpu_blocks_override": 24, "max_model_len": 448, "max_num_batched_tokens": 128},
}
"""A model with two KV cache groups, and sizes at which its prompts preempt each other."""
LFM2: dict[str, Any] = {
    "model_kind": "lfm2",
    "engine": {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 128},
}
"""A model with three groups of short convolutions and one of full attention. At these sizes its prompts preempt each
other."""
QWEN3NEXT: dict[str, Any] = {
    "model_kind": "qwen3next",
    "prompts": 5,
    "engine": {
        "dtype": "bfloat16",
        "block_size": 64,
        "num_gpu_blocks_override": 22,
        "max_num_batched_tokens": 128,
        # The states are then the same in every batch.
        "long_prefill_token_threshold": 64,
    },
}
"""The same for a model with three groups of gated delta nets. Its blocks have 64 tokens."""


def with_lfm2(**config: Any) -> dict[str, Any]:
    """Returns ``config`` for the model of LFM2."""
    return {**LFM2, **config, "engine": {**LFM2["engine"], **config.get("engine", {})}}


def with_gemma3(**config: Any) -> dict[str, Any]:
    """Returns ``config`` for the model of GEMMA3."""
    return {**GEMMA3, **config, "engine": {**GEMMA3["engine"], **config.get("engine", {})}}


Acts = Mapping[str, Mapping[str, Any]]
"""Scenarios of ``driver.py`` that one engine plays, each with the configuration that is its own."""


@dataclass(frozen=True)
class Run:
    """The result of one child, and its output."""

    result: dict[str, Any]
    log: str

    def __getitem__(self, name: str) -> Any:
        return self.result[name]


class Child:
    """A child of a warm parent, with the part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, parent: WarmParent, pid: int, stdin: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._parent = parent
        self._descriptor = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._parent.ask(pid=self.pid)["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit status. Raises ``subprocess.TimeoutExpired`` after ``timeout``."""
        if self.returncode is None and not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmParent:
    """A process that runs ``program``, usually ``warm.py``, with ``environment``: it has imported vLLM and forks
    children. ``base`` is the path of its files without a suffix; whoever gives the same one shares the process."""

    def __init__(self, environment: Mapping[str, str], base: Path, program: Path = WARM) -> None:
        self._log, lock, path = (base.with_suffix(suffix) for suffix in (".log", ".lock", ".socket"))
        with lock.open("w") as file, socket.socket(socket.AF_UNIX) as connection:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not path.exists():
                with self._log.open("wb") as output, socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(path))
                    listener.listen()
                    self._process = subprocess.Popen(
                        [sys.executable, str(program), str(listener.fileno()), str(lock)],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=environment,
                        pass_fds=[listener.fileno()],
                    )
            connection.connect(str(path))
            self._file = connection.makefile("rw")

    def ask(self, **request: Any) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._file, flush=True)
        line = self._file.readline()
        assert line, f"the warm parent has ended:\n{self._log.read_text(errors='replace')[-6000:]}"
        return dict(json.loads(line))

    def start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Starts a child in a session of its own that runs ``argv`` as Python would. Its output goes to ``log``."""
        request = {"environment": dict(environment), "log": str(log), "input": os.devnull, "descriptors": {}}
        return Child(self, self.ask(argv=list(argv), **request)["pid"])

    def start_process(self, command: Sequence[str], replies: int, log: Path, environment: Mapping[str, str]) -> Child:
        """As ``demo.process.start_process``, but starts a child. ``command`` is Python and its arguments."""
        reading, writing = os.pipe()
        mine = Path(f"/proc/{os.getpid()}/fd")
        try:
            pid = self.ask(
                argv=list(command[1:]),
                environment=dict(environment),
                log=str(log),
                input=str(mine / str(reading)),
                descriptors={replies: str(mine / str(replies))},
            )["pid"]
        finally:
            os.close(reading)
        return Child(self, pid, os.fdopen(writing, "wb"))

    def close(self) -> None:
        """Ends the process, unless others share it."""
        self._file.close()


class Runner:
    """Starts children that share one model. ``multiprocessing`` gives the engine processes of its own."""

    def __init__(self, directory: Path, shared: Path) -> None:
        self._directory = directory
        self._shared = shared
        """A directory that all processes of this test run share."""
        self._runs = 0
        self._parents: dict[tuple[str | None, ...], WarmParent] = {}

    def close(self) -> None:
        for parent in self._parents.values():
            parent.close()

    def parent(self, environment: Mapping[str, str]) -> WarmParent:
        """Returns the warm parent for children with ``environment``, in which the same modules are imported."""
        imports = tuple(environment.get(name) for name in ("PYTHONPATH", "TRITON_INTERPRET"))
        if imports not in self._parents:
            name = sha256(repr(imports).encode()).hexdigest()[:12]
            self._parents[imports] = WarmParent(environment, self._shared / f"warm-{name}")
        return self._parents[imports]

    def start(
        self,
        acts: str | Acts,
        *,
        multiprocessing: bool = False,
        environment: Mapping[str, str] | None = None,
        **config: Any,
    ) -> tuple[Child | subprocess.Popen[bytes], Path]:
        """Starts a child in a session of its own. Returns it and the path of its result; the log is beside that."""
        config["multiprocessing"] = multiprocessing
        config["acts"] = {acts: {}} if isinstance(acts, str) else acts
        self._runs += 1
        base = self._directory / f"{self._runs:02d}-{next(iter(config['acts']))}"
        paths = {name: base.with_suffix("." + name) for name in ("config", "json", "log")}
        paths["config"].write_text(json.dumps({"model": str(self._directory / "model"), **config}))
        variables = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
            **(environment or {}),
        }
        argv = [str(DRIVER), str(paths["config"]), str(paths["json"])]
        return self._start(argv, variables, paths["log"]), paths["json"]

    def _start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child | subprocess.Popen[bytes]:
        if not HAS_CUDA:
            return self.parent(environment).start(argv, environment, log)
        # CUDA does not survive a fork.
        return start_program([sys.executable, *argv], log, environment)

    def play(self, acts: Acts, **config: Any) -> dict[str, Run]:
        """Has one engine play ``acts`` one after the other: see ``driver.py``. Returns what came of each."""
        child, result = self.start(acts, **config)
        log = finish(child, result.with_suffix(".log"))
        return {name: Run(each, log) for name, each in json.loads(result.read_text()).items() if name in acts}

    def __call__(self, scenario: str, **config: Any) -> Run:
        return self.play({scenario: {}}, **config)[scenario]

    def right(self, kind: str, prompts: int = PROMPTS, max_tokens: int = MAX_TOKENS) -> list[Any]:
        """Returns the right answers of a model, which no engine has computed."""
        config = {"model_kind": kind, "prompts": prompts, "max_tokens": max_tokens}
        return list(self.once(f"right {kind} {prompts} {max_tokens}", "reference", **config)["outputs"][0])

    def write_model(self, directory: Path, seed: int = 0) -> None:
        """Writes the model of ``driver.py``, without an engine."""
        program = directory.with_suffix(".py")
        program.write_text(
            f"import driver, pathlib\ndriver.write_model(pathlib.Path({str(directory)!r}), seed={seed})\n"
        )
        log = directory.with_suffix(".log")
        environment = {**os.environ, **ENVIRONMENT}
        finish(self._start([str(program)], environment, log), log)

    def once(self, name: str, scenario: str, **config: Any) -> Run:
        """Runs a scenario once for all processes of this test run that ask for ``name``."""
        kept = self._shared / f"{name}.json"
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if kept.exists():
                return Run(**json.loads(kept.read_text()))
            run = self(scenario, **config)
            kept.write_text(json.dumps({"result": run.result, "log": run.log}))
        return run


def finish(child: Child | subprocess.Popen[bytes], log: Path) -> str:
    """Waits for a child and returns its output. Fails if its exit status is not 0."""
    try:
        code = child.wait(DEADLINE_S)
    finally:
        kill_session(child)
    text = log.read_text(errors="replace")
    assert code == 0, f"the child ended with {code}:\n{text[-6000:]}"
    return text


DEMO_MODEL = model.CONFIG | {"num_hidden_layers": 2}
"""The model of the demo with fewer layers: it then computes in a quarter of the time."""


def set_up_demo(patch: pytest.MonkeyPatch) -> None:
    """Sets the environment of the demos' engines."""
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)


def eventually(condition: Callable[[], Any], deadline_s: float = 60) -> bool:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def differences(got: list[Any], expected: list[Any]) -> list[int]:
    """Returns the indices of answers that are not as expected: other tokens, or logprobs that differ by more than
    float32 sums in another order do. With CUDA, where products may be rounded to TF32, up to a tie."""
    assert len(got) == len(expected)
    if HAS_CUDA:
        return differences_beyond_ties(got, expected, CUDA_TOLERANCE)
    return [
        i
        for i, ((tokens, logprobs), (right_tokens, right_logprobs)) in enumerate(zip(got, expected, strict=True))
        if tokens != right_tokens or any(abs(a - b) > TOLERANCE for a, b in zip(logprobs, right_logprobs, strict=True))
    ]


def differences_beyond_ties(got: list[Any], expected: list[Any], tolerance: float) -> list[int]:
    """Returns the indices of answers that are not as expected up to a tie: tokens may differ from the first position on
    at which both chosen tokens have the same logprob within ``tolerance``."""

    def is_same(one: Any, right: Any) -> bool:
        for token, logprob, right_token, right_logprob in zip(*one, *right, strict=True):
            if abs(logprob - right_logprob) > tolerance:
                return False
            if token != right_token:
                return True
        return True

    return [i for i, pair in enumerate(zip(got, expected, strict=True)) if not is_same(*pair)]


def check(run: Run, right: list[Any]) -> None:
    """Checks the answers of every round, and that nothing is left."""
    for answers in run["outputs"]:
        assert differences(answers, right) == []
    assert_at_rest(run.result)


def assert_counted(run: Run, *names: str) -> None:
    for name in names:
        assert run["metrics"][name] > 0, name


def with_disk(directory: Path) -> dict[str, Any]:
    """Returns options with which requests wait for blocks from disk, however slow this machine is."""
    return POOL | {
        "disk_dir": str(directory),
        "disk_bytes": DISK_BYTES,
        "load_deadline_ms": 1000 * DEADLINE_S,
        "load_only_if_faster": False,
    }


def found(run: Run) -> int:
    """Returns the number of blocks that a server found on disk at start."""
    match = FOUND.search(run.log)
    assert match is not None, "the log does not mention the disk tier"
    return int(match[1].replace(",", ""))


def disk_tokens(run: Run) -> int:
    return sum(record["disk_tokens"] for record in run["records"])


def corrupt(directory: Path, stripe: int | None = None) -> None:
    """Flips the sign of one number in sixteen, in all slabs; with ``stripe`` only in every other part of so many
    bytes."""
    slabs = list(directory.rglob("slab-*"))
    assert slabs
    for slab in slabs:
        raw = np.memmap(slab, np.uint8, "r+")
        begins = [0] if stripe is None else range(stripe, len(raw), 2 * stripe)
        for begin in begins:
            raw[begin : None if stripe is None else begin + stripe][3::64] ^= 0x80


def wrong_of_storm(run: Run, right: list[Any]) -> list[int]:
    """Returns the prompts whose answers are not the beginning of the right ones, up to ties."""
    found = []
    for index, (tokens, logprobs) in run["answers"]:
        beginning = [each[: len(tokens)] for each in right[index]]
        if differences_beyond_ties([[tokens, logprobs]], [beginning], TOLERANCE):
            found.append(index)
    return found


def assert_at_rest(state: dict[str, Any]) -> None:
    """Checks that nothing is in progress or pinned, that all device blocks are free, and that no check has failed."""
    assert not state["off"]
    assert (state["jobs"], state["requests"]) == (0, 0)
    assert state["busy_blocks"] == 0
    assert state["free_device_blocks"] == state["usable_device_blocks"]
