"""Copies for engines whose KV cache is in host memory, in calls of the engine's own thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvoffload.abc import ByteArray, PageGroup, Transfer, TransferResult, TransferSpec
from kvoffload.transfer.blocks import BlockCopier, merge_views
from kvoffload.transfer.copies import CopyList, copy_lists

logger = logging.getLogger(__name__)

BUSY_BYTES_PER_POLL = 128 << 20
"""How much a step that computes tokens copies at most: about 10 ms at the speed of memcpy. The rest follows later."""


@dataclass(slots=True)
class _Job:
    job_id: int
    is_store: bool
    lists: list[CopyList]
    done: int = 0
    """Device blocks copied."""
    nbytes: int = 0
    seconds: float = 0.0


class InlineTransfer(Transfer):
    """Copies in ``poll`` and ``wait``, loads before stores.

    The views of ``groups`` are numpy arrays. A slot of ``pool_data`` holds one block of one group: ``factor``
    device blocks one after another, each with its pages in the order of the group's views.
    """

    def __init__(self, groups: Sequence[PageGroup], pool_data: ByteArray) -> None:
        for group in groups:
            if len({len(view) for view in group.views}) > 1:
                raise ValueError(
                    f"the device views of a group have {[len(view) for view in group.views]} blocks; "
                    "they must all have the same number"
                )
        self._groups = list(groups)
        """Also keeps the memory alive that the merged arrays point to."""
        self._num_slots = len(pool_data)
        self._copiers = [
            BlockCopier(
                merge_views(group.views),
                pool_data[:, : group.block_bytes].reshape(len(pool_data), group.factor, group.device_block_bytes),
            )
            for group in groups
        ]
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._results: list[TransferResult] = []

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        try:
            lists = copy_lists(spec, self._groups, self._num_slots)
        except ValueError:
            logger.exception("kvoffload: job %d cannot be copied", job_id)
            self._results.append(TransferResult(job_id, ok=False))
            return
        (self._stores if is_store else self._loads).append(_Job(job_id, is_store, lists))

    def poll(self, busy: bool) -> list[TransferResult]:
        # Any budget allows one block, so that every poll makes progress.
        budget = max([BUSY_BYTES_PER_POLL, *(group.device_block_bytes for group in self._groups)]) if busy else None
        for queue in (self._loads, self._stores):
            while queue:
                copied = self._run(queue[0], budget)
                budget = None if budget is None else budget - copied
                if queue[0].lists:
                    break
                queue.popleft()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        wanted = set(job_ids)
        for queue in (self._loads, self._stores):
            for job in [job for job in queue if job.job_id in wanted]:
                self._run(job, None)
                queue.remove(job)

    def wait_any(self, timeout_s: float) -> None:
        """Returns at once: copies run only on this thread."""

    def close(self) -> None:
        self._loads.clear()
        self._stores.clear()

    def _run(self, job: _Job, limit: int | None) -> int:
        """Copies up to ``limit`` bytes of the job (None: all) and returns how many. The job is done when its ``lists``
        are empty."""
        start = time.perf_counter()
        copied = 0
        while job.lists:
            copies = job.lists[0]
            block_bytes = self._groups[copies.group].device_block_bytes
            left = len(copies.slots) - job.done
            n = left if limit is None else min(left, (limit - copied) // block_bytes)
            if n == 0:
                break
            part = slice(job.done, job.done + n)
            self._copiers[copies.group].copy(
                copies.device_blocks[part], copies.slots[part], copies.parts[part], job.is_store
            )
            copied += n * block_bytes
            job.done += n
            if n == left:
                job.lists.pop(0)
                job.done = 0
        job.nbytes += copied
        job.seconds += time.perf_counter() - start
        if not job.lists:
            self._results.append(TransferResult(job.job_id, True, job.nbytes, job.seconds))
        return copied
