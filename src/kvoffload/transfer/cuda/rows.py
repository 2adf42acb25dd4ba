"""Rows that wait to be copied: one row per device block of a job, as columns of one array."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Event

JOB, GROUP, BLOCK, SLOT, OFFSET, NBYTES = range(6)
"""Columns: the id of the job, the group, the device block, the slot, the offset of the bytes in the pool, and how many
they are."""
RowArray: TypeAlias = npt.NDArray[np.int64]
"""Shape (6, rows)."""


@dataclass(slots=True, eq=False)
class Point:
    """A point of the engine's stream. Rows that came with it are copied after it. Later points have higher numbers."""

    number: int
    event: Event
    is_used: bool = False
    """Whether jobs refer to it. Until then its event may be recorded again."""


@dataclass(slots=True, eq=False)
class Batch:
    """Rows that wait for the same point."""

    rows: RowArray
    point: Point
    _ends: Numbers | None = None

    def split(self, max_bytes: int, max_rows: int) -> tuple[Batch | None, Batch | None]:
        """Returns the first rows, as many as are within both limits, and the others; None for no rows."""
        if self._ends is None:
            self._ends = np.cumsum(self.rows[NBYTES])
        rows, ends = self.rows, self._ends
        before = int(ends[0] - rows[NBYTES, 0])
        n = min(int(np.searchsorted(ends, before + max_bytes, side="right")), max_rows)
        if n == 0:
            return None, self
        if n == len(ends):
            return self, None
        return Batch(rows[:, :n], self.point, ends[:n]), Batch(rows[:, n:], self.point, ends[n:])

    @property
    def nbytes(self) -> int:
        return int(self.rows[NBYTES].sum())


class RowQueue:
    """The rows of one direction that have not been issued, in the order of their jobs' ``submit``."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def oldest(self) -> Point | None:
        """The first point that a row waits for."""
        return self._batches[0].point if self._batches else None

    def add(self, batch: Batch) -> None:
        """Adds rows whose point is not before those of the rows in the queue."""
        if batch.rows.shape[1]:
            self._batches.append(batch)

    def take(self, max_bytes: int, max_rows: int) -> Batch:
        """Removes and returns the first rows, within both limits, with the last of their points. No row may be larger
        than ``max_bytes``."""
        parts: list[Batch] = []
        while self._batches:
            part, rest = self._batches.popleft().split(max_bytes, max_rows)
            if part is not None:
                parts.append(part)
            if rest is not None:
                self._batches.appendleft(rest)
                break
            if self._batches:
                max_bytes -= parts[-1].nbytes
                max_rows -= parts[-1].rows.shape[1]
        if len(parts) == 1:
            return parts[0]
        return Batch(np.concatenate([part.rows for part in parts], axis=1), parts[-1].point)

    def take_matching(self, jobs: Numbers, blocks: Numbers | None) -> RowQueue:
        """Removes the rows of ``jobs`` that copy one of ``blocks`` (None: all of theirs) and returns them."""
        found = RowQueue()
        kept: deque[Batch] = deque()
        for batch in self._batches:
            matches = matching(batch.rows, jobs, blocks)
            if matches.any():
                found.add(Batch(batch.rows[:, matches], batch.point))
                batch = Batch(batch.rows[:, ~matches], batch.point)
            if batch.rows.shape[1]:
                kept.append(batch)
        self._batches = kept
        return found

    def put_back(self, batch: Batch) -> None:
        """Puts rows that were taken in front of the others."""
        if batch.rows.shape[1]:
            self._batches.appendleft(batch)


def matching(rows: RowArray, jobs: Numbers, blocks: Numbers | None) -> npt.NDArray[np.bool_]:
    """Returns which rows are of ``jobs`` and copy one of ``blocks`` (None: any block)."""
    matches = np.isin(rows[JOB], jobs)
    if blocks is not None and matches.any():
        matches &= np.isin(rows[BLOCK], blocks)
    return matches
