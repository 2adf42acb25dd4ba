"""A storm on vLLM's own OffloadingConnector with one tier below its host memory, which ``driver.py`` runs.

Requests come at random, some are aborted, caches are reset while requests run, and bytes in the tier's files change.
All that the tier was given and has reported is counted here too, so that vLLM's and the tier's own counts can be
compared with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from driver import answer, prometheus

LIVE = 12
"""Requests that are asked at the same time."""
SAMPLE_S = 0.005
DRAIN_DEADLINE_S = 60.0
MAX_STEPS = 400_000
PAGE = 4096


class Usage:
    """Samples how many bytes of the medium the files in a folder take, on a thread, until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.most = self.samples = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.most = max(self.most, taken(self._folder))
            self.samples += 1

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def files_in(folder: Path) -> Iterator[os.stat_result]:
    """Yields the facts of all files in a folder, and in those in it."""
    for directory, _, names in os.walk(folder):
        for name in names:
            # Files may disappear while this runs.
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(directory, name))


def taken(folder: Path) -> int:
    """Returns the bytes of the medium that the files in a folder take."""
    return sum(found.st_blocks * 512 for found in files_in(folder))


class CountedTier:
    """Counts the jobs of a ``SecondaryTierManager``, and checks that each ends once."""

    def __init__(self, tier: Any) -> None:
        self.counts: Counter[str] = Counter()
        self._jobs: dict[int, Any] = {}
        submit_store, submit_load, finished = tier.submit_store, tier.submit_load, tier.get_finished_jobs

        def store(job: Any) -> None:
            self._begin(job, "stores")
            submit_store(job)

        def load(job: Any) -> None:
            self._begin(job, "loads")
            submit_load(job)

        def get_finished_jobs() -> list[Any]:
            results = list(finished())
            for result in results:
                self._end(result)
            return results

        tier.submit_store, tier.submit_load, tier.get_finished_jobs = store, load, get_finished_jobs

    @property
    def unfinished(self) -> int:
        return len(self._jobs)

    def _begin(self, job: Any, kind: str) -> None:
        assert job.job_id not in self._jobs, f"job {job.job_id} is submitted twice"
        self._jobs[job.job_id] = job
        self.counts[kind] += 1
        self.counts[f"{kind}:chunks"] += len(job.keys)

    def _end(self, result: Any) -> None:
        job = self._jobs.pop(result.job_id, None)
        assert job is not None, f"job {result.job_id} ends, but is not there"
        kind = "loads" if job.is_promotion else "stores"
        done = len(job.keys) if result.success else len(result.successful_keys or ())
        if not result.success:
            self.counts[f"{kind}:failed"] += 1
            assert set(result.successful_keys or ()) <= set(job.keys)
        self.counts[f"{kind}:done"] += done


def change_a_page(folder: Path, random: Random) -> bool:
    """Changes bytes of a random page of a random file. Returns whether there was one with a whole page."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= PAGE)
    if not paths:
        return False
    path = random.choice(paths)
    page = random.randrange(path.stat().st_size // PAGE)
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(page * PAGE)
        raw = np.frombuffer(file.read(PAGE), np.uint8).copy()
        # The highest byte of each sixteenth float.
        raw[3::64] ^= 0x5A
        file.seek(page * PAGE)
        file.write(raw.tobytes())
    return True


def run_storm(engine: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Runs ``requests`` random requests by ``seed``. Answers are [index of the prompt, answer].

    ``folder`` is the tier's, and ``flips`` the chance per step that bytes there change. ``resets`` is that of a reset,
    of one of ``kinds``.
    """
    random = Random(config["seed"])
    folder = Path(config["folder"])
    core, scheduler = engine.llm.llm_engine, engine.scheduler
    manager = scheduler.connector.connector_scheduler.manager
    (tier,) = manager.secondary_tiers
    counted, usage = CountedTier(tier), Usage(folder)
    live: dict[str, int] = {}
    answers: list[Any] = []
    counts: Counter[str] = Counter()
    longest_step_s = 0.0
    resets: dict[str, Callable[[], Any]] = {
        "reset_device": engine.llm.reset_prefix_cache,
        "reset_connector": functools.partial(engine.llm.reset_prefix_cache, reset_connector=True),
        "reset_running": functools.partial(_reset_running, engine),
    }
    for _ in range(MAX_STEPS):
        if counts["arrived"] < config["requests"] and len(live) < LIVE and random.random() < 0.5:
            index, name = random.randrange(len(engine.prompts)), f"s{counts['arrived']}"
            # Few have the whole length, so that many requests come in few steps.
            sampling = engine.sampling(max_tokens=random.choice([1, 1, 2, 8, 20, config["max_tokens"]]))
            core.add_request(name, {"prompt_token_ids": engine.prompts[index]}, sampling)
            live[name] = index
            counts["arrived"] += 1
        if live and random.random() < 0.03:
            name = random.choice(list(live))
            core.abort_request([name])
            del live[name]
            counts["aborted"] += 1
        if random.random() < config["resets"]:
            name = random.choice(config.get("kinds", list(resets)))
            counts[f"{name}:whole"] += bool(resets[name]())
            counts[name] += 1
        if random.random() < config.get("flips", 0.0):
            counts["flips"] += change_a_page(folder, random)
        begun = time.monotonic()
        outputs = core.step()
        longest_step_s = max(longest_step_s, time.monotonic() - begun)
        finished = [output for output in outputs if output.finished and output.request_id in live]
        answers += [[live.pop(output.request_id), answer(output)] for output in finished]
        if counts["arrived"] == config["requests"] and not live:
            break
    drained_s = _drain(engine)
    stats = prometheus()
    host = manager.primary_tier
    result = {
        "answers": answers,
        "left": len(live),
        "drained_s": drained_s,
        "longest_step_s": longest_step_s,
        "counts": dict(counts),
        "jobs": dict(counted.counts),
        "unfinished_jobs": counted.unfinished,
        "managers_jobs": len(manager._jobs),
        "managers_requests": len(manager._req_state),
        "host_chunks": host._num_chunks,
        "host_free": host._get_num_free_chunks() + host._num_evictable_cache_chunks,
        "chunk_bytes": tier.block_size_bytes,
        "prometheus": {name: value for name, value in stats.items() if "offload" in name},
        "preemptions": stats.get("vllm:num_preemptions_total", 0),
        "free_device_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "usable_device_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
    }
    begun = time.monotonic()
    engine.close()
    result["close_s"] = time.monotonic() - begun
    usage.close()
    maps = Path("/proc/self/maps").read_text()
    return result | {
        "most_taken": usage.most,
        "samples": usage.samples,
        "threads_left": [each.name for each in threading.enumerate() if "kvoffload" in each.name],
        "maps_left": sorted({line.split()[-1] for line in maps.splitlines() if "vllm_offload" in line}),
    }


def _reset_running(engine: Any) -> bool:
    """Preempts all running requests and resets. vLLM cannot while one waits for a load."""
    with contextlib.suppress(RuntimeError):
        return bool(engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
    return False


def _drain(engine: Any) -> float:
    """Steps until nothing is to do. Returns the seconds."""
    begun = time.monotonic()
    while engine.scheduler.has_requests():
        assert time.monotonic() - begun < DRAIN_DEADLINE_S, "the engine never comes to rest"
        engine.llm.llm_engine.step()
    return time.monotonic() - begun
