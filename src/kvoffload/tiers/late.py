"""LateTier: a tier whose medium may answer late, fail for a while, or be replaced under a running server.

**Threads.** The thread of Opener opens the tier, looks whether its files are still there, and closes a tier that was
left. It may hang in the medium without consequence for the scheduler's thread, which calls everything else.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from operator import add
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvoffload.abc import Keys, OffloadKey, RetainRefusal, Slots, States, TenantUse, Tier, TierResult, TierStats
from kvoffload.tiers.limited_log import LimitedLog

logger = logging.getLogger(__name__)

RETRY_S = 60.0
"""Time between two attempts to open a tier whose medium has failed."""
WATCH_S = 2.0
"""Time between two looks at the directory."""
MAX_DELETED = 1 << 16
"""Blocks remembered as deleted while the tier is not open. Beyond it the tier is emptied when it opens."""
_PROBE = """
import os, sys
path = sys.argv[1]
while not os.path.lexists(path):
    path = os.path.dirname(path)
found = os.stat(path)
os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
"""


class RenewableTier(Tier):
    """A tier that notices that its files are lost; another one is opened in its place then."""

    loss: ClassVar[str]
    """What others have done to the files that are lost, for the log."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the files are lost. Does not wait for the medium."""

    def look(self) -> None:
        """Looks for ``is_lost`` whether the files are there. Called by another thread, again and again; may wait for
        the medium. Raises OSError. Does nothing by default: another thread of the tier looks."""

    @abstractmethod
    def give_up(self) -> None:
        """From now on nothing is held, and nothing is written any more. Jobs under way may still write."""

    @property
    @abstractmethod
    def has_jobs(self) -> bool:
        """Whether a job uses the files, or may have since the last ``poll``."""


class Opener:
    """Opens a tier, and another one in place of each that is lost, on a thread of its own.

    ``directory``: that of the tier, None if it has none. ``name`` and ``setting`` are those of the tier in the log.
    Everything public is called on the scheduler's thread.
    """

    def __init__(self, open_tier: Callable[[], Tier], directory: str | None, name: str, setting: str) -> None:
        self.name, self.setting = name, setting
        self.error: Exception | None = None
        """Why the latest attempt has failed."""
        self.is_awaited = True
        """Whether the caller waits for the first attempt, and logs its failure."""
        self._open_tier, self._directory = open_tier, directory
        self._mounted_at = ""
        """The mount point of the directory when the tier was first opened."""
        self._lock = threading.Lock()
        """Held while the thread offers a tier, and while that is taken."""
        self._offered: Tier | None = None
        self._left: Tier | None = None
        """A tier for the thread to close."""
        self._tried, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=f"kvoffload-open-{name}", daemon=True).start()

    def wait(self, deadline: float) -> bool:
        """Waits until a tier is open, or the first attempt has failed, at most until ``deadline``, a time of
        ``time.monotonic``. Returns whether that is so."""
        return self._tried.wait(max(0.0, deadline - time.monotonic()))

    def take(self) -> Tier | None:
        """Returns a tier that is open since the last call, if there is one."""
        with self._lock:
            tier, self._offered = self._offered, None
        return tier

    def leave(self, tier: Tier) -> None:
        """Has ``tier``, which has lost its files and is not used any more, closed and another one opened."""
        self._left = tier

    def close(self) -> None:
        """Ends the thread, and closes what was not taken."""
        self._closed.set()
        tier = self.take()
        if tier is not None:
            tier.close()

    def log_failure(self) -> None:
        """Logs that there is no tier, and why."""
        error = self.error
        cause = error.strerror or error if isinstance(error, OSError) else error
        self.log_missing(cause, f"tries again every {RETRY_S:.0f} s")

    def log_missing(self, cause: object, what_next: str) -> None:
        logger.warning(
            "kvoffload: %s: THERE IS NO %s TIER: %s; the server continues without it, and %s",
            self.setting,
            self.name.upper(),
            cause,
            what_next,
        )

    # On the thread.

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                tier = self._open()
            except Exception as error:
                self._fail(error)
                self._closed.wait(RETRY_S)
                continue
            with self._lock:
                self._offered = tier
            self._tried.set()
            if self._closed.is_set():
                self.close()
            if not isinstance(tier, RenewableTier):
                return
            self._watch(tier)

    def _open(self) -> Tier:
        if self._directory is None:
            return self._open_tier()
        wait_until_writable(self._directory)
        if self._mounted_at and self._mounted_at != mount_point(self._directory):
            raise OSError(f"nothing is mounted at {self._mounted_at} any more")
        tier = self._open_tier()
        with suppress(OSError):
            self._mounted_at = mount_point(self._directory)
        return tier

    def _fail(self, error: Exception) -> None:
        is_known, self.error = str(error) == str(self.error), error
        self._tried.set()
        if not self.is_awaited and not is_known and not self._closed.is_set():
            self.log_failure()

    def _watch(self, tier: RenewableTier) -> None:
        """Returns when ``tier`` was left, and is closed, or when the opener is closed."""
        while not self._closed.wait(WATCH_S) and self._left is not tier:
            with suppress(OSError):
                tier.look()
        if self._left is tier:
            tier.close()


