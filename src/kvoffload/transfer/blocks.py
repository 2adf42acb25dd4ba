"""Copies device blocks between pages in host memory, where a CPU's KV cache is, and slots of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvoffload.abc import ByteArray, Slots
from kvoffload.native import load
from kvoffload.transfer.copies import Numbers

Place: TypeAlias = tuple[int, int]
"""Where the first page of an array is in a row, and the distance from each page to the next, in bytes."""

TWO_THREADS_BYTES = 64 << 20
"""From so many bytes on, a second thread helps. It saves at most 1 ms of a smaller copy, and delays it by more if other
threads need the processors."""


class PlainBlockCopier:
    """Copies device blocks of one group to and from slots, with numpy on the calling thread.

    ``views`` are the pages and ``places`` where a row has them, as ``merge_views`` returns them; all views have the
    same number of blocks. Without places the pages of a device block follow one another, in the order of the views and
    of their layers, and fill the row. ``host`` holds the slots, shape (slots, parts, bytes per row): a part is the row
    of a device block. Both are bytes, and the bytes of a page and of a row are contiguous.
    """

    def __init__(self, views: Sequence[ByteArray], host: ByteArray, places: Sequence[Place] | None = None) -> None:
        self._views = list(views)
        self._host = host
        for array in (*views, host):
            if array.dtype != np.uint8:
                raise TypeError("pages and slots must be arrays of uint8")
            if array.ndim != 3 or (array.shape[2] > 1 and array.strides[2] != 1):
                raise ValueError("pages and slots must have three dimensions, of which the last is contiguous")
        if len({view.shape[1] for view in views}) > 1:
            raise ValueError("the views must all have the same number of blocks")
        sizes = [len(view) * view.shape[2] for view in views]
        if places is None:
            if host.shape[2] != sum(sizes):
                raise ValueError(f"a row has {host.shape[2]} bytes, but a device block {sum(sizes)}")
            ends = accumulate(sizes, initial=0)
            places = [(at, view.shape[2]) for at, view in zip(ends, views, strict=False)]
        for (at, step), view in zip(places, views, strict=True):
            if not (at >= 0 and step >= 0 and at + max(0, len(view) - 1) * step + view.shape[2] <= host.shape[2]):
                raise ValueError(f"pages at {at}, {step} bytes apart, do not fit into a row of {host.shape[2]} bytes")
        self._places = list(places)

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
            row = self._host[slot, part]
            for view, (at, step) in zip(self._views, self._places, strict=True):
                pages = view[:, block]
                placed = np.lib.stride_tricks.as_strided(row[at:], pages.shape, (step, 1))
                if is_store:
                    placed[:] = pages
                else:
                    pages[:] = placed


def merge_views(
    views: Sequence[ByteArray], offsets: Sequence[int] | None = None
) -> tuple[list[ByteArray], list[Place]]:
    """Returns the same pages in fewer arrays of shape (layers, num_blocks, page_bytes), and their places.

    ``offsets``: where the page of each view begins in a row; None: where the one before ends. Consecutive views of the
    same shape and strides at equal distances, in memory and in a row, become one array, so that one call copies a block
    of all of them.
    """
    if offsets is None:
        offsets = list(accumulate((view.shape[1] for view in views), initial=0))[:-1]
    runs: list[list[tuple[ByteArray, int]]] = []
    for view, offset in zip(views, offsets, strict=True):
        run = runs[-1] if runs else None
        if run is not None and (view.shape, view.strides) == (run[0][0].shape, run[0][0].strides):
            steps = _steps(run[-1], (view, offset))
            if min(steps) > 0 and (len(run) == 1 or steps == _steps(*run[:2])):
                run.append((view, offset))
                continue
        runs.append([(view, offset)])
    arrays, places = [], []
    for run in runs:
        (first, offset), (step, row_step) = run[0], _steps(*run[:2]) if len(run) > 1 else (0, 0)
        shape, strides = (len(run), *first.shape), (step, *first.strides)
        arrays.append(np.lib.stride_tricks.as_strided(first, shape=shape, strides=strides))
        places.append((offset, row_step))
    return arrays, places


def _steps(one: tuple[ByteArray, int], next_one: tuple[ByteArray, int]) -> tuple[int, int]:
    """Returns the distance of two views in memory, and that of their pages in a row."""
    return _address(next_one[0]) - _address(one[0]), next_one[1] - one[1]


def _address(view: ByteArray) -> int:
    return int(view.ctypes.data)


if TYPE_CHECKING or (native := load("_copies")) is None:
    BlockCopier = PlainBlockCopier
else:

    class BlockCopier(native.BlockCopier):
        """Copies without Python's lock, and large jobs on two threads."""

        def copy(self, device_blocks: Numbers, slots: Slots, parts: Numbers, is_store: bool) -> None:
            nbytes = len(device_blocks) * self.block_bytes
            self.copy_rows(device_blocks, slots, parts, is_store, nbytes >= TWO_THREADS_BYTES)
