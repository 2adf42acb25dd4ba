"""What remains after a reset: contents that may become valid again, and device blocks with old KV."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvoffload.connector.adapters import Digests
from kvoffload.connector.jobs import JOB_IDS, JobTable
from kvoffload.connector.layout import NULL_BLOCK
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.request import RequestState, Storing

logger = logging.getLogger(__name__)


class PausedContents:
    """Hides contents of the manager after a reset: those of shared tiers, or all if the engine has only paused. These
    are valid again if all workers find that they have the weights of before, and dropped otherwise."""

    def __init__(self, jobs: JobTable) -> None:
        self._manager, self._changes, self._num_workers = jobs.manager, jobs.changes, jobs.num_workers
        self.is_hidden = False
        """Whether the contents are from before a reset, and not known to be valid."""
        self.checks: dict[int, int] = {}
        """The jobs in which workers compare their weights, and for each the number of those that have not reported."""
        self._check: int | None = None
        """The job that began after the last reset."""
        self.must_check = False
        """Whether a request waits for that job: the next step must begin it."""

    def reset(self, keeps: bool) -> None:
        """Hides the contents, with ``keeps`` all of them, otherwise those of shared tiers. Drops the others."""
        self._changes.resets += 1
        self._changes.was_reset = True
        # If a comparison from before this reset fails, the workers have accepted other weights since.
        self._end_check(is_hidden=keeps or self._manager.reset(keep_shared=True))

    def begin_step(self, has_tokens: bool) -> int | None:
        """Begins a step. Returns the job in which the workers compare their weights, if that begins now."""
        # Not in other steps: a sleeping engine takes some, while its weights have no memory.
        if not self.is_hidden or self._check is not None or not (has_tokens or self.must_check):
            return None
        self._check = next(JOB_IDS)
        self.checks[self._check] = self._num_workers
        return self._check

    def take_report(self, report: WorkerReport) -> None:
        """Takes in the workers' comparisons, if ``report`` has some."""
        for job_id in self.checks.keys() & report.done.keys():
            self.checks[job_id] -= report.done[job_id]
            if job_id in report.failed and self.is_hidden:
                self.drop()
                logger.info("kvoffload: the weights are not known to be those of before the reset: no block is kept")
            if self.checks[job_id] > 0:
                continue
            del self.checks[job_id]
            if job_id == self._check:
                self._end_check()
                logger.info("kvoffload: the weights are those of before the reset: blocks are found again")

    def drop(self) -> None:
        """Resets the manager, if its contents are from before a reset."""
        if self.is_hidden:
            self._manager.reset()
            self._changes.was_reset = True
            self._end_check()

    def _end_check(self, is_hidden: bool = False) -> None:
        self.is_hidden, self._check, self.must_check = is_hidden, None, False
        self._changes.contents += 1
        self._changes.wakeups += 1


class BlockOrigins:
    """Device blocks filled since the last reset, from nothing computed before it, each with the adapter of its KV.

    The engine's own cache may hold KV of weights that are gone, of other bytes under the name of an adapter, and of
    other tokens than their names say (``EngineSpec.drops_tokens``). A request that continues from such blocks must
    store nothing, and the blocks that it fills are not sound either.
    """

    def __init__(self, has_adapters: bool) -> None:
        self.origins: dict[int, Digests | None] | None = {} if has_adapters else None
        """By device block, see ``RequestState.origin``. None: every block is sound, and nothing need be followed."""
        self._others: Digests | None = None
        """The origin of blocks that have none there."""

    def track(self) -> None:
        """Begins to follow blocks. All are sound so far."""
        if self.origins is None:
            self.origins, self._others = {}, frozenset()

    def reset(self) -> None:
        self.origins, self._others = {}, None

    def discard(self, origins: Collection[Digests]) -> None:
        """Removes the blocks of adapters that have changed."""
        if self.origins is not None and origins:
            self.origins = {block: origin for block, origin in self.origins.items() if origin not in origins}

    def trace(self, state: RequestState | None, new: set[int], found: set[int]) -> None:
        """Follows a request that continues from the blocks ``found`` in the engine's own cache, and fills ``new``."""
        if (origins := self.origins) is None:
            return
        origin = None if state is None else state.origin
        if state is not None and any(origins.get(block, self._others) != origin for block in found - {NULL_BLOCK}):
            state.blocks.storing = Storing.STALE
        is_sound = state is not None and state.blocks.storing is not Storing.STALE
        origins.update(dict.fromkeys(new, origin if is_sound else None))
