"""Copies device blocks between pages in host memory, where a CPU's KV cache is, and slots of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.abc import ByteArray, Slots
from kvoffload.native import load
from kvoffload.transfer.copies import Numbers

TWO_THREADS_BYTES = 64 << 20
"""From so many bytes on, a second thread helps. It saves at most 1 ms of a smaller copy, and delays it by more if other
threads need the processors."""


class PlainBlockCopier:
    """Copies device blocks of one group to and from slots, with numpy on the calling thread.

    ``views`` have the pages of a layer each, shape (blocks, bytes), all with the same number of blocks; in a row the
    page of a view is at its place in ``offsets``. ``host`` holds the slots, shape (slots, parts, bytes per row): a part
    is the row of a device block. All are bytes, and the bytes of a page and of a row are contiguous.
    """

    def __init__(self, views: Sequence[ByteArray], host: ByteArray, offsets: Sequence[int]) -> None:
        self._views = list(views)
        self._host = host
        self._offsets = list(offsets)
        for array, dimensions in ((host, 3), *((view, 2) for view in views)):
            if array.dtype != np.uint8:
                raise TypeError("pages and slots must be arrays of uint8")
            if array.ndim != dimensions or (array.shape[-1] > 1 and array.strides[-1] != 1):
                raise ValueError(f"pages and slots must have {dimensions} dimensions, of which the last is contiguous")
        if len({len(view) for view in views}) > 1:
            raise ValueError("the views must all have the same number of blocks")
        for at, view in zip(offsets, views, strict=True):
            if not 0 <= at <= host.shape[2] - view.shape[1]:
                raise ValueError(f"a page at {at} does not fit into a row of {host.shape[2]} bytes")

    def copy(self, device_blocks: Numbers, slots: Slots, parts: Numbers, is_store: bool) -> None:
        """Copies ``device_blocks[i]`` to, or else from, part ``parts[i]`` of slot ``slots[i]``.

        The arrays have the same length, and no place is copied to twice. Raises IndexError if a block, slot or part
        does not exist; then nothing is copied.
        """
        if not len(device_blocks) == len(slots) == len(parts):
            raise ValueError("device_blocks, slots and parts must have the same length")
        for numbers, end in (
            (device_blocks, len(self._views[0]) if self._views else 0),
            (slots, self._host.shape[0]),
            (parts, self._host.shape[1]),
        ):
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < end):
                raise IndexError(f"a device block, slot or part is not in [0, {end})")
        for view, at in zip(self._views, self._offsets, strict=True):
            placed = self._host[:, :, at : at + view.shape[1]]
            if is_store:
                placed[slots, parts] = view[device_blocks]
            else:
                view[device_blocks] = placed[slots, parts]


if TYPE_CHECKING or (native := load("_copies")) is None:
    BlockCopier = PlainBlockCopier
else:

    class BlockCopier(native.BlockCopier):
        """Copies without Python's lock, and large jobs on two threads."""

        def copy(self, device_blocks: Numbers, slots: Slots, parts: Numbers, is_store: bool) -> None:
            nbytes = len(device_blocks) * self.block_bytes
            self.copy_rows(device_blocks, slots, parts, is_store, nbytes >= TWO_THREADS_BYTES)
