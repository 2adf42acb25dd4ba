"""A loop that decodes, as an engine does with a CUDA graph: products of matrices and a read of much memory per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu import cuda
from benchmarks.gpu.parts import Options

WIDTH, BATCH, LAYERS = 8192, 64, 48
"""About 6 GiB of weights: 2 ms per step on an H200."""
MEMORY_SHARE = 0.25
"""How much of the free device memory the weights may take."""


@dataclass(slots=True)
class Steps:
    """Milliseconds of each step: on the device, and of the engine's thread in the calls before the step."""

    device: list[float]
    thread: list[float]

    def __iadd__(self, other: Steps) -> Steps:
        self.device += other.device
        self.thread += other.thread
        return self


class Decoder:
    """A captured step."""

    def __init__(self, options: Options) -> None:
        width = 64 if options.dry_run else WIDTH
        fits = int(cuda.free_memory() * MEMORY_SHARE) // (2 * width * width)
        layers = 2 if options.dry_run else max(1, min(LAYERS, fits))
        weights = [cuda.empty((width, width), torch.bfloat16).normal_(0, width**-0.5) for _ in range(layers)]
        self._weights = weights
        self._state = cuda.empty((BATCH, width), torch.bfloat16).normal_()
        self._graph = cuda.capture(self._step)

    def _step(self) -> None:
        state = self._state
        for weight in self._weights:
            state = torch.tanh(state @ weight)
        self._state.copy_(state)

    def run(self, steps: int, before: Callable[[], None] = lambda: None) -> Steps:
        """``before`` is called before each step, on the engine's thread."""
        times = Steps([], [])
        for _ in range(steps):
            begin = time.perf_counter()
            before()
            times.thread.append((time.perf_counter() - begin) * 1e3)
            start = cuda.record()
            self._graph.replay()
            end = cuda.record()
            end.synchronize()
            times.device.append(cuda.seconds_between(start, end) * 1e3)
        return times


def percentiles(times: list[float]) -> dict[str, float]:
    return {"p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99))}
