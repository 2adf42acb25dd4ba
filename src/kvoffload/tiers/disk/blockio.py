"""Moves blocks between host slots and slots on disk, and verifies them.

**Threads.** The scheduler's thread owns every object of the tier and calls every public method. The executor's threads
run jobs of BlockIO, any number at a time, and one job of Maintenance at a time. A job may touch the following.

- A job of BlockIO owns the arrays of its ``Batch``, and the host slots and slots on disk that these name, with payloads
  and records, until the scheduler's thread has taken its results: nothing else reads or writes them until then. It
  appends to the queue of results, and only reads what else it needs of BlockIO.
- A job of Maintenance grows the files and writes the header, the recency file, and the records of blocks that are gone.
  It shares with the scheduler's thread: ``SlabFiles.header`` and ``num_allocated``, which one thread assigns and the
  other reads; the queues of stale records and of outcomes; the array of how often each slot was given away; the arrays
  of Recency. If a value changes just after it was read, a record or a page is written once more, or a restart does not
  find a block; bytes are never wrong.
- The files of SlabFiles are read and written by all of these at the same time, at different offsets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, OffloadKey, Slots, TierError, TierResult
from kvoffload.tiers.disk.format import (
    EMPTY_RECORD,
    MAX_HITS,
    MAX_SECONDS,
    Header,
    pack_record,
    payload_checksum,
)
from kvoffload.tiers.disk.slabs import SlabFiles
from kvoffload.tiers.disk.storage import is_full
from kvoffload.tiers.executor import Executor
from kvoffload.tiers.threads import MAX_QUEUED_WRITES

JOB_BYTES = 4 << 20
"""Small blocks share a job of up to this size; larger ones have one each."""
MAX_BUFFERS = 1024
"""IOV_MAX: buffers per system call."""

FACTS = np.dtype([("sequence", "<i8"), ("stored_at", "<u4"), ("hits", "<u4"), ("payload_checksum", "<u8")])
"""Fields of a block's record other than key and layout."""
Facts = npt.NDArray[np.void]
"""Array of FACTS."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks to be moved between host slots and slots on disk, and the facts of their records; one entry per block."""

    keys: list[OffloadKey]
    host_slots: Slots
    slots: Slots
    facts: Facts

    def part(self, start: int, stop: int) -> Batch:
        """Returns entries ``start`` to ``stop``; ``facts`` is a view."""
        return Batch(self.keys[start:stop], self.host_slots[start:stop], self.slots[start:stop], self.facts[start:stop])

    def sorted(self) -> Batch:
        """Returns a copy in ascending order of ``slots``."""
        order = np.argsort(self.slots)
        keys = [self.keys[i] for i in order.tolist()]
        return Batch(keys, self.host_slots[order], self.slots[order], self.facts[order])

    def runs(self, slots_per_slab: int, max_blocks: int) -> Iterator[Batch]:
        """Yields parts of at most ``max_blocks`` blocks that lie next to each other in a slab. ``slots`` must be in
        ascending order."""
        slots = self.slots
        ends = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % slots_per_slab == 0)) + 1
        start = 0
        for end in [*ends.tolist(), len(slots)]:
            while start < end:
                yield self.part(start, min(end, start + max_blocks))
                start = min(end, start + max_blocks)


@dataclass(frozen=True, slots=True)
class Done:
    """A run of blocks whose transfer has ended. ``facts`` is valid for the blocks whose result is good. ``problem``
    says why no block is good."""

    is_read: bool
    slots: Slots
    facts: Facts
    results: list[TierResult]
    problem: str = ""


