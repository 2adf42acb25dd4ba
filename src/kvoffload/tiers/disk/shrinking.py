"""Makes the disk tier's files fit a budget that is smaller than before: the most recently used blocks stay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import compress

import numpy as np

from kvoffload.abc import OffloadKey, Slots
from kvoffload.tiers.disk.format import Facts, pack_records
from kvoffload.tiers.disk.slabs import SlabFiles
from kvoffload.tiers.disk.storage import reason

logger = logging.getLogger(__name__)

MOVE_DEADLINE_S = 20.0
"""Time for moving blocks. In a shared directory, others take a server for gone that is silent for three times as
long."""
MOVED_AT_ONCE = 64
MOVED_BYTES = 16 << 20
"""So many blocks are moved between two looks at the clock, or blocks of so many bytes, or one."""


def shrink(
    files: SlabFiles, keys: list[OffloadKey], slots: Slots, facts: Facts, clock: Callable[[], float]
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
    at_once = max(1, min(MOVED_AT_ONCE, MOVED_BYTES // files.header.block_bytes))
    slots, done, num_moved, error = slots.copy(), 0, 0, None
    while done < len(wanted) and clock() < deadline:
        these = wanted[done : done + at_once]
        into = targets[done : done + len(these)]
        facts[into] = facts[slots[these]]
        records = pack_records(files.header, [keys[i] for i in these.tolist()], facts[into])
        arrived, problem = files.move(slots[these], into, records)
        error = error or problem
        slots[these[arrived]] = into[arrived]
        done += len(these)
        num_moved += int(np.count_nonzero(arrived))
    files.cut()
    stays = slots < files.num_slots
    stays[:num_lost] &= ~np.isin(slots[:num_lost], targets[:done])
    if not done and stays.all():
        return keys, slots
    failed = late = ""
    if error and num_moved < done:
        failed = f"; {done - num_moved:,} more could not be moved ({reason(error)}) and are lost: check the medium"
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
