"""The contract of a tier: a medium below host memory that keeps blocks and gives them back.

docs/tiers.md shows how to write one.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.abc.types import LookupState, OffloadKey, Slots, TenantUse

States = npt.NDArray[np.uint8]
"""One LookupState per key."""
MISS, HIT, PENDING, RETRY = map(int, LookupState)
"""Members of LookupState as plain numbers, which numpy compares with States faster than members of an enum."""
POLL_INTERVAL_S = 0.001
"""How long ``Tier.wait`` sleeps by default."""


class TierError(enum.StrEnum):
    """Why one block could not be read or written."""

    CORRUPT = "corrupt"
    """The bytes read are not the bytes written. The tier no longer holds the block."""
    IO = "io"
    """The medium has failed."""
    NO_SPACE = "no_space"
    """The medium has no room, although the tier's own budget has."""
    GONE = "gone"
    """The block has left the tier since the transfer began: it was evicted, deleted or reset."""


class TierResult(NamedTuple):
    """How the reading or writing of one block has ended.

    ``nbytes`` were moved. ``begun`` and ``ended`` are times of the monotonic clock between which the block was under
    way, perhaps together with others; ``seconds`` is its share of the time that a thread has spent.
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
    """Keeps blocks by key in a medium that is slower than host memory and may fail.

    **Threads.** All methods are called on the scheduler's thread. Only ``wait`` and ``close`` wait for the medium, and
    for a bounded time. The tier does its work on threads of its own.

    **Errors.** No method raises for a failure of the medium. The transfer of each block succeeds or fails on its own,
    and ``poll`` reports which.

    **Bytes.** Blocks move directly between the medium and the slots of the host pools. Until ``poll`` reports a block,
    the caller does not change a slot that is written from, and gives a slot that is read into to nothing else. A key is
    read or written at most once at a time. A block that was read without an error has exactly the bytes that were
    written under its key: the tier has verified that.

    **Budget.** ``used_bytes`` never exceeds ``capacity_bytes``. A medium that bounds itself, such as a store that
    others write to as well, has neither.
    """

    name: str
    """For logs and metrics. Distinct among the tiers of a manager."""
    is_shared: bool = False
    """Whether other processes use the same blocks. New weights in one process then delete nothing: the process stops
    using the tier until it is started again."""

    @property
    def capacity_bytes(self) -> int | None:
        """The tier's budget in the medium. By default None: the medium bounds itself."""
        return None

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes that one block takes in the medium; does not change."""

    @property
    def num_blocks(self) -> int | None:
        """Blocks held now, including those being written. By default None: the tier does not know."""
        return None

    @property
    def used_bytes(self) -> int | None:
        """Bytes taken in the medium now, including everything that the tier keeps there beside the blocks that it
        holds. By default there is nothing else."""
        return None if self.num_blocks is None else self.num_blocks * self.block_bytes

    def most_blocks(self, key: OffloadKey) -> int | None:
        """Returns how many blocks of one chain, to which ``key`` belongs, the tier can hold at once. By default as many
        as its budget has room for, None if the medium bounds itself."""
        return None if self.capacity_bytes is None else self.capacity_bytes // max(1, self.block_bytes)

    def tenant_uses(self) -> Sequence[TenantUse]:
        """Returns what each tenant holds. By default nothing, for a tier of which tenants have no shares."""
        return ()

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start. By default 0, for a tier that evicts none."""
        return 0

    @property
    def num_failed_lookups(self) -> int:
        """Lookups since the start that have failed, one per attempt to ask the medium. By default 0."""
        return 0

    @property
    def is_connected(self) -> bool:
        """Whether the medium could be reached when the tier last looked. A tier that is not connected answers MISS and
        takes nothing on, and so has no failures that show it. By default True."""
        return True

    def expect(self, keys: Sequence[OffloadKey]) -> None:
        """Says that a request is about to look up ``keys``, a chain, head first. A tier that answers RETRY while it
        asks its medium then asks for all of them at once. By default does nothing."""

    @abstractmethod
    def contains(self, keys: Sequence[OffloadKey]) -> States:
        """Returns one state per key. HIT: it can be read now. MISS: it cannot. RETRY: the medium is being asked, and a
        later call knows; ``poll`` need not report that. Does not count as a use. An answer about a shared medium may be
        out of date by a few seconds: a read then ends with GONE."""

    @abstractmethod
    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        """Begins to read ``keys[i]`` into host slot ``slots[i]``. Returns the keys that were taken on; ``poll`` reports
        each of them once. The others are not held, or too many reads are under way. Reads go ahead of writes."""

    @abstractmethod
    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        """Begins to write ``keys[i]`` from host slot ``slots[i]``, evicting others for it. Returns the keys that
        were taken on; ``poll`` reports each of them once. The others are held already, or there is no room, or too many
        writes are under way. A block that turns out to be held by a shared medium already has been written, with
        ``nbytes`` 0."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Marks ``keys``, a chain, as recently used, last key first, so that the chain loses its tail before its head.
        Ignores unknown keys."""

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey]) -> None:
        """Brings a chain, which a request has touched and of which it has stored ``stored``, into the order of one
        touch. It is not another use. By default this is ``touch``, which is right unless the tier counts uses."""
        self.touch(keys)

    @abstractmethod
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` are no longer held from now on, even those being read or written. Ignores unknown keys. A shared
        tier deletes only what this process has written, and may find what others have."""

    @abstractmethod
    def reset(self) -> None:
        """No key is held from now on, and no later process finds any that was held until now. A shared tier deletes
        nothing: it holds nothing for this process from now on, and takes nothing on."""

    def take_evicted(self) -> list[OffloadKey]:
        """Returns the keys of blocks that were evicted or lost since the last call, for events, also those that a reset
        has dropped from a tier that is not shared. Blocks that were deleted, and those of which ``poll`` has said that
        they are CORRUPT or GONE, may be among them. Called only if events are on: first when the tier is taken into
        use, then after each ``poll``. A tier that has not been asked yet keeps nothing for it, and the keys that it
        keeps are bounded. By default none."""
        return []

    @abstractmethod
    def poll(self) -> list[TierResult]:
        """Returns the results of transfers that have ended since the last call, one per key that was taken on."""

    def wait(self, timeout_s: float) -> None:
        """Returns once there may be something to poll, after ``timeout_s`` at the latest. By default it sleeps for
        POLL_INTERVAL_S."""
        time.sleep(min(timeout_s, POLL_INTERVAL_S))

    @abstractmethod
    def close(self) -> None:
        """Ends all transfers within a deadline and releases everything. Afterwards nothing is held, no method raises,
        and ``poll`` still reports the transfers that were in progress. May be called twice."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if the tier's own accounts do not balance. O(blocks)."""
