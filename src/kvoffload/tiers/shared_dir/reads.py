"""Reads blocks from other seats into host slots, and verifies them.

The methods of ForeignReads are called on the scheduler's thread; jobs run on the executor's. A job owns its ``Batch``
and the host slots in it until the scheduler's thread has taken its results.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from kvoffload.abc import ByteArray, OffloadKey, TierError
from kvoffload.tiers.disk.blockio import JOB_BYTES, Batch, BlockJobs, Done
from kvoffload.tiers.disk.format import FACTS, RECORD_BYTES, FormatError, parse_records, payload_checksum
from kvoffload.tiers.shared_dir.followers import GONE_ERRORS, Follower, read_header, read_record
from kvoffload.tiers.shared_dir.foreign import ForeignBlocks, ForeignSlot, SeatView
from kvoffload.tiers.threads import Executor

STALE_ERRORS = (*GONE_ERRORS, errno.EBADF)
"""Errors of files and folders that were removed, or that the follower has closed since."""


class ForeignReads(BlockJobs):
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
        super().__init__(pools, executor, clock, job_bytes)
        self._found = blocks
        self._follower = follower

    def submit(self, blocks: Mapping[OffloadKey, tuple[ForeignSlot, int]]) -> list[OffloadKey]:
        """Queues reads of blocks, whose places and host slots are given. Returns the keys that were taken on."""
        by_view: dict[SeatView, list[OffloadKey]] = defaultdict(list)
        for key, (located, _) in blocks.items():
            by_view[located.view].append(key)
        taken: list[OffloadKey] = []
        for view, keys in by_view.items():
            facts = np.zeros(len(keys), dtype=FACTS)
            facts["payload_checksum"] = [blocks[key][0].checksum for key in keys]
            slots, hosts = np.array([(blocks[key][0].slot, blocks[key][1]) for key in keys], dtype=np.int64).T
            batch = Batch(keys, hosts, slots, facts)
            taken += batch.keys[: self._submit(batch, partial(self._read, view), is_read=True)]
        return taken

    # On the executor's threads.

    def _read(self, view: SeatView, batch: Batch) -> Iterator[Done]:
        blocks, slots = self._blocks(batch), batch.slots.tolist()
        checksums = batch.facts["payload_checksum"].tolist()
        errors: dict[int, TierError | None] = {}

        def read(start: int, stop: int) -> None:
            self._fill(view, slots[start], [part for block in blocks[start:stop] for part in block])
            for i in range(start, stop):
                errors[i] = self._verify(view, slots[i], batch.keys[i], checksums[i], blocks[i])

        for start, stop in self._spans(batch, view.header):
            begun, problems = self._clock(), dict[int, Exception]()
            self._each(read, [(start, stop)], problems)
            for i, problem in problems.items():
                is_gone = isinstance(problem, OSError) and problem.errno in STALE_ERRORS
                errors[i] = TierError.GONE if is_gone or self._found.view(view.number) is not view else TierError.IO
            failed = {i - start: error for i in range(start, stop) if (error := errors[i]) is not None}
            for i in failed:
                self._follower.recheck(view.number, slots[start + i])
            yield self._ended(batch.part(start, stop), True, begun, failed, {})

    def _fill(self, view: SeatView, slot: int, buffers: Sequence[ByteArray]) -> None:
        """Raises OSError if not every byte could be read; ESTALE at the end of the file, which its owner has cut."""
        number, offset = view.header.place(slot)
        slab, nbytes = self._found.slabs.get(view, number, self._clock()), sum(buffer.size for buffer in buffers)
        if slab.file.read(buffers, offset) != nbytes:
            if slab.file.size() < offset + nbytes:
                raise OSError(errno.ESTALE, "the slab has become shorter")
            raise OSError(errno.EIO, "not every byte could be read")

    def _verify(
        self, view: SeatView, slot: int, key: OffloadKey, checksum: int, block: Sequence[ByteArray]
    ) -> TierError | None:
        """Verifies one block. A bad one is read again after its record, from a file that was opened anew: its owner
        may have replaced it, and empties the record before. Raises OSError."""
        if payload_checksum(view.header, key, block) == checksum:
            return None
        if not self._is_current(view, slot, key, checksum):
            return TierError.GONE
        self._found.slabs.close(view, view.header.place(slot)[0])
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
