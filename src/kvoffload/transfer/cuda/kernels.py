"""Kernels that gather device blocks into rows and scatter rows into device blocks.

A Triton kernel does it where Triton works, and functions of torch do it elsewhere.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda.pages import PageTable, page_table

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

logger = logging.getLogger(__name__)

TensorAt: TypeAlias = Callable[[int, int], torch.Tensor]
"""Returns the device memory at an address, of so many bytes, as a tensor of bytes."""

NUM_PROGRAMS = 16
"""How many multiprocessors of the device a copy occupies at most; the others compute meanwhile."""
NUM_WARPS = 8
WORDS_PER_STEP = 8192
"""How many words a program copies at once. With words of 4 bytes that are eight vectors of 16 bytes per thread."""
MIN_PIECE_WORDS, MAX_PIECE_WORDS = 128, 4096
MAX_IDLE_SHARE = 1 / 8
"""How much of a step may be idle because runs do not fill their pieces, before smaller pieces are chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The runs of a page table, cut into pieces of at most ``piece_bytes``: what the kernel takes.

    ``entries`` has a row per piece, with the fields of a run: base, stride, nbytes, offset. All of them, and
    ``row_bytes``, are multiples of ``align``, which is at most 16.
    """

    entries: npt.NDArray[np.int64]
    align: int
    piece_bytes: int
    row_bytes: int

    @property
    def word_bytes(self) -> int:
        return min(self.align, 4)


def cut(table: PageTable) -> Pieces:
    """Returns the pieces of a table: the largest whose last ones leave little of a step idle, else the best ones."""
    runs = np.array([(run.base, run.stride, run.nbytes, run.offset) for run in table.runs], np.int64).reshape(-1, 4)
    align = math.gcd(16, table.device_block_bytes, *runs.ravel().tolist())
    lengths = runs[:, 2]
    word_bytes = min(align, 4)
    sizes = [words * word_bytes for words in _powers(MAX_PIECE_WORDS, MIN_PIECE_WORDS)]
    copied = [int((-(-lengths // size) * size).sum()) for size in sizes]
    enough = [
        size for size, nbytes in zip(sizes, copied, strict=True) if nbytes * (1 - MAX_IDLE_SHARE) <= lengths.sum()
    ]
    size = enough[0] if enough else sizes[int(np.argmin(copied))]
    entries = [
        (base + at, stride, min(size, nbytes - at), offset + at)
        for base, stride, nbytes, offset in runs.tolist()
        for at in range(0, nbytes, size)
    ]
    return Pieces(np.array(entries, np.int64).reshape(-1, 4), align, size, table.device_block_bytes)


def _powers(largest: int, smallest: int) -> Iterable[int]:
    while largest >= smallest:
        yield largest
        largest //= 2


def copy_pieces(  # type: ignore[no-untyped-def]
    entries: tl.int64,
    index: tl.int64,
    staging: tl.int64,
    num_rows: tl.int64,
    num_pieces: tl.int64,
    row_bytes: tl.int64,
    TO_STAGING: tl.constexpr,
    ALIGN: tl.constexpr,
    PIECE_BYTES: tl.constexpr,
    PIECES_PER_STEP: tl.constexpr,
):
    """Copies the pieces of blocks ``index`` to rows at ``staging``, or back: Triton's source, see ``TritonCopier``.

    The first three are addresses. A step of a program copies PIECES_PER_STEP pieces, of one or several rows. All
    addresses are computed in 64 bits.
    """
    WORD_BYTES: tl.constexpr = ALIGN if ALIGN < 4 else 4
    word: tl.constexpr = tl.int32 if WORD_BYTES == 4 else tl.int16 if WORD_BYTES == 2 else tl.int8
    # Triton's interpreter takes small numbers as 32 bits wide.
    fields = tl.cast(entries, tl.int64).to(tl.pointer_type(tl.int64))
    blocks = tl.cast(index, tl.int64).to(tl.pointer_type(tl.int64))
    words = tl.arange(0, PIECE_BYTES // WORD_BYTES)
    total = tl.cast(num_rows, tl.int64) * num_pieces
    first = tl.program_id(0).to(tl.int64) * PIECES_PER_STEP
    for at in range(first, total, tl.num_programs(0).to(tl.int64) * PIECES_PER_STEP):
        number = at + tl.arange(0, PIECES_PER_STEP)
        exists = number < total
        row = number // num_pieces
        piece = fields + (number - row * num_pieces) * 4
        block = tl.load(blocks + row, mask=exists, other=0)
        base = tl.load(piece, mask=exists, other=0)
        stride = tl.load(piece + 1, mask=exists, other=0)
        nbytes = tl.load(piece + 2, mask=exists, other=0)
        offset = tl.load(piece + 3, mask=exists, other=0)
        page = (base + block * stride).to(tl.pointer_type(word))
        place = (tl.cast(staging, tl.int64) + row * row_bytes + offset).to(tl.pointer_type(word))
        size = (nbytes // WORD_BYTES).to(tl.int32)
        # These hints make vectors of ALIGN bytes of the words.
        pages = tl.multiple_of(page, ALIGN)[:, None] + words[None, :]
        places = tl.multiple_of(place, ALIGN)[:, None] + words[None, :]
        inside = words[None, :] < tl.multiple_of(size, ALIGN // WORD_BYTES)[:, None]
        if TO_STAGING:
            tl.store(places, tl.load(pages, mask=inside), mask=inside)
        else:
            tl.store(pages, tl.load(places, mask=inside), mask=inside)


# Without specialization, one compilation serves all addresses and numbers of rows.
RUNTIME_ARGUMENTS = ("entries", "index", "staging", "num_rows", "num_pieces", "row_bytes")
kernel: Any = None if triton is None else triton.jit(copy_pieces, do_not_specialize=RUNTIME_ARGUMENTS)


class BlockCopier(ABC):
    """Copies device blocks of one group to and from consecutive rows, on torch's current stream."""

    @abstractmethod
    def copy(self, index: int, num_blocks: int, staging: int, to_staging: bool) -> None:
        """Enqueues the copy of ``num_blocks`` blocks, whose numbers (int64) are at the address ``index``, to or from
        the rows at the address ``staging``."""


