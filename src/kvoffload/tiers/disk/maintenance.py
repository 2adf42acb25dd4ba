"""Work on the disk tier's files besides transfers of blocks: growth, header, stale records, recency.

One job at a time does all work that is due, on a thread of the executor; ``blockio`` says which data it may touch.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvoffload.abc import Slots
from kvoffload.tiers.disk.files import DiskFiles
from kvoffload.tiers.disk.format import EMPTY_RECORD
from kvoffload.tiers.disk.recency import Recency
from kvoffload.tiers.disk.storage import is_full
from kvoffload.tiers.threads import Executor

logger = logging.getLogger(__name__)

RETRY_S = 60.0
"""Time from a task's failure, on a full medium for example, to its next attempt."""
RECENCY_S = 10.0
"""Time between two writes of the recency file. A kill makes the tier forget no more uses than those."""


class Task(enum.Enum):
    """Kinds of maintenance, in the order in which a job does them."""

    HEADER = enum.auto()
    """Write the header of the index, after a reset."""
    GROWTH = enum.auto()
    """Allocate the next slab."""
    STALE_RECORDS = enum.auto()
    """Empty the records of blocks that are gone."""
    RECENCY = enum.auto()
    """Write down which blocks were used."""


_NO_SLOTS = np.empty(0, dtype=np.int64)
_FINAL_TASKS = (Task.HEADER, Task.STALE_RECORDS, Task.RECENCY)


class Maintenance:
    """Keeps ``files`` in order. The methods are called on the scheduler's thread, and only ``grow_now`` and ``finish``
    wait for the medium."""

    def __init__(self, files: DiskFiles, recency: Recency, executor: Executor, clock: Callable[[], float]) -> None:
        self._files = files
        self._recency = recency
        self._executor = executor
        self._clock = clock
        self.is_busy = False
        """Whether a job is under way, or has ended since the last ``poll``."""
        self._closed = False
        self._wants_growth = False
        """Whether the next job, or the present one, makes the files grow."""
        self._growth_failed = files.is_short
        """Whether the last attempt has failed, and that was logged."""
        self._not_before = dict.fromkeys(Task, -float("inf"))
        """When each task may be done next."""
        self._num_slots = files.num_allocated
        """Slots that the tier knows of."""
        self._num_given = np.zeros(files.budget.num_slots, dtype=np.int64)
        """How often each slot was given to a block."""
        self._stale: deque[tuple[int, int]] = deque(maxlen=files.budget.num_slots)
        """Slots whose records must be emptied, each with its ``_num_given``: if that has changed since, another block
        was given the slot, and the old record went when that block was written."""
        self.outcomes: deque[tuple[Task | None, Exception | None]] = deque()
        """The tasks that have ended, and their errors, for ``poll``; no task when a whole job has ended."""

    # Growth.

    @property
    def files_are_final(self) -> bool:
        """Whether new blocks must replace others, because the files cannot grow at the moment or any more."""
        if self._wants_growth:
            return False
        is_complete = self._files.num_allocated == self._files.budget.num_slots
        return is_complete or (self._growth_failed and self._clock() < self._not_before[Task.GROWTH])

    def grow(self) -> None:
        """Requests the next slab. ``poll`` returns its slots. May not be called if ``files_are_final``."""
        self._wants_growth = True
        self.submit()

    def grow_now(self) -> Slots:
        """Allocates the next slab before it returns. Returns the new slots, none if that has failed."""
        self._wants_growth = True
        self._run([Task.GROWTH])
        return self.poll()

    def _end_growth(self, error: Exception | None) -> Slots:
        before = self._num_slots
        if error is None:
            self._num_slots = self._files.num_allocated
        elif not self._growth_failed:
            self._log_failed_growth(error)
        self._wants_growth, self._growth_failed = False, error is not None
        return np.arange(before, self._num_slots, dtype=np.int64)

    def _log_failed_growth(self, error: Exception) -> None:
        effect = "evicts for new blocks" if self._files.num_allocated else "keeps no blocks"
        advice = "use a file system that can"
        if is_full(error):
            advice = "free space on that file system, or give the tier fewer bytes"
        logger.warning(
            "kvoffload: disk tier: it cannot grow (%s) and %s; %s. It tries again every %.0f s",
            error,
            effect,
            advice,
            RETRY_S,
        )

    # Stale records.

    def give(self, slots: Slots) -> None:
        """Notes that ``slots`` get new blocks, whose writing replaces the old records."""
        self._num_given[slots] += 1

    def empty_records(self, slots: Slots) -> None:
        """Queues the records of the blocks that were last given ``slots`` to be emptied: no later process may find
        them."""
        self._stale.extend(zip(slots.tolist(), self._num_given[slots].tolist(), strict=True))

    # Jobs.

    def submit(self) -> None:
        """Submits a job for the tasks that are due, unless one is under way."""
        if self.is_busy or self._closed or self._files.read_only:
            return
        found = (
            (Task.HEADER, self._files.index.header_is_due),
            (Task.GROWTH, self._wants_growth),
            (Task.STALE_RECORDS, self._stale),
            (Task.RECENCY, self._recency.has_changes),
        )
        pending = [task for task, has_work in found if has_work]
        if pending:
            now = self._clock()
            urgent = Task.RECENCY if self._recency.is_urgent else None
            due = [task for task in pending if now >= self._not_before[task] or task is urgent]
            self.is_busy = bool(due) and self._executor.submit_maintenance(partial(self._run, due))

    def poll(self) -> Slots:
        """Takes the outcomes of tasks that have ended. Returns new slots."""
        slots = _NO_SLOTS
        while self.outcomes:
            task, error = self.outcomes.popleft()
            if task is None:
                self.is_busy = False
                continue
            if task is Task.GROWTH:
                slots = self._end_growth(error)
            if error is not None:
                self._not_before[task] = self._clock() + RETRY_S
            elif task is Task.RECENCY:
                self._not_before[task] = self._clock() + RECENCY_S
        return slots

    def close(self) -> None:
        """Submits a last job for everything but growth, whether it is due or not. ``finish`` must follow."""
        if not (self.is_busy or self._closed or self._files.read_only):
            self._executor.submit_maintenance(partial(self._run, _FINAL_TASKS, is_final=True))
        self._closed = True

    def finish(self) -> None:
        """Does the rest, and waits for the medium. No job may be running."""
        if not self._files.read_only:
            self._run(_FINAL_TASKS, is_final=True)

    # On a thread of the executor.

    def _run(self, tasks: Sequence[Task], is_final: bool = False) -> None:
        for task in tasks:
            self.outcomes.append((task, self._try(task, is_final)))
        self.outcomes.append((None, None))

    def _try(self, task: Task, is_final: bool) -> Exception | None:
        """Returns the error of a task that has failed."""
        try:
            if task is Task.HEADER:
                self._files.index.write_header()
            elif task is Task.GROWTH:
                self._files.grow()
            elif task is Task.STALE_RECORDS:
                self._empty_stale_records()
            else:
                self._recency.write(self._files.num_allocated, everything=is_final)
        except OSError as error:
            return error
        except Exception as error:
            logger.exception(
                "kvoffload: disk tier: maintenance failed (%s); it is tried again in %.0f s", task.name, RETRY_S
            )
            return error
        return None

    def _empty_stale_records(self) -> None:
        while self._stale:
            slot, num_given = self._stale.popleft()
            try:
                if self._num_given[slot] == num_given:
                    self._files.index.write_records(slot, EMPTY_RECORD)
            except OSError:
                self._stale.appendleft((slot, num_given))
                raise
