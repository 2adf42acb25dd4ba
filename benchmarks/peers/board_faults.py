"""The faults of the integrity board: a first engine stores, something breaks, a second engine is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import faults
from benchmarks.peers.board_judge import Answer, Asked, Cell, Outcome, is_right, judge
from benchmarks.peers.board_places import Place
from benchmarks.peers.board_process import CrashError, RefusedError, Running
from benchmarks.peers.board_systems import System
from benchmarks.peers.systems import HangError
from demo import model as demo_model

PROMPTS = 8
PROMPT_TOKENS = 400
SEED = 0
CHANGED_TENSOR = "model.layers.0.self_attn.v_proj.weight"
KILL_AFTER_S = 0.2


@dataclass(slots=True)
class Bench:
    """A system with the place of its bytes. ``logs``: the folder of the engines' logs, one for each cell."""

    system: System
    place: Place
    logs: Path
    is_stored: bool = False
    """Whether ``place`` keeps a copy of the KV of all prompts."""


class Board:
    """Carries out faults. Every system gets the same prompts and the same model."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._work = work
        self._model = work / "model"
        self._other_model = work / "other-model"
        demo_model.write_model(self._model, SEED)
        faults.copy_folder(self._model, self._other_model)
        faults.negate_tensor(self._other_model, CHANGED_TENSOR)
        self._right_model = work / "right-model"
        faults.copy_folder(self._model, self._right_model)
        rng = np.random.default_rng(SEED)
        shape = (PROMPTS, PROMPT_TOKENS)
        self.prompts: list[list[int]] = rng.integers(3, demo_model.VOCAB, shape).tolist()
        self.reference = self._without_cache(self._model)
        self._other_reference = self._without_cache(self._other_model)

    def controls(self) -> dict[str, Any]:
        """Returns what must hold for the board to mean something: all prompts tell the two models apart."""
        pairs = zip(self._other_reference, self.reference, strict=True)
        return {"prompts_that_tell_the_weights_apart": sum(not is_right(other, right) for other, right in pairs)}

    def _without_cache(self, model: Path) -> list[Answer]:
        log = self._work / f"reference-{model.name}.log"
        with Running(model, None, log) as engine:
            asked = engine.ask(self.prompts)
            engine.stop()
        if len(asked.answers) != len(self.prompts):
            raise RuntimeError(f"vLLM without a cache does not answer: {asked.message}; see {log}")
        return asked.answers

    # What faults are made of.

    def start(self, bench: Bench) -> Running:
        bench.place.begin()
        connector = bench.system.connector(bench.place)
        environment = {**bench.system.environment, **bench.place.environment}
        log = bench.logs / f"engine-{len(list(bench.logs.glob('engine-*.log'))) + 1}.log"
        engine = Running(self._model, connector, log, environment, bench.system.paths())
        lines = log.read_text(errors="replace").splitlines() if bench.system.refusal else []
        said = next((line for line in lines if str(bench.system.refusal) in line), None)
        if said is not None:
            engine.kill()
            raise RefusedError(f"{said.strip()} (the engine runs on without it)")
        return engine

    def store(self, bench: Bench) -> None:
        """Makes ``bench`` hold the KV of all prompts."""
        if bench.is_stored:
            bench.place.restore()
            return
        bench.place.empty()
        engine = self.start(bench)
        try:
            engine.ask(self.prompts)
            engine.settle()
            bench.place.stored(engine)
        except BaseException:
            engine.kill()
            raise
        bench.place.end()
        bench.is_stored = bench.place.keep()

    def ask(self, bench: Bench, reference: Sequence[Answer] | None = None) -> Cell:
        """Asks a new engine all prompts."""
        with self.start(bench) as engine:
            asked = engine.ask(self.prompts, bench.place.source())
            engine.stop()
        bench.place.end()
        return judge(asked, self.reference if reference is None else reference)

    def judge(self, asked: Asked) -> Cell:
        return judge(asked, self.reference)

    # The faults.

    def no_fault(self, bench: Bench) -> Cell:
        self.store(bench)
        return self.ask(bench)

    def flips(self, bench: Bench) -> Cell:
        self.store(bench)
        if bench.place.flip() == 0:
            raise RuntimeError("there was nothing to flip")
        return self.ask(bench)

    def truncation(self, bench: Bench) -> Cell:
        self.store(bench)
        if bench.place.truncate() == 0:
            raise RuntimeError("there was nothing to truncate")
        return self.ask(bench)

    def killed(self, bench: Bench) -> Cell:
        """Kills an engine right after half of the answers, while it stores their KV and computes the next."""
        bench.place.empty()
        half = len(self.prompts) // 2
        with self.start(bench) as engine:
            asked = engine.ask(self.prompts[:half])
            engine.begin(self.prompts[half:])
            time.sleep(KILL_AFTER_S)
            engine.kill()
            bench.place.crash()
        return worse(judge(asked, self.reference[:half]), self.ask(bench))

    def full(self, bench: Bench) -> Cell:
        with bench.place.full() as fill:
            engine = self.start(bench)
            try:
                fill()
                first = self.judge(engine.ask(self.prompts))
                try:
                    engine.settle()
                except HangError as error:
                    return Cell(Outcome.HANG, first.from_cache, first.computed, message=str(error))
                except CrashError as error:
                    return Cell(Outcome.CRASH, first.from_cache, first.computed, message=str(error))
                bench.place.stored(engine)
                bench.place.end()
                return worse(first, self.ask(bench))
            finally:
                engine.kill()

    def weights(self, bench: Bench) -> Cell:
        self.store(bench)
        try:
            faults.copy_folder(self._other_model, self._model)
            return self.ask(bench, self._other_reference)
        finally:
            faults.copy_folder(self._right_model, self._model)

    def restarted(self, bench: Bench) -> Cell:
        """Restarts the cache's server between two rounds of the same engine."""
        bench.place.stop_service()
        self.store(bench)
        with self.start(bench) as engine:
            bench.place.stop_service()
            bench.place.start_service()
            asked = engine.ask(self.prompts, bench.place.source())
            engine.stop()
        return self.judge(asked)

    def restarted_during(self, bench: Bench) -> Cell:
        """Kills the cache's server after a quarter of the prompts, and starts it again after five eighths."""
        place = bench.place
        place.stop_service()
        self.store(bench)
        actions = {PROMPTS // 4: place.stop_service, 5 * PROMPTS // 8: place.start_service}
        with self.start(bench) as engine:
            asked = engine.ask(self.prompts, place.source(), lambda count: actions.get(count, lambda: None)())
            engine.stop()
        return self.judge(asked)


def worse(one: Cell, other: Cell) -> Cell:
    """Returns ``one`` if something went wrong in it, else ``other``."""
    return other if one.outcome in (Outcome.RIGHT, Outcome.MISS) else one


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    how: str
    run: Callable[[Board, Bench], Cell]

    @property
    def folder(self) -> str:
        """The name of the folder of its logs."""
        return self.name.replace(" ", "-")


FAULTS = (
    Fault("no fault", "a second engine is asked the same prompts", Board.no_fault),
    Fault(
        "byte flips", "one bit in every whole 64 KiB of every file (of every value in a store's memory)", Board.flips
    ),
    Fault("truncation", "every file is cut to half its size", Board.truncation),
    Fault("kill -9", "the engine's processes are killed while they store", Board.killed),
    Fault(
        "full disk",
        "another file takes almost all room of the disk while the engine runs (a store: little memory)",
        Board.full,
    ),
    Fault("replaced weights", "one tensor has another sign, under the same path", Board.weights),
    Fault("store restarted", "the cache's server is killed and started again between requests", Board.restarted),
    Fault("store down", "the same, after the second answer and after the fifth", Board.restarted_during),
)
CONTROL_FAULTS = ("no fault", "byte flips")
