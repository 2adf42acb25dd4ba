"""What all peers have in common."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvoffload.abc import ByteArray

Move = Callable[[Sequence[str], ByteArray], object]
"""Moves the values of these names from or to the rows."""


def new_rows(count: int, nbytes: int) -> ByteArray:
    """Returns memory with random bytes, shape (count, nbytes), which begins at a page."""
    memory = np.frombuffer(mmap.mmap(-1, count * nbytes), dtype=np.uint8)
    memory[:] = np.frombuffer(np.random.default_rng(1).bytes(memory.size), dtype=np.uint8)
    return memory.reshape(count, nbytes)


def serve(rows: ByteArray, moves: Mapping[str, Move]) -> None:
    """Answers the lines of the input, then ends the process."""
    print("ready", flush=True)
    for line in sys.stdin:
        do, prefix, number = line.split()
        names = [f"{prefix}/{i}" for i in range(int(number))]
        begun = time.perf_counter()
        moves[do](names, rows[: len(names)])
        print(time.perf_counter() - begun, flush=True)
    os._exit(0)
