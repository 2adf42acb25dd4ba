"""Many requests with the same long prefix at once, in real vLLM: the time until the prefix is on the device.

The prefix is only in host memory. The time of a request is measured from the arrival of all requests to the first step
that computes tokens for it. The first request loads the prefix; the others either wait for it or load their own copies.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.report import Row, publish
from demo.engine import connector, sampling, start_llm
from demo.model import write_model
from kvoffload.connector.engine import EngineSpec

REQUESTS = 16
BLOCK_SIZE = 128
SUFFIX_TOKENS = 40


def main(out: Path, quick: bool) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2"}
    prefix_blocks, rounds = (8, 2) if quick else (28, 7)
    rows = []
    for share_loads, name in ((True, "waiting for the first load"), (False, "each loading a copy")):
        with ProcessPoolExecutor(1, get_context("spawn")) as child:
            lone, runs = child.submit(_measure, share_loads, prefix_blocks, rounds).result()
        if share_loads:
            rows.append(Row("one request alone", _median(map(max, lone)) * 1e3, "ms"))
        first, slowest = _median(map(min, runs)), _median(map(max, runs))
        rows.append(
            Row(f"{name}: first of {REQUESTS}", first * 1e3, "ms", "over one alone", _ratio(map(min, runs), lone))
        )
        ratio = _median(max(run) / min(run) for run in runs)
        rows.append(Row(f"{name}: slowest of {REQUESTS}", slowest * 1e3, "ms", "over the first", ratio))
    title = f"{REQUESTS} requests at once with the same prefix of {prefix_blocks * BLOCK_SIZE} tokens in host memory"
    publish("convoys", f"{title}: time until it is on the device", rows, out)


def _measure(share_loads: bool, prefix_blocks: int, rounds: int) -> tuple[list[list[float]], list[list[float]]]:
    """Returns the times of single requests and of REQUESTS at once, per round. Runs in a child process."""
    from kvoffload.vllm import connector as adapter

    if not share_loads:
        # Every request then loads its own copy.
        vars(adapter)["EngineSpec"] = partial(EngineSpec, share_loads=False)
    with tempfile.TemporaryDirectory() as directory:
        engine = _engine(Path(directory), prefix_blocks)
        _convoy(engine, prefix_blocks, 1, seed=0)
        times = [
            (_convoy(engine, prefix_blocks, 1, seed), _convoy(engine, prefix_blocks, REQUESTS, 1000 + seed))
            for seed in range(1, rounds + 1)
        ]
    return [lone for lone, _ in times], [together for _, together in times]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _ratio(these: Iterable[float], those: list[list[float]]) -> float:
    return _median(a / max(b) for a, b in zip(these, those, strict=True))


def _engine(directory: Path, prefix_blocks: int) -> Any:
    write_model(directory, seed=0)
    return start_llm(
        directory,
        connector({"host_bytes": "2GiB"}),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=(prefix_blocks + 2) * (REQUESTS + 1),
        max_model_len=(prefix_blocks + 2) * BLOCK_SIZE,
        max_num_batched_tokens=8192,
        max_num_seqs=REQUESTS,
    )


def _convoy(llm: Any, prefix_blocks: int, requests: int, seed: int) -> list[float]:
    """Returns, per request, the seconds from the first step to the step that first computes tokens for it."""
    import numpy as np

    rng = np.random.default_rng(seed)
    prefix = rng.integers(5, 500, prefix_blocks * BLOCK_SIZE).tolist()
    prompts = [prefix + rng.integers(5, 500, SUFFIX_TOKENS).tolist() for _ in range(requests)]
    params = sampling(1, logprobs=None)
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    llm.generate([{"prompt_token_ids": prefix}], params, use_tqdm=False)
    while scheduler.has_requests():
        engine.step()
    assert llm.reset_prefix_cache()
    ready: dict[str, float] = {}
    schedule = scheduler.schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        now = time.perf_counter()
        for req_id in output.num_scheduled_tokens:
            ready.setdefault(req_id, now)
        return output

    scheduler.schedule = noting
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt}, params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    scheduler.schedule = schedule
    assert len(ready) == requests
    return [moment - start for moment in ready.values()]
