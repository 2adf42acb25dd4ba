"""Reads blocks from other seats into host slots, and verifies them.

The methods of ForeignReads are called on the scheduler's thread; jobs run on the executor's. A job owns its ``Batch``
and the host slots in it until the scheduler's thread has taken its results.
"""

from __future__ import annotations

import errno
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kvoffload.abc import ByteArray, OffloadKey, TierError, TierResult
from kvoffload.tiers.disk.blockio import JOB_BYTES, MAX_BUFFERS, Batch
from kvoffload.tiers.disk.format import FACTS, RECORD_BYTES, FormatError, parse_records, payload_checksum
from kvoffload.tiers.executor import Executor
from kvoffload.tiers.shared_dir.followers import GONE_ERRORS, Follower, read_header, read_record
from kvoffload.tiers.shared_dir.foreign import ForeignBlocks, ForeignSlot, SeatView

logger = logging.getLogger(__name__)

STALE_ERRORS = (*GONE_ERRORS, errno.EBADF)
"""Errors of files and folders that were removed, or that the follower has closed since."""


class ForeignReads:
    """Reads blocks that ``blocks`` has found into ``pools`` on ``executor``.

    A block whose bytes are wrong is looked at again: if its owner has replaced it meanwhile, it is gone, and else it is
    corrupt. ``follower`` is asked to look at the record again after each failure.
    """

    def __init__(
        self,
        pools: Sequence[ByteArray],
        executor: Executor,
        blocks: ForeignBlocks,
        follower: Follower,
        clock: Callable[[], float],
        job_bytes: int = JOB_BYTES,
    ) -> None:
        self._pools = list(pools)
        self._executor = executor
        self._blocks = blocks
        self._follower = follower
        self._clock = clock
        self._blocks_per_job = max(1, job_bytes // sum(pool.shape[1] for pool in pools))
        self._done: deque[list[TierResult]] = deque()

    def submit(
        self, keys: Sequence[OffloadKey], places: Sequence[ForeignSlot], host_slots: Sequence[int]
    ) -> list[OffloadKey]:
        """Queues reads. Returns the keys that were taken on."""
        by_view: dict[SeatView, list[int]] = defaultdict(list)
        for i, located in enumerate(places):
            by_view[located.view].append(i)
        taken: list[OffloadKey] = []
        for view, chosen in by_view.items():
            facts = np.zeros(len(chosen), dtype=FACTS)
            facts["payload_checksum"] = [places[i].checksum for i in chosen]
            slots, hosts = np.array([(places[i].slot, host_slots[i]) for i in chosen], dtype=np.int64).T
            batch = Batch([keys[i] for i in chosen], hosts, slots, facts)
            for start in range(0, len(chosen), self._blocks_per_job):
                job = batch.part(start, min(len(chosen), start + self._blocks_per_job))
                if not self._executor.submit_read(partial(self._run, view, job)):
                    return taken
                taken += job.keys
        return taken

    @property
    def has_done(self) -> bool:
        """Whether ``take_done`` would return something."""
        return bool(self._done)

    def take_done(self) -> list[TierResult]:
        """Returns the results of reads that have ended since the last call."""
        return [result for _ in range(len(self._done)) for result in self._done.popleft()]

    # On the executor's threads.

    def _run(self, view: SeatView, batch: Batch) -> None:
        batch, begun, num_ended = batch.sorted(), self._clock(), 0
        try:
            for start, stop in batch.spans(view.header.slots_per_slab, max(1, MAX_BUFFERS // len(self._pools))):
                for results in self._read(view, batch.part(start, stop)):
                    num_ended += len(results)
                    self._done.append(results)
        except Exception as error:
            # Blocks that are not reported would keep their host slots for ever.
            logger.debug("kvoffload: shared directory: reads of writer-%d failed", view.number, exc_info=error)
            rest = batch.part(num_ended, len(batch.keys))
            self._done.append(self._ended(view, rest, [TierError.IO] * len(rest.keys), begun))

    def _read(self, view: SeatView, run: Batch) -> Iterator[list[TierResult]]:
        """Reads neighbouring blocks by one call; if that fails, each by a call of its own."""
        begun, errors = self._clock(), list[TierError | None]()
        try:
            blocks = [[pool[slot] for pool in self._pools] for slot in run.host_slots.tolist()]
            self._fill(view, int(run.slots[0]), [part for block in blocks for part in block])
            for i, block in enumerate(blocks):
                errors.append(self._verify(view, run.part(i, i + 1), block))
        except Exception as error:
            if len(run.keys) > 1:
                for i in range(len(run.keys)):
                    yield from self._read(view, run.part(i, i + 1))
                return
            is_gone = isinstance(error, OSError) and error.errno in STALE_ERRORS
            errors = [TierError.GONE if is_gone or self._blocks.view(view.number) is not view else TierError.IO]
        for slot, problem in zip(run.slots.tolist(), errors, strict=True):
            if problem is not None:
                self._follower.recheck(view.number, slot)
        yield self._ended(view, run, errors, begun)

    def _ended(self, view: SeatView, run: Batch, errors: Sequence[TierError | None], begun: float) -> list[TierResult]:
        ended, nbytes = self._clock(), view.header.block_bytes
        seconds = (ended - begun) / len(run.keys)
        return [
            TierResult(key, True, error, 0 if error else nbytes, seconds, begun, ended)
            for key, error in zip(run.keys, errors, strict=True)
        ]

    def _fill(self, view: SeatView, slot: int, buffers: Sequence[ByteArray]) -> None:
        """Raises OSError if not every byte could be read; ESTALE at the end of the file, which its owner has cut."""
        number, offset = view.header.place(slot)
        slab, nbytes = self._blocks.slabs.get(view, number, self._clock()), sum(buffer.size for buffer in buffers)
        if slab.file.read(buffers, offset) != nbytes:
            if slab.file.size() < offset + nbytes:
                raise OSError(errno.ESTALE, "the slab has become shorter")
            raise OSError(errno.EIO, "not every byte could be read")

    def _verify(self, view: SeatView, run: Batch, block: Sequence[ByteArray]) -> TierError | None:
        """Verifies one block. A bad one is read again after its record, from a file that was opened anew: its owner
        may have replaced it, and empties the record before. Raises OSError."""
        slot, key, checksum = int(run.slots[0]), run.keys[0], int(run.facts["payload_checksum"][0])
        if payload_checksum(view.header, key, block) == checksum:
            return None
        if not self._is_current(view, slot, key, checksum):
            return TierError.GONE
        self._blocks.slabs.close(view, view.header.place(slot)[0])
        self._fill(view, slot, block)
        if payload_checksum(view.header, key, block) == checksum:
            return None
        return TierError.CORRUPT if self._is_current(view, slot, key, checksum) else TierError.GONE

    def _is_current(self, view: SeatView, slot: int, key: OffloadKey, checksum: int) -> bool:
        """Returns whether the index still says that this block is in the slot. Raises OSError."""
        try:
            header = read_header(view.storage, view.header.fingerprint)
        except FormatError:
            return False
        record = read_record(view.storage, view.header.fingerprint, slot)
        if header != view.header or len(record) < RECORD_BYTES:
            return False
        entries = parse_records(header, record, slot)
        return entries.keys == [key] and int(entries.records[0]["payload_checksum"]) == checksum
