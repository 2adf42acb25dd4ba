"""Time to first token in real vLLM if the prompt is computed, on the device, or in host memory; in one process or more.

On a CPU, the engine's own thread makes the copies. To measure the benefit of waiting in idle steps, a second thread
makes them too, with and without the wait. Each engine runs in a child process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from demo.engine import connector, sampling, start_llm
from demo.model import write_model
from demo.process import kill_session

BLOCK_SIZE = 128
PROMPT_TOKENS = 2000
MODES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "one process": ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    "engine in its own process": ({}, {}),
    "two ranks": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
}
CONNECTORS = {
    "": "KVOffloadConnector",
    ", copies on a thread": "ThreadedKVOffloadConnector",
    ", copies on a thread, no wait in idle steps": "SpinningKVOffloadConnector",
}


def main(out: Path, quick: bool) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), seed=0)
        for mode, (engine, environment) in MODES.items():
            for name, kind in CONNECTORS.items():
                config = {"model": directory, "engine": engine, "connector": kind, "prompts": 4 if quick else 8}
                seconds = _in_child(config, environment)
                device = seconds["device"]
                if not name:
                    rows.append(Row(f"{mode}: computed", seconds["computed"] * 1e3, "ms"))
                    rows.append(Row(f"{mode}: device hit", device * 1e3, "ms"))
                ratio = seconds["host"] / device
                rows.append(Row(f"{mode}: host hit{name}", seconds["host"] * 1e3, "ms", "over a device hit", ratio))
    publish("ttft", f"Time to first token of a prompt of {PROMPT_TOKENS} tokens, p50", rows, out)


def _in_child(config: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    with tempfile.NamedTemporaryFile("r") as result:
        command = [sys.executable, "-m", "benchmarks.ttft", json.dumps(config), result.name]
        child = subprocess.Popen(command, env=variables, start_new_session=True)
        try:
            child.wait(timeout=900)
            measured: dict[str, float] = json.load(result)
        finally:
            # The engine's child processes do not end with it.
            kill_session(child)
    return measured


def _measure(config: dict[str, Any]) -> dict[str, float]:
    usual = config["connector"] == "KVOffloadConnector"
    module = "kvoffload.vllm" if usual else "benchmarks.connectors"
    llm = start_llm(
        config["model"],
        connector({"host_bytes": "2GiB"}, config["connector"], module),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=64,
        max_model_len=PROMPT_TOKENS + BLOCK_SIZE,
        max_num_batched_tokens=PROMPT_TOKENS + BLOCK_SIZE,
        **config["engine"],
    )
    params = sampling(1, logprobs=None)
    rng = np.random.default_rng(0)

    def seconds(prompt: list[int]) -> float:
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
    for _ in range(config["prompts"] + 2):
        prompt = rng.integers(5, 500, PROMPT_TOKENS).tolist()
        times["computed"].append(seconds(prompt))
        times["device"].append(seconds(prompt))
        time.sleep(0.05)
        assert llm.reset_prefix_cache()
        times["host"].append(seconds(prompt))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_measure(json.loads(sys.argv[1]))))
    os._exit(0)
