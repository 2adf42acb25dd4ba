"""Many requests with one long prefix at once, in real vLLM: how long each waits for the prefix to be on the device.

The prefix lies in host memory only. Measured per request: from when all have arrived to the step that first
computes for it, with the prefix in place. The first of them loads; the others could each load a copy, or wait.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import Row, publish

REQUESTS = 16
BLOCK_SIZE = 128
SUFFIX_TOKENS = 40


def main(out: Path, quick: bool) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2"}
    prefix_blocks, rounds = (8, 2) if quick else (28, 7)
    with tempfile.TemporaryDirectory() as directory:
        engine = _engine(Path(directory), prefix_blocks)
        _convoy(engine, prefix_blocks, 1, seed=0)
        lone, waiting, copying = [], [], []
        for seed in range(1, rounds + 1):
            _offload(engine)._share_loads = True
            lone.append(_convoy(engine, prefix_blocks, 1, seed))
            waiting.append(_convoy(engine, prefix_blocks, REQUESTS, 1000 + seed))
            _offload(engine)._share_loads = False
            copying.append(_convoy(engine, prefix_blocks, REQUESTS, 2000 + seed))
    rows = [Row("one request by itself", _median(map(max, lone)) * 1e3, "ms")]
    for name, runs in (("waiting for the first's load", waiting), ("each loading a copy", copying)):
        first, slowest = _median(map(min, runs)), _median(map(max, runs))
        rows.append(
            Row(f"{name}: first of {REQUESTS}", first * 1e3, "ms", "of one alone", _ratio(map(min, runs), lone))
        )
        ratio = _median(max(run) / min(run) for run in runs)
        rows.append(Row(f"{name}: slowest of {REQUESTS}", slowest * 1e3, "ms", "of the first", ratio))
    title = f"{REQUESTS} requests at once, one prefix of {prefix_blocks * BLOCK_SIZE} tokens in host memory"
    publish("convoys", f"{title}: until it is on the device", rows, out)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _ratio(these: Iterable[float], those: list[list[float]]) -> float:
    return _median(a / max(b) for a, b in zip(these, those, strict=True))


def _offload(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler


def _engine(directory: Path, prefix_blocks: int) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from kvoffload.demo.model import write_model

    write_model(directory, seed=0)
    return LLM(
        model=str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=(prefix_blocks + 2) * (REQUESTS + 1),
        max_model_len=(prefix_blocks + 2) * BLOCK_SIZE,
        max_num_batched_tokens=8192,
        max_num_seqs=REQUESTS,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVOffloadConnector",
            kv_connector_module_path="kvoffload.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"host_bytes": "2GiB"},
        ),
    )


def _convoy(llm: Any, prefix_blocks: int, requests: int, seed: int) -> list[float]:
    """Seconds from the first step that all are there for to the first that computes for each."""
    import numpy as np
    from vllm import SamplingParams

    rng = np.random.default_rng(seed)
    prefix = rng.integers(5, 500, prefix_blocks * BLOCK_SIZE).tolist()
    prompts = [prefix + rng.integers(5, 500, SUFFIX_TOKENS).tolist() for _ in range(requests)]
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    llm.generate([{"prompt_token_ids": prefix}], sampling, use_tqdm=False)
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
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt}, sampling)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    scheduler.schedule = schedule
    assert len(ready) == requests
    return [moment - start for moment in ready.values()]
