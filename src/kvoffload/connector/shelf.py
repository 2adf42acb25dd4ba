"""What remains after a reset: contents that may become valid again after a sleep, and device blocks with old KV."""

from __future__ import annotations

import logging
from collections.abc import Collection
from enum import Enum, auto

from kvoffload.abc import OffloadingManager
from kvoffload.connector.adapters import Digests
from kvoffload.connector.jobs import JOB_IDS
from kvoffload.connector.layout import NULL_BLOCK
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.request import Changes, RequestState, Storing

logger = logging.getLogger(__name__)


class Contents(Enum):
    """Whether the manager's contents are valid."""

    VALID = auto()
    RESET = auto()
    """They are from before a reset, and are dropped when the engine continues, unless it has slept."""
    AWAKE = auto()
    """The engine has slept since. They are valid again if all workers find that their weights are the same."""


class Shelf:
    """Keeps the manager's contents after a reset that may belong to a sleep, hidden from all requests.

    An engine that falls asleep resets its caches. With ``may_sleep`` it calls ``wake_up`` after each sleep; then the
    workers compare their weights, and the contents are valid again or dropped.
    """

    def __init__(self, manager: OffloadingManager, changes: Changes, num_workers: int, may_sleep: bool) -> None:
        self._manager = manager
        self._changes = changes
        self._num_workers = num_workers
        self._may_sleep = may_sleep
        self.contents = Contents.VALID
        self.num_resets = 0
        self.was_reset = False
        """Since the last step, which the engine must take so that events and metrics show the reset."""
        self._check: tuple[int, int] | None = None
        """The job in which workers compare their weights, and the number of those that have not reported yet."""
        self._must_check = False
        """A request waits for that job: the next step must begin it."""

    def reset(self) -> None:
        """Hides the contents, or drops them at once if there was no sleep."""
        # If there were two resets, one belonged to no sleep: the contents that it dropped must not come back.
        keeps = self._may_sleep and self.contents is Contents.VALID
        self.contents = Contents.RESET
        if not keeps:
            self.drop()
        self.num_resets += 1
        self.was_reset = True
        self._has_changed()

    def wake_up(self) -> None:
        """Notes that the engine has slept since the reset, and is awake."""
        if self.contents is Contents.RESET:
            self.contents = Contents.AWAKE

    def ask_for_check(self) -> None:
        """Notes that a request waits for the workers' comparison."""
        self._must_check = True

    def begin_step(self, has_tokens: bool) -> int | None:
        """Begins a step. Returns the job in which the workers compare their weights, if that begins now."""
        if self.contents is Contents.RESET and has_tokens:
            self.drop()
        elif self.contents is Contents.AWAKE and self._check is None and (has_tokens or self._must_check):
            self._check = next(JOB_IDS), self._num_workers
            return self._check[0]
        return None

    def take_report(self, report: WorkerReport) -> None:
        """Takes in the workers' comparison, if ``report`` has it."""
        if self._check is None or self._check[0] not in report.done:
            return
        job_id, pending = self._check
        pending -= report.done[job_id]
        self._check = job_id, pending
        if job_id in report.failed:
            self.drop()
            logger.info("kvoffload: the weights are not known to be those of before the sleep: all blocks are dropped")
        elif pending == 0:
            self.accept()
            logger.info("kvoffload: the weights are those of before the sleep: offloaded blocks can be found again")

    def drop(self) -> None:
        """Resets the manager, if its contents are from before a reset."""
        if self.contents is not Contents.VALID:
            self._manager.reset()
            self.was_reset = True
            self.accept()

    def accept(self) -> None:
        """Declares the contents valid."""
        self.contents, self._check, self._must_check = Contents.VALID, None, False
        self._has_changed()

    def _has_changed(self) -> None:
        self._changes.contents += 1
        self._changes.loads += 1


class SoundBlocks:
    """Device blocks that were filled since the last reset, from nothing that was computed before it, each with the
    adapter that has computed it.

    The engine's own cache may still hold KV of weights that are gone, and finds blocks by the name of an adapter. A
    request that continues from such blocks, or from those of other bytes under the name of its adapter, must store
    nothing, and the blocks that it fills are not sound either.
    """

    def __init__(self, has_adapters: bool = False) -> None:
        self._origins: dict[int, Digests] | None = {} if has_adapters else None
        """By device block, see ``RequestState.origin``. None: there was neither a reset nor an adapter, and every block
        is sound."""

    @property
    def is_tracking(self) -> bool:
        return self._origins is not None

    def reset(self) -> None:
        self._origins = {}

    def add(self, state: RequestState, blocks: list[int]) -> None:
        """Adds blocks that a load of the request fills."""
        if self._origins is not None and state.origin is not None:
            self._origins.update(dict.fromkeys(blocks, state.origin))

    def discard(self, origins: Collection[Digests]) -> None:
        """Removes the blocks of adapters that have changed."""
        if self._origins is not None and origins:
            self._origins = {block: origin for block, origin in self._origins.items() if origin not in origins}

    def trace(self, state: RequestState | None, new: set[int], found: set[int]) -> None:
        """Follows a request that continues from the blocks ``found`` in the engine's own cache, and fills ``new``
        ones."""
        origins = self._origins
        if origins is None:
            return
        origin = None if state is None else state.origin
        if state is not None and any(origins.get(block) != origin for block in found - {NULL_BLOCK}):
            state.storing = Storing.STALE
        if state is not None and origin is not None and state.storing is not Storing.STALE:
            origins.update(dict.fromkeys(new, origin))
        else:
            for block in new:
                origins.pop(block, None)
