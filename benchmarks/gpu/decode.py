"""A loop that decodes, as an engine does with a CUDA graph: products of matrices and a read of much memory per step."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu import cuda
from benchmarks.gpu.parts import Options

WIDTH, BATCH, LAYERS = 8192, 64, 48
"""About 6 GiB of weights: 2 ms per step on an H200."""


class Decoder:
    """A captured step. ``run`` returns the milliseconds that each step took, by the clock of the engine's thread."""

    def __init__(self, options: Options) -> None:
        width, layers = (64, 2) if options.dry_run else (WIDTH, LAYERS)
        weights = [cuda.empty((width, width), torch.bfloat16).normal_(0, width**-0.5) for _ in range(layers)]
        self._weights = weights
        self._state = cuda.empty((BATCH, width), torch.bfloat16).normal_()
        self._graph = cuda.capture(self._step)

    def _step(self) -> None:
        state = self._state
        for weight in self._weights:
            state = torch.tanh(state @ weight)
        self._state.copy_(state)

    def run(self, steps: int, before: Callable[[], None] = lambda: None) -> list[float]:
        """``before`` is called before each step, on the engine's thread, within the time of the step."""
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            before()
            self._graph.replay()
            cuda.record().synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return times


def percentiles(times: list[float]) -> dict[str, float]:
    return {"p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99))}
