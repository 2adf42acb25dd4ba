"""Makes the disk tier's files fit a budget that is smaller than before: the most recently used blocks stay."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress, groupby

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, OffloadKey, Slots
from kvoffload.tiers.disk.files import DiskFiles
from kvoffload.tiers.disk.format import Facts, pack_records
from kvoffload.tiers.disk.storage import StoredFile, aligned_buffer, reason

logger = logging.getLogger(__name__)

MOVE_DEADLINE_S = 20.0
"""Time for moving blocks. In a shared directory, others take a server for gone that is silent for three times as
long."""
MOVED_BYTES = 16 << 20
"""So many bytes are moved between two looks at the clock, or one block."""
LEAST_MOVED_BYTES = 256 << 10
"""A smaller block counts as one of this size: it takes as many calls."""


def shrink(
    files: DiskFiles,
    keys: list[OffloadKey],
    slots: Slots,
    facts: Facts,
    clock: Callable[[], float],
) -> tuple[list[OffloadKey], Slots]:
    """Moves blocks into the budget and cuts the files. Returns the blocks that stay, and their slots.

    ``keys`` and ``slots``: all blocks, the least recently used first; ``facts``: one per slot, kept up to date.
    The most recently used blocks stay, so chains lose their tails, as in evictions. Those beyond the budget replace
    those that do not stay, the most recently used first. After MOVE_DEADLINE_S the rest of them is lost, and older
    blocks stay in their place.
    """
    num_lost, deadline = max(0, len(keys) - files.num_slots), clock() + MOVE_DEADLINE_S
    is_beyond = slots >= files.num_slots
    wanted = np.flatnonzero(is_beyond[num_lost:])[::-1] + num_lost
    is_free = np.ones(files.num_slots, dtype=np.bool_)
    is_free[slots[~is_beyond]] = False
    targets = np.concatenate((np.flatnonzero(is_free), slots[:num_lost][~is_beyond[:num_lost]]))
    at_once = max(1, MOVED_BYTES // max(files.layout.block_bytes, LEAST_MOVED_BYTES))
    slots, done, num_moved, move = slots.copy(), 0, 0, _Move(files)
    while done < len(wanted) and clock() < deadline:
        these = wanted[done : done + at_once]
        into = targets[done : done + len(these)]
        facts[into] = facts[slots[these]]
        records = pack_records(files.index.header, [keys[i] for i in these.tolist()], facts[into])
        arrived = move.move(slots[these], into, records)
        slots[these[arrived]] = into[arrived]
        done += len(these)
        num_moved += int(np.count_nonzero(arrived))
    files.cut()
    stays = slots < files.num_slots
    stays[:num_lost] &= ~np.isin(slots[:num_lost], targets[:done])
    if not done and stays.all():
        return keys, slots
    failed = late = ""
    if move.error and num_moved < done:
        failed = f"; {done - num_moved:,} more could not be moved ({reason(move.error)}) and are lost: check the medium"
    if done < len(wanted):
        late = f"; {len(wanted) - done:,} more were not moved within {MOVE_DEADLINE_S:.0f} s and are lost"
    logger.warning(
        "kvoffload: disk tier: its budget is smaller than before, and %s of %s blocks stay; %s of them were moved%s%s",
        f"{np.count_nonzero(stays):,}",
        f"{len(keys):,}",
        f"{num_moved:,}",
        failed,
        late,
    )
    return list(compress(keys, stays.tolist())), slots[stays]


class _Move:
    """Copies blocks from slots beyond the budget to slots within it."""

    def __init__(self, files: DiskFiles) -> None:
        self.error: OSError | None = None
        """The first error."""
        self._files = files
        self._buffer = aligned_buffer(files.layout.block_bytes)

    def move(self, sources: Slots, targets: Slots, records: ByteArray) -> npt.NDArray[np.bool_]:
        """Moves blocks, whose ``records`` are written after them. Returns which have arrived. The others are lost, and
        so are the blocks that were in ``targets``."""
        index, per_slab = self._files.index, self._files.layout.slots_per_slab
        arrived, emptied = np.zeros(len(sources), dtype=np.bool_), []
        for i, slot in enumerate(targets.tolist()):
            with self._noted():
                index.empty_records(slot, 1)
                emptied.append(i)
        with self._noted():
            index.withdraw(targets)
            by_place = sorted(emptied, key=lambda i: int(sources[i]))
            for number, places in groupby(by_place, lambda i: int(sources[i]) // per_slab):
                with self._noted(), self._files.slabs.opened(number) as slab:
                    for i in places:
                        with self._noted():
                            self._copy(slab, int(sources[i]) % per_slab, int(targets[i]))
                            index.write_records(int(targets[i]), records[i])
                            arrived[i] = True
        return arrived

    def _copy(self, slab: StoredFile, place: int, target: int) -> None:
        if slab.read([self._buffer], place * self._buffer.size) < self._buffer.size:
            raise OSError(errno.EIO, "not every byte was read")
        self._files.slabs.write(target, [self._buffer])

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Returns a context that is left at an OSError, which is noted."""
        try:
            yield
        except OSError as error:
            self.error = self.error or error
