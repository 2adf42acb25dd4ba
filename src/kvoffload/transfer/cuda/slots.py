"""The host side of copies: addresses of slots, and bounce buffers for slots that the driver does not know yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Addresses, Device
from kvoffload.transfer.cuda.limits import Limits
from kvoffload.transfer.cuda.rows import SLOT, RowArray


class Registration(Protocol):
    """The part of the pool that is registered with the driver."""

    @property
    def num_ready_slots(self) -> int:
        """The device may copy to and from the slots below this number, which only grows."""
        ...

    @property
    def boundary_slots(self) -> int:
        """One copy must not cross a multiple of this number of slots."""
        ...

    def release(self) -> None:
        """Called when no copy of the slots is in progress and none will begin."""
        ...


class Unregistered:
    """A pool that is not registered: all copies go through bounce buffers."""

    num_ready_slots = 0
    boundary_slots = 1

    def release(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class BounceBuffer:
    """Pinned memory that holds the bytes of one chunk, row by row."""

    data: ByteArray
    address: int


class HostSlots:
    """The slots of a pool, shape (num_slots, slot_bytes), as addresses."""

    def __init__(self, pool_data: ByteArray, registration: Registration) -> None:
        if not pool_data.flags.c_contiguous:
            raise ValueError("the slots of a pool must be one piece of memory")
        self.num_slots, self.slot_bytes = pool_data.shape
        self._bytes = pool_data.reshape(-1)
        self.address = int(pool_data.ctypes.data)
        self._registration = registration

    def new_bounce_buffers(self, device: Device, limits: Limits, largest: int) -> list[BounceBuffer]:
        """Returns new buffers for these slots, see ``new_bounce_buffers``."""
        return new_bounce_buffers(device, self._registration, self.num_slots, limits, largest)

    def are_ready(self, slots: Numbers) -> bool:
        """Returns whether the device may copy to and from all of these slots."""
        num_ready = self._registration.num_ready_slots
        return num_ready >= self.num_slots or int(slots.max()) < num_ready

    def sections(self, rows: RowArray) -> Numbers:
        """Returns the section of the pool in which the slot of each row lies. One copy stays in one section."""
        sections: Numbers = rows[SLOT] // self._registration.boundary_slots
        return sections

    def read(self, buffer: BounceBuffer, places: Addresses, offsets: Addresses, sizes: Addresses) -> None:
        """Copies ``sizes[i]`` bytes at ``offsets[i]`` of the pool to ``places[i]`` of the buffer."""
        for at, offset, nbytes in _merged(places, offsets, sizes):
            buffer.data[at : at + nbytes] = self._bytes[offset : offset + nbytes]

    def write(self, buffer: BounceBuffer, places: Addresses, offsets: Addresses, sizes: Addresses) -> None:
        """Makes the copies of ``read`` in the other direction."""
        for at, offset, nbytes in _merged(places, offsets, sizes):
            self._bytes[offset : offset + nbytes] = buffer.data[at : at + nbytes]


def _merged(places: Addresses, offsets: Addresses, sizes: Addresses) -> list[tuple[int, int, int]]:
    merged = merge(places, offsets, sizes, np.zeros_like(places))
    return list(zip(*(each.tolist() for each in merged), strict=True))


def new_bounce_buffers(
    device: Device, registration: Registration, num_slots: int, limits: Limits, largest: int
) -> list[BounceBuffer]:
    """Returns new buffers for rows of at most ``largest`` bytes; none if all ``num_slots`` slots are ready already."""
    if registration.num_ready_slots >= num_slots:
        return []
    nbytes = max(limits.bounce_bytes, largest)
    arrays = [device.allocate_host(nbytes) for _ in range(limits.num_bounce_buffers)]
    return [BounceBuffer(data, int(data.ctypes.data)) for data in arrays]


def merge(
    targets: Addresses, sources: Addresses, sizes: Addresses, sections: Numbers
) -> tuple[Addresses, Addresses, Addresses]:
    """Returns the same copies in fewer pieces: neighbours in the same section that follow one another on both sides
    become one."""
    breaks = (targets[1:] != targets[:-1] + sizes[:-1]) | (sources[1:] != sources[:-1] + sizes[:-1])
    starts = np.concatenate([[0], np.flatnonzero(breaks | (sections[1:] != sections[:-1])) + 1])
    return targets[starts], sources[starts], np.add.reduceat(sizes, starts)
