"""Copies device blocks between pages in host memory, where a CPU's KV cache is, and slots of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.abc import ByteArray, Slots
from kvoffload.native import load
from kvoffload.transfer.copies import Numbers

BYPASS_STORE_BYTES = 0
"""Stores of at least so many bytes bypass the processor's caches: all, because slots are not read soon."""
BYPASS_LOAD_BYTES = 1 << 20
"""Loads of at least so many bytes bypass the processor's caches. The model reads smaller ones from the caches next."""
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


if TYPE_CHECKING or (native := load("_copies")) is None:
    BlockCopier = PlainBlockCopier
else:

    class BlockCopier(native.BlockCopier):
        """Copies without Python's lock, and large jobs on two threads."""

        def copy(self, device_blocks: Numbers, slots: Slots, parts: Numbers, is_store: bool) -> None:
            nbytes = len(device_blocks) * self.block_bytes
            bypass_caches = nbytes >= (BYPASS_STORE_BYTES if is_store else BYPASS_LOAD_BYTES)
            self.copy_rows(device_blocks, slots, parts, is_store, bypass_caches, nbytes >= TWO_THREADS_BYTES)
