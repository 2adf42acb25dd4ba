"""Time to first token in real vLLM if the prompt is computed, on the device, or in host memory; in one process or more;
under device pressure, with host memory that repeats the device and with host memory that does not; and of sessions that
return from disk at a known time, and of the requests beside them, with and without the hint.

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

RETURNING, RETURNING_BLOCKS = "64MiB", 32
"""Host memory and device cache where sessions return. Together they have room for half of the sessions."""
NUM_SESSIONS, RETURN_S, OTHER_TOKENS = 8, 16.0, 128
"""Each session returns this long after its end. Beside them one other request runs at any time."""


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
        rows += _return_rows(config, 1 if quick else 3)
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


def _return_rows(config: dict[str, Any], num_runs: int) -> list[Row]:
    """Rows with and without the hint, measured in turn. A ratio above 1 says that with the hint there is more of it."""
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    seconds = 20.0 if num_runs == 1 else 60.0
    for _ in range(num_runs):
        for has_hints, of_kind in runs.items():
            of_kind.append(_in_child({**config, "hinted": has_hints, "seconds": seconds}, MODES["one process"][1]))
    rows = []
    for name in runs[True][0]:
        without, hinted = (statistics.median(run[name] for run in runs[kind]) for kind in (False, True))
        unit = "%" if "found" in name else "ms"
        rows.append(Row(f"returns from disk, no hint: {name}", without, unit))
        rows.append(Row(f"returns from disk, hint: {name}", hinted, unit, "times without", hinted / without))
    return rows


def _returning(config: dict[str, Any], directory: str) -> dict[str, float]:
    """Serves sessions that return every RETURN_S seconds, and another request after the other beside them."""
    disk = {"disk_dir": directory, "disk_bytes": "2GiB", "load_only_if_faster": False}
    llm = start_llm(
        config["model"],
        connector({"host_bytes": RETURNING, **disk}),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=RETURNING_BLOCKS + 1,
        max_model_len=PROMPT_TOKENS + BLOCK_SIZE,
        max_num_batched_tokens=PROMPT_TOKENS + BLOCK_SIZE,
    )
    core: Any = llm.llm_engine
    half: Any = core.engine_core.engine_core.scheduler.connector.connector_scheduler
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 500, PROMPT_TOKENS).tolist() for _ in range(NUM_SESSIONS)]
    begun = time.perf_counter()
    due = {s: begun + s * RETURN_S / NUM_SESSIONS for s in range(NUM_SESSIONS)}
    arrived: dict[str, float] = {}
    has_token: set[str] = set()
    first_tokens: dict[str, list[float]] = {"session": [], "other": []}
    number, end = 0, begun + 2 * RETURN_S + config["seconds"]
    before: dict[str, float] = {}

    def add(name: str, prompt: list[int], num_tokens: int, **options: Any) -> None:
        params = sampling(num_tokens, logprobs=None)
        if options:
            params.extra_args = {"kv_transfer_params": {"kvoffload": options}}
        core.add_request(name, {"prompt_token_ids": prompt}, params)
        arrived[name] = time.perf_counter()

    while (now := time.perf_counter()) < end:
        if not before and now >= begun + 2 * RETURN_S:
            # Each session has been there twice.
            before, first_tokens = half.metrics.snapshot(), {"session": [], "other": []}
        for s in [s for s, at in due.items() if at <= now]:
            del due[s]
            add(
                f"session-{s}",
                prompts[s],
                1,
                session=str(s),
                **({"expect_return_s": RETURN_S} if config["hinted"] else {}),
            )
        if not any(request.startswith("other") for request in arrived):
            number += 1
            add(f"other-{number}", rng.integers(5, 500, OTHER_TOKENS).tolist(), 16)
        for output in core.step():
            kind, _, of = output.request_id.partition("-")
            if output.request_id not in has_token:
                has_token.add(output.request_id)
                first_tokens[kind].append(time.perf_counter() - arrived[output.request_id])
            if output.finished:
                del arrived[output.request_id]
                has_token.remove(output.request_id)
                if kind == "session":
                    due[int(of)] = time.perf_counter() + RETURN_S
    spent = {name: total - before.get(name, 0) for name, total in half.metrics.snapshot().items()}
    found = {"in host memory": spent.get("host_hit_tokens", 0), "on disk": spent.get("tier_hit_tokens:disk", 0)}
    asked = len(first_tokens["session"]) * PROMPT_TOKENS
    return {
        **{f"tokens of sessions found {where}": 100 * tokens / asked for where, tokens in found.items()},
        "time to first token of sessions, p50": 1e3 * statistics.median(first_tokens["session"]),
        **{
            f"time to first token of other requests, p{p}": 1e3 * float(np.percentile(first_tokens["other"], p))
            for p in (50, 99)
        },
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
    # After a reset host memory has the prompt already.
    options = {"host_bytes": "2GiB", "host_contents": "inclusive"}
    llm = start_llm(
        config["model"],
        connector(options, config["connector"], module),
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


def _run(config: dict[str, Any]) -> dict[str, float]:
    if "contents" in config:
        return _pressed(config)
    if "hinted" in config:
        with tempfile.TemporaryDirectory() as directory:
            return _returning(config, directory)
    return _measure(config)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_run(json.loads(sys.argv[1]))))
    os._exit(0)
