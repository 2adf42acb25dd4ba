"""Kills while servers of real vLLM hand prompts over to each other: ``python tests/vllm_engine/handover_storm.py``.

Some servers compute prompts, others go on with them, and all share a store. While clients ask through a proxy, servers
and the store are killed with SIGKILL at random moments and started again. Every answer is compared with that of a
server without kvoffload. ``--corrupt`` is the control: what servers that go on load is corrupted, and answers must be
found wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from driver import BLOCK_SIZE, connector_module
from vllm_harness import ENVIRONMENT, HAS_CUDA, TOLERANCE, Runner, differences_beyond_ties

from demo.engine import connector
from demo.process import DemoError, start_program, with_demo
from demo.servers import Answer, Handed, OverdueError, Proxy, ServerProcess, VllmServer
from demo.stores import STORES, ServerStore, Store

ARGUMENTS = ("--block-size", str(BLOCK_SIZE), "--max-model-len", "512", "--num-gpu-blocks-override", "48")
OPTIONS: Mapping[str, Any] = {"host_bytes": "16MiB"}
CLIENTS = 3
ATTEMPT_S = 60.0
"""A server that is silent for so long hangs."""
REQUEST_S = 240.0
MAX_TOKENS = 8
MAX_DELAY_S = 0.3
"""A kill comes up to so long after the request that it was planned for has ended, a restart up to DOWN_S after it."""
DOWN_S = 1.0
MAX_AHEAD = 8
"""Requests that are asked between the one that a kill was planned for and the end of the restart."""


class Outcome(StrEnum):
    HANDED_OVER = "handed over"
    """All that the first server has named was found, in the store or on the way to it."""
    PARTLY = "partly handed over"
    COMPUTED = "computed"
    WRONG = "wrong"
    HANG = "hang"
    FAILED = "failed"


@dataclass(frozen=True)
class Plan:
    """How many requests and kills there are, for how many servers of each kind, and on which store."""

    requests: int = 500
    kills: int = 20
    prefill: int = 1
    decode: int = 1
    store: str = "redis"
    seed: int = 0
    deadline_ms: int = 1000
    """How long a server that goes on waits for blocks."""
    corrupt: bool = False


@dataclass
class Result:
    """What came of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    offered: int = 0
    """Requests that were sent to a server that goes on with what another one has named."""
    retried: int = 0
    retries: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    """How often each server and the store were killed."""
    found_tokens: int = 0
    longest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not any(self.outcomes[each] for each in (Outcome.WRONG, Outcome.HANG, Outcome.FAILED))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outcomes": {str(each): self.outcomes[each] for each in Outcome}}


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Returns prompts of three to thirteen blocks. Every third one begins with blocks of an earlier one."""
    random = Random(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        own = [random.randrange(5, 500) for _ in range(random.randrange(3 * BLOCK_SIZE, 9 * BLOCK_SIZE))]
        begin = random.choice(prompts)[: random.randrange(1, 4) * BLOCK_SIZE] if i % 3 == 2 else []
        prompts.append(begin + own)
    return prompts


class Fleet:
    """Starts servers of one model, forked from a warm parent where that is possible."""

    def __init__(self, run: Runner, folder: Path) -> None:
        self._run = run
        self._rights: dict[tuple[int, ...], Answer] = {}
        self.folder = folder
        self.model = folder / "model"
        run.write_model(self.model)

    def server(self, name: str, options: Mapping[str, Any] | None, kind: str = "KVOffloadConnector") -> VllmServer:
        """Starts a server with these options of kvoffload; None: without kvoffload."""
        transfer = None if options is None else connector(options, kind, connector_module(kind))
        log = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder), f"{name}.log")
        return VllmServer(self.model, log, transfer, ARGUMENTS, ENVIRONMENT, self._start)

    def _start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> ServerProcess:
        if HAS_CUDA:
            return start_program(command, log, environment)
        return self._run.parent(environment).start(command[1:], environment, log)

    def expected(self, prompts: Sequence[list[int]]) -> list[Answer]:
        """Returns the answers of a server without kvoffload. Prompts that were asked before are not asked again."""
        if new := [prompt for prompt in prompts if tuple(prompt) not in self._rights]:
            with self.server("alone", None) as server, ThreadPoolExecutor(CLIENTS) as threads:
                answers = threads.map(lambda prompt: server.complete(prompt, MAX_TOKENS, ATTEMPT_S), new)
                self._rights |= zip(map(tuple, new), answers, strict=True)
        return [self._rights[tuple(prompt)] for prompt in prompts]


def judge(handed: Handed, right: Answer) -> Outcome:
    """Returns what came of a request that was answered."""
    answer = handed.answer
    got, expected = [[each.tokens, each.logprobs] for each in (answer, right)]
    if len(answer.tokens) != len(right.tokens) or differences_beyond_ties([got], [expected], TOLERANCE):
        return Outcome.WRONG
    named = handed.offered.get("kvoffload", {}).get("handover", {}).get("tokens", 0)
    found = num_found(answer)
    if not named or not found:
        return Outcome.COMPUTED
    usage = answer.transfer["kvoffload"]
    return Outcome.HANDED_OVER if found + usage["device_tokens"] >= named else Outcome.PARTLY


def num_found(answer: Answer) -> int:
    """Returns the tokens that were found outside the server's device memory."""
    usage = answer.transfer.get("kvoffload", {})
    return int(sum(usage.get("tier_tokens", {}).values()) + usage.get("host_tokens", 0))


