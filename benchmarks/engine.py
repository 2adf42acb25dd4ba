"""What kvoffload costs the engine in real vLLM, beside a connector that does nothing: CPU time per step, and time to
first token.

Engines with different connectors run in processes of their own, on the same core, in strict alternation: A B C C B A,
a block of steps or one prompt at a time, while the others wait for a line in their pipes. So noise of the machine hits
all alike. Everything else is the same: model, prompts, device cache, vLLM in one process (scheduler and worker on one
thread). A ratio is the median over the rounds of the ratio of the sums of a round; its interval covers 95% of the
medians of rounds drawn again (bootstrap).

The benchmark has controls of its own: a third engine whose connector does nothing either must cost 1.00 times as much,
and in every other round it burns BURNT of a step in each step, which must be found.

``KVOFFLOAD_BENCH_CPU`` is the core to use, by default the last one of this process.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish

CONNECTORS = {
    "kvoffload": ("KVOffloadConnector", "kvoffload.vllm"),
    "nothing": ("NothingConnector", "benchmarks.connectors"),
    "burning": ("NothingConnector", "benchmarks.connectors"),
}
DEVICE_TOKENS = 32_768
LARGE_BLOCK, SMALL_BLOCK = 128, 32
"""Tokens. vLLM on a CPU takes no smaller blocks than 32."""
HOST_BYTES = "384MiB"
"""Less than the prompts of a run, so that the pool is full and each store evicts."""
PROMPT_TOKENS = 2000
PROMPT_BUDGET, MIXED_BUDGET = 2048, 256
"""Tokens per step: all of a prompt if only its first token counts, pieces of it beside requests that decode."""
LEAST_ROUNDS = 2
STEPS_PER_BLOCK = 8
STEPS_PER_BATCH = 320
"""Steps that the decoding requests of a batch take before new requests replace them."""
MIXED_STEPS = 24
"""Steps of a block in the mixed load: in the first step a new prompt arrives, in the middle one that has been seen."""
BURNT = 0.02
DRAWS = 4000
START_DEADLINE_S, ANSWER_DEADLINE_S = 300, 120
SCHEDULER_HALF = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
)
WORKER_HALF = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "build_connector_worker_meta",
)
BOTH_HALVES = ("get_kv_connector_stats",)

Step = tuple[float, float, float, bool]
"""Seconds of wall time, of CPU time of the engine's thread and of its process, and whether a prompt was computed."""
WALL, THREAD, PROCESS, HAS_PROMPT = range(4)


# The child: one engine.


