"""What each system answers after its cache was broken: a first engine stores, something breaks, a second one is asked.

Real vLLM computes a small model with random float32 weights. Answers are compared with those of vLLM without a cache.
What should never happen must happen twice to count.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers import faults
from benchmarks.peers.judge import Answer, Cell, Outcome, is_right, judge, short
from benchmarks.peers.place import Place
from benchmarks.peers.running import ENVIRONMENT, FailedError, Running
from benchmarks.peers.systems import StartError, System, environment
from demo import model as demo_model

PROMPTS = 8
PROMPT_TOKENS = 400
SEED = 0
HOST_BYTES = 160 << 20
CHANGED_TENSOR = "model.layers.0.self_attn.v_proj.weight"
KILL_AFTER_S = 0.2


class Bench:
    """Carries out faults. Every system gets the same prompts and the same model, in ``work``."""

    def __init__(self, work: Path) -> None:
        # The process that forks engines takes its environment from this one when it starts.
        os.environ.update({**environment(), **ENVIRONMENT})
        self._work = work
        self._model = work / "model"
        self._other_model = work / "other-model"
        self._right_model = work / "right-model"
        demo_model.write_model(self._model, SEED)
        faults.copy_folder(self._model, self._right_model)
        faults.copy_folder(self._model, self._other_model)
        faults.negate_tensor(self._other_model, CHANGED_TENSOR)
        rng = np.random.default_rng(SEED)
        self._prompts: list[list[int]] = rng.integers(3, demo_model.VOCAB, (PROMPTS, PROMPT_TOKENS)).tolist()
        self._reference = self._without_cache(self._model)
        self._other_reference = self._without_cache(self._other_model)

    def num_distinct(self) -> int:
        """Returns how many prompts tell the two models apart: all, if replaced weights are to mean something."""
        pairs = zip(self._other_reference, self._reference, strict=True)
        return sum(not is_right(other, right) for other, right in pairs)

    def _without_cache(self, model: Path) -> list[Answer]:
        with Running(model, None, self._work / f"reference-{model.name}.log") as engine:
            asked = engine.ask(self._prompts)
            engine.stop()
        if len(asked.answers) != len(self._prompts):
            raise RuntimeError(f"vLLM without a cache does not answer: {asked.message}")
        return asked.answers

    # What faults are made of.

    def _start(self, place: Place) -> Running:
        settings = place.begin()
        log = place.logs / f"engine-{len(list(place.logs.glob('engine-*.log'))) + 1}.log"
        return Running(self._model, settings.connector, log, settings.environment, place.system.python())

    def _store(self, place: Place) -> None:
        """Makes ``place`` hold the KV of all prompts."""
        if place.is_kept:
            place.restore()
            return
        place.empty()
        with self._start(place) as engine:
            engine.ask(self._prompts)
            engine.settle()
            engine.stop()
        place.end()
        place.keep()

    def _ask(self, place: Place, reference: Sequence[Answer] | None = None) -> Cell:
        """Asks a new engine all prompts."""
        with self._start(place) as engine:
            asked = engine.ask(self._prompts)
            engine.stop()
        place.end()
        return judge(asked, self._reference if reference is None else reference)

    # The faults.

    def no_fault(self, place: Place) -> Cell:
        self._store(place)
        return self._ask(place)

    def flips(self, place: Place) -> Cell:
        self._store(place)
        if faults.flip(place.folder) == 0:
            raise RuntimeError("there was nothing to flip")
        return self._ask(place)

    def truncation(self, place: Place) -> Cell:
        self._store(place)
        if faults.truncate(place.folder) == 0:
            raise RuntimeError("there was nothing to truncate")
        return self._ask(place)

    def killed(self, place: Place) -> Cell:
        """Kills an engine right after half of the answers, while it stores their KV and computes the next."""
        place.empty()
        half = len(self._prompts) // 2
        with self._start(place) as engine:
            asked = engine.ask(self._prompts[:half])
            engine.begin(self._prompts[half:])
            time.sleep(KILL_AFTER_S)
            engine.kill()
            place.crash()
        return worse(judge(asked, self._reference[:half]), self._ask(place))

    def full(self, place: Place) -> Cell:
        with place.full() as fill, self._start(place) as engine:
            fill()
            first = judge(engine.ask(self._prompts), self._reference)
            engine.settle()
            engine.stop()
            place.end()
            return worse(first, self._ask(place))

    def weights(self, place: Place) -> Cell:
        self._store(place)
        try:
            faults.copy_folder(self._other_model, self._model)
            return self._ask(place, self._other_reference)
        finally:
            faults.copy_folder(self._right_model, self._model)


def worse(one: Cell, other: Cell) -> Cell:
    """Returns ``one`` if something went wrong in it, else ``other``."""
    return other if one.outcome in (Outcome.RIGHT, Outcome.MISS) else one


FAULTS: dict[str, Callable[[Bench, Place], Cell]] = {
    "no fault": Bench.no_fault,
    "byte flips": Bench.flips,
    "truncation": Bench.truncation,
    "kill -9": Bench.killed,
    "full disk": Bench.full,
    "replaced weights": Bench.weights,
}
NO_FAULT, FLIPS = list(FAULTS)[:2]


def run_cell(bench: Bench, place: Place, fault: str) -> Cell:
    """Runs one cell once. What the engine does when it starts is a result, too."""
    place.logs.mkdir(parents=True, exist_ok=True)
    try:
        return FAULTS[fault](bench, place)
    except StartError as error:
        return Cell(Outcome.REFUSED, message=str(error))
    except FailedError as error:
        return Cell(error.outcome, message=str(error))
    except (OSError, RuntimeError) as error:
        return Cell(Outcome.NOT_APPLICABLE, message=f"the fault could not be planted: {error}")


def run_row(bench: Bench, system: System, chosen: Sequence[str], logs: Path) -> dict[str, list[Cell]]:
    """Returns the cells of one system, by fault, with its logs below ``logs``. A bad cell is run twice.

    A system that does not start is asked no further.
    """
    place = Place(system, logs / "services", HOST_BYTES, system.cache_bytes)
    message = system.missing()
    known = None if message is None else Cell(Outcome.REFUSED, message=message)
    cells: dict[str, list[Cell]] = {}
    try:
        for fault in chosen:
            if known is None and system.is_control and fault not in (NO_FAULT, FLIPS):
                cells[fault] = [Cell(Outcome.NOT_APPLICABLE)]
                continue
            found = cells[fault] = [] if known is None else [known]
            for again in ("", "-again"):
                if known is None and (not found or found[0].is_bad):
                    place.logs = logs / (fault.replace(" ", "-") + again)
                    found.append(run_cell(bench, place, fault))
            if found[0].outcome is Outcome.REFUSED:
                known = found[0]
            print(f"{system.name} | {fault} | {short(found)}", file=sys.stderr, flush=True)
    finally:
        place.close()
    return cells
