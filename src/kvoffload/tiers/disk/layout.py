"""What slots take of the medium, and how many slots a budget gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.abc import ConfigError
from kvoffload.host.pool import SLOT_ALIGNMENT
from kvoffload.tiers.disk.format import MAX_BLOCK_BYTES, MAX_RANKS, RECENCY_BYTES, RECORD_BYTES
from kvoffload.tiers.disk.journal import journal_bytes
from kvoffload.units import Amount, format_bytes

SLAB_BYTES = 1 << 30
FIXED_BYTES = 64 << 10
"""Set aside for folders, lock, header, and the file system's map of the index."""
SLAB_OVERHEAD_BYTES = 64 << 10
"""Set aside per slab for the file system's map of it."""
EXTENT_BYTES = 24
"""Set aside per slot: if slots are written one at a time, each can become an extent of its own, which takes 12 bytes in
file system blocks that are half full."""
MAPPED_BYTES = 1020
"""A file system without extents needs one byte of map per this many bytes: 4 bytes per block of 4 KiB, and the same
again for the map's own blocks."""
LEAST_ADVISED = 1 << 20
"""A budget below this is no advice."""


def slot_cost(block_bytes: int) -> int:
    """Returns an upper bound of the bytes that one slot takes of the medium."""
    return block_bytes + RECORD_BYTES + RECENCY_BYTES + max(EXTENT_BYTES, block_bytes // MAPPED_BYTES)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Slots of ``block_bytes`` in slabs of ``slots_per_slab``, and a journal of ``journal_entries``, 0 without one."""

    block_bytes: int
    slots_per_slab: int
    journal_entries: int = 0

    def num_slabs(self, num_slots: int) -> int:
        return -(-num_slots // self.slots_per_slab)

    def bytes_of(self, num_slots: int) -> int:
        """Returns an upper bound of the bytes that ``num_slots`` slots take of the medium."""
        fixed = FIXED_BYTES + (journal_bytes(self.journal_entries) if self.journal_entries else 0)
        return fixed + self.num_slabs(num_slots) * SLAB_OVERHEAD_BYTES + num_slots * slot_cost(self.block_bytes)

    def slots_within(self, nbytes: int) -> int:
        """Returns the highest number of slots whose ``bytes_of`` is at most ``nbytes``."""
        fixed = self.bytes_of(0)
        whole, rest = divmod(nbytes - fixed, self.bytes_of(self.slots_per_slab) - fixed)
        rest_slots = max(0, rest - SLAB_OVERHEAD_BYTES) // slot_cost(self.block_bytes)
        return max(0, whole * self.slots_per_slab + rest_slots)


def check_slot_bytes(slot_bytes: Sequence[int]) -> None:
    """Raises ConfigError if the tier cannot serve pools, one per rank, with slots of these sizes."""
    if not 1 <= len(slot_bytes) <= MAX_RANKS:
        raise ConfigError(f"{len(slot_bytes)} pools: the disk tier serves 1 to {MAX_RANKS} ranks")
    if any(size < 1 or size % SLOT_ALIGNMENT for size in slot_bytes):
        raise ConfigError(
            "slot_bytes",
            list(slot_bytes),
            f"with a disk tier, slots of host pools must be multiples of {SLOT_ALIGNMENT} bytes",
            "make each with padded_slot_bytes(block_bytes) of kvoffload.host.pool",
        )
    if sum(slot_bytes) > MAX_BLOCK_BYTES:
        raise ConfigError(
            fault=f"blocks of {format_bytes(sum(slot_bytes))}: the disk tier takes at most "
            f"{format_bytes(MAX_BLOCK_BYTES)}",
            fix="set a smaller block size",
        )


def check_capacity(capacity_bytes: int, possible: int) -> None:
    """Raises ConfigError if ``capacity_bytes`` is more than the file system's ``possible`` bytes."""
    if capacity_bytes > possible:
        most = format_bytes(possible * 9 // 10)
        fix = f"set it to {most} or less" if possible >= LEAST_ADVISED else "make room, or name another directory"
        raise ConfigError(
            "bytes",
            Amount(capacity_bytes),
            f"the file system of the directory can give only {format_bytes(possible)}",
            fix,
        )
