"""Which slots of the host pool the device may copy to and from."""

from __future__ import annotations

from typing import Protocol


class ReadySlots(Protocol):
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
