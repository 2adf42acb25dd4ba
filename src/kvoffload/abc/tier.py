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

from kvoffload.abc.errors import IntegrityError
from kvoffload.abc.types import Keys, LookupState, OffloadKey, RetainRefusal, Slots, TenantUse

States = npt.NDArray[np.uint8]
"""One LookupState per key."""
MISS, HIT, PENDING, RETRY = map(int, LookupState)
"""Members of LookupState as plain numbers, which numpy compares with States faster than members of an enum."""
POLL_INTERVAL_S = 0.001
"""How long ``Tier.wait`` sleeps by default."""


MAX_PLACE_CHARS = 64
"""Characters of what ``Tier.hand_over`` returns."""


class Ability(enum.StrEnum):
    """What a tier can do. Each may fail while the other works."""

    READ = "read"
    """It says what it holds, and reads it."""
    WRITE = "write"


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
    AWAY = "away"
    """The part of the medium that has the block does not work now, while other parts do."""


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


class TierStats(NamedTuple):
    """How full a tier is, and what it has done since its start.

    The sizes are None in a tier whose medium bounds itself, such as a store that others write to as well.
    """

    capacity_bytes: int | None = None
    """The tier's budget in the medium."""
    num_blocks: int | None = None
    """Blocks held now, including those being written."""
    used_bytes: int | None = None
    """Bytes taken in the medium now, including everything that the tier keeps there beside the blocks that it holds."""
    num_evicted: int = 0
    """Blocks evicted since the start."""
    is_connected: bool = True
    """Whether the medium could be reached when the tier last looked. A tier that is not connected answers MISS and
    takes nothing on, and so has no failures that show it."""


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

    **Budget.** ``used_bytes`` of ``stats`` never exceeds ``capacity_bytes``. A medium that bounds itself, such as a
    store that others write to as well, has neither.
    """

    name: str
    """For logs and metrics. Distinct among the tiers of a manager."""
    block_bytes: int
    """Bytes that one block takes in the medium; does not change."""
    is_shared: bool = False
    """Whether other processes use the same blocks. New weights in one process then delete nothing: the process stops
    using the tier until it is started again."""
    num_failed_lookups: int = 0
    """Lookups since the start that have failed, one per attempt to ask the medium."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Returns how full the tier is and what it has done so far. ``capacity_bytes`` does not change while it is
        connected."""

    def tenant_uses(self) -> Sequence[TenantUse]:
        """Returns what each tenant holds; nothing, by default, in a tier of which tenants have no shares."""
        return ()

    def most_blocks(self, key: OffloadKey) -> int | None:
        """Returns how many blocks of one chain, to which ``key`` belongs, the tier can hold at once. By default as many
        as its budget has room for, None if the medium bounds itself."""
        capacity_bytes = self.stats().capacity_bytes
        return None if capacity_bytes is None else capacity_bytes // max(1, self.block_bytes)

    @abstractmethod
    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        """Returns one state per key. HIT: it can be read now. MISS: it cannot. RETRY: the medium is being asked, and a
        later call knows; ``poll`` need not report that. Does not count as a use. An answer about a shared medium may be
        out of date by a few seconds: a read then ends with GONE.

        ``ahead``: a chain, head first, that the request looks up from here on, ``keys`` included. A tier that answers
        RETRY asks its medium for all of it at once."""

    @abstractmethod
    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        """Begins to read ``keys[i]`` into host slot ``slots[i]``. Returns the keys that were taken on; ``poll`` reports
        each of them once. The others are not held, or too many reads are under way. Reads go ahead of writes."""

    @abstractmethod
    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        """Begins to write ``keys[i]`` from host slot ``slots[i]``, evicting others for it. Returns the keys that
        were taken on; ``poll`` reports each of them once. The others are held already, or there is no room, or too many
        writes are under way. A block that turns out to be held by a shared medium already has been written, with
        ``nbytes`` 0."""

    @abstractmethod
    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> None:
        """Marks ``keys``, a chain, as recently used, last key first, so that the chain loses its tail before its head.
        Ignores unknown keys.

        With ``stored``, the keys that a request has stored of the chain which it touched before, the chain is brought
        into the order of one touch. That is not another use."""

    def retain(self, keys: Keys, session: int | None, seconds: float) -> RetainRefusal | None:
        """Keeps ``keys``, the chain of a request, head first, for ``seconds`` from now on, also over restarts; each
        block until the latest time for which that was asked. They are charged to their tenant. Blocks that are written
        later are kept from then on. Returns why not, and changes nothing then. By default a tier retains nothing.

        0 seconds: ends what it keeps for the session and nobody else. Those of ``keys`` that it has not got will not be
        written: they are charged no more, and count as lost."""
        return RetainRefusal.NO_QUOTA

    def hand_over(self, keys: Keys) -> str:
        """Another process waits for ``keys``, which a shared tier holds or will be given soon: it should find each as
        soon as it is written. Returns where it is to look for them, for ``look_for``; by default it need not know."""
        return ""

    def look_for(self, keys: Keys, place: str, pause_s: float, chain: Collection[OffloadKey] = ()) -> None:
        """A request waits for ``keys``, which the tier has said to lack and another process is writing in ``place``:
        the medium is asked for them again if it was last asked ``pause_s`` seconds ago or earlier. ``chain``: all that
        the other process hands over, head first; others may hold a block together with one before it. By default
        ``contains`` always knows."""
        return None

    @abstractmethod
    def delete(self, keys: Keys) -> None:
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
        keeps are bounded. By default there are no such events."""
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
        """Raises IntegrityError if the tier's own accounts do not balance. O(blocks). By default it checks the
        budget."""
        stats = self.stats()
        if stats.capacity_bytes is not None and (stats.used_bytes or 0) > stats.capacity_bytes:
            raise IntegrityError(f"the {self.name} tier uses {stats.used_bytes} of {stats.capacity_bytes} bytes")
