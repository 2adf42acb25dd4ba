"""Runs two servers on each store."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from demo.act import EngineProcess, Progress
from demo.engine import connector
from demo.model import kv_bytes_per_token
from demo.process import DemoError
from demo.protocol import ActConfig, EngineInfo, RequestResult
from demo.run import BLOCK_SIZE, Sizes, check_vllm, disk_directory, load, make_config, model_directory
from demo.shared_report import (
    LOAD_DEADLINE_S,
    SharedReport,
    SkippedStore,
    StoreResult,
)
from demo.stores import STORE_BYTES, STORES, Store, StoreMissingError

HOST_BLOCKS = 48
"""Blocks in host memory: few, so that prompts come from the store when they are asked again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked about: documents by their numbers."""

    shared: range
    """These the first server sees first."""
    back: range
    """These the second server sees first."""

    @property
    def documents(self) -> int:
        return self.back.stop


def make_plan(shared: int = 12, back: int = 4) -> Plan:
    return Plan(range(shared), range(shared, shared + back))


class SharedDemo:
    """The run of the demo. Logs go to ``out``. ``options``: kvoffload's, without ``tiers``."""

    def __init__(
        self, out: Path, config: ActConfig, options: Mapping[str, Any], plan: Plan, progress: Progress
    ) -> None:
        self._out = out
        self._config = config
        self._options = options
        self.plan = plan
        self._progress = progress
        self._numbers = itertools.count()

    def start(self, name: str, store: Store | None) -> EngineProcess:
        """Starts a server. ``name`` is that of its log."""
        config = self._config
        if store is not None:
            config = replace(config, connector=connector({**self._options, "tiers": [store.entry()]}))
        return EngineProcess(config, self._out / f"shared-{name}.log")

    def ask(self, engine: EngineProcess, documents: Sequence[int], title: str | None = None) -> list[RequestResult]:
        """Asks about ``documents``, one after the other, and waits until what is to be written has been. With a title
        this is a new part of the run."""
        if title is not None:
            self._progress.begin(title, len(documents))
        results = [self._ask(engine, document) for document in documents]
        engine.call("settle")
        return results

    def _ask(self, engine: EngineProcess, document: int, load: bool = True) -> RequestResult:
        result = engine.ask(next(self._numbers), document, load)
        self._progress.request(result)
        return result

    def _ask_in_turn(
        self, engine: EngineProcess, documents: Sequence[int], title: str
    ) -> tuple[list[RequestResult], list[RequestResult]]:
        """Asks about each document twice, and returns the answers: those for which the server loads what it finds, and
        those for which it computes the whole prompt. In turn, so that whatever else the machine does slows both."""
        self._progress.begin(title, 2 * len(documents))
        pairs = [(self._ask(engine, document), self._ask(engine, document, load=False)) for document in documents]
        engine.call("settle")
        return [loaded for loaded, _ in pairs], [computed for _, computed in pairs]

    def baseline(self) -> tuple[EngineInfo, dict[int, RequestResult]]:
        """Returns the answers without kvoffload by document."""
        with self.start("baseline", None) as engine:
            results = self.ask(engine, range(self.plan.documents), "without kvoffload")
            engine.shut_down()
            return engine.wait_ready(), {result.document: result for result in results}

    def share(self, store: Store) -> StoreResult:
        """Runs two servers on ``store``, the second while the first still runs."""
        plan, name = self.plan, store.name
        with ExitStack() as opened:
            first = opened.enter_context(self.start(f"{name}-first", store))
            asked = self.ask(first, plan.shared, f"{name}: first server")
            second = opened.enter_context(self.start(f"{name}-second", store))
            shared, computed = self._ask_in_turn(second, plan.shared, f"{name}: second server")
            self.ask(second, plan.back, "  new prompts")
            time.sleep(store.visible_s)
            back = self.ask(first, plan.back, "  the same at the first server")
            second.call("corrupt_loads")
            control = self.ask(second, plan.shared, "  control: corrupted loads")
            # What it computes now is wrong.
            second.kill()
            before = bad_blocks(first)
            store.corrupt()
            corrupted = self.ask(first, plan.shared, "  stored values changed")
            found = bad_blocks(first) - before
            first.shut_down()
        return StoreResult(name, store.title, asked, shared, computed, back, control, corrupted, found)


def run_shared_demo(out: Path, seed: int, progress: Progress, stores: Sequence[str] = ()) -> SharedReport:
    """Runs the demo on ``stores``, by default all, and returns the report. Leaves the logs of servers and stores in
    ``out``.

    Raises DemoError if it cannot run. A store that cannot run here is skipped. If the servers of one store fail, the
    report says so, and the others go on.
    """
    for name in stores:
        if name not in STORES:
            raise DemoError(f"--store {name}: there is no such store; known: {', '.join(STORES)}")
    check_vllm()
    load_average = os.getloadavg()[0]
    out.mkdir(parents=True, exist_ok=True)
    with model_directory(None, seed) as model, disk_directory(out, 4 * STORE_BYTES) as work:
        plan = make_plan()
        sizes = Sizes(documents=plan.documents)
        config = make_config(model, True, load(model, True, None, seed, sizes), seed, sizes)
        demo = SharedDemo(out, config, options(model), plan, progress)
        info, baseline = demo.baseline()
        report = SharedReport(
            model="random Llama, 24M float32 weights",
            seed=seed,
            made_at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            load_average=load_average,
            info=info,
            baseline=baseline,
            stores=[],
        )
        for name, make in STORES.items():
            if stores and name not in stores:
                continue
            try:
                with make(work / name, out) as store:
                    report.stores.append(demo.share(store))
            except StoreMissingError as error:
                report.stores.append(SkippedStore(name, str(error)))
                progress.skip(name, str(error))
            except DemoError as error:
                report.errors.append(f"{name}: {error}")
    return report


def options(model: Path, host_blocks: int = HOST_BLOCKS) -> dict[str, Any]:
    """Returns kvoffload's options for a server, without ``tiers``."""
    return {
        "host_bytes": host_blocks * BLOCK_SIZE * (kv_bytes_per_token(model) or 0),
        "policy": "lru",
        "load_deadline_ms": 1000 * LOAD_DEADLINE_S,
    }


def bad_blocks(engine: EngineProcess) -> int:
    """Returns how many blocks of tiers the server has found to be corrupt."""
    counters = engine.call("metrics")
    return int(sum(value for name, value in counters.items() if name.startswith("tier_bad_blocks:")))
