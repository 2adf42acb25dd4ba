"""KV caches of several layouts in host memory, for tests of what copies their blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda.pages import PageTable, page_table

GUARD = 1 << 15
"""Bytes around a cache and around staging that no kernel may write: as much as two pieces of the kernel."""


class Cache:
    """Views of random bytes, with GUARD bytes around them. ``starts`` and ``strides`` place the pages of each layer."""

    def __init__(self, num_blocks: int, pages: list[int], starts: list[int], strides: list[int], seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        ends = [at + (num_blocks - 1) * step + page for at, step, page in zip(starts, strides, pages, strict=True)]
        self.num_blocks = num_blocks
        self.bytes = aligned(max(ends) + 2 * GUARD)
        self.bytes[:] = self.rng.integers(0, 256, len(self.bytes), np.uint8)
        self.views = [
            np.lib.stride_tricks.as_strided(self.bytes[GUARD + at :], (num_blocks, page), (step, 1))
            for at, step, page in zip(starts, strides, pages, strict=True)
        ]

    @property
    def row_bytes(self) -> int:
        return sum(view.shape[1] for view in self.views)

    @property
    def table(self) -> PageTable:
        return page_table(PageGroup(self.views))


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns zeros whose address is a multiple of 256."""
    data = np.zeros(nbytes + 256, np.uint8)
    return data[-data.ctypes.data % 256 :][:nbytes]


def layers_outermost(num_blocks: int, layers: int, page: int) -> Cache:
    return Cache(num_blocks, [page] * layers, [i * num_blocks * page for i in range(layers)], [page] * layers)


def blocks_outermost(num_blocks: int, layers: int, page: int, gap: int = 0) -> Cache:
    stride = layers * (page + gap)
    return Cache(num_blocks, [page] * layers, [i * (page + gap) for i in range(layers)], [stride] * layers)


def separate(num_blocks: int, pages: list[int], gap: int = 0) -> Cache:
    starts = [num_blocks * sum(pages[:i]) + i * gap for i in range(len(pages))]
    return Cache(num_blocks, pages, starts, pages)


CACHES: dict[str, Callable[[], Cache]] = {
    "layers outermost": lambda: layers_outermost(9, 4, 2048),
    "blocks outermost, one run": lambda: blocks_outermost(9, 4, 1024),
    "blocks outermost with gaps": lambda: blocks_outermost(9, 4, 1024, gap=256),
    "pages of several sizes": lambda: separate(7, [9216, 512, 64, 73728]),
    "a page that fills no piece": lambda: separate(6, [18432, 18432 + 48]),
    "words of 8 bytes": lambda: separate(5, [1032, 520, 8]),
    "words of 4 bytes": lambda: separate(5, [516, 1028]),
    "words of 2 bytes": lambda: separate(5, [130, 514, 2]),
    "bytes": lambda: separate(5, [7, 129, 1]),
    "an address that is not aligned": lambda: separate(4, [512, 512], gap=3),
    "more steps than programs": lambda: layers_outermost(40, 6, 16384),
}
