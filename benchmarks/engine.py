"""What kvoffload costs the engine in real vLLM, beside a connector that does nothing: CPU time per step, and time to
first token.

Both run in one engine, in one process, on one core: a connector that can be switched off (``SwitchedConnector``) does
its work or nothing. Each kind has running requests of its own, of the same lengths, and only one kind runs at a time:
a block of steps or one prompt, in the order A B C C B A. So weights, memory and device cache are the same for all, and
noise of the machine hits all alike. The first step of a block is left out, because in it vLLM exchanges its batch. A
ratio is the mean over the rounds of the ratio of the sums of a round, without the TRIMMED lowest and highest ones; its
interval covers 95% of the means of rounds drawn again (bootstrap).

The third kind is the control. It does nothing either, and must cost 1.00 times as much; in every third round it burns
BURNT of a step in each step, which must be found. What the ratios cannot resolve, the CPU time within the methods of
the connector does.

``KVOFFLOAD_BENCH_CPU`` is the core to use, by default the last one of this process.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from demo.engine import connector, sampling, start_llm
from demo.model import write_model

KVOFFLOAD, NOTHING, CONTROL = KINDS = ("kvoffload", "nothing", "control")
DEVICE_TOKENS = 98_304
LARGE_BLOCK, SMALL_BLOCK = 128, 32
"""Tokens. vLLM on a CPU takes no smaller blocks than 32."""
HOST_BYTES = "384MiB"
"""Less than the prompts of a run, so that the pool is full and each store evicts."""
PROMPT_TOKENS = 2000
PROMPT_BUDGET, MIXED_BUDGET = 2048, 256
"""Tokens per step: all of a prompt if only its first token counts, pieces of it beside requests that decode."""
LEAST_ROUNDS = 3
STEPS_PER_BLOCK = 8
STEPS_PER_BATCH = 256
"""Steps that the decoding requests of a batch take before new requests replace them."""
RETURNS = (12, 22, 32)
MIXED_STEPS = 42
"""Steps of a block in the mixed load: in the first step a new prompt arrives, in the steps RETURNS it returns."""
DRAIN_STEPS = 4
"""Steps without tokens after which nothing is left to store."""
BURNT = 0.02
TRIMMED = 0.2
DRAWS = 4000

Step = tuple[float, float, bool]
"""Seconds of wall time and of CPU time of the engine's thread, and whether more was computed than one token per
request."""
WALL, THREAD, HAS_PROMPT = range(3)


class Engine:
    """One vLLM engine in this process, and its requests of each kind."""

    def __init__(self, model: str, block_size: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._llm = start_llm(
            model,
            connector({"host_bytes": HOST_BYTES}, "SwitchedConnector", "benchmarks.connectors"),
            block_size=block_size,
            num_gpu_blocks_override=DEVICE_TOKENS // block_size,
            max_model_len=PROMPT_TOKENS + block_size,
            max_num_batched_tokens=PROMPT_BUDGET,
        )
        self._engine: Any = self._llm.llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._halves = (self._scheduler.connector, get_kv_transfer_group())
        self._block_size = block_size
        self._num_added = self._num_batches = 0
        self._kind = KVOFFLOAD
        self._running: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        """The running requests of the kinds that are not in use."""
        self._most_tokens = 0
        """The most tokens that a request computes in the latest step."""
        self._burnt_ns = 0
        schedule = self._scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._most_tokens = max(output.num_scheduled_tokens.values(), default=0)
            return output

        self._scheduler.schedule = noted

    def use(self, kind: str) -> None:
        """From now on requests of this kind run, with its connector; the others stand still."""
        self._running[self._kind] = self._scheduler.running
        self._scheduler.running = self._running[kind]
        self._kind = kind
        for half in self._halves:
            half.switch(kind == KVOFFLOAD)

    def burn(self, seconds: float) -> None:
        """Lets the control burn that much CPU time per step."""
        self._burnt_ns = int(seconds * 1e9)

    def _add(self, prompt: list[int], num_tokens: int) -> str:
        self._num_added += 1
        name = f"request-{self._num_added}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling(num_tokens, logprobs=None))
        return name

    def _step(self) -> tuple[Step, set[str]]:
        """Returns the times of one step, and the requests that got a token."""
        before = time.perf_counter(), time.thread_time()
        outputs = self._engine.step()
        wall, thread = time.perf_counter() - before[WALL], time.thread_time() - before[THREAD]
        return (wall, thread, self._most_tokens > 1), {output.request_id for output in outputs}

    def drain(self) -> None:
        """Lets the connector store what is left."""
        for _ in range(DRAIN_STEPS):
            self._engine.step()

    def prompt(self, seed: int) -> list[int]:
        prompt: list[int] = np.random.default_rng(seed).integers(5, 500, PROMPT_TOKENS).tolist()
        return prompt

    def first_token(self, kind: str, seed: int) -> list[Step]:
        """Returns the wall time from the arrival of a prompt, which runs alone, to its first token, and the CPU time
        until it is stored too."""
        self.use(kind)
        self.drain()
        prompt = self.prompt(seed)
        before = time.perf_counter(), time.thread_time()
        name = self._add(prompt, 1)
        while name not in self._step()[1]:
            pass
        wall = time.perf_counter() - before[WALL]
        self.drain()
        return [(wall, time.thread_time() - before[THREAD], True)]

    def returned(self, kind: str, seed: int) -> list[Step]:
        """Returns the same for a prompt that the connector has stored, or else that the device holds."""
        self.first_token(kind, seed)
        if kind == KVOFFLOAD:
            self._forget_on_device()
        return self.first_token(kind, seed)

    def begin_batch(self, num_requests: int, num_tokens: int = STEPS_PER_BATCH) -> None:
        """Replaces all requests by new ones, which complete blocks in different steps, and computes their prompts. No
        prompt comes twice, because its blocks would not be stored again."""
        self._num_batches += 1
        for which, kind in enumerate(KINDS):
            self.end_batch(kind)
            rng = np.random.default_rng((self._num_batches, which))
            for i in range(num_requests):
                length = 16 + i * max(1, self._block_size // num_requests) % self._block_size
                self._add(rng.integers(5, 500, length).tolist(), num_tokens + 8)
            started: set[str] = set()
            while len(started) < num_requests:
                started |= self._step()[1]

    def end_batch(self, kind: str) -> None:
        """Aborts all requests of a kind."""
        self.use(kind)
        self._engine.abort_request([each.request_id for each in list(self._scheduler.running)], internal=True)
        self.drain()

    def steps(self, kind: str, num_steps: int) -> list[Step]:
        self.use(kind)
        nothing = self._scheduler.connector.nothing
        nothing.burn_ns = self._burnt_ns if kind == CONTROL else 0
        self._step()
        found = [self._step()[0] for _ in range(num_steps)]
        nothing.burn_ns = 0
        return found

    def mixed(self, kind: str, seed: int) -> tuple[list[Step], list[Step]]:
        """Returns MIXED_STEPS steps of the requests that decode, and the times to the first token of a prompt whenever
        it returns. In the first step it arrives for the first time. When it returns, kvoffload loads it from host
        memory, where the others find it on the device."""
        self.use(kind)
        self._step()
        self._scheduler.max_num_scheduled_tokens = MIXED_BUDGET
        found: list[Step] = []
        first_tokens: list[Step] = []
        name, since = "", 0
        for at in range(MIXED_STEPS):
            if at in RETURNS and kind == KVOFFLOAD:
                self._forget_on_device()
            if at == 0 or at in RETURNS:
                name, since = self._add(self.prompt(seed), 1), at
            step, answered = self._step()
            found.append(step)
            if since and name in answered:
                wall, thread = (sum(step[which] for step in found[since:]) for which in (WALL, THREAD))
                first_tokens.append((wall, thread, True))
        self._scheduler.max_num_scheduled_tokens = PROMPT_BUDGET
        assert len(first_tokens) == len(RETURNS)
        return found, first_tokens

    def _forget_on_device(self) -> None:
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0})

    def account(self, kind: str, steps: int) -> dict[str, float]:
        """Returns the microseconds of CPU time per decoding step within the connector, by part of it."""
        from benchmarks.connectors import METRICS, SCHEDULER_HALF

        spent = dict.fromkeys(PARTS, 0)
        stack: list[int] = []

        def timed(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                stack.append(0)
                start = time.thread_time_ns()
                result = method(*args, **kwargs)
                took = time.thread_time_ns() - start
                # What is called within counts for its own part only.
                spent[part] += took - stack.pop()
                if stack:
                    stack[-1] += took
                return result

            return wrapped

        def part_of(name: str) -> str:
            return "scheduler half" if name in SCHEDULER_HALF else "metrics" if name in METRICS else "worker half"

        self.use(kind)
        self._step()
        for half in self._halves:
            half.switch(kind == KVOFFLOAD, lambda name, method: timed(part_of(name), method))
        worker = self._halves[1].connector_worker
        parts = ((worker.transfer, "poll", "copies"), (worker.weights.watch, "begin", "comparing weights"))
        for owner, name, part in parts:
            setattr(owner, name, timed(part, getattr(owner, name)))
        for _ in range(steps):
            self._step()
        for owner, name, _ in parts:
            delattr(owner, name)
        self.use(kind)
        return {part: ns / 1e3 / steps for part, ns in spent.items()}


PARTS = ("scheduler half", "worker half", "copies", "comparing weights", "metrics")


@dataclass
class Rounds:
    """The steps of each kind, per round."""

    steps: dict[str, list[list[Step]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def run(self, one: Callable[[str, int], list[Step]]) -> None:
        """Adds a round: every kind twice, in the order A B C C B A. ``one`` takes a kind and 0 or 1."""
        found: dict[str, list[Step]] = {kind: [] for kind in KINDS}
        for half, kinds in enumerate((KINDS, KINDS[::-1])):
            for kind in kinds:
                found[kind] += one(kind, half)
        for kind, steps in found.items():
            self.steps[kind].append(steps)

    def median(self, kind: str, which: int) -> float:
        return statistics.median(step[which] for steps in self.steps[kind] for step in steps)

    def sums(self, kind: str, which: int) -> Any:
        return np.array([sum(step[which] for step in steps) for steps in self.steps[kind]])

    def ratio(
        self, kind: str, which: int, chosen: Callable[[int], bool] = lambda number: True
    ) -> tuple[float, tuple[float, float]]:
        """Returns how many times the cost of doing nothing ``kind`` costs in the ``chosen`` rounds, and the
        interval."""
        ratios = self.sums(kind, which) / self.sums(NOTHING, which)
        ratios = ratios[[chosen(number) for number in range(len(ratios))]]
        draws = np.random.default_rng(0).integers(0, len(ratios), (DRAWS, len(ratios)))
        low, high = np.percentile(trimmed_mean(ratios[draws]), [2.5, 97.5])
        return float(trimmed_mean(ratios)), (float(low), float(high))

    def tail(self, kind: str, which: int, percent: float, with_prompts: bool) -> float:
        """Returns a percentile of the steps; without prompts only of those in which requests only decoded."""
        return float(np.percentile(np.concatenate(self._chosen(kind, which, with_prompts)), percent))

    def tail_ratio(
        self, kind: str, which: int, percent: float, with_prompts: bool
    ) -> tuple[float, tuple[float, float]]:
        mine, other = (self._chosen(each, which, with_prompts) for each in (kind, NOTHING))
        rng, found = np.random.default_rng(0), []
        for _ in range(DRAWS // 8):
            draw = rng.integers(0, len(mine), len(mine))
            found.append(
                np.percentile(np.concatenate([mine[i] for i in draw]), percent)
                / np.percentile(np.concatenate([other[i] for i in draw]), percent)
            )
        low, high = np.percentile(found, [2.5, 97.5])
        ratio = self.tail(kind, which, percent, with_prompts) / self.tail(NOTHING, which, percent, with_prompts)
        return ratio, (float(low), float(high))

    def _chosen(self, kind: str, which: int, with_prompts: bool) -> list[Any]:
        return [
            np.array([step[which] for step in steps if with_prompts or not step[HAS_PROMPT]])
            for steps in self.steps[kind]
        ]


def trimmed_mean(values: Any) -> Any:
    """Returns the means of the last axis without the lowest and the highest TRIMMED of its values."""
    cut = int(values.shape[-1] * TRIMMED)
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)


def progress(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


BURN_EVERY = 3


def numbers(seconds: float) -> Iterator[int]:
    """Counts the rounds of a case: as many as fit into ``seconds``, at least LEAST_ROUNDS."""
    end = time.monotonic() + seconds
    for number in count():
        if number >= LEAST_ROUNDS and time.monotonic() >= end:
            return
        yield number


def burns(number: int) -> bool:
    """Whether the control burns CPU time in this round."""
    return number % BURN_EVERY == BURN_EVERY - 1


def decode(engine: Engine, num_requests: int, seconds: float) -> Rounds:
    """Steps in which ``num_requests`` requests decode. In some rounds the control burns BURNT of a step."""
    found = Rounds()
    per_batch = STEPS_PER_BATCH // (2 * (STEPS_PER_BLOCK + 1))
    for number in numbers(seconds):
        if number % per_batch == 0:
            engine.begin_batch(num_requests)
        engine.burn(found.median(NOTHING, THREAD) * BURNT if burns(number) else 0.0)
        found.run(lambda kind, _: engine.steps(kind, STEPS_PER_BLOCK))
    engine.burn(0.0)
    return found


def prompts(one: Callable[[str, int], list[Step]], first_seed: int, seconds: float) -> Rounds:
    """Prompts that run alone, one at a time."""
    found, seeds = Rounds(), count(first_seed)
    for _ in numbers(seconds):
        found.run(lambda kind, _: one(kind, next(seeds)))
    return found


def mixed(engine: Engine, num_requests: int, seconds: float) -> tuple[Rounds, Rounds]:
    """Requests that decode while prompts come for the first time and return: their steps, and the times to the first
    tokens of what returns."""
    found, first_tokens, seeds = Rounds(), Rounds(), count(50_000)
    per_batch = STEPS_PER_BATCH // (2 * (MIXED_STEPS + 1))
    for number in numbers(seconds):
        if number % per_batch == 0:
            engine.begin_batch(num_requests)
        returned: dict[str, list[Step]] = {kind: [] for kind in KINDS}

        def one(kind: str, half: int, returned: dict[str, list[Step]] = returned) -> list[Step]:
            steps, first_tokens = engine.mixed(kind, next(seeds))
            returned[kind] += first_tokens
            return steps

        found.run(one)
        for kind, steps in returned.items():
            first_tokens.steps[kind].append(steps)
    return found, first_tokens


def cost_rows(what: str, rounds: Rounds, unit: str, has_burnt: bool = False) -> list[Row]:
    """Rows of kvoffload and of the control."""
    cases: list[tuple[str, Callable[[int], bool], str]] = [(KVOFFLOAD, lambda number: True, "")]
    cases += [(CONTROL, lambda number: not (has_burnt and burns(number)), ", control: nothing beside nothing")]
    if has_burnt:
        cases += [(CONTROL, burns, f", control: {BURNT:.0%} burnt on purpose")]
    rows = []
    for kind, chosen, label in cases:
        for which, time_label in ((THREAD, "CPU time"), (WALL, "wall time")):
            ratio, interval = rounds.ratio(kind, which, chosen)
            value = rounds.median(kind, which) * 1e3
            rows.append(Row(f"{what}, {time_label}{label}", value, unit, "times nothing", ratio, interval))
    return rows


def tail_rows(what: str, rounds: Rounds) -> list[Row]:
    rows = []
    for with_prompts, which_steps in ((True, "all steps"), (False, "steps that only decode")):
        for which, label in ((THREAD, "CPU time"), (WALL, "wall time")):
            for kind in (KVOFFLOAD, CONTROL):
                ratio, interval = rounds.tail_ratio(kind, which, 99, with_prompts)
                value = rounds.tail(kind, which, 99, with_prompts) * 1e3
                control = "" if kind == KVOFFLOAD else ", control: nothing beside nothing"
                text = f"{what}, {which_steps}, p99 {label}{control}"
                rows.append(Row(text, value, "ms", "times nothing", ratio, interval))
    return rows


def account_rows(what: str, engine: Engine, num_requests: int, steps: int, step_s: float) -> list[Row]:
    """CPU time within the connector, and its share of a step. A connector that does nothing shows what of it is the
    measuring itself, which is subtracted."""
    engine.begin_batch(num_requests, steps)
    mine, none = (engine.account(kind, steps) for kind in (KVOFFLOAD, NOTHING))
    spent = {part: mine[part] - none[part] for part in PARTS}
    rows = [Row(f"{what}, within the connector, {part}", us, "us/step") for part, us in spent.items()]
    share = sum(spent.values()) / 1e6 / step_s
    return [*rows, Row(f"{what}, within the connector, share of a step", share * 100, "%")]


def measure_all(model: str, scale: int) -> list[Row]:
    """The measurements with large blocks."""
    engine, rows = Engine(model, LARGE_BLOCK), []
    progress("prompts that run alone")
    found = prompts(engine.first_token, 10_000, 55 / scale)
    rows += cost_rows(f"first sight of {PROMPT_TOKENS} tokens, first token (CPU time: until stored)", found, "ms")
    found = prompts(engine.returned, 30_000, 20 / scale)
    rows += cost_rows(f"return of {PROMPT_TOKENS} tokens, first token", found, "ms")
    for num_requests, seconds in ((16, 50), (64, 90)):
        what = f"{num_requests} requests decode, blocks of {LARGE_BLOCK} tokens"
        progress(what)
        found = decode(engine, num_requests, seconds / scale)
        rows += cost_rows(what, found, "ms/step", has_burnt=True)
        rows += account_rows(what, engine, num_requests, LARGE_BLOCK // scale, found.median(NOTHING, THREAD))
    progress("loads and stores")
    found, first_tokens = mixed(engine, 16, 80 / scale)
    what = "16 requests decode beside loads and stores"
    rows += tail_rows(what, found)
    rows += cost_rows(f"{what}, return of {PROMPT_TOKENS} tokens, first token", first_tokens, "ms")
    return rows


def measure_small_blocks(model: str, scale: int) -> list[Row]:
    engine = Engine(model, SMALL_BLOCK)
    what = f"64 requests decode, blocks of {SMALL_BLOCK} tokens"
    progress(what)
    found = decode(engine, 64, 50 / scale)
    rows = cost_rows(what, found, "ms/step", has_burnt=True)
    return rows + account_rows(what, engine, 64, 2 * SMALL_BLOCK // scale, found.median(NOTHING, THREAD))


def in_process(measure: Callable[[str, int], list[Row]], model: str, scale: int) -> list[Row]:
    """Runs ``measure`` in a process of its own: two engines in one process would share threads and memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        return executor.submit(measure, model, scale).result()


def main(out: Path, quick: bool) -> None:
    cpus: Sequence[int] = sorted(os.sched_getaffinity(0))
    cpu = int(os.environ.get("KVOFFLOAD_BENCH_CPU", cpus[-1]))
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": str(cpu),
    }
    scale = 8 if quick else 1
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), seed=0)
        rows = [row for each in (measure_all, measure_small_blocks) for row in in_process(each, directory, scale)]
    publish("engine", "The engine with kvoffload, and with a connector that does nothing (95% intervals)", rows, out)
