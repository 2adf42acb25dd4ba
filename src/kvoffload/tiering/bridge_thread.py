"""BridgeThread: the thread of a TierBridge. It owns the manager and makes all copies.

What the engine's workers are to the connector, this thread is to the bridge: it copies between foreign pages and
staging slots. The manager is used under one lock that is never held while bytes are copied or a medium is waited for.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvoffload.locks import FairLock
from kvoffload.tiering.bridge_copies import Copy, Loads, Stores
from kvoffload.tiering.bridge_jobs import BridgeJob, Jobs
from kvoffload.tiering.manager import TieredOffloadingManager

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Otherwise = TypeVar("Otherwise")

CALL_WAIT_S = 0.005
"""How long calls of an engine's scheduler wait for the lock of the manager. After that a lookup is answered RETRY. The
thread may hold it longer: for long chains, or while a tier hangs in a call."""
FIRST_DELAY_S, MAX_DELAY_S = 0.0001, 0.01
"""How long the thread waits for transfers: twice as long each time, while nothing happens."""
IDLE_DELAY_S = 0.25
"""The same while there are none: tiers connect again and end their pauses."""
FLUSH_DEADLINE_S = 2.0
"""How long ``close`` lets tiers take on what is staged."""
CLOSE_DEADLINE_S = 30.0
"""How long ``close`` waits for the thread. The tiers have deadlines of their own."""


class BridgeThread:
    """The thread of a bridge, which owns the manager: it does what the inbox of ``jobs`` says, and makes their copies.

    If a check fails, it is off: all jobs end as failed. ``namespace``: that of keys at first.
    """

    def __init__(
        self,
        manager: TieredOffloadingManager,
        jobs: Jobs,
        block_bytes: int,
        namespace: bytes,
        clock: Callable[[], float],
        close_pool: Callable[[], None],
    ) -> None:
        self.names = tuple(tier.name for tier in manager.tiers)
        self.fault: str | None = None
        """Why it is off; None if it serves."""
        self.namespace = namespace
        """The namespace of keys, another one after a reset."""
        self.lock = FairLock()
        """Held while the manager, or what the thread has planned, is used."""
        self.stuck_since: float | None = None
        """Since when calls have waited for the lock in vain."""
        self.thread: threading.Thread | None = None
        self.manager = manager
        self._jobs = jobs
        self._stores = Stores(manager, jobs, block_bytes, clock)
        self._loads = Loads(manager, jobs, block_bytes, clock)
        self._clock = clock
        self._close_pool = close_pool
        self._served = namespace
        """The namespace of what the thread has seen: another one while it has not seen a reset."""
        self._has_ended = False

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name="kvoffload-bridge", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends everything within CLOSE_DEADLINE_S."""
        self._jobs.close()
        if self.thread is None:
            self._end()
            return
        self.thread.join(CLOSE_DEADLINE_S)
        if self.thread.is_alive():
            logger.warning(
                "kvoffload: the tiers have not closed within %.0f s, because one of them hangs; the process can end",
                CLOSE_DEADLINE_S,
            )

    @property
    def is_busy(self) -> bool:
        """Whether something is to be done, or is being written to a tier."""
        if self._jobs.num_open or self._jobs.inbox or self._stores.queue:
            return True
        return self.manager.has_transfers or self.manager.has_pending_writes

    def ask(self, call: Callable[[], Answer], otherwise: Otherwise, wait_s: float = CALL_WAIT_S) -> Answer | Otherwise:
        """Returns what ``call`` returns with the lock held; ``otherwise`` if the bridge is off or closed, or the thread
        has kept the lock for ``wait_s``. If a check fails in ``call``, the bridge is off."""
        if self._jobs.is_closed:
            return otherwise
        with self.lock(wait_s if self.stuck_since is None else 0) as is_held:
            if not is_held:
                self.stuck_since = self._clock() if self.stuck_since is None else self.stuck_since
                return otherwise
            self.stuck_since = None
            if self._jobs.is_closed:
                return otherwise
            try:
                return call()
            except Exception as error:
                self._switch_off(error)
                return otherwise

    def _switch_off(self, error: BaseException) -> None:
        """Ends the service because of a bug. Logs ``error``."""
        if self.fault is None:
            self.fault = f"{type(error).__name__}: {error}"
            logger.error(
                "kvoffload: THE TIERS %s ARE OFF: a check failed; requests are computed from here on. Restart to use "
                "them again, and report this error",
                ", ".join(self.names).upper(),
                exc_info=error,
            )
        self._jobs.close()

    def _run(self) -> None:
        try:
            delay = IDLE_DELAY_S
            while not self._jobs.is_closed:
                if self.step():
                    delay = FIRST_DELAY_S
                    continue
                delay = min(2 * delay, MAX_DELAY_S) if self.is_busy else IDLE_DELAY_S
                self._jobs.wake.wait(delay)
                self._jobs.wake.clear()
            until = time.monotonic() + FLUSH_DEADLINE_S
            while self.fault is None and self.is_busy and time.monotonic() < until:
                self.step()
                time.sleep(FIRST_DELAY_S)
        except Exception as error:
            self._switch_off(error)
        finally:
            self._end()

    def step(self) -> bool:
        """Does what there is to do now. Returns whether any of it has brought jobs or transfers on."""
        before = self._progress
        with self.lock():
            self._forget_if_reset()
            self.manager.poll()
            self._take_in()
        # The lock is released often, lest lookups wait for it.
        with self.lock():
            batches = self._loads.begin()
        for batch in batches:
            self._copy(partial(self._loads.look, batch))
        self._copy(self._stores.plan)
        return self._progress != before

    def _copy(self, plan: Callable[[], Copy | None]) -> None:
        """Copies what ``plan`` returns, without the lock."""
        with self.lock():
            copy = plan()
        if copy is not None:
            num_copied = self._jobs.copy(copy.job, copy.indices, copy.slots)
            with self.lock():
                copy.end(num_copied)

    def _forget_if_reset(self) -> None:
        if self._served != self.namespace:
            self._served = self.namespace
            self._stores.forget()
            self.manager.forget()

    def _take_in(self) -> None:
        while self._jobs.inbox:
            entry = self._jobs.inbox.popleft()
            # What came after a reset must not be forgotten by it.
            self._forget_if_reset()
            if entry.namespace != self._served:
                # Its submission began before the reset.
                if isinstance(entry, BridgeJob):
                    self._jobs.stop([entry])
            elif isinstance(entry, BridgeJob) and entry.is_load:
                self._loads.submit(entry)
            else:
                self._stores.queue.append(entry)

    @property
    def _progress(self) -> tuple[int, ...]:
        transfers = ((len(tier.reads), len(tier.writes.writing)) for tier in self.manager.tiers)
        waiting = len(self._jobs.inbox) + len(self._stores.queue)
        return (self._jobs.num_settled, waiting, self.manager.num_promotions, *itertools.chain.from_iterable(transfers))

    def _end(self) -> None:
        """Releases everything. The bridge is closed, or off."""
        if self._has_ended:
            return
        self._has_ended = True
        self._jobs.close()
        self._jobs.inbox.clear()
        for release in (self._stores.forget, self.manager.shutdown):
            try:
                with self.lock():
                    release()
            except Exception:
                logger.exception("kvoffload: closing the tiers failed")
        # The arrays of the tiers keep the pool's memory mapped.
        del self.manager, self._stores, self._loads
        self._close_pool()
