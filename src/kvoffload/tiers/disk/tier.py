"""The disk tier: blocks in slab files of a local directory, verified, bounded, and found again after a restart."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.abc import (
    ByteArray,
    Keys,
    OffloadKey,
    RetainRefusal,
    Slots,
    States,
    TenantUse,
    TierError,
    TierResult,
    TierStats,
)
from kvoffload.cache.tenants import MakeShares
from kvoffload.deadlines import within
from kvoffload.tiers.catalog import Catalog, Claim
from kvoffload.tiers.disk.blockio import JOB_BYTES, Batch, BlockIO, Done
from kvoffload.tiers.disk.format import FACTS, MAX_KEY_BYTES
from kvoffload.tiers.disk.layout import SLAB_BYTES
from kvoffload.tiers.disk.maintenance import Maintenance
from kvoffload.tiers.disk.recency import Recency
from kvoffload.tiers.disk.recovery import open_files
from kvoffload.tiers.disk.restart import Restart
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.late import RenewableTier
from kvoffload.tiers.limited_log import LimitedLog
from kvoffload.tiers.threads import Executor, IOThreads

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0
"""Time for the transfers under way when the tier is closed."""
FINISH_DEADLINE_S = 2.0
"""Time for the writes after them."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Settings of a disk tier."""

    fingerprint: str
    capacity_bytes: int
    policy: str = "lru"
    shares: MakeShares | None = None
    """Returns what each tenant may take."""
    slab_bytes: int = SLAB_BYTES
    job_bytes: int = JOB_BYTES
    """Smaller blocks share a job of this size."""
    with_journal: bool = False
    """Whether other processes follow the index, by a journal that some thread keeps up to date with
    ``write_journal``."""


