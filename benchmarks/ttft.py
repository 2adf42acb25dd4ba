"""Time to first token in real vLLM if the prompt is computed, on the device, or in host memory; in one process or more;
and under device pressure, with host memory that repeats the device and with host memory that does not.

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
CONTENTS = ("inclusive", "exclusive")
PRESSED, PRESSED_BLOCKS = "256MiB", 128
"""Host memory and device cache under device pressure: as many blocks of each."""
NUM_PROMPTS, NUM_ANSWERED, ANSWER_TOKENS = 20, 80, 24
"""Under device pressure: different prompts, more than both have room for, and requests for any of them."""


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
        config = {"model": directory, "engine": {}, "connector": "KVOffloadConnector", "answered": NUM_ANSWERED}
        rows += _pressure_rows(config, 1 if quick else 3)
    publish("ttft", f"Time to first token of a prompt of {PROMPT_TOKENS} tokens, p50", rows, out)


def _pressure_rows(config: dict[str, Any], num_runs: int) -> list[Row]:
    """Rows of both contents, measured in turn. A ratio above 1 says that exclusive contents have more of it."""
    environment = MODES["one process"][1]
    found: dict[str, list[dict[str, float]]] = {contents: [] for contents in CONTENTS}
    for _ in range(num_runs):
        for contents, runs in found.items():
            runs.append(_in_child({**config, "contents": contents}, environment))
    rows = []
    for name, unit in PRESSURE.items():
        inclusive, exclusive = (statistics.median(run[name] for run in found[contents]) for contents in CONTENTS)
        rows.append(Row(f"under device pressure, inclusive: {name}", inclusive, unit))
        ratio = exclusive / inclusive if inclusive else None
        rows.append(Row(f"under device pressure, exclusive: {name}", exclusive, unit, "times inclusive", ratio))
    return rows


PRESSURE = {
    "prompt tokens found": "%",
    "found in host memory": "%",
    "mean time to first token": "ms",
    "steps, p99": "ms",
    "steps without prompt tokens, p99": "ms",
    "stored per computed token": "KiB",
    "stored": "MiB",
    "loaded": "MiB",
    "CPU time of the engine's thread per request": "ms",
}


def _pressed(config: dict[str, Any]) -> dict[str, float]:
    """Answers requests for any of some prompts: the next one comes when the one before has its first token."""
    llm = start_llm(
        config["model"],
        connector({"host_bytes": PRESSED, "host_contents": config["contents"]}),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=PRESSED_BLOCKS + 1,
        max_model_len=PROMPT_TOKENS + BLOCK_SIZE,
        max_num_batched_tokens=PROMPT_TOKENS + BLOCK_SIZE,
    )
    core: Any = llm.llm_engine
    scheduler: Any = core.engine_core.engine_core.scheduler
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 500, PROMPT_TOKENS).tolist() for _ in range(NUM_PROMPTS)]
    steps: list[tuple[float, bool]] = []
    first_tokens: list[float] = []
    cpu = 0.0
    for i in range(config["answered"] + NUM_PROMPTS):
        if i == NUM_PROMPTS:
            # Each prompt has been seen once, and all that runs is warm.
            scheduler.connector.get_kv_connector_stats()
            before = scheduler.connector.connector_scheduler.metrics.snapshot()
            steps, first_tokens, cpu = [], [], time.thread_time()
        prompt = prompts[i if i < NUM_PROMPTS else int(rng.integers(NUM_PROMPTS))]
        core.add_request(str(i), {"prompt_token_ids": prompt}, sampling(ANSWER_TOKENS, logprobs=None))
        arrived, has_token = time.perf_counter(), False
        while not has_token:
            start = time.perf_counter()
            has_token = any(output.request_id == str(i) for output in core.step())
            steps.append((time.perf_counter() - start, has_token))
        first_tokens.append(time.perf_counter() - arrived)
    cpu = time.thread_time() - cpu
    after = scheduler.connector.connector_scheduler.metrics.snapshot()
    spent = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    asked, host = spent["asked_tokens"], spent["host_hit_tokens"]
    hits = host + spent["device_hit_tokens"]
    decoding = [seconds for seconds, is_first in steps if not is_first]
    return {
        "prompt tokens found": 100 * hits / asked,
        "found in host memory": 100 * host / asked,
        "mean time to first token": 1e3 * statistics.mean(first_tokens),
        "steps, p99": 1e3 * float(np.percentile([seconds for seconds, _ in steps], 99)),
        "steps without prompt tokens, p99": 1e3 * float(np.percentile(decoding, 99)) if decoding else 0.0,
        "stored per computed token": spent["store_bytes"] / 1024 / (asked - hits),
        "stored": spent["store_bytes"] / (1 << 20),
        "loaded": spent["load_bytes"] / (1 << 20),
        "CPU time of the engine's thread per request": 1e3 * cpu / config["answered"],
    }


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
    _config = json.loads(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(_pressed(_config) if "contents" in _config else _measure(_config)))
    os._exit(0)
