"""Runs ``driver.py`` in child processes and compares what they answered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("driver.py")
DEADLINE_S = 400
TOLERANCE = 1e-4
POOL = {"host_bytes": "64MiB"}
"""Room for everything the prompts of the driver need."""
GEMMA3: dict[str, Any] = {
    "model_kind": "gemma3",
    "engine": {"num_gpu_blocks_override": 24, "max_model_len": 448, "max_num_batched_tokens": 128},
}
"""A model with two KV cache groups, and sizes with which its prompts preempt each other."""


def with_gemma3(**config: Any) -> dict[str, Any]:
    """``config`` for that model."""
    return {**GEMMA3, **config, "engine": {**GEMMA3["engine"], **config.get("engine", {})}}


@dataclass(frozen=True)
class Run:
    """What one child reported, and all that it printed."""

    result: dict[str, Any]
    log: str

    def __getitem__(self, name: str) -> Any:
        return self.result[name]


class Runner:
    """Starts children that share one model. ``multiprocessing`` gives the engine processes of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs = 0

    def start(
        self,
        scenario: str,
        *,
        multiprocessing: bool = False,
        environment: Mapping[str, str] | None = None,
        **config: Any,
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """A child in a session of its own, and where its result will be; its log is beside it."""
        config["multiprocessing"] = multiprocessing
        self._runs += 1
        base = self._directory / f"{self._runs:02d}-{scenario}"
        paths = {name: base.with_suffix("." + name) for name in ("config", "json", "log")}
        paths["config"].write_text(
            json.dumps({"scenario": scenario, "model": str(self._directory / "model"), **config})
        )
        variables = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One thread, free to run anywhere: threads that wait for each other crawl on a busy machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        with paths["log"].open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, str(DRIVER), str(paths["config"]), str(paths["json"])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        return child, paths["json"]

    def __call__(self, scenario: str, **config: Any) -> Run:
        child, result = self.start(scenario, **config)
        log = result.with_suffix(".log")
        try:
            code = child.wait(DEADLINE_S)
        finally:
            kill_session(child)
        text = log.read_text(errors="replace")
        assert code == 0, f"the engine's process ended with {code}:\n{text[-6000:]}"
        return Run(json.loads(result.read_text()), text)


def eventually(condition: Callable[[], Any], deadline_s: float = 60) -> bool:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def kill_session(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL to every process of a child that ``Runner.start`` made."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def differences(got: list[Any], expected: list[Any]) -> list[int]:
    """Which answers of a round are not the expected ones: other tokens, or logprobs further off than float32
    sums in another order are."""
    assert len(got) == len(expected)
    return [
        i
        for i, ((tokens, logprobs), (right_tokens, right_logprobs)) in enumerate(zip(got, expected, strict=True))
        if tokens != right_tokens or any(abs(a - b) > TOLERANCE for a, b in zip(logprobs, right_logprobs, strict=True))
    ]


def assert_at_rest(state: dict[str, Any]) -> None:
    """Nothing under way, nothing pinned, every device block free, and no check has failed."""
    assert not state["off"]
    assert (state["jobs"], state["states"]) == (0, 0)
    assert state["idle_blocks"] == state["used_blocks"]
    assert state["free_device_blocks"] == state["usable_device_blocks"]
