"""Arrays in files, to share a trace between processes. The files are mapped, so all processes together need the memory
of one."""

from __future__ import annotations

import mmap
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PIECE = 1 << 16
"""Entries that are worked on at once where a whole column might not fit into memory."""

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint64]


class Folder:
    """A folder of arrays. By default a temporary one, where TMPDIR says, deleted when nothing refers to it any more."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(tempfile.mkdtemp(prefix="kvoffload-trace-"))
        if path is None:
            weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def get(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Returns an array, read only."""
        path = self.path / name
        if not path.stat().st_size:
            return np.empty(0, dtype=dtype)
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)

    def save(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes an array. Raises OSError if the disk has no room for it."""
        with (self.path / name).open("xb") as file:
            for start in range(0, len(array), PIECE):
                array[start : start + PIECE].tofile(file)


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
