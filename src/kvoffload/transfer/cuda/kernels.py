"""Kernels that gather device blocks into rows and scatter rows into device blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch


def as_words(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the pages as tensors (num_blocks, layers, words) of the widest integers that divide all their sizes,
    strides and addresses, so that kernels move words instead of bytes. Views at equal distances in one storage become
    one tensor."""
    width = 8
    for view in views:
        width = math.gcd(width, view.shape[1], view.stride(0), view.data_ptr())
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    words = [view.view(dtype) for view in views]
    first = words[0]
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(words)}
    same = all(
        (w.shape, w.stride()) == (first.shape, first.stride())
        and w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for w in words
    )
    if same and len(steps) == 1 and min(steps) > 0:
        shape = (first.shape[0], len(words), first.shape[1])
        return [first.as_strided(shape, (first.stride(0), steps.pop(), 1), first.storage_offset())]
    return [word.unsqueeze(1) for word in words]


def gather(layers: Sequence[torch.Tensor], index: torch.Tensor, stage: torch.Tensor) -> None:
    """Copies blocks ``index`` of all layers into the rows of ``stage``, bytes of shape (len(index), block_bytes)."""
    for piece, pages in _pieces(layers, stage):
        if piece.is_contiguous():
            torch.index_select(pages, 0, index, out=piece)
        else:
            piece.copy_(pages[index])


def scatter(layers: Sequence[torch.Tensor], index: torch.Tensor, stage: torch.Tensor) -> None:
    """Copies the rows of ``stage`` into blocks ``index`` of all layers."""
    for piece, pages in _pieces(layers, stage):
        pages.index_copy_(0, index, piece)


def _pieces(layers: Sequence[torch.Tensor], stage: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each tensor of ``layers`` after its columns of ``stage``, viewed in its type and shape."""
    at = 0
    for pages in layers:
        width = pages.shape[1] * pages.shape[2] * pages.element_size()
        columns = stage[:, at : at + width].view(pages.dtype)
        yield columns.unflatten(1, tuple(pages.shape[1:])), pages
        at += width
