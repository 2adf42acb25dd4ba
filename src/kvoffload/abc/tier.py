"""The contract of a tier: a medium below host memory that keeps blocks and gives them back."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.abc.types import OffloadKey, Slots

States = npt.NDArray[np.uint8]
"""A LookupState a key."""


class TierError(enum.StrEnum):
    """Why one block could not be read or written."""

    CORRUPT = "corrupt"
    """What was read is not what was written: the block is quarantined."""
    IO = "io"
    NO_SPACE = "no_space"
    GONE = "gone"
    """It left the tier meanwhile: evicted, deleted, reset."""


@dataclass(frozen=True, slots=True)
class TierResult:
    """How the reading or writing of one block has ended.

    It was under way while the monotonic clock went from ``begun`` to ``ended``, perhaps together with others.
    ``seconds`` is its share of the time that a thread has spent.
    """

    key: OffloadKey
    is_read: bool
    error: TierError | None = None
    nbytes: int = 0
    seconds: float = 0.0
    begun: float = 0.0
    ended: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None


class Tier(ABC):
    """Blocks by key, in a medium that is slower than host memory and may fail.

    Called from the scheduler's thread only. No method waits for the medium (``wait`` and ``close`` say for how long at
    most), and none raises for what goes wrong in it: each block's reading or writing ends well or badly on its own, and
    ``poll`` tells. Bytes go straight from and to the host pools, whose slots the caller keeps as they are until then:
    a slot that is written from does not change, one that is read into belongs to nobody else. A key is read or
    written at most once at a time. ``name`` is for logs and metrics.

    A block that ``read`` has delivered without an error holds exactly the bytes that were written under its key: the
    tier has verified that. ``used_bytes`` never exceeds ``capacity_bytes``.
    """

    name: str

    @property
    @abstractmethod
    def capacity_bytes(self) -> int: ...

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of the medium taken now, everything the tier keeps there included."""

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes that one block takes in the medium."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks held now, those being written included."""

    @property
    @abstractmethod
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""

    @abstractmethod
    def contains(self, keys: Sequence[OffloadKey]) -> States:
        """HIT: can be read now. MISS: cannot. RETRY: the medium is being asked, and a later call knows; ``poll`` may
        then return nothing although something has changed. Changes no recency."""

    @abstractmethod
    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        """Begins to read ``keys[i]`` into host slot ``slots[i]``. Returns the keys that were taken on, each of which
        ``poll`` will tell of once; the others are not there, or there is too much to do already. Reads go ahead of
        writes."""

    @abstractmethod
    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        """Begins to write ``keys[i]`` from host slot ``slots[i]``. Returns the keys that were taken on, each of which
        ``poll`` will tell of once; the others are there already, or there is no room or too much to do already."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Marks as recently used, last key first. Unknown keys are ignored."""

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey]) -> None:
        """Puts a chain that a request has touched, and of which it has stored ``stored``, into the order of one touch.
        It counts as no further use."""
        self.touch(keys)

    @abstractmethod
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Keys are gone at once, whatever is under way for them. Unknown ones are ignored."""

    @abstractmethod
    def reset(self) -> None:
        """Every key is gone at once and for good: no later process finds it either."""

    @abstractmethod
    def poll(self) -> list[TierResult]:
        """What has ended since the last call, each key that was taken on exactly once."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Gives the processor away until there is something to poll, at most ``timeout_s``."""

    @abstractmethod
    def close(self) -> None:
        """Ends what is under way, within a deadline, and lets go of everything. May be called twice."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if the tier's books do not balance. O(blocks)."""
