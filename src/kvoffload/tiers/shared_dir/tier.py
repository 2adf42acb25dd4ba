"""The shared directory tier: a disk tier of its own, and the blocks of other servers beside it.

**Threads.** Beside the scheduler's thread and the executor's, see ``disk.blockio``, there are two that may hang in
calls to the medium without consequence for the others: the *keeper* writes heartbeat and journal (``Writer.keep``), the
*follower* follows the other seats (``OtherSeats.follow``); see ``foreign`` for what these share.
"""

from __future__ import annotations

import enum
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ConfigError, Keys, OffloadKey, Slots, States, TenantUse, TierError, TierResult, TierStats
from kvoffload.abc.tier import HIT, MISS
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.blockio import JOB_BYTES
from kvoffload.tiers.disk.identities import log_unusable, write_identity
from kvoffload.tiers.disk.journal import UInt64s, digests_of
from kvoffload.tiers.disk.layout import SLAB_BYTES
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from kvoffload.tiers.late import RenewableTier
from kvoffload.tiers.shared_dir.background import Repeating
from kvoffload.tiers.shared_dir.followers import FOLLOW_S, Follower
from kvoffload.tiers.shared_dir.foreign import MAX_FOREIGN_BLOCKS, ForeignBlocks
from kvoffload.tiers.shared_dir.reads import ForeignReads
from kvoffload.tiers.shared_dir.seats import GONE_AFTER_S, Claimant, Machine, Seat, log_unusable_seat, seat_names
from kvoffload.tiers.shared_dir.writer import Writer
from kvoffload.tiers.threads import Executor, IOThreads