class TritonCopier(BlockCopier):
    """Copies with the Triton kernel. ``entries`` is the address of the pieces' entries on the device. Compiles both
    directions when it is made."""

    def __init__(self, pieces: Pieces, entries: int, launch: Any = None) -> None:
        self._pieces = pieces
        self._entries = entries
        self._launch = kernel if launch is None else launch
        for to_staging in (True, False):
            self._run(0, 0, 0, to_staging)

    def copy(self, index: int, num_blocks: int, staging: int, to_staging: bool) -> None:
        if staging % 16:
            raise ValueError(f"rows begin at {staging:#x}, which is not a multiple of 16")
        if num_blocks:
            self._run(index, num_blocks, staging, to_staging)

    def _run(self, index: int, num_blocks: int, staging: int, to_staging: bool) -> None:
        pieces = self._pieces
        per_step = WORDS_PER_STEP * pieces.word_bytes // pieces.piece_bytes
        num_steps = -(-num_blocks * len(pieces.entries) // per_step)
        self._launch[(max(1, min(NUM_PROGRAMS, num_steps)),)](
            self._entries,
            index,
            staging,
            num_blocks,
            len(pieces.entries),
            pieces.row_bytes,
            TO_STAGING=to_staging,
            ALIGN=pieces.align,
            PIECE_BYTES=pieces.piece_bytes,
            PIECES_PER_STEP=per_step,
            num_warps=NUM_WARPS,
        )


class TorchCopier(BlockCopier):
    """Copies with functions of torch, which take the device memory at an address as a tensor from ``tensor_at``."""

    def __init__(self, views: Sequence[torch.Tensor], tensor_at: TensorAt) -> None:
        self._layers = as_words(views)
        self._row_bytes = sum(view.shape[1] for view in views)
        self._tensor_at = tensor_at

    def copy(self, index: int, num_blocks: int, staging: int, to_staging: bool) -> None:
        if not num_blocks:
            return
        blocks = self._tensor_at(index, num_blocks * 8).view(torch.int64)
        rows = self._tensor_at(staging, num_blocks * self._row_bytes).view(num_blocks, self._row_bytes)
        (gather if to_staging else scatter)(self._layers, blocks, rows)


def copiers(
    groups: Sequence[PageGroup], allocate: Callable[[int], int], tensor_at: TensorAt
) -> list[BlockCopier | None]:
    """Returns a copier per group, and None for a group without views. Says in the log if Triton is not used.

    Triton's copies are compared with torch's once, on the group's own pages, whose bytes are put back. ``allocate``
    returns the address of device memory that keeps its bytes as long as the copiers are used.
    """
    if triton is None:
        logger.warning("kvoffload: Triton is not installed, so torch gathers device blocks, which takes longer")
    return [_copier(group, allocate, tensor_at) if group.views else None for group in groups]


def _copier(group: PageGroup, allocate: Callable[[int], int], tensor_at: TensorAt) -> BlockCopier:
    plain = TorchCopier(group.views, tensor_at)
    if triton is None:
        return plain
    try:
        pieces = cut(page_table(group))
        entries = allocate(pieces.entries.nbytes)
        tensor_at(entries, pieces.entries.nbytes).copy_(torch.from_numpy(pieces.entries.view(np.uint8).ravel()))
        fast = TritonCopier(pieces, entries)
        if copies_right(fast, group.views):
            return fast
        logger.error("kvoffload: Triton's kernel copied wrong bytes at start, so torch gathers device blocks")
    except Exception:
        logger.warning("kvoffload: Triton's kernel does not work here, so torch gathers device blocks", exc_info=True)
    return plain


def copies_right(copier: BlockCopier, views: Sequence[torch.Tensor]) -> bool:
    """Returns whether ``copier`` copies the first, middle and last block as torch does, in both directions.

    Overwrites these blocks meanwhile, and puts their bytes back. Called before the engine uses its cache.
    """
    device, num_blocks = views[0].device, len(views[0])
    layers, row_bytes = as_words(views), sum(view.shape[1] for view in views)
    index = torch.tensor(sorted({0, num_blocks // 2, num_blocks - 1}), dtype=torch.int64, device=device)
    # numpy's numbers, because torch's would change those that the engine samples with.
    rng = np.random.default_rng(0)
    random = torch.from_numpy(rng.integers(0, 256, (len(index), row_bytes), np.uint8)).to(device)
    before, found = torch.empty_like(random), torch.zeros_like(random)
    gather(layers, index, before)
    scatter(layers, index, random)
    try:
        copier.copy(index.data_ptr(), len(index), found.data_ptr(), to_staging=True)
        gathers = torch.equal(found, random)
        copier.copy(index.data_ptr(), len(index), before.data_ptr(), to_staging=False)
        gather(layers, index, found)
        return gathers and bool(torch.equal(found, before))
    finally:
        scatter(layers, index, before)


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