class DiskTier(RenewableTier):
    """Blocks of ``pools`` (one per rank, shape (num_slots, slot_bytes)) on ``storage``.

    ``files`` and ``catalog``, its two public parts, are for tests and benchmarks. The catalog is kept on the
    scheduler's thread; jobs on ``executor`` move bytes and verify them, see ``blockio``. Nothing is synced: a block
    that a power loss has damaged fails its checksum. ``random(n)`` returns n random bytes.

    If ``storage`` is full or read-only, the blocks that it holds are served. Raises ConfigError if a setting is wrong,
    and OSError if its medium fails; later, no method raises because of the medium.
    """

    name = "disk"
    loss = "others have emptied or replaced the directory"
    is_lost = False

    def __init__(
        self,
        storage: Storage,
        pools: Sequence[ByteArray],
        settings: DiskSettings,
        *,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._random = random
        self.files = open_files(
            storage,
            settings.fingerprint,
            [pool.shape[1] for pool in pools],
            settings.capacity_bytes,
            settings.slab_bytes,
            self._new_generation,
            settings.with_journal,
        )
        num_slots, self.block_bytes = self.files.budget.num_slots, self.files.budget.layout.block_bytes
        try:
            shares = None if settings.shares is None else settings.shares(num_slots, self.block_bytes)
            self.catalog = Catalog(num_slots, self.block_bytes, settings.policy, clock, grows=True, shares=shares)
            self._facts = np.zeros(num_slots, dtype=FACTS)
            """The facts of each slot's record."""
            self._recency = Recency(num_slots, self.files.recency)
            self._restart = Restart(self.files, self.catalog, self._recency, clock, wall_clock)
            stale = self._restart.restore(self._facts)
        except BaseException:
            self.files.close()
            raise
        self._executor = executor or IOThreads()
        self._io = BlockIO(self.files, pools, self._executor, clock, wall_clock, settings.job_bytes)
        self._maintenance = Maintenance(self.files, self._recency, self._executor, clock)
        self._maintenance.empty_records(stale)
        if not self.files.num_allocated:
            self.catalog.add_free(self._maintenance.grow_now())
        self._unreported: list[TierResult] = []
        """Results that ``close`` has found, for ``poll``."""
        self._warnings = LimitedLog(logger, clock)
        self._closed = False
        self._restart.note_retained()

    def _new_generation(self) -> int:
        return int.from_bytes(self._random(8), "little")

    def stats(self) -> TierStats:
        catalog, files = self.catalog, self.files
        return TierStats(files.budget.capacity_bytes, catalog.num_blocks, files.used_bytes, catalog.num_evicted)

    def tenant_uses(self) -> Sequence[TenantUse]:
        return self.catalog.blocks.tenant_uses()

    def most_blocks(self, key: OffloadKey) -> int:
        return self.catalog.blocks.room.most_blocks(key)

    @property
    def has_jobs(self) -> bool:
        return any(self._io.num_moving.values()) or self._maintenance.is_busy

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        return self.catalog.contains(keys)

    # Transfers.

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        if self._closed or not keys:
            return []
        batch = self._batch(self.catalog.begin_reads(keys, slots))
        self._note_use(batch.slots)
        taken = self._io.submit(batch, is_read=True)
        if taken < len(batch.keys):
            self.catalog.cancel_reads(batch.slots[taken:])
        return batch.keys[:taken]

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        if self._closed or not keys:
            return []
        if max(map(len, keys)) > MAX_KEY_BYTES:
            fitting = [i for i, key in enumerate(keys) if len(key) <= MAX_KEY_BYTES]
            keys, slots = [keys[i] for i in fitting], slots[fitting]
        room = min(self._room(len(keys)), self._io.write_room)
        if room <= 0:
            return []
        batch = self._batch(self.catalog.begin_writes(keys, slots, room))
        batch.facts["sequence"] = self._recency.take(len(batch.slots))
        self._maintenance.give(batch.slots)
        taken = self._io.submit(batch, is_read=False)
        if taken < len(batch.keys):
            self.catalog.cancel_writes(batch.slots[taken:])
        return batch.keys[:taken]

    def _batch(self, claim: Claim) -> Batch:
        keys, host_slots, slots = claim
        return Batch(keys, host_slots, slots, self._facts[slots])

    def _room(self, wanted: int) -> int:
        """Returns how many blocks can be written now. While the files can grow, ahead of need, nothing is evicted."""
        if self.files.read_only:
            return 0
        if self._maintenance.files_are_final:
            return self.catalog.num_available
        free = self.catalog.num_free
        if free - wanted < max(1, self.files.budget.layout.slots_per_slab // 4):
            self._maintenance.grow()
        return free

    def poll(self) -> list[TierResult]:
        if self._maintenance.outcomes and len(new_slots := self._maintenance.poll()):
            self.catalog.add_free(new_slots)
        results, self._unreported = self._unreported, []
        if self._io.done:
            results += self._take_results()
        # What a process has closed stays retained.
        if (self.catalog.retention.blocks or self.catalog.retention.changes) and not self._closed:
            self._restart.note_retained()
        self._maintenance.submit()
        return results

    def _take_results(self) -> list[TierResult]:
        done = self._io.take_done()
        return self._end([run for run in done if run.is_read]) + self._end([run for run in done if not run.is_read])

    def _end(self, done: Sequence[Done]) -> list[TierResult]:
        if not done:
            return []
        results = [result for run in done for result in run.results]
        slots = done[0].slots if len(done) == 1 else np.concatenate([run.slots for run in done])
        for run in done:
            if not run.is_read:
                self._facts[run.slots] = run.facts
        succeeded = np.array([result.error is None for result in results])
        if done[0].is_read:
            gone = self.catalog.end_reads([result.key for result in results], slots, succeeded)
        else:
            gone = self.catalog.end_writes(slots, succeeded)
        if len(gone):
            # Their records may have been written after the keys were dropped.
            self._maintenance.empty_records(gone)
        if len(gone) or not succeeded.all():
            dropped = set(gone.tolist())
            return [
                self._reported(run, i, slot in dropped) for run in done for i, slot in enumerate(run.slots.tolist())
            ]
        return results

    def _reported(self, run: Done, index: int, is_dropped: bool) -> TierResult:
        """Returns the result of a block, of which nothing is there if it was dropped meanwhile. Logs its failure."""
        result = run.results[index]
        if is_dropped:
            return result._replace(error=TierError.GONE, nbytes=0) if result.ok else result
        if result.error is not None:
            self._warnings.warning(
                "disk tier: %s block %s failed (%s), so it is a miss; check the medium",
                "reading" if result.is_read else "writing",
                result.key.hex(),
                run.problems.get(index, result.error),
            )
        return result

    def wait(self, timeout_s: float) -> None:
        if not self._io.done and not self._unreported:
            self._executor.wait(timeout_s)

    # Order and removal.

    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> None:
        self._note_use(self.catalog.touch(keys, stored))

    def _note_use(self, slots: Slots) -> None:
        if len(slots) and not self.files.read_only:
            self._recency.note_use(slots)

    def retain(self, keys: Keys, session: int | None, seconds: float) -> RetainRefusal | None:
        if self._closed or (seconds > 0 and self.files.read_only):
            return RetainRefusal.NO_QUOTA
        refusal = self.catalog.retain(keys, session, seconds)
        self._restart.note_retained()
        self._maintenance.submit()
        return refusal

    def delete(self, keys: Keys) -> None:
        self._maintenance.empty_records(self.catalog.drop(keys))
        self._maintenance.submit()

    def reset(self) -> None:
        """Drops every block. Blocks that are stored later are invalid for the next process, since they belong to other
        weights than that process will load."""
        if self._closed:
            return
        self.catalog.blocks.reset()
        self._restart.note_retained()
        index = self.files.index
        index.header = replace(index.header, generation=self._new_generation(), transient=True)
        self._maintenance.submit()

    def take_evicted(self) -> list[OffloadKey]:
        return self.catalog.take_removed()

    def write_journal(self) -> None:
        """Lets other processes know which blocks have come and gone. May be called by any thread, and waits for the
        medium. Raises OSError."""
        if not self.files.read_only:
            self.files.index.write_journal()

    def look(self) -> None:
        self.is_lost |= self.files.folder.has_vanished()

    def give_up(self) -> None:
        self.files.read_only = True
        self._io.abandon()
        self.catalog.blocks.reset()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._maintenance.close()
        all_ended = self._executor.close(CLOSE_DEADLINE_S)
        self._unreported += self._take_results()
        self._restart.note_retained()
        self.catalog.blocks.reset()
        if all_ended:
            # On a thread of its own, because the medium may hang. The thread closes the files when it continues.
            with suppress(TimeoutError):
                within(FINISH_DEADLINE_S, self._finish)
                return
        # A thread hangs in a call. Its descriptors stay open, so that none comes to name another file. The lock stays,
        # too: the thread may still write when it continues.
        self._io.abandon()

    def _finish(self) -> None:
        """Writes the rest and closes the files."""
        self._maintenance.finish()
        with suppress(OSError):
            self.write_journal()
        self.files.close()

    def check_integrity(self) -> None:
        self.catalog.blocks.check_integrity()
        super().check_integrity()
