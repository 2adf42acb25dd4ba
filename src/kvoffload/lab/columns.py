"""Arrays in files, for traces that are larger than memory, and to share a trace between processes.

The files are mapped: the kernel may drop any of their pages from memory at any time, and read it again.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PIECE = 1 << 16
"""Entries that are worked on at once where a whole column might not fit into memory."""
PART = 1 << 18
"""Entries of a part that ``renumber_in_files`` sorts at once; it takes about 80 bytes for each."""
MAX_PARTS = 256
"""Parts that are open at once."""
_PAIR = np.dtype([("id", "<u8"), ("at", "<i8")])
_ODD = np.uint64(0x9E3779B97F4A7C15)
_TOP = np.uint64(40)

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint64]


class Folder:
    """A folder of arrays. By default a temporary one, where TMPDIR says, deleted when nothing refers to it any more."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(tempfile.mkdtemp(prefix="kvoffload-trace-"))
        if path is None:
            weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def rename(self, name: str, new_name: str) -> None:
        (self.path / name).rename(self.path / new_name)

    def remove(self, *names: str) -> None:
        """Removes those that exist. What is mapped of them stays so."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def get(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns an array, read only."""
        return map_file(self.path / name, dtype)

    def new(self, name: str, dtype: npt.DTypeLike, length: int) -> npt.NDArray[Any]:
        """Returns a new array of zeros. Raises OSError if the disk has no room for it."""
        size = np.dtype(dtype).itemsize * length
        self.remove(name)
        with (self.path / name).open("xb") as file:
            if size:
                # With room set aside now, no later access to the mapped file can fail.
                os.posix_fallocate(file.fileno(), 0, size)
        return map_file(self.path / name, dtype, writable=True)

    def save(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes an array, which gets its name when it is complete. Raises OSError if the disk has no room for it."""
        unfinished = f"unfinished-{name}"
        self.remove(unfinished)
        with (self.path / unfinished).open("xb") as file:
            for start in range(0, len(array), PIECE):
                array[start : start + PIECE].tofile(file)
        self.rename(unfinished, name)


def map_file(path: Path, dtype: npt.DTypeLike, writable: bool = False) -> npt.NDArray[Any]:
    """Returns the file as an array."""
    if not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    with path.open("r+b" if writable else "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return np.frombuffer(memory, dtype=dtype)


def pieces(offsets: Ints) -> Iterator[tuple[int, int]]:
    """Splits requests into runs with at most PIECE requests, and at most PIECE blocks unless it is a single request.
    Yields the first request of each run and the one after its last."""
    first, requests = 0, len(offsets) - 1
    while first < requests:
        end = int(np.searchsorted(offsets, offsets[first] + PIECE, "right")) - 1
        end = min(max(end, first + 1), first + PIECE, requests)
        yield first, end
        first = end


def renumber(ids: Ids) -> tuple[Ints, Ids]:
    """Returns block numbers in the order of first occurrence, and the id of each number."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], distinct[order]


def renumber_in_files(ids: Ids, folder: Folder, part: int = PART) -> tuple[Ints, Ids]:
    """Does the same as ``renumber``, in memory for a part of the ids."""
    num_parts = min(MAX_PARTS, len(ids) // part + 1)
    paths = [folder.path / f"part-{i}" for i in range(num_parts)]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("xb")) for path in paths]
        for start in range(0, len(ids), PIECE):
            piece = ids[start : start + PIECE]
            home = (piece * _ODD >> _TOP) % np.uint64(num_parts)
            order = np.argsort(home, kind="stable")
            pairs = np.empty(len(piece), dtype=_PAIR)
            pairs["id"], pairs["at"] = piece[order], start + order
            ends = np.cumsum(np.bincount(home.astype(np.int64), minlength=num_parts)).tolist()
            for file, begin, end in zip(files, [0, *ends], ends, strict=False):
                file.write(pairs[begin:end].tobytes())
    first_at = folder.new("first", np.int64, len(ids))
    for path in paths:
        _find_first(map_file(path, _PAIR), first_at, part)
        path.unlink()
    blocks = folder.new("blocks", np.int64, len(ids))
    known = 0
    with (folder.path / "ids").open("xb") as file:
        for start in range(0, len(ids), PIECE):
            first, here = first_at[start : start + PIECE], blocks[start : start + PIECE]
            is_first = first == np.arange(start, start + len(first))
            new = int(np.count_nonzero(is_first))
            here[is_first] = np.arange(known, known + new)
            here[~is_first] = blocks[first[~is_first]]
            known += new
            ids[start : start + PIECE][is_first].tofile(file)
    folder.remove("first")
    return blocks, map_file(folder.path / "ids", np.uint64)


def _find_first(pairs: npt.NDArray[Any], first_at: Ints, part: int) -> None:
    """Sets ``first_at``, at the position of each pair, to the first position of its id. Positions ascend."""
    known, known_at = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    for start in range(0, len(pairs), part):
        at = pairs["at"][start : start + part]
        distinct, index, inverse = np.unique(pairs["id"][start : start + part], return_index=True, return_inverse=True)
        where = np.searchsorted(known, distinct)
        is_known = np.zeros(len(distinct), dtype=np.bool_)
        inside = where < len(known)
        is_known[inside] = known[where[inside]] == distinct[inside]
        first = at[index]
        first[is_known] = known_at[where[is_known]]
        first_at[at] = first[inverse]
        new = ~is_known
        known, known_at = np.insert(known, where[new], distinct[new]), np.insert(known_at, where[new], first[new])
