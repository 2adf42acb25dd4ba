"""Copies for engines whose KV cache is in host memory, in calls of the engine's own thread."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvoffload.abc import ByteArray, PageGroup, Transfer, TransferResult, TransferSpec
from kvoffload.transfer.blocks import BlockCopier
from kvoffload.transfer.copies import CopyList, copy_lists

logger = logging.getLogger(__name__)

BUSY_SHARE = 1 / 16
"""How long a step that computes tokens copies at most, as a share of the time that its computation has taken: requests
that decode are hardly delayed. The rest follows with later steps."""
PIECE_BYTES = 2 << 20
"""What such a step copies before it looks at the clock, so at least this much, and more if device blocks are larger."""


@dataclass(slots=True)
class _InlineJob:
    job_id: int
    is_store: bool
    lists: list[CopyList]
    done: int = 0
    """Device blocks copied."""
    nbytes: int = 0
    seconds: float = 0.0


class InlineTransfer(Transfer):
    """Copies in ``poll`` and ``wait``, loads before stores.

    The views of ``groups`` are numpy arrays. A slot of ``pool_data`` holds one block of one group: the rows of
    ``factor`` device blocks, one after another. ``clock`` returns seconds.
    ``piece_bytes``: what a step that computes tokens copies before it looks at the clock.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        pool_data: ByteArray,
        clock: Callable[[], float] = time.perf_counter,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._groups = list(groups)
        self._num_slots = len(pool_data)
        self._copiers = [_copier(group, pool_data) for group in groups]
        self._loads: deque[_InlineJob] = deque()
        self._stores: deque[_InlineJob] = deque()
        self._results: list[TransferResult] = []
        self._piece_bytes = piece_bytes
        self._clock = clock
        self._forward_began = clock()

    def before_forward(self) -> None:
        self._forward_began = self._clock()

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        try:
            lists = copy_lists(spec, self._groups, self._num_slots)
        except ValueError:
            logger.exception("kvoffload: job %d cannot be copied", job_id)
            self._results.append(TransferResult(job_id, ok=False))
            return
        (self._stores if is_store else self._loads).append(_InlineJob(job_id, is_store, lists))

    def poll(self, busy: bool) -> list[TransferResult]:
        if self._loads or self._stores:
            now = self._clock()
            end = now + BUSY_SHARE * (now - self._forward_began)
            left = piece = self._piece_bytes if busy else sys.maxsize
            while queue := self._loads or self._stores:
                left -= self._copy(queue[0], left)
                if not queue[0].lists:
                    self._end(queue.popleft())
                if left <= 0:
                    if self._clock() >= end:
                        break
                    left = piece
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        wanted = set(job_ids)
        for queue in (self._loads, self._stores):
            for job in [job for job in queue if job.job_id in wanted]:
                while job.lists:
                    self._copy(job, sys.maxsize)
                queue.remove(job)
                self._end(job)

    def wait_any(self, timeout_s: float) -> None:
        """Returns at once: copies run only on this thread."""

    def close(self) -> None:
        self._loads.clear()
        self._stores.clear()

    def _copy(self, job: _InlineJob, most: int) -> int:
        """Copies up to ``most`` bytes of one group of the job, at least a block, and returns how many. The job is done
        when its ``lists`` are empty."""
        if not job.lists:
            return 0
        start = self._clock()
        copies = job.lists[0]
        block_bytes = self._groups[copies.group].device_block_bytes
        left = len(copies.slots) - job.done
        n = min(left, max(1, most // block_bytes))
        part = slice(job.done, job.done + n)
        self._copiers[copies.group].copy(
            copies.device_blocks[part], copies.slots[part], copies.parts[part], job.is_store
        )
        job.done += n
        if n == left:
            job.lists.pop(0)
            job.done = 0
        job.nbytes += n * block_bytes
        job.seconds += self._clock() - start
        return n * block_bytes

    def _end(self, job: _InlineJob) -> None:
        self._results.append(TransferResult(job.job_id, True, job.nbytes, job.seconds))


def _copier(group: PageGroup, pool_data: ByteArray) -> BlockCopier:
    rows = pool_data[:, : group.block_bytes].reshape(len(pool_data), group.factor, group.row_bytes)
    return BlockCopier(group.views, rows, group.offsets)
