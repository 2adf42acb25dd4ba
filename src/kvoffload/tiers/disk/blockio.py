"""Moves blocks between host slots and slots on disk, and verifies them.

**Threads.** The scheduler's thread owns every object of the tier and calls every public method. The executor's threads
run jobs of BlockIO, any number at a time, and one job of Maintenance at a time. A job may touch the following.

- A job of BlockIO owns the arrays of its ``Batch``, and the host slots and slots on disk that these name, with payloads
  and records, until the scheduler's thread has taken its results: nothing else reads or writes them until then. It
  appends to the queue of results, and only reads what else it needs of BlockIO.
- A job of Maintenance grows the files and writes the header, the recency file, and the records of blocks that are gone.
  It shares with the scheduler's thread: ``Index.header`` and ``DiskFiles.num_allocated``, which one thread assigns and
  the other reads; the queues of stale records and of outcomes; the array of how often each slot was given away; the
  arrays of Recency. If a value changes just after it was read, a record or a page is written once more, or a restart
  does not find a block; bytes are never wrong.
- The files of DiskFiles are read and written by all of these at the same time, at different offsets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvoffload.abc import ByteArray, OffloadKey, Slots, TierError, TierResult
from kvoffload.tiers.disk.files import DiskFiles
from kvoffload.tiers.disk.format import EMPTY_RECORD, MAX_SECONDS, Facts, Header, pack_records, payload_checksums
from kvoffload.tiers.disk.storage import is_full
from kvoffload.tiers.threads import MAX_QUEUED, Executor

JOB_BYTES = 4 << 20
"""Small blocks share a job of up to this size; a larger block has a job of its own."""
HANDOVER_S = 0.01
"""A job hands over its blocks once this much time has passed and the current read has ended: a request may wait for
nothing else."""
MAX_BUFFERS = 1024
"""IOV_MAX: buffers per system call."""

Span = tuple[int, int]
"""Start and stop (exclusive) of some blocks of a batch."""


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

    def spans(self, slots_per_slab: int, max_blocks: int) -> list[Span]:
        """Returns the runs of blocks that lie next to each other in a slab, at most ``max_blocks`` each. ``slots`` must
        be in ascending order."""
        slots = self.slots
        ends = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % slots_per_slab == 0)) + 1
        spans, start = [], 0
        for end in [*ends.tolist(), len(slots)]:
            while start < end:
                stop = min(end, start + max_blocks)
                spans.append((start, stop))
                start = stop
        return spans


@dataclass(frozen=True, slots=True)
class Done:
    """Blocks whose transfer has ended. ``facts`` is valid for those whose result is good. ``problems`` says, by index,
    why the medium could not move a block."""

    is_read: bool
    slots: Slots
    facts: Facts
    results: list[TierResult]
    problems: Mapping[int, Exception]


class BlockJobs:
    """Moves batches of blocks into or out of ``pools`` (one per rank, shape (num_slots, slot_bytes)) in jobs on
    ``executor``. Smaller blocks share a job of ``job_bytes``.

    Blocks that are neighbours in a slab are moved by one call. If that fails, each of its blocks is moved by a call of
    its own, and those that cannot be moved do not affect the others.
    """

    def __init__(
        self, pools: Sequence[ByteArray], executor: Executor, clock: Callable[[], float], job_bytes: int
    ) -> None:
        self.done: deque[Done] = deque()
        """Transfers that have ended, for ``take_done``."""
        self.num_moving = {True: 0, False: 0}
        """Blocks whose reads (True) and writes were not taken by ``take_done``."""
        self._pools = list(pools)
        self._executor = executor
        self._clock = clock
        self._block_bytes: int = sum(pool.shape[1] for pool in pools)
        self._blocks_per_job = max(1, job_bytes // self._block_bytes)

    def take_done(self) -> list[Done]:
        """Returns the transfers that have ended since the last call."""
        done = [self.done.popleft() for _ in range(len(self.done))]
        for run in done:
            self.num_moving[run.is_read] -= len(run.results)
        return done

    def _submit(self, batch: Batch, move: Callable[[Batch], Iterator[Done]], *, is_read: bool) -> int:
        """Queues jobs that ``move`` parts of ``batch``, sorted. Returns how many blocks, from the first on, were taken
        on."""
        submit = self._executor.submit_read if is_read else self._executor.submit_write
        taken, count = 0, len(batch.keys)
        while taken < count:
            job = batch.part(taken, min(count, taken + self._blocks_per_job))
            if not submit(partial(self._run, job, move, is_read)):
                break
            taken += len(job.keys)
        self.num_moving[is_read] += taken
        return taken

    # On the executor's threads.

    def _run(self, batch: Batch, move: Callable[[Batch], Iterator[Done]], is_read: bool) -> None:
        batch, begun, num_ended = batch.sorted(), self._clock(), 0
        try:
            for done in move(batch):
                num_ended += len(done.results)
                self.done.append(done)
        except Exception as problem:
            # Blocks that are not reported would count as being moved, and stay pinned, for ever.
            rest = batch.part(num_ended, len(batch.keys))
            errors = dict.fromkeys(range(len(rest.keys)), TierError.IO)
            self.done.append(self._ended(rest, is_read, begun, errors, dict.fromkeys(errors, problem)))

    def _spans(self, batch: Batch, header: Header) -> list[Span]:
        return batch.spans(header.slots_per_slab, max(1, MAX_BUFFERS // len(self._pools)))

    def _blocks(self, batch: Batch) -> list[list[ByteArray]]:
        """Returns the host memory of each block, one buffer per rank."""
        return [[pool[slot] for pool in self._pools] for slot in batch.host_slots.tolist()]

    def _each(
        self, move: Callable[[int, int], None], spans: Sequence[Span], problems: dict[int, Exception]
    ) -> list[Span]:
        """Calls ``move`` for each span; if that fails, for each of its blocks. Returns the spans that were moved, and
        adds the others to ``problems``, by block."""
        moved = []
        for start, stop in spans:
            try:
                move(start, stop)
            except Exception as problem:
                if stop - start > 1:
                    moved += self._each(move, [(i, i + 1) for i in range(start, stop)], problems)
                else:
                    problems[start] = problem
            else:
                moved.append((start, stop))
        return moved

    def _ended(
        self,
        batch: Batch,
        is_read: bool,
        begun: float,
        errors: Mapping[int, TierError],
        problems: Mapping[int, Exception],
    ) -> Done:
        """``errors``: of the blocks that were not moved, by index."""
        ended = self._clock()
        seconds = (ended - begun) / len(batch.keys)
        results = [TierResult(key, is_read, None, self._block_bytes, seconds, begun, ended) for key in batch.keys]
        for i, error in errors.items():
            results[i] = results[i]._replace(error=error, nbytes=0)
        return Done(is_read, batch.slots, batch.facts, results, problems)


class BlockIO(BlockJobs):
    """Moves blocks between the pools and ``files``.

    A block is written in this order: the slot's old record is emptied, then comes the payload, then the new record. So
    whatever a kill interrupts is a miss afterwards. Each step is done for all blocks of a job before the next one.
    """

    def __init__(
        self,
        files: DiskFiles,
        pools: Sequence[ByteArray],
        executor: Executor,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        job_bytes: int,
    ) -> None:
        super().__init__(pools, executor, clock, job_bytes)
        self._files = files
        self._wall_clock = wall_clock
        self._abandoned = False

    @property
    def write_room(self) -> int:
        """Blocks that may be submitted for writing now."""
        return MAX_QUEUED * self._blocks_per_job - self.num_moving[False]

    def submit(self, batch: Batch, *, is_read: bool) -> int:
        """Queues reads or writes. The facts are those of the blocks' records; for writes they need a sequence only.
        Returns how many blocks, from the first on, were taken on."""
        move = self._read if is_read else self._write
        return self._submit(batch, partial(move, self._files.index.header), is_read=is_read)

    def abandon(self) -> None:
        """Stops jobs that hang from writing records when they continue: the host slots may have other contents then."""
        self._abandoned = True

    # On the executor's threads.

    def _read(self, header: Header, batch: Batch) -> Iterator[Done]:
        blocks, slots = self._blocks(batch), batch.slots.tolist()

        def fill(start: int, stop: int) -> None:
            buffers = blocks[start] if stop - start == 1 else [part for block in blocks[start:stop] for part in block]
            self._files.slabs.read(slots[start], buffers)

        spans = self._spans(batch, header)
        first, problems, begun = 0, dict[int, Exception](), self._clock()
        for number, span in enumerate(spans, 1):
            self._each(fill, [span], problems)
            if number == len(spans) or self._clock() - begun >= HANDOVER_S:
                yield self._verified(batch, blocks, spans[first:number], problems, header, begun)
                first, problems, begun = number, {}, self._clock()

    def _verified(
        self,
        batch: Batch,
        blocks: Sequence[Sequence[ByteArray]],
        spans: Sequence[Span],
        problems: dict[int, Exception],
        header: Header,
        begun: float,
    ) -> Done:
        """Verifies the blocks of ``spans``, which were read except for those with ``problems``, and empties the records
        of those that cannot be used. The others keep theirs: a write per read would cost half of the speed."""
        first, stop = spans[0][0], spans[-1][1]
        mine = batch.part(first, stop)
        is_bad = payload_checksums(header, mine.keys, blocks[first:stop]) != mine.facts["payload_checksum"]
        is_bad[[i - first for i in problems]] = True
        corrupt = np.flatnonzero(is_bad).tolist()
        if not self._abandoned and not self._files.read_only:
            for i in corrupt:
                # The next process finds it corrupt, too.
                with suppress(OSError):
                    self._files.index.write_records(int(mine.slots[i]), EMPTY_RECORD)
        problems = {i - first: problem for i, problem in problems.items()}
        errors = dict.fromkeys(corrupt, TierError.CORRUPT) | _errors_of(problems)
        return self._ended(mine, True, begun, errors, problems)

    def _write(self, header: Header, batch: Batch) -> Iterator[Done]:
        begun = self._clock()
        blocks, slots = self._blocks(batch), batch.slots.tolist()
        problems: dict[int, Exception] = {}

        def empty(start: int, stop: int) -> None:
            self._files.index.empty_records(slots[start], stop - start)
            self._files.index.withdraw(slice(slots[start], slots[start] + stop - start))

        def write(start: int, stop: int) -> None:
            self._files.slabs.write(slots[start], [part for block in blocks[start:stop] for part in block])

        def record(start: int, stop: int) -> None:
            self._files.index.write_records(slots[start], records[start:stop].reshape(-1))

        spans = self._each(empty, self._spans(batch, header), problems)
        batch.facts["payload_checksum"] = payload_checksums(header, batch.keys, blocks)
        batch.facts["stored_at"] = min(max(0, int(self._wall_clock())), MAX_SECONDS)
        records = pack_records(header, batch.keys, batch.facts)
        spans = self._each(write, spans, problems)
        if not self._abandoned:
            self._each(record, spans, problems)
        yield self._ended(batch, False, begun, _errors_of(problems), problems)


def _errors_of(problems: Mapping[int, Exception]) -> dict[int, TierError]:
    return {i: TierError.NO_SPACE if is_full(problem) else TierError.IO for i, problem in problems.items()}