class BlockIO:
    """Runs transfers between ``pools`` (one per rank, shape (num_slots, slot_bytes)) and ``files`` on ``executor``.

    A block is written in this order: the slot's old record is emptied, then comes the payload, then the new record. So
    whatever a kill interrupts is a miss afterwards. Blocks that are neighbours in a slab are moved by one call. If that
    call fails, each of its blocks is moved by a call of its own.
    """

    def __init__(
        self,
        files: SlabFiles,
        pools: Sequence[ByteArray],
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        job_bytes: int = JOB_BYTES,
    ) -> None:
        self.num_reading = self.num_writing = 0
        """Blocks whose transfers have not been taken by ``take_done``."""
        self._files = files
        self._pools = list(pools)
        self._executor = executor
        self._clock = clock
        self._wall_clock = wall_clock
        self._blocks_per_job = max(1, job_bytes // files.header.block_bytes)
        self._done: deque[Done] = deque()
        self._abandoned = False

    @property
    def write_room(self) -> int:
        """Blocks that may be submitted for writing now."""
        return MAX_QUEUED_WRITES * self._blocks_per_job - self.num_writing

    @property
    def has_done(self) -> bool:
        """Whether ``take_done`` would return something."""
        return bool(self._done)

    def submit_reads(self, batch: Batch) -> int:
        """Queues reads. The facts are those that the blocks were stored with, except the sequence, which is new.
        Returns how many blocks, from the first on, were taken on."""
        taken = self._submit(self._executor.submit_read, self._read, batch)
        self.num_reading += taken
        return taken

    def submit_writes(self, batch: Batch) -> int:
        """Queues writes. The facts need a sequence only. Returns how many blocks, from the first on, were taken on."""
        taken = self._submit(self._executor.submit_write, self._write, batch)
        self.num_writing += taken
        return taken

    def take_done(self) -> list[Done]:
        """Returns the transfers that have ended since the last call."""
        done = [self._done.popleft() for _ in range(len(self._done))]
        for run in done:
            if run.is_read:
                self.num_reading -= len(run.results)
            else:
                self.num_writing -= len(run.results)
        return done

    def abandon(self) -> None:
        """Stops jobs that hang from writing records when they continue: the host slots may have other contents then."""
        self._abandoned = True

    def _submit(
        self, submit: Callable[[Callable[[], None]], bool], move: Callable[[Batch, Header], None], batch: Batch
    ) -> int:
        header, count = self._files.header, len(batch.keys)
        for start in range(0, count, self._blocks_per_job):
            job = batch.part(start, min(count, start + self._blocks_per_job))
            if not submit(partial(self._run, move, job, header)):
                return start
        return count

    # On the executor's threads.

    def _run(self, move: Callable[[Batch, Header], None], batch: Batch, header: Header) -> None:
        for run in batch.sorted().runs(header.slots_per_slab, max(1, MAX_BUFFERS // len(self._pools))):
            move(run, header)

    def _read(self, run: Batch, header: Header) -> None:
        begun = self._clock()
        try:
            blocks = self._blocks(run)
            self._files.read(int(run.slots[0]), [part for block in blocks for part in block])
            corrupt = self._verify(run, header, blocks)
        except Exception as problem:
            if len(run.keys) > 1:
                for i in range(len(run.keys)):
                    self._read(run.part(i, i + 1), header)
            else:
                self._write_records(run, EMPTY_RECORD, is_change=True)
                self._end(run, True, begun, problem)
            return
        self._write_records(run, self._records(run, header, corrupt), is_change=any(corrupt))
        self._end(run, True, begun, corrupt=corrupt)

    def _verify(self, run: Batch, header: Header, blocks: list[list[ByteArray]]) -> list[bool]:
        """Returns which blocks differ from what was stored. Counts a hit for the others."""
        checksums = run.facts["payload_checksum"].tolist()
        corrupt = [
            payload_checksum(header, key, block) != checksum
            for key, block, checksum in zip(run.keys, blocks, checksums, strict=True)
        ]
        run.facts["hits"] = np.minimum(run.facts["hits"], MAX_HITS - 1) + 1
        return corrupt

    def _write(self, run: Batch, header: Header) -> None:
        begun = self._clock()
        try:
            blocks = self._blocks(run)
            slot = int(run.slots[0])
            self._files.empty_records(slot, len(run.keys))
            run.facts["payload_checksum"] = [
                payload_checksum(header, key, block) for key, block in zip(run.keys, blocks, strict=True)
            ]
            run.facts["stored_at"] = min(max(0, int(self._wall_clock())), MAX_SECONDS)
            run.facts["hits"] = 0
            self._files.write(slot, [part for block in blocks for part in block])
            if not self._abandoned:
                self._files.write_records(slot, self._records(run, header))
        except Exception as problem:
            if len(run.keys) > 1:
                for i in range(len(run.keys)):
                    self._write(run.part(i, i + 1), header)
            else:
                self._end(run, False, begun, problem)
            return
        self._end(run, False, begun)

    def _blocks(self, run: Batch) -> list[list[ByteArray]]:
        """Returns the host memory of each block, one buffer per rank."""
        return [[pool[slot] for pool in self._pools] for slot in run.host_slots.tolist()]

    def _records(self, run: Batch, header: Header, corrupt: Sequence[bool] = ()) -> ByteArray:
        """Returns the records of the run's slots, empty for ``corrupt`` blocks."""
        records = []
        for i, (key, facts) in enumerate(zip(run.keys, run.facts.tolist(), strict=True)):
            if corrupt and corrupt[i]:
                records.append(EMPTY_RECORD)
                continue
            sequence, stored_at, hits, checksum = facts
            records.append(
                pack_record(header, key, sequence=sequence, stored_at=stored_at, hits=hits, payload_checksum=checksum)
            )
        return np.concatenate(records)

    def _write_records(self, run: Batch, records: ByteArray, is_change: bool) -> None:
        """Writes the records after a read, if the medium allows it; the bytes that were read are right without it."""
        if not self._abandoned and not self._files.read_only:
            with suppress(OSError):
                self._files.write_records(int(run.slots[0]), records, is_change=is_change)

    def _end(
        self,
        run: Batch,
        is_read: bool,
        begun: float,
        problem: Exception | None = None,
        corrupt: Sequence[bool] = (),
    ) -> None:
        ended = self._clock()
        seconds = (ended - begun) / len(run.keys)
        results = []
        for i, key in enumerate(run.keys):
            error = None
            if problem is not None:
                error = TierError.NO_SPACE if is_full(problem) else TierError.IO
            elif corrupt and corrupt[i]:
                error = TierError.CORRUPT
            nbytes = 0 if error else self._files.header.block_bytes
            results.append(TierResult(key, is_read, error, nbytes, seconds, begun, ended))
        self._done.append(Done(is_read, run.slots, run.facts, results, str(problem or "")))