class Killer:
    """Kills servers and the store, each at least once if there are enough kills, on a thread of its own. Only this
    thread starts and ends processes."""

    def __init__(
        self, plan: Plan, servers: Mapping[str, VllmServer], store: Store, num_ended: Callable[[], int]
    ) -> None:
        random = Random(plan.seed + 1)
        victims = [*servers, "store"]
        order = [name for _ in range(plan.kills) for name in random.sample(victims, len(victims))][: plan.kills]
        after = sorted(random.randrange(plan.requests // 20, max(1, plan.requests * 9 // 10)) for _ in order)
        self.done: Counter[str] = Counter()
        self.error: Exception | None = None
        self._steps = [
            (at, name, random.uniform(0, MAX_DELAY_S), random.uniform(0, DOWN_S))
            for at, name in zip(after, order, strict=True)
        ]
        self._servers = servers
        self._store = store
        self._num_ended = num_ended
        self._is_over = threading.Event()
        self.limit: float = 0
        """Requests from this number on must wait."""
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the kills, after a restart in progress."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for at, name, delay_s, down_s in self._steps:
                self.limit = at + MAX_AHEAD
                while self._num_ended() < at:
                    if self._is_over.wait(0.02):
                        return
                if self._is_over.wait(delay_s):
                    return
                self._kill(name, down_s)
                self.done[name] += 1
        except Exception as error:
            self.error = error
        finally:
            self.limit = math.inf

    def _kill(self, name: str, down_s: float) -> None:
        if name != "store":
            self._servers[name].kill()
            self._is_over.wait(down_s)
            self._servers[name].start()
            self._servers[name].wait()
        elif isinstance(self._store, ServerStore):
            self._store.kill()
            self._is_over.wait(down_s)
            self._store.start()
        else:
            # There is no process to kill. Its bytes change instead.
            self._store.corrupt()


def storm(plan: Plan, fleet: Fleet, progress: Callable[[Result, int], object] = lambda result, ended: None) -> Result:
    """Runs a storm. ``progress`` is called after each request."""
    prompts = make_prompts(plan.requests, plan.seed)
    rights = fleet.expected(prompts)
    result = Result()
    lock = threading.Lock()
    left = iter(range(plan.requests))
    ended = itertools.count(1)
    num_ended = 0

    def run_client() -> None:
        nonlocal num_ended
        while True:
            with lock:
                i = next(left, None)
            if i is None:
                return
            while i >= killer.limit:
                time.sleep(0.02)
            begun = time.monotonic()
            handed, problem = None, ""
            try:
                handed = proxy.ask(prompts[i], MAX_TOKENS, ATTEMPT_S, REQUEST_S)
                outcome = judge(handed, rights[i])
                if outcome is Outcome.WRONG:
                    problem = f"{handed.answer.tokens} instead of {rights[i].tokens}, {dict(handed.answer.transfer)}"
            except OverdueError as error:
                outcome, problem = Outcome.HANG, str(error)
            except DemoError as error:
                outcome, problem = Outcome.FAILED, str(error)
            with lock:
                result.outcomes[outcome] += 1
                result.longest_s = max(result.longest_s, time.monotonic() - begun)
                if problem:
                    result.problems.append(f"request {i}, {outcome}: {problem}")
                if handed is not None:
                    result.offered += handed.is_offered
                    result.retried += handed.retries > 0
                    result.retries += handed.retries
                    result.found_tokens += num_found(handed.answer)
                num_ended = next(ended)
                progress(result, num_ended)

    with contextlib.ExitStack() as opened:
        folder = Path(tempfile.mkdtemp(prefix="store-", dir=fleet.folder))
        store = opened.enter_context(STORES[plan.store](folder / "blocks", folder))
        options = {**OPTIONS, "load_deadline_ms": plan.deadline_ms, "tiers": [store.entry()]}
        servers = {f"prefill{i}": fleet.server(f"prefill{i}", options) for i in range(plan.prefill)}
        kind = "CorruptedKVOffloadConnector" if plan.corrupt else "KVOffloadConnector"
        servers |= {f"decode{i}": fleet.server(f"decode{i}", options, kind) for i in range(plan.decode)}
        for server in servers.values():
            opened.callback(server.kill)
        for server in servers.values():
            server.wait()
        proxy = Proxy(*([servers[name] for name in servers if name.startswith(role)] for role in ("prefill", "decode")))
        killer = Killer(plan, servers, store, lambda: num_ended)
        try:
            with ThreadPoolExecutor(CLIENTS) as threads:
                for client in [threads.submit(run_client) for _ in range(CLIENTS)]:
                    client.result()
        finally:
            killer.close()
        if killer.error is not None:
            raise killer.error
    result.kills = killer.done
    return result


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[Result, int], None]]:
    """Shows a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bars:
        task = bars.add_task("starting vLLM", total=total)

        def show(result: Result, ended: int) -> None:
            text = ", ".join(f"{count} {name}" for name, count in sorted(result.outcomes.items()))
            bars.update(task, completed=ended, description=text)

        yield show


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    usual = Plan()
    for name in ("requests", "kills", "prefill", "decode", "seed", "deadline_ms"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(usual, name))
    parser.add_argument("--store", choices=sorted(STORES), default=usual.store)
    parser.add_argument("--corrupt", action="store_true", help="the control: loads are corrupted")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    plan = Plan(**arguments)
    os.environ |= with_demo(os.environ)
    with tempfile.TemporaryDirectory(prefix="handovers-") as temporary:
        folder = Path(temporary)
        with contextlib.closing(Runner(folder, folder)) as run, bar(plan.requests) as show:
            result = storm(plan, Fleet(run, folder), show)
    report = {"plan": asdict(plan), **result.to_dict()}
    print(json.dumps(report, indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if result.is_good is not plan.corrupt else 1


if __name__ == "__main__":
    sys.exit(main())
