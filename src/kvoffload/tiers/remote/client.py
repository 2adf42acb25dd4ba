"""The contract of a store's client, which runs in a process of its own."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvoffload.abc import ByteArray, KVOffloadError


class Outcome(enum.IntEnum):
    """The result of a call for one value, and of a request for one block. None of them is 0."""

    OK = enum.auto()
    """``exists``: the store has the value. Otherwise: done. A block that was read is verified."""
    MISSING = enum.auto()
    """The store does not have the value, or has it in another format."""
    HELD = enum.auto()
    """``put``: the store has a value of this name already, and has kept it."""
    OTHER_SIZE = enum.auto()
    """``get``: the store has a value of this name, which does not have the size of the buffers. The first of them
    begins with the value's first RECORD_BYTES, if the value has so many and the store gives a part of a value."""
    FULL = enum.auto()
    """``put``: the store has no room."""
    AWAY = enum.auto()
    """The part of the store that has the value does not work now, or refuses writes, while other parts work."""
    FAILED = enum.auto()
    """The store did not answer, or answered with another error. It may have carried the call out."""
    CORRUPT = enum.auto()
    """Not of a client: the bytes that were read are not those that were stored under the name."""


class StoreError(KVOffloadError):
    """A whole call failed, for the reason in the message."""


class StoreClient(ABC):
    """Values by name in a store that others use too. A value is put once and does not change, but the store may lose
    it at any time.

    All methods may be called from several threads at once. They may block, raise or end the process: a caller
    with a deadline ends the process. They raise StoreError if nothing is known about any of the names. Names are
    ASCII and contain letters, digits and ``/._-`` only.
    """

    registers_memory = False
    """Whether buffers of ``get`` and ``put`` must lie in registered memory, where peers of the store may read and
    write. Values are then one buffer each, in memory of their own, and are copied before they are verified."""

    def register(self, memory: ByteArray) -> None:
        """Prepares ``memory`` for transfers. By default does nothing. Raises StoreError."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[Outcome]:
        """Returns OK, MISSING, AWAY or FAILED per name."""

    @abstractmethod
    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        """Reads each value into its buffers, one after the other. Returns OK, MISSING, OTHER_SIZE, AWAY or FAILED
        per name. The buffers have any bytes afterwards if it is MISSING, AWAY or FAILED."""

    @abstractmethod
    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        """Stores the bytes of each list of buffers, one after the other, as one value. Returns OK, HELD, FULL, AWAY
        or FAILED per name. A value can be read once it is complete, never in part."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> list[Outcome]:
        """Removes values, even while others read them. Returns OK, MISSING, AWAY or FAILED per name."""

    def distrust(self, names: Sequence[str]) -> list[str]:
        """Notes values that came back with wrong bytes. Returns the names to remove; the other values go with them, and
        count as missing. By default returns all."""
        return list(names)

    def advice(self) -> str:
        """Returns a warning about the settings of the store itself, with its fix, for the log. By default an empty
        text."""
        return ""

    def close(self) -> None:
        """Leaves the store. By default does nothing."""