class Engine:
    """One vLLM engine in this process, and its requests."""

    def __init__(self, model: str, connector: str, block_size: int) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        name, module = CONNECTORS[connector]
        self._sampling: Callable[[int], Any] = lambda n: SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False
        )
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=block_size,
            num_gpu_blocks_override=DEVICE_TOKENS // block_size,
            max_model_len=PROMPT_TOKENS + block_size,
            max_num_batched_tokens=PROMPT_BUDGET,
            kv_transfer_config=KVTransferConfig(
                kv_connector=name,
                kv_connector_module_path=module,
                kv_role="kv_both",
                kv_connector_extra_config={"host_bytes": HOST_BYTES} if connector == "kvoffload" else {},
            ),
        )
        self._engine: Any = self._llm.llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._block_size = block_size
        self._num_added = 0
        self._spent: dict[str, int] = {}

    def _add(self, prompt: list[int], num_tokens: int) -> str:
        self._num_added += 1
        name = f"request-{self._num_added}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(num_tokens))
        return name

    def _step(self) -> tuple[Step, list[Any]]:
        before = time.perf_counter(), time.thread_time(), time.process_time()
        outputs = self._engine.step()
        after = time.perf_counter(), time.thread_time(), time.process_time()
        wall, thread, process = (b - a for a, b in zip(before, after, strict=True))
        return (wall, thread, process, False), outputs

    def first_sight(self, seed: int) -> Step:
        """Returns the times from the arrival of a new prompt to its first token."""
        prompt = np.random.default_rng(seed).integers(5, 500, PROMPT_TOKENS).tolist()
        before = time.perf_counter(), time.thread_time(), time.process_time()
        self._add(prompt, 1)
        while not any(output.finished for output in self._engine.step()):
            pass
        after = time.perf_counter(), time.thread_time(), time.process_time()
        wall, thread, process = (b - a for a, b in zip(before, after, strict=True))
        return wall, thread, process, True

    def begin_batch(self, seed: int, num_requests: int, num_tokens: int) -> None:
        """Replaces all requests by new ones, which complete blocks in different steps, and computes their prompts."""
        self.end_batch()
        rng = np.random.default_rng(seed)
        for i in range(num_requests):
            length = 64 + i * max(1, self._block_size // num_requests) % self._block_size
            self._add(rng.integers(5, 500, length).tolist(), num_tokens + 8)
        started: set[str] = set()
        while len(started) < num_requests:
            started.update(output.request_id for output in self._engine.step())

    def end_batch(self) -> None:
        """Aborts all requests, and lets the connector store what they have left."""
        self._engine.abort_request([each.request_id for each in list(self._scheduler.requests.values())], internal=True)
        for _ in range(4):
            self._engine.step()

    def steps(self, num_steps: int) -> list[Step]:
        return [self._step()[0] for _ in range(num_steps)]

    def mixed(self, new_seed: int, old_seed: int, must_load: bool) -> list[Step]:
        """Returns MIXED_STEPS steps of the requests that decode. In the first one a new prompt arrives, in the middle
        one an old one: from host memory with ``must_load``, else from the device."""
        self._scheduler.max_num_scheduled_tokens = MIXED_BUDGET
        found = []
        for at in range(MIXED_STEPS):
            if at in (0, MIXED_STEPS // 2):
                if at and must_load:
                    self._forget_on_device()
                seed = old_seed if at else new_seed
                self._add(np.random.default_rng(seed).integers(5, 500, PROMPT_TOKENS).tolist(), 1)
            waiting = len(self._scheduler.waiting) + sum(r.num_output_tokens == 0 for r in self._scheduler.running)
            step, _ = self._step()
            wall, thread, process, _ = step
            found.append((wall, thread, process, bool(waiting)))
        self._scheduler.max_num_scheduled_tokens = PROMPT_BUDGET
        return found

    def _forget_on_device(self) -> None:
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0})

    def burn(self, seconds: float) -> None:
        """Lets a connector that does nothing burn that much CPU time per step."""
        self._scheduler.connector.burn_ns = int(seconds * 1e9)

    def account(self) -> None:
        """From now on the time within the methods of the connector is measured."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        halves = ((self._scheduler.connector, SCHEDULER_HALF), (get_kv_transfer_group(), WORKER_HALF))
        for connector, names in halves:
            for name in (*names, *BOTH_HALVES):
                setattr(connector, name, self._timed(getattr(connector, name), name))

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        spent = self._spent
        spent[name] = 0

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            result = method(*args, **kwargs)
            spent[name] += time.thread_time_ns() - start
            return result

        return timed

    def spent(self) -> dict[str, float]:
        """Returns the seconds within each method of the connector since the last call."""
        found = {name: ns / 1e9 for name, ns in self._spent.items()}
        self._spent.update(dict.fromkeys(self._spent, 0))
        return found


def serve(pipe: Connection, model: str, connector: str, block_size: int) -> None:
    """The main function of a child: does what comes through the pipe, one call at a time."""
    engine = Engine(model, connector, block_size)
    pipe.send("ready")
    while True:
        name, args = pipe.recv()
        if name == "end":
            pipe.send(None)
            # vLLM's own end takes seconds, and there is nothing to save.
            os._exit(0)
        pipe.send(getattr(engine, name)(*args))


# The parent: alternates.


class Child:
    """A process with one engine."""

    def __init__(self, model: str, connector: str, block_size: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, model, connector, block_size), daemon=True)
        self._process.start()
        theirs.close()
        self.connector = connector

    def wait_ready(self) -> None:
        self._receive(START_DEADLINE_S)

    def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._receive(ANSWER_DEADLINE_S)

    def _receive(self, deadline_s: float) -> Any:
        if not self._pipe.poll(deadline_s):
            raise TimeoutError(f"the engine with connector {self.connector} did not answer within {deadline_s} s")
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def engines(model: str, block_size: int, names: Iterable[str]) -> Iterator[dict[str, Child]]:
    children = {name: Child(model, name, block_size) for name in names}
    try:
        for child in children.values():
            child.wait_ready()
        progress(f"engines with blocks of {block_size} tokens have started")
        yield children
    finally:
        for child in children.values():
            child.kill()


@dataclass
class Rounds:
    """The steps of each engine, per round."""

    names: Sequence[str]
    steps: dict[str, list[list[Step]]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = {name: [] for name in self.names}

    def run(self, one: Callable[[str, int], list[Step]]) -> None:
        """Adds a round: every engine twice, in the order A B C C B A. ``one`` takes a name and 0 or 1."""
        found: dict[str, list[Step]] = {name: [] for name in self.names}
        for name in self.names:
            found[name] += one(name, 0)
        for name in reversed(self.names):
            found[name] += one(name, 1)
        for name, steps in found.items():
            self.steps[name].append(steps)

    def median(self, name: str, which: int) -> float:
        return statistics.median(step[which] for steps in self.steps[name] for step in steps)

    def sums(self, name: str, which: int) -> Any:
        return np.array([sum(step[which] for step in steps) for steps in self.steps[name]])

    def ratio(self, name: str, which: int, rounds: slice = slice(None)) -> tuple[float, tuple[float, float]]:
        """Returns how many times the cost of doing nothing ``name`` costs, and the interval."""
        ratios = self.sums(name, which)[rounds] / self.sums("nothing", which)[rounds]
        draws = np.random.default_rng(0).integers(0, len(ratios), (DRAWS, len(ratios)))
        low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
        return float(np.median(ratios)), (float(low), float(high))

    def tail(self, name: str, which: int, percent: float, with_prompts: bool) -> float:
        """Returns a percentile of the steps; without prompts only of those in which requests only decoded."""
        chosen = [s[which] for steps in self.steps[name] for s in steps if with_prompts or not s[HAS_PROMPT]]
        return float(np.percentile(chosen, percent))

    def tail_ratio(
        self, name: str, which: int, percent: float, with_prompts: bool
    ) -> tuple[float, tuple[float, float]]:
        def values(which_name: str) -> list[Any]:
            return [
                np.array([s[which] for s in steps if with_prompts or not s[HAS_PROMPT]])
                for steps in self.steps[which_name]
            ]

        mine, other = values(name), values("nothing")
        rng, found = np.random.default_rng(0), []
        for _ in range(DRAWS // 8):
            draw = rng.integers(0, len(mine), len(mine))
            found.append(
                np.percentile(np.concatenate([mine[i] for i in draw]), percent)
                / np.percentile(np.concatenate([other[i] for i in draw]), percent)
            )
        low, high = np.percentile(found, [2.5, 97.5])
        ratio = self.tail(name, which, percent, with_prompts) / self.tail("nothing", which, percent, with_prompts)
        return ratio, (float(low), float(high))


def progress(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def numbers(seconds: float) -> Iterator[int]:
    """Counts the rounds of a case: as many as fit into ``seconds``, at least LEAST_ROUNDS."""
    end = time.monotonic() + seconds
    for number in count():
        if number >= LEAST_ROUNDS and time.monotonic() >= end:
            return
        yield number


def decode(children: dict[str, Child], num_requests: int, seconds: float) -> Rounds:
    """Steps in which ``num_requests`` requests decode. In odd rounds the burning connector burns BURNT of a step."""
    found = Rounds(list(children))
    per_batch = STEPS_PER_BATCH // (2 * STEPS_PER_BLOCK)
    for number in numbers(seconds):
        if number % per_batch == 0:
            for child in children.values():
                child.call("begin_batch", number, num_requests, STEPS_PER_BATCH)
        if "burning" in children:
            is_odd = bool(number % 2)
            children["burning"].call("burn", found.median("nothing", THREAD) * BURNT if is_odd else 0.0)
        found.run(lambda name, _: children[name].call("steps", STEPS_PER_BLOCK))
    if "burning" in children:
        children["burning"].call("burn", 0.0)
    for child in children.values():
        child.call("end_batch")
    return found


def first_sights(children: dict[str, Child], seconds: float) -> Rounds:
    """Prompts that come for the first time, one at a time. Each engine sees the same ones."""
    found = Rounds(list(children))
    for child in children.values():
        child.call("first_sight", 0)
    for number in numbers(seconds):
        found.run(lambda name, half, at=10_000 + 2 * number: [children[name].call("first_sight", at + half)])  # type: ignore[misc]
    return found


def mixed(children: dict[str, Child], num_requests: int, seconds: float) -> Rounds:
    """Requests that decode while prompts come for the first time and return."""
    found = Rounds(list(children))
    per_batch = STEPS_PER_BATCH // (2 * MIXED_STEPS) - 1
    for number in numbers(seconds):
        if number % per_batch == 0:
            for child in children.values():
                child.call("begin_batch", number, num_requests, STEPS_PER_BATCH)
                for back in (2, 1):
                    child.call("mixed", 20_000 + 2 * number - back, 20_000 + 2 * number - back, False)

        def one(name: str, half: int, at: int = 20_000 + 2 * number) -> list[Step]:
            steps: list[Step] = children[name].call("mixed", at + half, at + half - 2, name == "kvoffload")
            return steps

        found.run(one)
    for child in children.values():
        child.call("end_batch")
    return found


def account(child: Child, num_requests: int, steps: int) -> dict[str, float]:
    """Microseconds per decoding step within each method of the connector."""
    child.call("account")
    child.call("begin_batch", 0, num_requests, STEPS_PER_BATCH)
    child.call("spent")
    child.call("steps", steps)
    spent = {name: seconds * 1e6 / steps for name, seconds in child.call("spent").items()}
    child.call("end_batch")
    return spent


def cost_rows(
    what: str, rounds: Rounds, unit: str, rounds_of: slice = slice(None), name: str = "kvoffload"
) -> list[Row]:
    rows = []
    for which, label in ((THREAD, "CPU time"), (WALL, "wall time")):
        ratio, interval = rounds.ratio(name, which, rounds_of)
        value = rounds.median(name, which) * 1e3
        rows.append(Row(f"{what}, {label}", value, unit, "times nothing", ratio, interval))
    return rows


def control_rows(what: str, rounds: Rounds) -> list[Row]:
    rows = []
    for rounds_of, label in ((EVEN, "nothing beside nothing"), (ODD, f"{BURNT:.0%} burnt on purpose")):
        ratio, interval = rounds.ratio("burning", THREAD, rounds_of)
        value = rounds.median("nothing", THREAD) * 1e3
        rows.append(Row(f"{what}, CPU time, control: {label}", value, "ms/step", "times nothing", ratio, interval))
    return rows


def tail_rows(what: str, rounds: Rounds) -> list[Row]:
    rows = []
    for with_prompts, which_steps in ((True, "all steps"), (False, "steps that only decode")):
        for which, label in ((THREAD, "CPU time"), (WALL, "wall time")):
            for name in ("kvoffload", "burning"):
                ratio, interval = rounds.tail_ratio(name, which, 99, with_prompts)
                value = rounds.tail(name, which, 99, with_prompts) * 1e3
                control = "" if name == "kvoffload" else ", control: nothing beside nothing"
                text = f"{what}, {which_steps}, p99 {label}{control}"
                rows.append(Row(text, value, "ms", "times nothing", ratio, interval))
    return rows


def account_rows(what: str, child: Child, control: Child, num_requests: int, steps: int) -> list[Row]:
    """Time within the connector. The control shows what of it is the measuring itself."""
    mine, none = account(child, num_requests, steps), account(control, num_requests, steps)
    rows = []
    for label, names in (("scheduler half", SCHEDULER_HALF), ("worker half", WORKER_HALF), ("metrics", BOTH_HALVES)):
        value, least = (sum(spent.get(name, 0.0) for name in names) for spent in (mine, none))
        rows.append(Row(f"{what}, within the connector, {label}", value - least, "us/step"))
    return rows


def main(out: Path, quick: bool) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    cpu = int(os.environ.get("KVOFFLOAD_BENCH_CPU", cpus[-1]))
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(cpu),
    }
    scale = 8 if quick else 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        from kvoffload.demo.model import write_model

        write_model(Path(directory), seed=0)
        with engines(directory, LARGE_BLOCK, CONNECTORS) as children:
            progress("first sights")
            sights = first_sights(children, 60 / scale)
            rows += cost_rows(f"first sight of {PROMPT_TOKENS} tokens, time to first token", sights, "ms")
            for num_requests, seconds in ((16, 50), (64, 65)):
                what = f"{num_requests} requests decode, blocks of {LARGE_BLOCK} tokens"
                progress(what)
                found = decode(children, num_requests, seconds / scale)
                rows += cost_rows(what, found, "ms/step") + control_rows(what, found)
            progress("loads and stores")
            found = mixed(children, 16, 70 / scale)
            rows += tail_rows("16 requests decode beside loads and stores", found)
            progress("time within the connector")
            rows += account_rows(
                f"64 requests decode, blocks of {LARGE_BLOCK} tokens",
                children["kvoffload"],
                children["nothing"],
                64,
                128 // scale,
            )
        with engines(directory, SMALL_BLOCK, ("kvoffload", "nothing")) as children:
            what = f"64 requests decode, blocks of {SMALL_BLOCK} tokens"
            progress(what)
            found = decode(children, 64, 50 / scale)
            rows += cost_rows(what, found, "ms/step")
            rows += account_rows(what, children["kvoffload"], children["nothing"], 64, 128 // scale)
    publish("engine", "The engine with kvoffload, and with a connector that does nothing (95% intervals)", rows, out)