class LateTier(Tier):
    """The tier that ``opener`` opens. Until it is open, and while another one is opened in place of a lost one, nothing
    is held and nothing is taken on, and the tier has no budget."""

    def __init__(self, opener: Opener, block_bytes: int, *, is_shared: bool) -> None:
        self.name, self.is_shared = opener.name, is_shared
        self._opener = opener
        self._standby, self.block_bytes = TierStats(0, 0, 0, is_connected=False), block_bytes
        self._tier: Tier | None = None
        self._is_given_up = False
        """Whether the tier has lost its files, and its jobs are waited for."""
        self._former_uses: Sequence[TenantUse] = ()
        """What tenants have lost and used of the tiers that were left."""
        self._was_reset = False
        self._deleted: dict[OffloadKey, None] = {}
        """Blocks deleted since a tier was last open."""
        self._has_events = False
        self._log = LimitedLog(logger, time.monotonic)

    def join(self) -> Tier | None:
        """Uses the tier from now on if it is open. Returns it; None if it is not open."""
        tier = self._opener.take()
        if tier is not None:
            if self._was_reset or len(self._deleted) > MAX_DELETED:
                tier.reset()
            elif self._deleted:
                tier.delete(list(self._deleted))
            self._deleted.clear()
            if self._has_events:
                tier.take_evicted()
            self._tier, self.block_bytes = tier, tier.block_bytes
        return self._tier

    def _leave_lost(self, tier: RenewableTier) -> None:
        """Gives up ``tier``, and leaves it once nothing uses its files."""
        if not self._is_given_up:
            self._is_given_up = True
            # Chains of which blocks are lost are looked up again, as if those were evicted.
            self._count_evicted(tier.stats().num_blocks or 0)
            tier.give_up()
            self._log.warning(
                "%s: THE %s TIER HAS LOST ITS FILES: %s. Its space is given back, and the tier opens anew in the "
                "directory that is there now. Let no other program remove or rename it or its files; kvoffload disk "
                "clear empties it while the server is stopped",
                self._opener.setting,
                self.name.upper(),
                tier.loss,
            )
        elif not tier.has_jobs:
            self._count_evicted(tier.stats().num_evicted)
            self._former_uses = [use._replace(num_blocks=0, num_retained=0) for use in self.tenant_uses()]
            self._tier, self._is_given_up = None, False
            self._opener.leave(tier)

    def _count_evicted(self, num_blocks: int) -> None:
        self._standby = self._standby._replace(num_evicted=self._standby.num_evicted + num_blocks)

    def stats(self) -> TierStats:
        if self._tier is None:
            return self._standby
        stats = self._tier.stats()
        return stats._replace(num_evicted=self._standby.num_evicted + stats.num_evicted)

    def tenant_uses(self) -> Sequence[TenantUse]:
        former, uses = self._former_uses, () if self._tier is None else self._tier.tenant_uses()
        if not (former and uses):
            return uses or former
        pairs = zip(former, uses, strict=True)
        return [TenantUse(now.name, *map(add, before[1:], now[1:])) for before, now in pairs]

    def most_blocks(self, key: OffloadKey) -> int | None:
        return super().most_blocks(key) if self._tier is None else self._tier.most_blocks(key)

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        return np.zeros(len(keys), dtype=np.uint8) if self._tier is None else self._tier.contains(keys, ahead)

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return [] if self._tier is None else self._tier.read(keys, slots)

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return [] if self._tier is None else self._tier.write(keys, slots)

    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> None:
        if self._tier is not None:
            self._tier.touch(keys, stored)

    def retain(self, keys: Keys, session: int | None, seconds: float) -> RetainRefusal | None:
        return (
            super().retain(keys, session, seconds) if self._tier is None else self._tier.retain(keys, session, seconds)
        )

    def hand_over(self, keys: Keys) -> str:
        return super().hand_over(keys) if self._tier is None else self._tier.hand_over(keys)

    def look_for(self, keys: Keys, place: str, pause_s: float, chain: Collection[OffloadKey] = ()) -> None:
        if self._tier is not None:
            self._tier.look_for(keys, place, pause_s, chain)

    def delete(self, keys: Keys) -> None:
        if self._tier is not None:
            self._tier.delete(keys)
        elif len(self._deleted) <= MAX_DELETED:
            self._deleted.update(dict.fromkeys(keys))

    def reset(self) -> None:
        # A tier that is opened later must not give blocks of other weights either.
        self._was_reset = True
        if self._tier is not None:
            self._tier.reset()

    def take_evicted(self) -> list[OffloadKey]:
        self._has_events = True
        return [] if self._tier is None else self._tier.take_evicted()

    def poll(self) -> list[TierResult]:
        if isinstance(self._tier, RenewableTier) and self._tier.is_lost:
            # Before the results: a block that ends now is lost, and must not be announced after that.
            self._leave_lost(self._tier)
        if self._tier is None:
            tier = self.join()
            if tier is None:
                return []
            logger.warning(
                "kvoffload: %s: the %s tier is open with %s blocks, and used from now on",
                self._opener.setting,
                self.name,
                f"{tier.stats().num_blocks or 0:,}",
            )
        assert self._tier is not None
        results = self._tier.poll()
        self.num_failed_lookups = max(self.num_failed_lookups, self._tier.num_failed_lookups)
        return results

    def wait(self, timeout_s: float) -> None:
        super().wait(timeout_s) if self._tier is None else self._tier.wait(timeout_s)

    def close(self) -> None:
        self._opener.close()
        if self._tier is not None:
            self._tier.close()

    def check_integrity(self) -> None:
        super().check_integrity() if self._tier is None else self._tier.check_integrity()


def mount_point(path: str) -> str:
    """Returns where the file system that has ``path`` is mounted."""
    return next(str(folder) for folder in (Path(path), *Path(path).parents) if folder.is_mount())


def wait_until_writable(path: str) -> None:
    """Returns once the file system that has ``path`` answers and takes writes, or says why not. The wait is in another
    process: a process that waits for a frozen file system cannot be killed, and would keep its memory and its GPU."""
    with suppress(OSError):
        probe = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROBE, path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        probe.wait()
