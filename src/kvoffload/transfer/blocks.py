"""Copies device blocks between pages in host memory, where a CPU's KV cache is, and slots of the pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.abc import ByteArray, Slots
from kvoffload.native import load
from kvoffload.transfer.copies import Numbers
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

STREAMS = (0, 4, 8)
"""The kinds of copy: the number of pieces of memory that are copied in turn, past the processor's caches; 0: one after
another, by memcpy. Which is fastest depends on the processor and on the size of the pieces."""
SHORTEST_PIECE = 512
"""Shorter pieces are copied by memcpy."""
LONGEST_PIECE = 256 << 10
"""Longer pieces are copied as these are."""
MEASURED_BYTES = 2 << 20
ROUNDS = 5
DEADLINE_S = 0.1
"""No round of measurements begins later than this after the first."""
LEAST_GAIN = 0.05
"""The share of memcpy's time that another kind must save."""
TWO_THREADS_BYTES = 64 << 20
"""From so many bytes on, a second thread helps. It saves at most 1 ms of a smaller copy, and delays it by more if other
threads need the processors."""


class PlainBlockCopier:
    """Copies device blocks of one group to and from slots, with numpy on the calling thread.

    ``views`` are the pages, as ``merge_views`` returns them; all have the same number of blocks. ``host`` holds the
    slots, shape (slots, parts, bytes per device block): a part is a device block, whose pages follow one another in the
    order of the views and of their layers. Both are bytes, and the bytes of a page and of a part are contiguous.
    """

    def __init__(self, views: Sequence[ByteArray], host: ByteArray) -> None:
        self._views = list(views)
        self._host = host
        for array in (*views, host):
            if array.dtype != np.uint8:
                raise TypeError("pages and slots must be arrays of uint8")
            if array.ndim != 3 or (array.shape[2] > 1 and array.strides[2] != 1):
                raise ValueError("pages and slots must have three dimensions, of which the last is contiguous")
        if len({view.shape[1] for view in views}) > 1:
            raise ValueError("the views must all have the same number of blocks")
        if host.shape[2] != sum(len(view) * view.shape[2] for view in views):
            raise ValueError(f"a part of a slot has {host.shape[2]} bytes, which is not the size of a device block")

    def copy(self, device_blocks: Numbers, slots: Slots, parts: Numbers, is_store: bool) -> None:
        """Copies ``device_blocks[i]`` to, or else from, part ``parts[i]`` of slot ``slots[i]``.

        The arrays have the same length, and no place is copied to twice. Raises IndexError if a block, slot or part
        does not exist; then nothing is copied.
        """
        if not len(device_blocks) == len(slots) == len(parts):
            raise ValueError("device_blocks, slots and parts must have the same length")
        for numbers, end in (
            (device_blocks, self._views[0].shape[1] if self._views else 0),
            (slots, self._host.shape[0]),
            (parts, self._host.shape[1]),
        ):
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < end):
                raise IndexError(f"a device block, slot or part is not in [0, {end})")
        for block, slot, part in zip(device_blocks.tolist(), slots.tolist(), parts.tolist(), strict=True):
            row, at = self._host[slot, part], 0
            for view in self._views:
                pages = view[:, block]
                piece = row[at : at + pages.size].reshape(pages.shape)
                if is_store:
                    piece[:] = pages
                else:
                    pages[:] = piece
                at += pages.size


def merge_views(views: Sequence[ByteArray]) -> list[ByteArray]:
    """Returns the same pages in fewer arrays of shape (layers, num_blocks, page_bytes). Consecutive views of the same
    shape and strides at equal distances in memory become one array, so that one call copies a block of all of them."""
    runs: list[list[ByteArray]] = []
    for view in views:
        run = runs[-1] if runs else None
        if run is not None and (view.shape, view.strides) == (run[0].shape, run[0].strides):
            step = _address(view) - _address(run[-1])
            if step > 0 and (len(run) == 1 or step == _address(run[1]) - _address(run[0])):
                run.append(view)
                continue
        runs.append([view])
    return [
        np.lib.stride_tricks.as_strided(
            run[0],
            shape=(len(run), *run[0].shape),
            strides=(_address(run[1]) - _address(run[0]) if len(run) > 1 else 0, *run[0].strides),
        )
        for run in runs
    ]


def _address(view: ByteArray) -> int:
    return int(view.ctypes.data)


def choose_streams(measure: Callable[[int], float], clock: Callable[[], float] = time.perf_counter) -> int:
    """Returns the fastest of STREAMS, or 0 where none is clearly faster than memcpy.

    ``measure`` copies once and returns the seconds. The kinds take turns, and the shortest time of each counts, because
    other processes only add to it.
    """
    end = clock() + DEADLINE_S
    rounds = [[measure(streams) for streams in STREAMS]]
    while len(rounds) < ROUNDS and clock() < end:
        rounds.append([measure(streams) for streams in STREAMS])
    times = dict(zip(STREAMS, map(min, zip(*rounds, strict=True)), strict=True))
    fastest = min(STREAMS, key=times.__getitem__)
    return fastest if times[fastest] < (1 - LEAST_GAIN) * times[0] else 0


@cache
def fastest_streams(piece_bytes: int, is_store: bool) -> int:
    """Returns the fastest of STREAMS for such pieces, in random order and in no cache, with native code.

    It is measured on the first call, which takes about ten milliseconds.
    """
    native: Any = load("_copies")
    if piece_bytes < SHORTEST_PIECE or not native.CAN_BYPASS:
        return 0
    device, host = (np.ones(MEASURED_BYTES, dtype=np.uint8) for _ in range(2))
    copier = native.BlockCopier([device.reshape(1, -1, piece_bytes)], host.reshape(-1, 1, piece_bytes))
    num_pieces = MEASURED_BYTES // piece_bytes
    blocks, slots = (np.random.default_rng(seed).permutation(num_pieces) for seed in range(2))
    parts = np.zeros(num_pieces, dtype=np.int64)

    def measure(streams: int) -> float:
        native.evict(device)
        native.evict(host)
        begun = time.perf_counter()
        copier.copy_rows(blocks, slots, parts, is_store, streams, False)
        return time.perf_counter() - begun

    streams = choose_streams(measure)
    logger.debug(
        "kvoffload: %s of %s per page are fastest %s",
        "stores" if is_store else "loads",
        format_bytes(piece_bytes),
        f"past the caches, {streams} pages in turn" if streams else "by memcpy",
    )
    return streams


if TYPE_CHECKING or (native := load("_copies")) is None:
    BlockCopier = PlainBlockCopier
else:

    class BlockCopier(native.BlockCopier):
        """Copies without Python's lock, and large jobs on two threads, with the kind of copy that is fastest here."""

        def __init__(self, views: Sequence[ByteArray], host: ByteArray) -> None:
            power_of_2 = 1 << min(self.piece_bytes, LONGEST_PIECE).bit_length() >> 1
            self.streams = [fastest_streams(power_of_2, is_store) for is_store in (False, True)]

        def copy(self, device_blocks: Numbers, slots: Slots, parts: Numbers, is_store: bool) -> None:
            nbytes = len(device_blocks) * self.block_bytes
            streams = self.streams[is_store]
            self.copy_rows(device_blocks, slots, parts, is_store, streams, nbytes >= TWO_THREADS_BYTES)
