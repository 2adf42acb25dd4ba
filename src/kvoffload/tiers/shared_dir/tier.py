"""The shared directory tier: a disk tier of its own, and the blocks of other servers beside it.

**Threads.** Beside the scheduler's thread and the executor's, see ``disk.blockio``, there are two that may hang in
calls to the medium without consequence for the others: the *keeper* writes heartbeat and journal (``keep``), the
*follower* follows the other seats (``follow``); see ``foreign`` for what these share.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, ConfigError, OffloadKey, Slots, States, TenantUse, Tier, TierError, TierResult
from kvoffload.abc.tier import HIT, MISS
from kvoffload.cache.tenants import MakeShares
from kvoffload.tiers.disk.blockio import JOB_BYTES
from kvoffload.tiers.disk.identities import log_unusable, write_identity
from kvoffload.tiers.disk.journal import UInt64s, digests_of
from kvoffload.tiers.disk.slabs import SLAB_BYTES
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.executor import Executor
from kvoffload.tiers.shared_dir.background import Repeating
from kvoffload.tiers.shared_dir.followers import FOLLOW_S, Follower
from kvoffload.tiers.shared_dir.foreign import ForeignBlocks
from kvoffload.tiers.shared_dir.reads import ForeignReads
from kvoffload.tiers.shared_dir.seats import GONE_AFTER_S, Machine, Seat, seat_names, take_seat
from kvoffload.tiers.shared_dir.writer import Renewal, Writer
from kvoffload.tiers.threads import IOThreads

logger = logging.getLogger(__name__)

KEEP_S = 0.5
"""Time between two writes of the journal."""
STOP_S = 2.0
"""Time for each of the two threads to end."""
GONE_S = 5.0
"""A foreign block that could not be read is not found for so long. Until then the follower knows more."""
BAD_S = 600.0
"""A foreign block with wrong bytes is not found for so long."""
MAX_HIDDEN = 4096


class _State(enum.Enum):
    SERVING = enum.auto()
    LOST = enum.auto()
    """The seat's files have vanished, or another process has it: foreign blocks are read. A new seat is taken in the
    background."""
    FORGOTTEN = enum.auto()
    """The tier was reset: nothing is read or written any more."""
    CLOSED = enum.auto()


class SharedDirTier(Tier):
    """Blocks of ``pools`` (one per rank, shape (num_slots, slot_bytes)) in a shared directory, of which this process
    writes at most ``capacity_bytes``, in a seat of its own.

    ``root`` is closed with the tier. With ``background`` False there are no threads of the tier's own, and the caller
    calls ``keep`` and ``follow``. Raises ConfigError if a setting is wrong or ``root`` cannot be used, and OSError if
    its medium fails; later, no method raises because of the medium.
    """

    name = "shared_dir"
    is_shared = True

    def __init__(
        self,
        root: Storage,
        pools: Sequence[ByteArray],
        *,
        fingerprint: str,
        capacity_bytes: int,
        identity: Mapping[str, str] | None = None,
        policy: str = "lru",
        gone_after_s: float = GONE_AFTER_S,
        machine: Machine | None = None,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[int], bytes] = os.urandom,
        slab_bytes: int = SLAB_BYTES,
        job_bytes: int = JOB_BYTES,
        background: bool = True,
        shares: MakeShares | None = None,
    ) -> None:
        self._fingerprint = fingerprint
        self._identity = dict(identity or {})
        """What to compare other identities with, once."""
        self._state = _State.SERVING
        executor = executor or IOThreads(name="kvoffload-shared-io")

        def open_own(seat: Seat) -> DiskTier:
            return DiskTier(
                seat.storage,
                pools,
                fingerprint=fingerprint,
                capacity_bytes=capacity_bytes,
                policy=policy,
                executor=executor,
                clock=clock,
                wall_clock=wall_clock,
                random=random,
                slab_bytes=slab_bytes,
                job_bytes=job_bytes,
                with_journal=True,
                shares=shares,
            )

        def open_writer(root: Storage) -> Writer:
            unusable: list[str] = []
            while True:
                seat = take_seat(root, fingerprint, machine or Machine.this(), random, wall_clock, sleep, unusable)
                seat.capacity_bytes = capacity_bytes
                try:
                    own = open_own(seat)
                    break
                except (OSError, ConfigError) as error:
                    # What a former server has left there may be damaged. A wrong setting has no such cause.
                    cause = error if isinstance(error, OSError) else error.__cause__
                    if seat.is_new or not isinstance(cause, OSError):
                        raise
                    logger.warning("kvoffload: shared directory: %s cannot be used (%s)", seat.name, error)
                    unusable.append(seat.name)
            try:
                write_identity(seat.storage, fingerprint, identity or {})
            except OSError as error:
                logger.debug("kvoffload: shared directory: the identity cannot be written (%s)", error)
            return Writer(root, seat, own, gone_after_s, clock)

        try:
            self._writer = open_writer(root)
        except BaseException:
            executor.close(0.0)
            raise
        self._renewal = Renewal(open_writer, clock)
        self._num_evicted_before = 0
        """Blocks evicted from seats that were lost."""
        self.blocks = ForeignBlocks()
        slot_bytes = [pool.shape[1] for pool in pools]
        self._follower = Follower(root, fingerprint, slot_bytes, self.blocks, self.seat.name, clock)
        self._reads = ForeignReads(pools, executor, self.blocks, self._follower, clock, job_bytes)
        self._reading: dict[OffloadKey, bool] = {}
        """Foreign blocks that are being read, and whether each was deleted meanwhile."""
        self._hidden = _Hidden(clock)
        self._threads: list[Repeating] = []
        if background:
            self._threads = [
                Repeating("kvoffload-shared-keep", self.keep, KEEP_S, self._end_keeping),
                Repeating("kvoffload-shared-follow", self.follow, FOLLOW_S, self._follower.close),
            ]

    # The threads' work.

    def keep(self) -> None:
        """Does what is due of: heartbeat, journal, seats of servers that are gone, a new seat in place of a lost
        one."""
        self._writer.keep()
        self._renewal.work(self._writer if self._state is _State.LOST else None)

    def _end_keeping(self) -> None:
        self._writer.end()
        self._renewal.close()

    def follow(self) -> None:
        """Takes in what other servers have written and removed."""
        self._follower.follow()
        if self._identity:
            identity, self._identity = self._identity, {}
            try:
                log_unusable("shared directory", _seats(self._writer.root), self._fingerprint, identity)
            except OSError as error:
                logger.debug("kvoffload: shared directory: identities cannot be read (%s)", error)

    # The tier.

    @property
    def seat(self) -> Seat:
        """The seat of this process."""
        return self._writer.seat

    @property
    def own(self) -> DiskTier:
        """The blocks in it."""
        return self._writer.own

    @property
    def capacity_bytes(self) -> int:
        return self.own.capacity_bytes

    def most_blocks(self, key: OffloadKey) -> int:
        return self.own.most_blocks(key)

    def tenant_uses(self) -> Sequence[TenantUse]:
        return self.own.tenant_uses()

    @property
    def used_bytes(self) -> int:
        return self.own.used_bytes

    @property
    def block_bytes(self) -> int:
        return self.own.block_bytes

    @property
    def num_blocks(self) -> int:
        return 0 if self._state is _State.FORGOTTEN else self.own.num_blocks

    @property
    def num_evicted(self) -> int:
        return self._num_evicted_before + self.own.num_evicted

    @property
    def is_busy(self) -> bool:
        """Whether reads or writes are under way, or have ended since the last ``poll``."""
        return self.own.is_busy or bool(self._reading)

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        if self._state in (_State.FORGOTTEN, _State.CLOSED):
            return np.full(len(keys), MISS, dtype=np.uint8)
        states = self.own.contains(keys)
        if len(self.blocks):
            absent = np.flatnonzero(states == MISS)
            if len(absent):
                asked = keys if len(absent) == len(keys) else [keys[i] for i in absent.tolist()]
                _, places = self._find(asked)
                states[absent[places >= 0]] = HIT
        return states

    def _find(self, keys: Sequence[OffloadKey]) -> tuple[UInt64s, npt.NDArray[np.int64]]:
        """Returns the digests of ``keys``, and their places in other seats, -1 without one."""
        digests = digests_of(keys)
        places = self.blocks.find(digests)
        if self._hidden:
            places[self._hidden.among(digests)] = -1
        return digests, places

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        if self._state in (_State.FORGOTTEN, _State.CLOSED) or not keys:
            return []
        absent = self.own.contains(keys) == MISS if len(self.blocks) else np.zeros(len(keys), dtype=np.bool_)
        if not absent.any():
            return self.own.read(keys, slots)
        mine = np.flatnonzero(~absent)
        taken = self.own.read([keys[i] for i in mine.tolist()], slots[mine]) if len(mine) else []
        others = np.flatnonzero(absent)
        return taken + self._read_foreign([keys[i] for i in others.tolist()], slots[others])

    def _read_foreign(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        digests, places = self._find(keys)
        chosen = {}
        for i in np.flatnonzero(places >= 0).tolist():
            located = self.blocks.locate(int(places[i]), int(digests[i]))
            if located is not None and keys[i] not in self._reading:
                chosen[keys[i]] = located, int(slots[i])
        taken = self._reads.submit(
            list(chosen), [located for located, _ in chosen.values()], [slot for _, slot in chosen.values()]
        )
        self._reading.update(dict.fromkeys(taken, False))
        return taken

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        """See ``Tier.write``. Blocks that another seat holds are not taken on."""
        if self._state is not _State.SERVING or not keys:
            return []
        if len(self.blocks):
            _, places = self._find(keys)
            if (places >= 0).any():
                absent = np.flatnonzero(places < 0)
                keys, slots = [keys[i] for i in absent.tolist()], slots[absent]
        return self.own.write(keys, slots)

    def poll(self) -> list[TierResult]:
        if self.seat.is_lost and self._follower.own is not None:
            self._give_up()
        results, foreign = self.own.poll(), self._reads.take_done()
        if self._state is _State.LOST and not self.own.has_jobs:
            self._use_new_seat()
        failed = [result for result in foreign if not result.ok]
        self._hidden.add([result.key for result in failed if result.error is TierError.CORRUPT], BAD_S)
        self._hidden.add([result.key for result in failed if result.error is not TierError.CORRUPT], GONE_S)
        for result in foreign:
            is_deleted = self._reading.pop(result.key)
            results.append(_gone(result) if is_deleted else result)
        return list(map(_gone, results)) if self._state is _State.FORGOTTEN else results

    def _give_up(self) -> None:
        self.own.give_up()
        self._follower.own = None
        if self._state is not _State.SERVING:
            return
        self._state = _State.LOST
        logger.warning(
            "kvoffload: shared directory: %s is lost: its files have vanished, or another server has taken it because "
            "this one was silent for too long. This server reads the others' blocks, and writes none until it has a "
            "new folder",
            self.seat.name,
        )

    def _use_new_seat(self) -> None:
        """Uses the seat that was taken in the background, if there is one."""
        writer = self._renewal.take(self._writer)
        if writer is None:
            return
        self._num_evicted_before += self.own.num_evicted
        self._writer = writer
        self._follower.move(self._writer.root, self.seat.name)
        self._state = _State.SERVING
        logger.warning("kvoffload: shared directory: this server writes into %s from now on", self.seat.name)

    def wait(self, timeout_s: float) -> None:
        if not self._reads.has_done:
            self.own.wait(timeout_s)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.own.touch(keys)

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey]) -> None:
        self.own.reorder_chain(keys, stored)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        self.own.delete(keys)
        for key in keys:
            if key in self._reading:
                self._reading[key] = True

    def reset(self) -> None:
        """Forgets all blocks, and writes nothing from now on. What the process has written stays: it was computed with
        the weights that its fingerprint says."""
        if self._state is not _State.CLOSED:
            self._state = _State.FORGOTTEN

    def take_evicted(self) -> list[OffloadKey]:
        return self.own.take_evicted()

    def close(self) -> None:
        if self._state is _State.CLOSED:
            return
        is_forgotten = self._state is _State.FORGOTTEN
        self._state = _State.CLOSED
        if not self._threads:
            self._end_keeping()
            self._follower.close()
        for thread in self._threads:
            thread.stop(STOP_S)
        self.own.close()
        if is_forgotten:
            self._reading = dict.fromkeys(self._reading, True)

    def check_integrity(self) -> None:
        self.own.check_integrity()


def _seats(root: Storage) -> Iterator[tuple[str, Storage]]:
    """Yields the seats that can be opened, by name. Each is closed when the next one is asked for."""
    for name in seat_names(root):
        try:
            storage = root.child(name)
        except (OSError, ConfigError):
            continue
        try:
            yield name, storage
        finally:
            storage.close()


def _gone(result: TierResult) -> TierResult:
    return result._replace(error=TierError.GONE, nbytes=0) if result.ok else result


class _Hidden:
    """Digests of foreign blocks that are not found for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[int, float] = {}
        self._next = float("inf")
        """When the first of them is found again."""
        self._digests = np.zeros(0, dtype=np.uint64)

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, keys: Sequence[OffloadKey], seconds: float) -> None:
        if keys:
            self._until |= dict.fromkeys(digests_of(keys).tolist(), self._clock() + seconds)
            for digest in list(self._until)[: max(0, len(self._until) - MAX_HIDDEN)]:
                del self._until[digest]
            self._changed()

    def among(self, digests: UInt64s) -> npt.NDArray[np.bool_]:
        """Returns which of ``digests`` are hidden now."""
        now = self._clock()
        if self._next <= now:
            self._until = {digest: until for digest, until in self._until.items() if until > now}
            self._changed()
        return np.isin(digests, self._digests)

    def _changed(self) -> None:
        self._digests = np.fromiter(self._until, dtype=np.uint64)
        self._next = min(self._until.values(), default=float("inf"))