KEEP_S = 0.5
"""Time between two writes of the journal."""
STOP_S = 2.0
"""Time for each of the two threads to end."""
MAX_HANDED_OVER = 1 << 16
"""Blocks for which other processes wait; the oldest are forgotten. They are found with the next journal then."""
FIRST_FOLLOW_S = 10.0
"""Time for which opening waits for the first pass over the other seats, so that the first request finds them."""
GONE_S = 5.0
"""A foreign block that could not be read is not found for so long. Until then the follower knows more."""
BAD_S = 600.0
"""A foreign block with wrong bytes is not found for so long."""
MAX_HIDDEN = 4096


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a tier runs on. ``repeat`` begins its threads. ``job_bytes``: blocks that are smaller share a job of this
    size."""

    machine: Machine = field(default_factory=Machine.this)
    executor: Executor = field(default_factory=lambda: IOThreads(name="kvoffload-shared-io"))
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    random: Callable[[int], bytes] = os.urandom
    slab_bytes: int = SLAB_BYTES
    job_bytes: int = JOB_BYTES
    max_foreign_blocks: int = MAX_FOREIGN_BLOCKS
    repeat: Callable[[str, Callable[[], None], float, Callable[[], None]], Repeating] = Repeating


class _SeatUse(enum.Enum):
    SERVING = enum.auto()
    FORGOTTEN = enum.auto()
    """The tier was reset, or has lost its seat: nothing is read or written any more."""
    CLOSED = enum.auto()


class SharedDirTier(RenewableTier):
    """Blocks of ``context.pools`` in a shared directory, of which this process writes at most ``capacity_bytes``, in a
    seat of its own.

    ``root`` is closed with the tier. Raises ConfigError if a setting is wrong or ``root`` cannot be used, and OSError
    if its medium fails; later, no method raises because of the medium.
    """

    name = "shared_dir"
    is_shared = True
    loss = "others have removed or moved them, or taken the folder because this server was silent for too long"

    def __init__(
        self,
        root: Storage,
        context: TierContext,
        capacity_bytes: int,
        gone_after_s: float = GONE_AFTER_S,
        surroundings: Surroundings | None = None,
    ) -> None:
        on = surroundings or Surroundings()
        self._state = _SeatUse.SERVING
        try:
            self.seat, self.own = _take_seat(root, context, capacity_bytes, on)
        except BaseException:
            on.executor.close(0.0)
            raise
        self.block_bytes = self.own.block_bytes
        self.writer = Writer(root, self.seat, self.own, gone_after_s, on.clock)
        self._handed_over: dict[OffloadKey, None] = {}
        """Blocks for which another process waits, and which are not written yet, the oldest first."""
        self._keeping = on.repeat("kvoffload-shared-keep", self.writer.keep, KEEP_S, self.writer.end)
        try:
            self.others = OtherSeats(root, context, self.seat.name, on)
        except BaseException:
            self._keeping.stop(STOP_S)
            self.own.close()
            raise

    def stats(self) -> TierStats:
        stats = self.own.stats()
        return stats._replace(num_blocks=0) if self._state is _SeatUse.FORGOTTEN else stats

    def tenant_uses(self) -> Sequence[TenantUse]:
        return self.own.tenant_uses()

    def most_blocks(self, key: OffloadKey) -> int:
        return self.own.most_blocks(key)

    @property
    def has_jobs(self) -> bool:
        return self.own.has_jobs or bool(self.others.reading)

    @property
    def is_lost(self) -> bool:
        return self.seat.is_lost

    def give_up(self) -> None:
        self.own.give_up()
        self._state = _SeatUse.FORGOTTEN

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        if self._state is not _SeatUse.SERVING:
            return np.full(len(keys), MISS, dtype=np.uint8)
        states = self.own.contains(keys)
        if len(self.others.blocks):
            absent = np.flatnonzero(states == MISS)
            if len(absent):
                asked = keys if len(absent) == len(keys) else [keys[i] for i in absent.tolist()]
                states[absent[self.others.hold(asked)]] = HIT
        return states

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        if self._state is not _SeatUse.SERVING or not keys:
            return []
        absent = self.own.contains(keys) == MISS if len(self.others.blocks) else np.zeros(len(keys), dtype=np.bool_)
        if not absent.any():
            return self.own.read(keys, slots)
        mine = np.flatnonzero(~absent)
        taken = self.own.read([keys[i] for i in mine.tolist()], slots[mine]) if len(mine) else []
        others = np.flatnonzero(absent)
        return taken + self.others.read([keys[i] for i in others.tolist()], slots[others])

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        """See ``Tier.write``. Blocks that another seat holds are not taken on."""
        if self._state is not _SeatUse.SERVING or not keys:
            return []
        if len(self.others.blocks):
            held = self.others.hold(keys)
            if held.any():
                absent = np.flatnonzero(~held)
                keys, slots = [keys[i] for i in absent.tolist()], slots[absent]
        return self.own.write(keys, slots)

    def hand_over(self, keys: Keys) -> str:
        """Returns the name of the seat. As soon as a block is written, so is the journal, for others to learn of it."""
        self._handed_over.update(dict.fromkeys(keys))
        for key in list(islice(self._handed_over, max(0, len(self._handed_over) - MAX_HANDED_OVER))):
            del self._handed_over[key]
        self._keeping.wake()
        return self.seat.name

    def look_for(self, keys: Keys, place: str, pause_s: float, chain: Collection[OffloadKey] = ()) -> None:
        self.others.look_for(place, pause_s)

    def poll(self) -> list[TierResult]:
        results, foreign = self.own.poll(), self.others.poll()
        if self._handed_over:
            written = [result.key for result in results if result.key in self._handed_over and not result.is_read]
            for key in written:
                del self._handed_over[key]
            if written:
                self._keeping.wake()
        results += foreign
        return list(map(_gone, results)) if self._state is _SeatUse.FORGOTTEN else results

    def wait(self, timeout_s: float) -> None:
        if not self.others.has_results:
            self.own.wait(timeout_s)

    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> None:
        self.own.touch(keys, stored)

    def delete(self, keys: Keys) -> None:
        self.own.delete(keys)
        self.others.delete(keys)

    def reset(self) -> None:
        """Forgets all blocks, and writes nothing from now on. What the process has written stays: it was computed with
        the weights that its fingerprint says."""
        if self._state is not _SeatUse.CLOSED:
            self._state = _SeatUse.FORGOTTEN

    def take_evicted(self) -> list[OffloadKey]:
        return self.own.take_evicted()

    def close(self) -> None:
        if self._state is _SeatUse.CLOSED:
            return
        is_forgotten = self._state is _SeatUse.FORGOTTEN
        self._state = _SeatUse.CLOSED
        self._keeping.stop(STOP_S)
        self.others.stop(STOP_S)
        self.own.close()
        if is_forgotten:
            self.others.delete_all()

    def check_integrity(self) -> None:
        self.own.check_integrity()


class OtherSeats:
    """The blocks of ``context.pools`` in all seats of ``root`` but ``own``. A thread of its own follows the seats, with
    ``follow``, until ``stop``; the other methods are called on the scheduler's thread."""

    def __init__(self, root: Storage, context: TierContext, own: str, on: Surroundings) -> None:
        self._root = root
        self._context = context
        self._clock = on.clock
        self._compares_identities = bool(context.identity)
        """Whether other identities are still to be compared with this one, once."""
        self.blocks = ForeignBlocks(on.max_foreign_blocks)
        slot_bytes = [pool.shape[1] for pool in context.pools]
        self.follower = Follower(root, context.fingerprint, slot_bytes, self.blocks, own, on.clock)
        self._reads = ForeignReads(context.pools, on.executor, self.blocks, self.follower, on.clock, on.job_bytes)
        self.reading: dict[OffloadKey, bool] = {}
        """Blocks that are being read, and whether each was deleted meanwhile."""
        self._hidden = _Hidden(on.clock)
        self._looked_at = -float("inf")
        """When the follower was last asked to follow a seat at once."""
        self._following = on.repeat("kvoffload-shared-follow", self.follow, FOLLOW_S, self.follower.close)
        self._following.wait_for_first(FIRST_FOLLOW_S)

    def follow(self) -> None:
        """Takes in the changes that other servers have made."""
        self.follower.follow()
        if self._compares_identities:
            self._compares_identities = False
            log_unusable("shared directory", _seats(self._root), self._context.fingerprint, self._context.identity)

    def look_for(self, place: str, pause_s: float) -> None:
        """Has the seat ``place`` followed at once, unless that was asked for within ``pause_s``."""
        # Whatever request has the follower woken next, it follows this seat too.
        self.follower.follow_now(place)
        now = self._clock()
        if now - self._looked_at >= pause_s:
            self._looked_at = now
            self._following.wake()

    def hold(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Returns which of ``keys`` can be read from another seat."""
        flags: npt.NDArray[np.bool_] = self._find(keys)[1] >= 0
        return flags

    def _find(self, keys: Keys) -> tuple[UInt64s, npt.NDArray[np.int64]]:
        """Returns the digests of ``keys``, and their places in other seats, -1 without one."""
        digests = digests_of(keys)
        places = self.blocks.find(digests)
        places[self._hidden.among(digests)] = -1
        return digests, places

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        """Begins to read blocks into host slots. Returns the keys that were taken on."""
        digests, places = self._find(keys)
        chosen = {}
        for i in np.flatnonzero(places >= 0).tolist():
            located = self.blocks.locate(int(places[i]), int(digests[i]))
            if located is not None and keys[i] not in self.reading:
                chosen[keys[i]] = located, int(slots[i])
        taken = self._reads.submit(chosen)
        self.reading.update(dict.fromkeys(taken, False))
        return taken

    @property
    def has_results(self) -> bool:
        return bool(self._reads.done)

    def poll(self) -> list[TierResult]:
        """Returns the results of reads that have ended since the last call."""
        results = []
        for result in (result for run in self._reads.take_done() for result in run.results):
            is_deleted = self.reading.pop(result.key)
            if not result.ok:
                self._hidden.add(result.key, BAD_S if result.error is TierError.CORRUPT else GONE_S)
            results.append(_gone(result) if is_deleted else result)
        return results

    def delete(self, keys: Keys) -> None:
        """Reads of ``keys`` that are under way find nothing."""
        self.reading.update((key, True) for key in keys if key in self.reading)

    def delete_all(self) -> None:
        """No read that is under way finds anything."""
        self.delete(list(self.reading))

    def stop(self, timeout_s: float) -> None:
        """Ends the thread, which closes ``root`` then."""
        self._following.stop(timeout_s)


def _take_seat(root: Storage, context: TierContext, capacity_bytes: int, on: Surroundings) -> tuple[Seat, DiskTier]:
    """Returns a seat and the blocks in it. Raises ConfigError and OSError."""
    unusable: list[str] = []
    claimant = Claimant(root, context.fingerprint, on.machine, on.random, on.wall_clock, capacity_bytes)
    while True:
        seat = claimant.take(unusable)
        try:
            own = DiskTier(
                seat.storage,
                context.pools,
                DiskSettings(
                    context.fingerprint,
                    capacity_bytes,
                    policy=context.policy,
                    shares=context.shares,
                    slab_bytes=on.slab_bytes,
                    job_bytes=on.job_bytes,
                    with_journal=True,
                ),
                executor=on.executor,
                clock=on.clock,
                wall_clock=on.wall_clock,
                random=on.random,
            )
            break
        except OSError as error:
            # What a former server has left there may be damaged.
            if seat.is_new:
                raise
            log_unusable_seat(seat.name, error)
            unusable.append(seat.name)
    write_identity(seat.storage, context.fingerprint, context.identity)
    return seat, own


def _gone(result: TierResult) -> TierResult:
    """Returns the result of a block that was dropped meanwhile."""
    return result._replace(error=TierError.GONE, nbytes=0) if result.ok else result


def _seats(root: Storage) -> Iterator[tuple[str, Storage]]:
    """Yields the seats that can be opened, by name. Each is closed when the next one is asked for."""
    with suppress(OSError):
        for name in seat_names(root):
            with suppress(OSError, ConfigError), closing(root.child(name)) as storage:
                yield name, storage


class _Hidden:
    """Digests of foreign blocks that are not found for a while, at most MAX_HIDDEN."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[int, float] = OrderedDict()
        self._last = -float("inf")
        """When all of them are found again."""

    def add(self, key: OffloadKey, seconds: float) -> None:
        (digest,) = digests_of([key]).tolist()
        until = self._clock() + seconds
        self._last = max(self._last, until)
        self._until.pop(digest, None)
        self._until[digest] = until
        if len(self._until) > MAX_HIDDEN:
            self._until.popitem(last=False)

    def among(self, digests: UInt64s) -> npt.NDArray[np.bool_]:
        """Returns which of ``digests`` are hidden now."""
        if not self._until:
            return np.zeros(len(digests), dtype=np.bool_)
        now, until = self._clock(), self._until
        if now >= self._last:
            self._until = OrderedDict()
        return np.fromiter((until.get(digest, now) > now for digest in digests.tolist()), np.bool_, len(digests))
